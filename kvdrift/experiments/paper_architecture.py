"""The paper's two claims about architecture, tested on copies that differ in architecture and in nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from kvdrift.controls.counterfactual import expand_kv_heads, widen_window
from kvdrift.controls.precision import cast_copy
from kvdrift.drift.compare import compare
from kvdrift.drift.result import Drift
from kvdrift.errors import InputError, ModelError
from kvdrift.experiments.course import KINDS, SITE, change, course, layer_changes, same_numbers
from kvdrift.experiments.experiment import Experiment, Folder
from kvdrift.models.architecture import Architecture
from kvdrift.models.load import load
from kvdrift.models.model import Model
from kvdrift.models.prompts import as_prompts
from kvdrift.renamed import renamed
from kvdrift.result import Saved, say, table_maker
from kvdrift.words.json import json_safe

ARMS = {
    "original": "original",
    "kv_heads": "KV heads expanded",
    "windows": "windows widened",
    "both": "both",
}
"""Field of `PaperArchitecture` → the arm in words."""
COPIED = (
    "Every arm ran on a fresh copy of the weights, the original too: where weights lie in memory (those of a loaded "
    "checkpoint often start off a 64-byte boundary) can by itself change the bits of a float32 product."
)

_MEASURES = ("first", "first_share", "largest_share")


@dataclass(frozen=True, repr=False)
class PaperArchitecture(Folder, Experiment):
    """Cache-ON against cache-OFF in one model and in its counterfactuals, on the same tokens.

    Made by `paper_architecture`.

    Attributes
    ----------
    original
        The model as it is, on a plain copy of its weights.
    kv_heads
        Every query head with a KV head of its own; None where that does not apply.
    windows
        Sliding layers that see everything; None where that does not apply.
    both
        Both changes; None where one does not apply.
    """

    part: ClassVar[type[Saved]] = Drift
    topic: ClassVar[str] = "architecture experiment"

    original: Drift
    kv_heads: Drift | None = None
    windows: Drift | None = None
    both: Drift | None = None

    @property
    def arms(self) -> dict[str, Drift]:
        """Arm in words → its drift, the original first."""
        found = {name: getattr(self, field) for field, name in ARMS.items()}
        return {name: drift for name, drift in found.items() if drift is not None}

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be measured or made, and why."""
        return tuple(dict.fromkeys(note for drift in self.arms.values() for note in drift.notes))

    def to_dataframe(self, what: str = "arms") -> Any:
        """A table of ``"arms"`` or of ``"layers"``.

        ``"arms"``: one row per arm and kind of drift (``of``: accumulated ``"drift"``, or ``"local"``). ``first`` is
        the first layer's drift, ``first_share`` its share of the whole and ``largest_share`` that of the layer that
        adds most (1 / layers in an even course; the whole is the last layer's drift, or the sum of all local drift):
        means over prompts, each followed by its paired difference to the original (``…_change``, its interval,
        ``…_p`` of a sign-flip test over prompts). ``same_numbers``: every number of this arm equals the original's in
        every bit.

        ``"layers"``: one row per arm, kind and layer: what the figure draws, with p-values after Holm's correction over
        layers.

        Raises
        ------
        InputError
            If ``what`` is neither.
        """
        return table_maker(what, {"arms": _arms, "layers": _layers})(self.arms)

    def headline(self) -> str:
        """The answer in one sentence."""
        return say(self, "headline")

    def to_dict(self) -> dict[str, Any]:
        """The tables and the reading as plain data."""
        rows = {name: self.to_dataframe(name).to_dict(orient="records") for name in ("arms", "layers")}
        return json_safe({**rows, "reading": self.reading(), "notes": self.notes}, math.isnan)


@renamed(resume="store")
def paper_architecture(
    model: Any,
    prompts: Any,
    *,
    max_new_tokens: int = 32,
    floor: int = 1,
    chat: bool = False,
    ignore_eos: bool = False,
    seed: int = 0,
    progress: bool = True,
    store: str | FilePath | None = None,
) -> PaperArchitecture:
    """Test what the paper says grouping and windows do to drift.

    The paper finds that models with grouped queries jump at the first layer, while Gemma, with its sliding windows,
    drifts evenly, and blames the architecture; but its models differ in everything else too. Here the same function is
    computed by copies in which only the grouping (`expand_kv_heads`), only the windows (`widen_window`), or both are
    gone, on the same tokens, for accumulated drift and for what each layer makes by itself. The original runs on a
    plain copy of its weights, so that the copies differ from it in architecture alone and not in where weights lie.

    Parameters
    ----------
    model
        Anything `kvdrift.load` takes.
    prompts
        As `kvdrift.compare` takes them: the unit of intervals and tests.
    max_new_tokens
        Steps per prompt. Windows are widened only if prompt and steps fit in the (shortest) window.
    floor
        Re-rolls for the rounding floors of every arm.
    chat, ignore_eos, seed, progress
        As in `kvdrift.compare`.
    store
        A folder that keeps finished prompts, one subfolder per arm.

    Raises
    ------
    InputError
        If the model has neither grouped heads nor windows that the texts fit in.
    ModelError
        If no counterfactual of it can be made.

    Examples
    --------
    >>> import kvdrift as kd
    >>> model = kd.models.tiny("llama")
    >>> found = kd.experiments.paper_architecture(model, [1, 2, 3], max_new_tokens=3, progress=False)
    >>> list(found.to_dataframe()["grouping"].unique())
    ['GQA 8:2', 'MHA 8:8']
    """
    source = load(model, quiet=not progress)
    given, _ = as_prompts(prompts)
    longest = max(len(source.encode(prompt, chat)) for prompt in given) + max_new_tokens
    makers, notes = _makers(source, longest)

    def run(name: str, one: Model, **options: Any) -> Drift:
        kept = None if store is None else FilePath(store) / name
        return compare(
            one, prompts, max_new_tokens=max_new_tokens, sites=(SITE,), floor=floor, chat=chat, ignore_eos=ignore_eos,
            seed=seed, progress=progress, store=kept, **options,
        )  # fmt: skip

    original = run("original", source.around(cast_copy(source.hf, source.dtype)))
    tokens = [row[:n].tolist() for row, n in zip(original.fed, original.n_steps, strict=True)]
    drifts: dict[str, Drift] = {}
    for name, make in makers.items():
        try:
            drifts[name] = run(name, make(source), tokens=tokens)
        except ModelError as reason:
            notes.append(f"The arm “{ARMS[name]}” is missing: {reason}")
    if not drifts:
        raise ModelError(f"No counterfactual of {source.name} could be made. {' '.join(notes)}")
    return PaperArchitecture(replace(original, notes=(*original.notes, COPIED, *notes)), **drifts)


