"""The paper's patching experiment: the whole residual stream once, beside everything it has to be held against."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, ClassVar

import numpy as np

from kvdrift.errors import InputError
from kvdrift.experiments.experiment import Experiment, Folder
from kvdrift.fingerprint import one_job
from kvdrift.models.load import load
from kvdrift.patching.outcome import Outcomes
from kvdrift.patching.result import Sweep
from kvdrift.patching.schedule import Schedule
from kvdrift.patching.setup import read
from kvdrift.patching.spec import Cell, Patch
from kvdrift.patching.sweep import run_cells
from kvdrift.paths.cache_off import CacheOff
from kvdrift.paths.cache_on import CacheOn
from kvdrift.paths.path import Path
from kvdrift.renamed import renamed
from kvdrift.result import Saved

CONDITIONS: dict[str, tuple[str, ...]] = {
    "residual": ("resid_post",),
    "KV": ("kv",),
    "K": ("k",),
    "V": ("v",),
    "residual + KV": ("resid_post", "kv"),
}
"""What is patched, at all layers: the residual at the current position, K/V at every past position."""
SCHEDULES = ("one-shot", "persistent")
DIRECTIONS = {"on_from_off": "ON ← OFF", "off_from_on": "OFF ← ON"}


@dataclass(frozen=True, repr=False)
class PaperPatching(Folder, Experiment):
    """Every condition of `CONDITIONS` in both schedules and both directions; made by `paper_patching`.

    Attributes
    ----------
    on_from_off
        Cache-ON patched from cache-OFF, as the paper does it; None if it was not run.
    off_from_on
        Cache-OFF patched from cache-ON; None if it was not run.
    """

    part: ClassVar[type[Saved]] = Sweep
    topic: ClassVar[str] = "patching experiment"

    on_from_off: Sweep | None = None
    off_from_on: Sweep | None = None

    @property
    def sweeps(self) -> dict[str, Sweep]:
        """Direction in words → its sweep, for those that were run."""
        found = {words: getattr(self, name) for name, words in DIRECTIONS.items()}
        return {words: sweep for words, sweep in found.items() if sweep is not None}

    def to_dataframe(self) -> Any:
        """One row per direction, schedule and condition; placebo, re-roll and the unpatched recipient are rows too.

        ``recovery`` is against the cell's placebo on forced tokens, ``against_unpatched`` against no patch at all;
        ``logit_l2`` is the mean over prompts of the mean distance to the donor after the first write, ``logit_l2_se``
        its standard error over prompts; ``free_recovery`` and ``followed`` speak of free-running texts.
        """
        import pandas as pd

        rows = []
        for direction, sweep in self.sweeps.items():
            for place, schedule in enumerate(SCHEDULES):
                first = place * len(CONDITIONS)
                for offset, condition in enumerate(CONDITIONS):
                    rows.append(_row(sweep, direction, schedule, condition, "patched", first + offset))
                kv = first + list(CONDITIONS).index("KV")
                for condition, role in _CONTROLS.items():
                    if sweep.find(role, kv):
                        rows.append(_row(sweep, direction, schedule, condition, role, kv))
        return pd.DataFrame(rows)


_CONTROLS = {
    "placebo (KV noise)": "placebo",
    "one ulp": "one ulp",
    "KV from float32": "float32 donor",
    "KV, re-rolled sums": "re-rolled patched",
    "re-roll, no patch": "re-roll",
    "no patch": "unpatched",
}
"""Rows beside the conditions, taken from the arms of the KV cell."""


@renamed(results="store")
@one_job()
def paper_patching(
    model: Any,
    prompts: Any,
    *,
    max_new_tokens: int = 32,
    step: int | None = None,
    directions: Iterable[str] = tuple(DIRECTIONS),
    placebos: int = 2,
    chat: bool = False,
    ignore_eos: bool = False,
    seed: int = 0,
    progress: bool = True,
    store: str | FilePath | None = None,
) -> PaperPatching:
    """Run the paper's patching protocol beside the controls it lacks.

    The paper patches the residual stream of the cached run with the cache-free run's, finds that the cache-free
    trajectory does not come back, and concludes that the KV cache carries the divergence. That inference needs what
    stands beside it here: the K/V patched in the same way, K and V alone, both together, each once and persistently,
    in both directions, held against noise of the same norm, re-rolled sums without a patch, and no patch at all.

    Parameters
    ----------
    model
        Anything `kvdrift.load` takes.
    prompts
        Text, token ids or a tensor (one prompt), or a list of those: the unit of the standard errors.
    max_new_tokens
        Steps per prompt.
    step
        Where one-shot patches are written; a quarter into the run by default.
    directions
        ``"on_from_off"`` (the paper's), ``"off_from_on"`` (slower: every arm recomputes the prefix), or both.
    placebos
        Noise placebos per cell.
    chat, ignore_eos, seed, progress
        As in `kvdrift.patch`.
    store
        A folder that keeps finished cells: the same call goes on from there.

    Raises
    ------
    InputError
        If ``step`` leaves no step after it, or a direction is none.

    Examples
    --------
    >>> import kvdrift as kd
    >>> model = kd.load(kd.models.tiny("llama"), quiet=True)
    >>> found = kd.experiments.paper_patching(model, [1, 2, 3], max_new_tokens=4, progress=False)
    >>> list(found.to_dataframe()["condition"][:5])
    ['residual', 'KV', 'K', 'V', 'residual + KV']
    """
    loaded = load(model, quiet=not progress)
    step = max(1, max_new_tokens // 4) if step is None else step
    if not 1 <= step <= max_new_tokens - 2:
        raise InputError(f"step={step}: give one from 1 to {max_new_tokens - 2}, so that a step follows the patch.")
    schedules = {"one-shot": Schedule.one_shot(step), "persistent": Schedule.persistent()}
    cells = [
        Cell(f"{condition}, {name}", tuple(Patch(site, schedule=schedules[name]) for site in sites))
        for name in SCHEDULES
        for condition, sites in CONDITIONS.items()
    ]
    controlled = frozenset(place for place, cell in enumerate(cells) if cell.label.startswith("KV,"))
    sweeps: dict[str, Sweep] = {}
    recipients: dict[str, Path] = {"on_from_off": CacheOn(), "off_from_on": CacheOff()}
    chosen = list(directions)
    if not chosen or not set(chosen) <= set(recipients):
        raise InputError(f"directions={chosen}: choose one or both of {', '.join(recipients)}.")
    for name in chosen:
        setup = read(
            loaded, prompts, donor=None, recipient=recipients[name], max_new_tokens=max_new_tokens, tokens=None,
            chat=chat, ignore_eos=ignore_eos, progress=progress,
        )  # fmt: skip
        kept = None if store is None else FilePath(store) / name
        sweeps[name] = run_cells(
            setup, cells, placebos=placebos, checks="all", seed=seed, progress=progress, store=kept,
            controlled=controlled,
        )  # fmt: skip
    return PaperPatching(**sweeps)


def _row(sweep: Outcomes, direction: str, schedule: str, condition: str, role: str, cell: int) -> dict[str, Any]:
    found, plain = sweep.recovery(cell, role=role), sweep.recovery(cell, role=role, against="unpatched")
    distance = sweep.distance(role, cell).mean(axis=0)
    known = distance[np.isfinite(distance)]
    followed = sweep.followed(role, cell).mean(axis=0)
    return {
        "direction": direction,
        "schedule": schedule,
        "condition": condition,
        "recovery": found.value,
        "recovery_se": found.standard_error,
        "recovery_low": found.low,
        "recovery_high": found.high,
        "against_unpatched": plain.value,
        "against_unpatched_low": plain.low,
        "against_unpatched_high": plain.high,
        "logit_l2": known.mean() if known.size else np.nan,
        "logit_l2_se": known.std(ddof=1) / math.sqrt(known.size) if known.size > 1 else np.nan,
        "restored": sweep.restored(cell, role=role),
        "flips": sweep.flips(cell, role=role),
        "followed": float(followed.mean()),
        "free_recovery": sweep.free_recovery(cell, role=role).value,
        "signature": sweep.signature(role, cell),
        "trivial": role == "patched" and sweep.trivial(cell),
        "n": found.n,
    }
