"""`sweep`: the same patch at many places, one after the other, beside one donor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path as FilePath
from typing import Any, Literal

import numpy as np
from tqdm.auto import tqdm

from kvdrift.errors import InputError
from kvdrift.patching.axes import cells_over
from kvdrift.patching.ledger import Ledger
from kvdrift.patching.measure import FLOATS
from kvdrift.patching.outcome import Arm
from kvdrift.patching.patch import common, one_prompt
from kvdrift.patching.result import Sweep
from kvdrift.patching.schedule import Schedule
from kvdrift.patching.setup import Setup, read
from kvdrift.patching.spec import Cell, Patch, Write, as_cell
from kvdrift.patching.walk import Plan, Rows, Walk
from kvdrift.paths.path import Path
from kvdrift.tracing.trace import Trace, free_memory

SITES = ("resid_post", "k", "v", "kv")
SHARED = -1
"""The number under which a ledger keeps the arms that all cells share."""
TOGETHER = 64
"""At most so many cells step beside one donor run; then its next run serves the next ones."""
NOTHING = np.zeros((0, 5), dtype=str)
SHARE_OF_FREE_MEMORY = 0.25
"""The caches of the cells that step together may take so much of the free memory."""
Controls = Literal["all", "shared", "none"]


def sweep(
    model: Any,
    prompts: Any,
    *,
    sites: str | Sequence[str] = SITES,
    over: str | Sequence[str] = "layer",
    schedule: str | Schedule | Sequence[str | Schedule] = "persistent",
    layers: Iterable[int] | int | None = None,
    heads: Iterable[int] | int | None = None,
    positions: Any = None,
    steps: Iterable[int] | None = None,
    write: Write | None = None,
    patches: Iterable[Patch | Sequence[Patch] | str] | None = None,
    donor: Path | Trace | Sequence[Trace] | None = None,
    recipient: Path | None = None,
    max_new_tokens: int = 32,
    tokens: Any = None,
    placebos: int = 1,
    controls: Controls = "shared",
    chat: bool = False,
    seed: int = 0,
    progress: bool = True,
    results: str | FilePath | None = None,
) -> Sweep:
    """Patch one place after the other, and find which brings the recipient to the donor.

    Donor and unpatched recipient run once for all cells that step beside them; a cell forks the recipient at its
    first written step instead of running the tokens before it again. Recipients are never batched: a batched pass
    would be another arithmetic than the one under study. So the time is that of one decode per cell and placebo.
    Each cell gives the same numbers in whatever order and company it runs.

    Parameters
    ----------
    model, prompts, donor, recipient, max_new_tokens, tokens, chat, seed, progress
        As `kvdrift.patch` takes them.
    sites
        Sites to patch, crossed with everything else.
    over
        What to go through one by one: ``"layer"``, ``"head"`` (KV heads at ``k``, ``v``, ``kv``), ``"position"``,
        ``"step"`` (one-shot at each step), or several of them, crossed.
    schedule
        When to write, or several schedules to cross.
    layers, heads, positions
        The values of an axis that is swept (all by default; positions: those of the shortest prompt), or what
        every cell is restricted to if it is not.
    steps
        The values of ``over="step"``; from 1 to the last but one by default.
    write
        As in `Patch`.
    patches
        Cells of your own instead of an axis: a `Patch`, or several that are written together, each.
    placebos
        Noise placebos per cell; without one, recovery is held against the unpatched recipient.
    controls
        ``"shared"``: re-roll and full patch beside the cells. ``"all"``: each cell's self-patch, one-ulp noise, patch
        into re-rolled sums and patch from a float32 donor too. ``"none"``: neither.
    results
        A file of JSON lines that keeps finished cells: the same call goes on from there.

    Returns
    -------
    Sweep

    Raises
    ------
    InputError, SiteError
        If an argument does not fit the model, the prompts or the donor.
    FileError
        If ``results`` cannot be used, or holds another sweep.

    Examples
    --------
    >>> import kvdrift as kd
    >>> model = kd.load(kd.models.tiny("llama"), quiet=True)
    >>> found = kd.sweep(model, [1, 2, 3], sites=["k", "v"], max_new_tokens=4, progress=False)
    >>> len(found.cells), found.over
    (8, ('layer',))
    """
    setup = read(
        model, prompts, donor=donor, recipient=recipient, max_new_tokens=max_new_tokens, tokens=tokens,
        chat=chat, progress=progress,
    )  # fmt: skip
    axes = (over,) if isinstance(over, str) else tuple(over)
    if patches is not None:
        axes = ()
        cells = [as_cell(entry) for entry in patches]
    else:
        chosen = {"layer": layers, "head": heads, "position": positions, "step": steps}
        names = (sites,) if isinstance(sites, str) else tuple(sites)
        schedules = [schedule] if isinstance(schedule, (str, Schedule)) else list(schedule)
        cells = cells_over(setup, names, axes, schedules, chosen, write)
    if not cells:
        raise InputError("There is no cell to sweep over; give a site and an axis, or patches.")
    return run_cells(
        setup, cells, placebos=placebos, controls=controls, seed=seed, progress=progress, results=results, over=axes
    )


def run_cells(
    setup: Setup,
    cells: Sequence[Cell],
    *,
    placebos: int,
    controls: Controls,
    seed: int,
    progress: bool,
    results: str | FilePath | None = None,
    over: tuple[str, ...] = (),
    controlled: frozenset[int] | None = None,
) -> Sweep:
    """Run these cells over the prompts of ``setup``; see `sweep`.

    ``controlled`` restricts each cell's own controls (``controls="all"``) to these cells.
    """
    if controls not in ("all", "shared", "none"):
        raise InputError(f"controls={controls!r}: choose 'all', 'shared' or 'none'.")
    plan = Plan(placebos, controls != "none", controls == "all", seed, controlled)
    walk = Walk(setup.model, setup.donor, setup.recipient, plan, setup.trace(0))
    settings = {"placebos": placebos, "controls": controls, "seed": seed, "controlled": sorted(controlled or ())}
    patches = [[patch.to_dict() for patch in cell.patches] for cell in cells]
    try:
        for prompt, length in zip(setup.prompts, setup.lengths, strict=True):
            walk.check(cells, len(prompt.ids), length)
        ledger = Ledger(results, setup.settings() | settings | {"cells": patches})
        shared = walk.shared_arms()
        found = []
        with tqdm(total=sum(setup.lengths) * len(cells), desc="sweep", unit="step", disable=not progress) as bar:
            for number in range(len(setup.prompts)):
                found.append(_prompt(setup, walk, number, cells, shared, ledger, bar))
                bar.n = sum(setup.lengths[: number + 1]) * len(cells)  # a text may end early
                bar.refresh()
        arms = [*shared, *(arm for number in range(len(cells)) for arm in walk.cell_arms(number))]
        notes = tuple(walk.notes)
    finally:
        walk.close()
    return Sweep(
        **common(setup, cells, arms, found), notes=notes, provenance=setup.provenance(**settings), extra={"over": over}
    )


def _prompt(
    setup: Setup, walk: Walk, number: int, cells: Sequence[Cell], shared: list[Arm], ledger: Ledger, bar: tqdm
) -> Rows:
    """All cells over one prompt: those that are kept from before, and the others in groups."""
    missing = [cell for cell in range(len(cells)) if ledger.get(number, cell) is None]
    bar.update((len(cells) - len(missing)) * setup.lengths[number])
    for cell in range(len(cells)):
        walk.recall((ledger.get(number, cell) or {}).get("absent", NOTHING))
    size = _together(setup, walk, number, len(cells))
    groups = [missing[i : i + size] for i in range(0, len(missing), size)]
    if not groups and ledger.get(number, SHARED) is None:
        groups = [[]]
    for group in groups:
        kept = ledger.get(number, SHARED)
        arms = shared if kept is None else shared[:1]
        own = [walk.cell_arms(cell) for cell in group]
        everyone = [*arms, *(arm for some in own for arm in some)]
        # All cells are handed over: the shared arms begin at the first write of any, whichever group they run in.
        rows = one_prompt(setup, walk, number, dict(enumerate(cells)), everyone, partial(_tick, bar, len(group)))
        finished: dict[tuple[int, int], Rows] = {}
        start = len(arms)
        if kept is None:
            common_rows = {name: rows[name] for name in ("fed", "donor_top1")}
            finished[number, SHARED] = common_rows | _some(rows, slice(0, start))
        for cell, some in zip(group, own, strict=True):
            finished[number, cell] = _some(rows, slice(start, start + len(some)))
            start += len(some)
        for cell in group[:1]:
            finished[number, cell]["absent"] = walk.absent
        ledger.add(finished)
    parts = [_known(ledger, number, SHARED), *(_known(ledger, number, cell) for cell in range(len(cells)))]
    stacked = {name: np.concatenate([part[name] for part in parts]) for name in (*FLOATS, "top1")}
    return stacked | {name: parts[0][name] for name in ("fed", "donor_top1")}


def _tick(bar: tqdm, n_cells: int, n_arms: int) -> None:
    """One step of a group is done."""
    bar.update(n_cells)


def _known(ledger: Ledger, prompt: int, cell: int) -> Rows:
    rows = ledger.get(prompt, cell)
    assert rows is not None, "every cell of the prompt has run"
    return rows


def _some(rows: Rows, arms: slice) -> Rows:
    return {name: rows[name][arms] for name in (*FLOATS, "top1")}


def _together(setup: Setup, walk: Walk, number: int, n_cells: int) -> int:
    """How many cells step beside one donor run: as many as their caches leave room for."""
    model = walk.model
    length = len(setup.prompts[number].ids) + setup.lengths[number]
    entry = sum(2 * info.n_kv_heads * info.head_dim for info in model.architecture.layers)
    arms = max(len(walk.cell_arms(cell)) for cell in range(n_cells))
    n_bytes = max(1, entry * length * arms * model.dtype.itemsize)
    return max(1, min(TOGETHER, int(SHARE_OF_FREE_MEMORY * free_memory(model.device)) // n_bytes))
