"""The work of a sweep: groups of cells over one prompt, and the records they leave in its store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvdrift.patching.arm_metrics import FLOATS
from kvdrift.patching.patch import one_prompt
from kvdrift.patching.setup import Setup
from kvdrift.patching.spec import Cell
from kvdrift.patching.walk import Company, Rows, Walk
from kvdrift.runs.ship import Packed

NUMBERS = (*FLOATS, "top1")
ONCE = ("fed", "donor_top1")
"""What a prompt has once, not per arm; it is kept with the shared arms."""
Kept = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Group:
    """Cells that step beside one donor run over one prompt.

    Attributes
    ----------
    prompt
        Its number.
    cells
        Their numbers.
    shared
        Whether the arms that all cells share run here, too.
    """

    prompt: int
    cells: tuple[int, ...]
    shared: bool


def key_of(prompt: int, cell: int | None) -> str:
    """The key of a cell's record in the store; None for the arms that all cells share."""
    return f"{prompt}/shared" if cell is None else f"{prompt}/{cell}"


class GroupRunner:
    """Runs groups of cells; an engine makes one in each process.

    Parameters
    ----------
    setup, cells, company
        The sweep.
    tick
        Called with the number of cells of a group after each of its steps.
    """

    def __init__(
        self,
        setup: Setup,
        cells: Sequence[Cell],
        company: Company,
        tick: Callable[[int], object] = lambda n: None,
    ) -> None:
        self.setup, self.cells, self.tick = setup, dict(enumerate(cells)), tick
        self.walk = Walk(setup.model, setup.donor, setup.recipient, company, setup.trace(0))

    def __call__(self, group: Group) -> dict[str, dict[str, Any]]:
        """Records by their keys in the store: one per cell, and one of the shared arms if they ran."""
        shared = self.walk.shared_arms() if group.shared else self.walk.shared_arms()[:1]
        own = [self.walk.cell_arms(cell) for cell in group.cells]
        arms = [*shared, *(arm for some in own for arm in some)]
        self.walk.forget()
        # All cells are handed over: the shared arms begin at the first write of any, whichever group they run in.
        rows = one_prompt(
            self.setup, self.walk, group.prompt, self.cells, arms, lambda n_arms: self.tick(len(group.cells))
        )
        found: dict[str, dict[str, Any]] = {}
        start = len(shared)
        if group.shared:
            once = {name: rows[name].tolist() for name in ONCE}
            found[key_of(group.prompt, None)] = _numbers(rows, slice(0, start)) | once
        for cell, some in zip(group.cells, own, strict=True):
            numbers = _numbers(rows, slice(start, start + len(some)))
            found[key_of(group.prompt, cell)] = numbers | {"absent": self.walk.absent(cell)}
            start += len(some)
        return found

    def close(self) -> None:
        """Free the float32 copy."""
        self.walk.close()


def unpack_runner(packed: Packed[Setup], cells: Sequence[Cell], company: Company, **tick: Any) -> GroupRunner:
    """The runner of a sweep whose models may have travelled."""
    return GroupRunner(packed.unpack(), cells, company, **tick)


def rows_of(kept: Kept, prompt: int, n_cells: int) -> Rows:
    """The rows of all arms over one prompt, once every record is there."""
    parts = [kept[key_of(prompt, cell)] for cell in (None, *range(n_cells))]
    stacked = {name: np.concatenate([np.array(part[name]) for part in parts]) for name in NUMBERS}
    return stacked | {name: np.array(parts[0][name]) for name in ONCE}


def _numbers(rows: Rows, arms: slice) -> dict[str, Any]:
    return {name: rows[name][arms].tolist() for name in NUMBERS}
