"""Putting the arrays of several prompts side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvdrift.drift.measure import Arrays, pad_stack
from kvdrift.drift.result import Drift

SHARED = ("steps", "positions/steps")
"""Coordinates: the same for every prompt, up to its length."""
_SEED_FIRST = ("floor/", "local_floor/")


def one_prompt(arrays: Arrays) -> Arrays:
    """Give the arrays of one walk a prompt axis of length one, and say which steps were measured."""
    result = {}
    for name, array in arrays.items():
        if name in SHARED or name.startswith("layers/"):
            result[name] = array
        else:
            result[name] = array[:, None] if name.startswith(_SEED_FIRST) else array[None]
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
    for name in first.arrays:
        rows = [drift.arrays[name] for drift in drifts if name in drift.arrays]
        if name in SHARED:
            arrays[name] = max(rows, key=len)
        elif name.startswith("layers/"):
            arrays[name] = rows[0]
        elif name.startswith(_SEED_FIRST):
            arrays[name] = np.moveaxis(_join([np.moveaxis(row, 1, 0) for row in rows]), 0, 1)
        else:
            arrays[name] = _join(rows)
    controls = [drift.control for drift in drifts if drift.control is not None]
    return replace(
        first,
        prompts=tuple(prompt for drift in drifts for prompt in drift.prompts),
        arrays=arrays,
        token_texts={token: text for drift in drifts for token, text in drift.token_texts.items()},
        control=concatenate(controls) if controls else None,
        notes=tuple(dict.fromkeys(note for drift in drifts for note in drift.notes)),
    )


def _join(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate along the first axis, filling up the others."""
    return pad_stack([entry for row in rows for entry in row])
