"""Recovery along one axis: a point per cell with its interval, beside placebos and the unpatched recipient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from kvdrift.patching.recovery import Recovery
from kvdrift.views.parts.interventions import ARM_COLOURS, UNDEFINED
from kvdrift.views.parts.labels import escape
from kvdrift.views.parts.sweep_axes import Axis
from kvdrift.views.parts.theme import BOUNDARY, FLOOR, NOT_FINITE, lay_out
from kvdrift.words.numbers import signed

LEFT = -1.0  # smaller values are drawn here


@dataclass(frozen=True)
class Point:
    """One cell: its name and hover box, its recovery, that of the other arms on the same scale (None: not run)."""

    name: str
    hover: str
    trivial: bool
    recovery: Recovery
    unpatched: Recovery
    reroll: Recovery | None


def points(cells: Sequence[Point], axis: Axis | None, reference: str, title: str, dark: bool) -> go.Figure:
    """Draw the cells in the order given: labels from top to bottom, or a numbered axis across.

    Parameters
    ----------
    axis
        The numbered axis, or None for labels.
    reference
        What 0 stands for.
    """
    fig = go.Figure()
    for mark in _marks(cells, axis is None):
        fig.add_scatter(**_turned(mark, axis is None))
    for place, dash in ((0, "solid"), (1, "dot")):
        line = {"color": BOUNDARY, "width": 1, "dash": dash}
        (fig.add_vline if axis is None else fig.add_hline)(place, line=line, layer="below")
    scale = {
        "title_text": "recovery", "range": [-1.08, 1.12], "tickvals": [-1, -0.5, 0, 0.5, 1],
        "ticktext": ["≤ −1<br>farther", "−0.5", f"0<br>as {reference}", "0.5", "1<br>the donor"],
    }  # fmt: skip
    places = list(range(len(cells)))
    if axis is None:
        labels = [escape(cell.name) for cell in cells]
        fig.update_xaxes(**scale)
        fig.update_yaxes(tickvals=places, ticktext=labels, range=[len(cells) - 0.4, -0.6], showgrid=False)
        height = max(120, 30 * len(cells))
    else:
        every = max(1, -(-len(cells) // 32))
        fig.update_yaxes(**scale)
        fig.update_xaxes(
            title_text=axis.title, tickvals=places[::every], ticktext=axis.labels[::every],
            range=[-0.6, len(cells) - 0.4], showgrid=False,
        )  # fmt: skip
        height = 380
    return lay_out(fig, title, dark=dark, plot=height, above=12, below=78)


def _turned(mark: dict[str, Any], sideways: bool) -> dict[str, Any]:
    """Put ``value`` on the recovery axis, ``at`` on the other one, and the error bars along the first."""
    along, across = ("x", "y") if sideways else ("y", "x")
    names = {"value": along, "at": across, "error": f"error_{along}"}
    return {names.get(key, key): value for key, value in mark.items()}


def _marks(cells: Sequence[Point], sideways: bool) -> list[dict[str, Any]]:
    """Everything that is drawn: placebos, the arms without a patch, and the patched cells by kind."""
    values = np.array([cell.recovery.value for cell in cells])
    trivial = np.array([cell.trivial for cell in cells], dtype=bool)
    kinds: list[tuple[str, np.ndarray, dict[str, Any]]] = [
        ("patched (95 % interval)", ~trivial & (values >= LEFT), {"symbol": "circle", "color": ARM_COLOURS["patched"]}),
        ("1 by construction", trivial & ~np.isnan(values),
         {"symbol": "square-open", "color": UNDEFINED, "line": {"width": 2}}),
        ("below −1", ~trivial & (values < LEFT),
         {"symbol": "triangle-left" if sideways else "triangle-down", "color": NOT_FINITE}),
        ("undefined: nothing to recover", np.isnan(values), {"symbol": "x", "color": UNDEFINED}),
    ]  # fmt: skip
    marks = _spread(cells)
    if any(cell.recovery.reference != "unpatched" for cell in cells):
        marks += _other("without a patch", [cell.unpatched for cell in cells], "diamond-open", "unpatched")
    marks += _other("re-roll, no patch", [cell.reroll for cell in cells], "x-thin-open", "re-roll")
    for number, (name, here, look) in enumerate(kinds):
        at = np.flatnonzero(here)
        if not at.size:
            continue
        texts = ["undefined" if np.isnan(value) else f"<b>{signed(value)}</b>" for value in values[at]]
        marks.append(
            {"value": np.nan_to_num(np.clip(values[at], LEFT, None)), "at": at, "mode": "markers+text", "name": name,
             "marker": {"size": 11, **look}, "text": texts, "textposition": "top center", "textfont": {"size": 11},
             "customdata": [cells[int(i)].hover for i in at], "hovertemplate": "%{customdata}<extra></extra>",
             "cliponaxis": False, **({"error": bars} if number == 0 and (bars := _bars(cells, at)) else {})}
        )  # fmt: skip
    return marks


def _spread(cells: Sequence[Point]) -> list[dict[str, Any]]:
    """A grey bar from the lowest to the highest single placebo; nothing where there is only one."""
    ends = np.array([cell.recovery.spread for cell in cells]).reshape(-1, 2)
    at = np.flatnonzero(~np.isnan(ends[:, 0]))
    if not at.size:
        return []
    broken = np.concatenate([np.clip(ends[at], LEFT, None), np.full((at.size, 1), np.nan)], axis=1)
    return [
        {"value": broken.ravel(), "at": np.repeat(at, 3), "mode": "lines", "name": "spread of single placebos",
         "line": {"color": FLOOR, "width": 14}, "hoverinfo": "skip"}
    ]  # fmt: skip


def _other(name: str, found: Sequence[Recovery | None], symbol: str, role: str) -> list[dict[str, Any]]:
    """An arm without a patch, on the scale of each cell."""
    values = np.array([np.nan if one is None else one.value for one in found])
    at = np.flatnonzero(~np.isnan(values))
    if not at.size:
        return []
    colour = ARM_COLOURS[role]
    return [
        {"value": np.clip(values[at], LEFT, None), "at": at, "mode": "markers", "name": name,
         "marker": {"symbol": symbol, "size": 10, "color": colour, "line": {"width": 2, "color": colour}},
         "customdata": [signed(value) for value in values[at]],
         "hovertemplate": f"{name}, on the same scale: %{{customdata}}<extra></extra>"}
    ]  # fmt: skip


def _bars(cells: Sequence[Point], at: np.ndarray) -> dict[str, Any] | None:
    """Error bars of the 95 % interval, cut at the end of the axis; None without any."""
    value, low, high = (
        np.array([getattr(cells[int(i)].recovery, name) for i in at]) for name in ("value", "low", "high")
    )
    if np.isnan(low).all():
        return None
    return {
        "type": "data", "symmetric": False, "array": np.nan_to_num(high - value).tolist(),
        "arrayminus": np.nan_to_num(value - np.clip(low, LEFT, None)).tolist(),
        "color": ARM_COLOURS["patched"], "thickness": 2, "width": 5,
    }  # fmt: skip
