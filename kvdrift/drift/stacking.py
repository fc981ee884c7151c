"""Arrays side by side: of one step after the other, of one prompt beside the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvdrift.drift.layout import Arrays, grows, prompt_axis
from kvdrift.drift.result import Drift


def pad_stack(rows: Sequence[np.ndarray | np.generic]) -> np.ndarray:
    """Stack arrays along a new first axis, filling up to the largest shape: NaN, -1 or False by dtype.

    Examples
    --------
    >>> pad_stack([np.array([1, 2]), np.array([3])])
    array([[ 1,  2],
           [ 3, -1]])
    """
    shape = tuple(max(sizes) for sizes in zip(*(row.shape for row in rows), strict=True))
    first = np.asarray(rows[0])
    empty = np.nan if first.dtype.kind == "f" else (False if first.dtype.kind == "b" else -1)
    stacked = np.full((len(rows), *shape), empty, dtype=first.dtype)
    for place, row in enumerate(rows):
        stacked[place, ...][tuple(slice(size) for size in row.shape)] = row
    return stacked


def one_prompt(arrays: Arrays) -> Arrays:
    """Give the arrays of one walk a prompt axis of length one, and say which steps were measured."""
    axes = {name: prompt_axis(name) for name in arrays}
    result = {name: x if (axis := axes[name]) is None else np.expand_dims(x, axis) for name, x in arrays.items()}
    result["measured"] = np.ones((1, len(arrays["steps"])), dtype=bool)
    result["n_steps"] = np.array([len(arrays["fed"])])
    return result


def concatenate(drifts: Sequence[Drift]) -> Drift:
    """One drift over the prompts of several, which share paths, model and settings.

    Shorter runs are filled up: floats with NaN, integers with -1, ``measured`` with False.
    """
    first = drifts[0]
    if len(drifts) == 1:
        return first
    arrays: Arrays = {}
    for name in dict.fromkeys(name for drift in drifts for name in drift.arrays):
        rows = [drift.arrays.get(name) for drift in drifts]
        like = next(row for row in rows if row is not None)
        axis = prompt_axis(name)
        if axis is None:
            arrays[name] = max((row for row in rows if row is not None), key=len) if grows(name) else like
        else:
            first_axis = [
                _nothing(like, len(drift.prompts)) if row is None else np.moveaxis(row, axis, 0)
                for row, drift in zip(rows, drifts, strict=True)
            ]
            joined = pad_stack([entry for row in first_axis for entry in row])  # fills up the other axes
            arrays[name] = np.moveaxis(joined, 0, axis)
    controls = [drift.control for drift in drifts if drift.control is not None]
    return replace(
        first,
        prompts=tuple(prompt for drift in drifts for prompt in drift.prompts),
        arrays=arrays,
        token_texts={token: text for drift in drifts for token, text in drift.token_texts.items()},
        control=concatenate(controls) if controls else None,
        notes=tuple(dict.fromkeys(note for drift in drifts for note in drift.notes)),
    )


def _nothing(like: np.ndarray, n_prompts: int) -> np.ndarray:
    """The array of prompts that have no value there (one of a single step has no local drift): empty rows."""
    return np.empty((n_prompts, *(0,) * (like.ndim - 1)), dtype=like.dtype)