def _makers(source: Model, longest: int) -> tuple[dict[str, Callable[[Model], Model]], list[str]]:
    """The counterfactuals that apply, and why another does not."""
    layers = source.architecture.layers
    makers: dict[str, Callable[[Model], Model]] = {}
    notes = []
    if any(0 < layer.n_kv_heads < source.architecture.n_heads for layer in layers):
        makers["kv_heads"] = expand_kv_heads
    window = min((layer.window for layer in layers if layer.window is not None), default=None)
    if window is not None and longest > window:
        notes.append(
            f"Windows were not widened: the longest text reaches {longest} positions, and beyond the window of "
            f"{window} a copy without it is another function."
        )
    elif window is not None:
        makers["windows"] = widen_window
    if len(makers) == 2:
        makers["both"] = lambda model: expand_kv_heads(widen_window(model))
    if not makers:
        why = notes[0] if notes else "it has no windows"
        raise InputError(
            f"{source.name} has no counterfactual: its heads are not grouped ({source.architecture.grouping}). {why}"
        )
    return makers, notes


# --- tables


def _arms(drifts: Mapping[str, Drift]) -> pd.DataFrame:
    """One row per arm and kind of drift; the original is the first arm."""
    original = next(iter(drifts.values()))
    return pd.DataFrame([_arm(name, drift, original, of) for name, drift in drifts.items() for of in KINDS])


def _arm(name: str, drift: Drift, original: Drift, of: str) -> dict[str, Any]:
    found, reference = course(drift, of), course(original, of)
    row: dict[str, Any] = {
        "arm": name,
        "of": of,
        "model": drift.a.model,
        "dtype": drift.a.dtype,
        "grouping": grouping(drift.architecture),
        "windows": windows(drift.architecture),
        "prompts": len(drift.prompts),
        "steps": int(drift.counted.sum()),
        "same_numbers": same_numbers(drift, original),
        "even_share": 1 / len(found.layers),
        "largest_layer": found.largest_layer,
        "last": float(found.mean[-1]),
        "first_floor": float(found.floor_band[1][0]),
        "last_floor": float(found.floor_band[1][-1]),
    }
    for measure in _MEASURES:
        here, there = getattr(found, measure), getattr(reference, measure)
        paired = change(here, there)
        row |= {
            measure: float(np.nanmean(here)) if not np.isnan(here).all() else float("nan"),
            f"{measure}_change": paired.mean,
            f"{measure}_change_low": paired.low,
            f"{measure}_change_high": paired.high,
            f"{measure}_p": paired.p,
            f"{measure}_higher": paired.higher,
            f"{measure}_lower": paired.lower,
        }
    return row


def _layers(drifts: Mapping[str, Drift]) -> pd.DataFrame:
    """One row per arm, kind of drift and layer."""
    original = next(iter(drifts.values()))
    rows = []
    for name, drift in drifts.items():
        for of in KINDS:
            found = course(drift, of)
            changes, adjusted = layer_changes(found, course(original, of))
            columns = {
                "layer": found.layers,
                "value": found.mean,
                "low": found.interval[0],
                "high": found.interval[1],
                "floor_low": found.floor_band[0],
                "floor": found.floor_band[1],
                "floor_high": found.floor_band[2],
                "change": [paired.mean for paired in changes],
                "change_low": [paired.low for paired in changes],
                "change_high": [paired.high for paired in changes],
                "p": [paired.p for paired in changes],
                "p_holm": adjusted,
            }
            rows.append(pd.DataFrame({"arm": name, "of": of, **columns}))
    return pd.concat(rows, ignore_index=True)


def grouping(architecture: Architecture) -> str:
    """Query heads to KV heads, as in ``GQA 9:3``."""
    return f"{architecture.grouping} {architecture.n_heads}:{architecture.n_kv_heads}"


def windows(architecture: Architecture) -> str:
    """The windows, as in ``15 of 18 layers: 512``; ``none`` without one."""
    found = [layer.window for layer in architecture.layers if layer.window is not None]
    sizes = "/".join(str(size) for size in sorted(set(found)))
    return f"{len(found)} of {architecture.n_layers} layers: {sizes}" if found else "none"
