"""`sweep`: the same patch at many places, one after the other, beside one donor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path as FilePath
from typing import Any, Literal

from tqdm.auto import tqdm

from kvdrift.errors import InputError
from kvdrift.fingerprint import one_job
from kvdrift.patching.axes import cells_over
from kvdrift.patching.cells import Group, key_of, rows_of, unpack_runner
from kvdrift.patching.patch import common
from kvdrift.patching.result import Sweep
from kvdrift.patching.schedule import Schedule
from kvdrift.patching.setup import Setup, read
from kvdrift.patching.spec import Cell, Patch, Write, as_cell
from kvdrift.patching.walk import Company, Walk
from kvdrift.paths.path import Path
from kvdrift.renamed import renamed
from kvdrift.runs.comparable import kept_with
from kvdrift.runs.engine import Engine, LocalEngine, pinned
from kvdrift.runs.engines import engine as engine_of
from kvdrift.runs.ship import cuda_devices, pack
from kvdrift.runs.store import Store
from kvdrift.tracing.trace import Trace, free_memory

SITES = ("resid_post", "k", "v", "kv")
TOGETHER = 64
"""At most so many cells step beside one donor run; then its next run serves the next ones."""
MANY = 8
"""For how many workers there are groups at least, where their number is the cluster's to decide."""
SHARE_OF_FREE_MEMORY = 0.25
"""The caches of the cells that step together may take so much of the free memory."""
Checks = Literal["all", "shared", "none"]


