"""Which axes a sweep ran over, and how its cells lie on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

from kvdrift.patching.outcome import Outcomes
from kvdrift.views.parts.interventions import cell_schedule

NUMBERED = ("layer", "head", "position", "step")
TITLES = {
    "layer": "layer (0 reads the embeddings)",
    "head": "head (KV head at k, v, kv)",
    "position": "absolute position",
    "step": "step of the one-shot patch",
    "site": "site",
    "schedule": "schedule",
}
UPWARDS = ("layer", "head", "position", "step", "schedule", "site")
ACROSS = ("position", "step", "head", "site", "schedule")


@dataclass(frozen=True)
class Axis:
    """One thing that varies: its name, its values in order (None where a cell singles none out), their labels."""

    name: str
    values: tuple[Any, ...]

    @property
    def labels(self) -> list[str]:
        """What stands at the ticks."""
        return ["all" if value is None else str(value) for value in self.values]

    @property
    def title(self) -> str:
        """The axis title in words."""
        return TITLES[self.name]

    @property
    def numbered(self) -> bool:
        """Whether its values are numbers in order."""
        return self.name in NUMBERED


@dataclass(frozen=True)
class Grid:
    """Cells on two axes, in panels that differ in everything else.

    Attributes
    ----------
    y, x
        The axes.
    panels
        Label of each panel (empty with only one), and the cell number at each ``(y, x)`` index.
    """

    y: Axis
    x: Axis
    panels: dict[str, dict[tuple[int, int], int]]


@dataclass(frozen=True)
class Row:
    """Cells on one numbered axis: the cell number at each index."""

    axis: Axis
    cells: tuple[int, ...]


def arrange(result: Outcomes, table: pd.DataFrame) -> Grid | Row | None:
    """The axes of a sweep by what varies among its cells; None if they are no grid and only have labels.

    Layers go upwards and heads, positions or steps across, where there are any; else sites, else schedules. What is
    left over makes panels. Cells of which two lie at the same place, or that vary in site and schedule alone, are a
    list of labels.
    """
    places = [_place(result, row) for _, row in table.iterrows()]
    axes = {name: axis for name in UPWARDS if len((axis := _axis(name, places)).values) > 1}
    keys = [tuple(place[name] for name in axes) for place in places]
    if len(set(keys)) < len(keys) or not any(axis.numbered for axis in axes.values()):
        return None
    if len(axes) == 1:
        (only,) = axes.values()
        order = {value: i for i, value in enumerate(only.values)}
        cells = sorted(range(len(places)), key=lambda cell: order[places[cell][only.name]])
        return Row(only, tuple(cells))
    up = next(name for name in UPWARDS if name in axes)
    across = next(name for name in ACROSS if name in axes and name != up)
    rest = [name for name in axes if name not in (up, across)]
    panels: dict[str, dict[tuple[int, int], int]] = {}
    for cell, place in enumerate(places):
        label = ", ".join(_words(name, place[name]) for name in reversed(rest))
        at = (axes[up].values.index(place[up]), axes[across].values.index(place[across]))
        panels.setdefault(label, {})[at] = cell
    return Grid(axes[up], axes[across], panels)


def names(result: Outcomes, table: pd.DataFrame, grid: Grid | Row | None) -> list[str]:
    """What each cell is called in words: its place, or its label where the cells are no grid."""
    if grid is None:
        return [str(label) for label in table["label"]]
    made = []
    for _, row in table.iterrows():
        place = _place(result, row)
        parts = [_words(name, place[name]) for name in NUMBERED if name != "step" and place[name] is not None]
        at = f" at {', '.join(parts)}" if parts else ""
        made.append(f"{place['site']}{at} ({cell_schedule(result.cells[int(row['cell'])])})")
    return made


def _words(name: str, value: Any) -> str:
    if name == "schedule":
        return str(value)
    return f"all {name}s" if value is None else f"{name} {value}"


def _place(result: Outcomes, row: pd.Series) -> dict[str, Any]:
    """Where a cell lies; one-shot steps are numbers if every cell is one-shot, else part of the schedule."""
    one_shot = all(patch.schedule.is_one_shot for cell in result.cells for patch in cell.patches)
    place: dict[str, Any] = {name: None if pd.isna(row[name]) else int(row[name]) for name in NUMBERED}
    place["site"] = str(row["site"])
    place["schedule"] = "" if one_shot and place["step"] is not None else cell_schedule(result.cells[int(row["cell"])])
    place["step"] = place["step"] if one_shot else None
    return place


def _axis(name: str, places: list[dict[str, Any]]) -> Axis:
    found = list(dict.fromkeys(place[name] for place in places))
    if name in NUMBERED:
        found.sort(key=lambda value: (value is None, value or 0))
    return Axis(name, tuple(found))
