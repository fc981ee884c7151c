"""Recovery of every cell of a sweep: a heat map, or points where there is one axis."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from kvdrift.errors import InputError
from kvdrift.patching import tables
from kvdrift.patching.outcome import Outcomes
from kvdrift.patching.recovery import Recovery
from kvdrift.views.parts import takeaway_patching as takeaway
from kvdrift.views.parts.choices import menu
from kvdrift.views.parts.interventions import (
    DISTANCES,
    UNDEFINED,
    cell_schedule,
    check_metric,
    check_outcomes,
    into,
    of_steps,
    recovery_words,
    size,
)
from kvdrift.views.parts.labels import escape
from kvdrift.views.parts.recovery_points import Point, points
from kvdrift.views.parts.sweep_axes import Axis, Grid, arrange, names
from kvdrift.views.parts.theme import lay_out, title_text
from kvdrift.words.numbers import number, plural, signed

DIVERGING = [[0, "#8f4300"], [0.25, "#e0913f"], [0.5, "#f4f3ef"], [0.75, "#5fa3d9"], [1, "#0b4f8f"]]
HATCH = "rgba(255,255,255,0.55)"
ZERO = {"placebo": "the placebo", "unpatched": "without a patch"}  # what 0 stands for
STEPS = {
    "after": "the steps that follow the first write",
    "written": "the steps at which the patch is written",
    "all": "all steps from 1 on",
}


def recovery(sweep: Outcomes, *, metric: str = "logit_l2", steps: str = "after", dark: bool = False) -> go.Figure:
    """Recovery of every cell, on a colour scale fixed at ±1: 1 is the donor, 0 no better than the placebo.

    A sweep over layers and sites (or heads, positions, steps, schedules) is a heat map; what varies beyond two axes
    goes into a dropdown. A sweep over one numbered axis, and cells that only have labels, are points with intervals,
    beside the spread of the placebos and the unpatched recipient on the same scale. Values below −1 are clipped in
    colour and given as they are in the hover box. Undefined cells (the placebo has the donor's logits already) are
    grey; cells whose recovery is 1 by construction are hatched.

    Parameters
    ----------
    sweep
        What `kvdrift.sweep` or `kvdrift.patch` found.
    metric
        ``"logit_l2"`` or ``"kl"``.
    steps
        Which steps count: ``"after"`` the first write, those ``"written"``, or ``"all"`` from 1 on. By default what
        is drawn is the column ``recovery`` of ``sweep.to_dataframe()``.
    dark
        Use the dark template.

    Raises
    ------
    InputError
        If it is another kind of result, or there is no such metric or choice of steps.

    Examples
    --------
    >>> import kvdrift as kd
    >>> model = kd.load(kd.models.tiny("llama"), quiet=True)
    >>> found = kd.sweep(model, [1, 2, 3], sites=["k", "v"], max_new_tokens=4, progress=False)
    >>> fig = kd.views.recovery(found)
    """
    check_outcomes("recovery", sweep)
    check_metric(metric)
    if steps not in STEPS:
        raise InputError(f"steps={steps!r}: choose {', '.join(map(repr, STEPS))}.")
    table = tables.cells(sweep, metric, steps)
    found = [sweep.recovery(cell, metric, steps) for cell in table["cell"]]
    layout = arrange(sweep, table)
    table["name"] = names(sweep, table, layout)
    hover = [_hover(sweep, row, f, metric, steps) for (_, row), f in zip(table.iterrows(), found, strict=True)]
    title = title_text(
        takeaway.recovery(sweep, table, metric, steps),
        f"Recovery: {_reference(found)} over {STEPS[steps]}, by {DISTANCES[metric].split(' (')[0]}. "
        f"{into(sweep)}. {size(sweep)}.",
        "" if layout is None else _common(sweep),
    )
    reference = ZERO.get("/".join({f.reference for f in found}), "the reference")
    unpatched = [sweep.recovery(cell, metric, steps, role="unpatched") for cell in table["cell"]]
    if isinstance(layout, Grid):
        bar = _bar(reference, [f.value for f in unpatched])
        return _heatmap(layout, table, hover, bar, title, dark)
    has_reroll = bool(sweep.find("re-roll"))
    order = range(len(table)) if layout is None else layout.cells
    cells = [
        Point(
            name=str(table["name"].iloc[cell]),
            hover=hover[cell],
            trivial=bool(table["trivial"].iloc[cell]),
            recovery=found[cell],
            unpatched=unpatched[cell],
            reroll=sweep.recovery(cell, metric, steps, role="re-roll") if has_reroll else None,
        )
        for cell in order
    ]
    return points(cells, None if layout is None else layout.axis, reference, title, dark)


def _reference(found: list[Recovery]) -> str:
    names = list(dict.fromkeys(f.reference for f in found))
    return f"1 is the donor's logits, 0 no nearer than the {' or '.join(names)},"


def _common(sweep: Outcomes) -> str:
    """The schedule, where all cells share one."""
    schedules = list(dict.fromkeys(cell_schedule(cell) for cell in sweep.cells))
    sites = list(dict.fromkeys(patch.site for cell in sweep.cells for patch in cell.patches))
    shared = [f"site: {sites[0]}"] * (len(sites) == 1) + [f"schedule: {schedules[0]}"] * (len(schedules) == 1)
    return f"All cells: {', '.join(shared)}." if shared else ""


def _hover(sweep: Outcomes, row: pd.Series, found: Recovery, metric: str, steps: str) -> str:
    """Everything a reader would ask of one cell, escaped."""
    cell = int(row["cell"])
    lines = [f"<b>{escape(str(row['name']))}</b>", f"recovery: <b>{recovery_words(found)}</b>"]
    if row["trivial"]:
        lines.append("1 by construction (the donor's last residual at every step): proves nothing")
    if np.isnan(found.value):
        lines.append(f"undefined: the {found.reference} has the donor's logits already, or no step counts")
    if not np.isnan(found.standard_error):
        lines.append(f"standard error: {number(found.standard_error)}")
    if (metric, steps) == ("logit_l2", "after") and not np.isnan(row["p_holm"]):
        lines.append(f"p of no recovery: {number(found.p_value)}; after Holm over the cells: {number(row['p_holm'])}")
    if not np.isnan(found.spread[0]):
        lines.append(f"single placebos: {signed(found.spread[0])} to {signed(found.spread[1])}")
    if found.reference != "unpatched":
        plain = sweep.recovery(cell, metric, steps, against="unpatched")
        lines.append(f"against no patch at all: {recovery_words(plain)}")
    if steps == "after":
        proves = "; 1 by construction" if row["trivial_written"] else ""
        restored = of_steps(float(row["restored_written"]))
        lines.append(f"at the written steps: {signed(row['recovery_written'])}, restored {restored}{proves}")
    lines.append(f"restored bit for bit: {of_steps(sweep.restored(cell, steps))} of steps")
    lines.append(f"flips: {sweep.flips(cell, steps)} (unpatched {sweep.flips(cell, steps, 'unpatched')})")
    if np.isfinite(row["followed"]):
        lines.append(f"tokens followed: {row['followed']:.3g} (unpatched {row['followed_unpatched']:.3g})")
    far = f"{number(row['logit_l2'])}; {found.reference} {number(row['logit_l2_reference'])}"
    if found.reference != "unpatched":
        far += f"; unpatched {number(row['logit_l2_unpatched'])}"
    lines.append(f"mean distance (centred logit L2): {far}")
    lines.append(f"n = {found.n} {plural(found.n, 'prompt')}")
    return "<br>".join(lines)


# --- the heat map


def _heatmap(
    grid: Grid, table: pd.DataFrame, hover: list[str], bar: dict[str, Any], title: str, dark: bool
) -> go.Figure:
    fig = go.Figure()
    owner: list[str | None] = []
    first = _first_panel(grid, table)
    for label, cells in grid.panels.items():
        traces = _panel(grid, cells, table, hover, label)
        fig.add_traces([trace.update(visible=label == first) for trace in traces])
        owner += [label] * len(traces)
    trivial, undefined = bool(table["trivial"].any()), bool(table["recovery"].isna().any())
    legend = _legend(trivial, undefined)
    fig.add_traces(legend)
    owner += [None] * len(legend)
    fig.update_layout(coloraxis={"cmin": -1, "cmax": 1, "colorscale": DIVERGING, "colorbar": bar})
    fig.update_xaxes(**_ticks(grid.x, 24), showgrid=False)
    fig.update_yaxes(**_ticks(grid.y, 32), showgrid=False)
    menus = []
    if len(grid.panels) > 1:
        labels = [escape(label) for label in grid.panels]
        args = [[{"visible": [o in (label, None) for o in owner]}] for label in grid.panels]
        menus.append(menu("panel", labels, escape(first), args))
    return lay_out(fig, title, dark=dark, menus=menus, plot=min(660, max(260, 20 * len(grid.y.values))), above=12)


def _first_panel(grid: Grid, table: pd.DataFrame) -> str:
    """The panel with the best cell that is not trivial, which the title speaks of."""
    values = table["recovery"].where(~table["trivial"].astype(bool))
    if values.notna().any():
        best = int(values.argmax())
        return next(label for label, cells in grid.panels.items() if best in cells.values())
    return next(iter(grid.panels))


def _bar(reference: str, unpatched: list[float]) -> dict[str, Any]:
    """The colour bar, with a tick where the unpatched recipient stands (median over cells) if it is not at 0."""
    ticks = {-1.0: "≤ −1  farther", -0.5: "−0.5", 0.0: f"0  as {reference}", 0.5: "0.5", 1.0: "1  the donor"}
    known = [value for value in unpatched if not np.isnan(value)]
    bare = float(np.clip(np.median(known), -1, 1)) if known else 0.0
    if 0.05 < abs(bare) < 0.95:
        ticks = {place: text for place, text in ticks.items() if abs(place - bare) > 0.05}
        ticks[bare] = f"{signed(bare)}  without a patch"
    return {
        "tickmode": "array", "tickvals": list(ticks), "ticktext": list(ticks.values()),
        "title": {"text": "recovery", "side": "right"},
    }  # fmt: skip


def _ticks(axis: Axis, most: int) -> dict[str, Any]:
    """Ticks at indices with the axis' own labels, thinned to at most ``most``."""
    every = max(1, -(-len(axis.values) // most))
    return {
        "title_text": axis.title, "tickmode": "array", "tickvals": list(range(0, len(axis.values), every)),
        "ticktext": [escape(label) for label in axis.labels[::every]], "range": [-0.5, len(axis.values) - 0.5],
    }  # fmt: skip


def _panel(
    grid: Grid, cells: dict[tuple[int, int], int], table: pd.DataFrame, hover: list[str], name: str
) -> list[Any]:
    """Colours, grey where undefined, and hatching where trivial."""
    shape = (len(grid.y.values), len(grid.x.values))
    z, grey = np.full(shape, np.nan), np.full(shape, np.nan)
    text, words = np.full(shape, "", dtype=object), np.full(shape, "", dtype=object)
    trivial = []
    for at, cell in cells.items():
        value = float(table["recovery"].iloc[cell])
        text[at] = hover[cell]
        if np.isnan(value):
            grey[at], words[at] = 0.0, "?"
            continue
        z[at], words[at] = float(np.clip(value, -1, 1)), signed(value)
        if table["trivial"].iloc[cell]:
            trivial.append(at)
            words[at] = ""
    room = shape[1] <= 10 and shape[0] <= 36
    common = {
        "x": np.arange(shape[1]), "y": np.arange(shape[0]), "customdata": text, "hoverongaps": False, "xgap": 1,
        "ygap": 1, "hovertemplate": "%{customdata}<extra></extra>",
    }  # fmt: skip
    plain = [[0, UNDEFINED], [1, UNDEFINED]]
    return [
        go.Heatmap(z=z, coloraxis="coloraxis", name=f"recovery {name}".strip(), **common),
        go.Heatmap(z=grey, colorscale=plain, showscale=False, name=f"undefined {name}".strip(), **common),
        _hatching(trivial, f"by construction {name}".strip()),
        *([_numbers(words, z, f"numbers {name}".strip())] if room else []),
    ]


def _numbers(words: np.ndarray, z: np.ndarray, name: str) -> go.Scatter:
    """The value in each cell, dark on pale colours and white on strong ones."""
    rows, columns = np.nonzero(words != "")
    strong = np.abs(np.nan_to_num(z[rows, columns], nan=1.0)) > 0.6
    return go.Scatter(
        x=columns,
        y=rows,
        mode="text",
        text=words[rows, columns],
        hoverinfo="skip",
        showlegend=False,
        name=name,
        textfont={"size": 11, "color": np.where(strong, "#ffffff", "#1f2430").tolist()},
    )


def _hatching(cells: list[tuple[int, int]], name: str) -> go.Scatter:
    """Diagonal strokes over cells ``(y, x)``."""
    x: list[float | None] = []
    y: list[float | None] = []
    for row, column in cells:
        for shift in np.linspace(-0.75, 0.75, 7):  # strokes from lower left to upper right, cut at the cell's edges
            low, high = max(-0.5, -0.5 + shift), min(0.5, 0.5 + shift)
            x += [column + low, column + high, None]
            y += [row + low - shift, row + high - shift, None]
    return go.Scatter(
        x=x, y=y, mode="lines", line={"color": HATCH, "width": 1.5}, showlegend=False, hoverinfo="skip", name=name
    )


def _legend(trivial: bool, undefined: bool) -> list[go.Scatter]:
    """Entries for the two special kinds of cell, where there are any."""
    marks = []
    if trivial:
        marks.append(("hatched: 1 by construction", {"symbol": "hash-open", "size": 12, "color": "#3f87c6"}))
    if undefined:
        marks.append(("?: undefined, nothing to recover", {"symbol": "square", "size": 12, "color": UNDEFINED}))
    return [
        go.Scatter(x=[None], y=[None], mode="markers", name=name, marker=marker, hoverinfo="skip")
        for name, marker in marks
    ]