@renamed(results="store", controls="checks")
@one_job()
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
    checks: Checks = "shared",
    chat: bool = False,
    ignore_eos: bool = False,
    seed: int = 0,
    progress: bool = True,
    store: str | FilePath | None = None,
    engine: str = "local",
    workers: int | None = None,
    threads: int | None = None,
    address: str | None = None,
) -> Sweep:
    """Patch one place after the other, and find which brings the recipient to the donor.

    Donor and unpatched recipient run once for all cells that step beside them; a cell forks the recipient at its
    first written step instead of running the tokens before it again. Recipients are never batched: a batched pass
    would be another arithmetic than the one under study. So the time is that of one decode per cell and placebo.
    Each cell gives the same numbers in whatever order and company it runs.

    Parameters
    ----------
    model, prompts, donor, recipient, max_new_tokens, tokens, chat, ignore_eos, seed, progress
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
    checks
        ``"shared"``: re-roll and full patch beside the cells. ``"all"``: each cell's self-patch, one-ulp noise, patch
        into re-rolled sums and patch from a float32 donor too. ``"none"``: neither.
    store
        A folder that keeps finished cells: the same call goes on from there, whatever stopped it.
    engine
        ``"local"``, or ``"ray"`` to spread groups of cells over the workers of a Ray cluster, each with a model of its
        own (needs ``kvdrift[ray]``). The numbers are the same.
    workers, threads, address
        For Ray: how many workers, how many CPU threads each, and the address of a running cluster (one is started on
        this machine by default). ``threads`` holds for the local engine, too.

    Raises
    ------
    InputError, SiteError
        If an argument does not fit the model, the prompts or the donor.
    FileError
        If ``store`` cannot be used, or holds another sweep; the sentence names what differs.

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
        chat=chat, ignore_eos=ignore_eos, progress=progress,
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
    run_on = engine_of(engine, workers=workers, threads=threads, address=address, gpus=cuda_devices(*setup.models))
    return run_cells(
        setup, cells, placebos=placebos, checks=checks, seed=seed, progress=progress, store=store, over=axes,
        run_on=run_on,
    )  # fmt: skip


def run_cells(
    setup: Setup,
    cells: Sequence[Cell],
    *,
    placebos: int,
    checks: Checks,
    seed: int,
    progress: bool,
    store: str | FilePath | None = None,
    over: tuple[str, ...] = (),
    controlled: frozenset[int] | None = None,
    run_on: Engine | None = None,
) -> Sweep:
    """Run these cells over the prompts of ``setup``; see `sweep`.

    ``controlled`` restricts each cell's own controls (``checks="all"``) to these cells.
    """
    if checks not in ("all", "shared", "none"):
        raise InputError(f"checks={checks!r}: choose 'all', 'shared' or 'none'.")
    run_on = engine_of() if run_on is None else run_on
    company = Company(placebos, checks != "none", checks == "all", seed, controlled)
    walk = Walk(setup.model, setup.donor, setup.recipient, company, setup.trace(0))  # checks and names; runs nothing
    for prompt, length in zip(setup.prompts, setup.lengths, strict=True):
        walk.check(cells, len(prompt.ids), length)
    shared = walk.shared_arms()
    arms = [*shared, *(arm for number in range(len(cells)) for arm in walk.cell_arms(number))]
    settings = {"placebos": placebos, "controls": checks, "seed": seed, "controlled": sorted(controlled or ())}
    with pinned(run_on.threads), Store(store, "sweep", _all_settings(setup, cells, settings, store)) as kept:
        _run(setup, walk, cells, company, run_on, kept, progress)
        for number in range(len(setup.prompts)):
            for cell in range(len(cells)):
                walk.recall(cell, kept.done[key_of(number, cell)]["absent"])
        found = [rows_of(kept.done, number, len(cells)) for number in range(len(setup.prompts))]
        provenance = setup.provenance(**settings)
    return Sweep(
        **common(setup, cells, arms, found),
        notes=(*setup.notes, *walk.notes),
        provenance=provenance,
        extra={"over": over},
    )


def _all_settings(
    setup: Setup, cells: Sequence[Cell], settings: Mapping[str, Any], store: str | FilePath | None
) -> dict[str, Any]:
    """Everything that a store of this sweep must have been made with."""
    if store is None:
        return {}
    patches = [[patch.to_dict() for patch in cell.patches] for cell in cells]
    return setup.settings | kept_with(*setup.models) | dict(settings) | {"cells": patches}


def _run(
    setup: Setup,
    walk: Walk,
    cells: Sequence[Cell],
    company: Company,
    run_on: Engine,
    store: Store,
    progress: bool,
) -> None:
    """Run what the store lacks."""
    jobs, lengths = _groups(setup, walk, len(cells), run_on, store.done), setup.lengths
    left = sum(len(group.cells) * lengths[group.prompt] for group in jobs.values())
    total = sum(lengths) * len(cells)
    with tqdm(total=total, initial=total - left, desc="sweep", unit="step", disable=not progress) as bar:
        here = {"tick": bar.update} if isinstance(run_on, LocalEngine) else {}
        make_worker = partial(unpack_runner, pack(setup), tuple(cells), company, **here)
        for key, finished in run_on.run(make_worker, jobs):
            for name, record in finished.items():
                store.add(name, record)
            left -= len(jobs[key].cells) * lengths[jobs[key].prompt]
            bar.n = total - left  # a text may end early
            bar.refresh()


def _groups(setup: Setup, walk: Walk, n_cells: int, run_on: Engine, done: Mapping[str, Any]) -> dict[str, Group]:
    """The cells that are missing, in groups that fit the memory and keep all workers busy."""
    missing = {
        number: [cell for cell in range(n_cells) if key_of(number, cell) not in done]
        for number in range(len(setup.prompts))
    }
    fair = math.ceil(sum(map(len, missing.values())) / (run_on.workers or MANY))
    found: list[Group] = []
    for number, cells in missing.items():
        size = max(1, min(_together(setup, walk, number, n_cells), fair))
        groups = [tuple(cells[i : i + size]) for i in range(0, len(cells), size)]
        shared = key_of(number, None) not in done
        if shared and not groups:
            groups = [()]
        found += [Group(number, group, shared and place == 0) for place, group in enumerate(groups)]
    return {str(place): group for place, group in enumerate(found)}


def _together(setup: Setup, walk: Walk, number: int, n_cells: int) -> int:
    """How many cells step beside one donor run: as many as their caches leave room for."""
    model = walk.model
    length = len(setup.prompts[number].ids) + setup.lengths[number]
    entry = sum(2 * info.n_kv_heads * info.head_dim for info in model.architecture.layers)
    arms = max(len(walk.cell_arms(cell)) for cell in range(n_cells))
    n_bytes = max(1, entry * length * arms * model.dtype.itemsize)
    return max(1, min(TOGETHER, int(SHARE_OF_FREE_MEMORY * free_memory(model.device)) // n_bytes))
