"""A distance by step as a curve: median and interval over prompts, exact zeros as marks of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from kvdrift.statistics.resampling import bootstrap_interval
from kvdrift.views.parts.curves import LogAxis
from kvdrift.views.parts.labels import cell_text
from kvdrift.views.parts.theme import IDENTICAL, NOT_FINITE


@dataclass(frozen=True)
class StepCurve:
    """One distance by step, over prompts; step 0 included.

    Attributes
    ----------
    steps
        Step numbers, ``[step]``; those that at least one prompt has.
    median
        Median over the prompts that have the step, ``[step]``; NaN if one of them has NaN.
    low, high
        95 % bootstrap interval of the median over prompts, ``[step]``; NaN with one prompt.
    same, n
        How many prompts are equal bit for bit, and how many there are, int ``[step]``.
    """

    steps: np.ndarray
    median: np.ndarray
    low: np.ndarray
    high: np.ndarray
    same: np.ndarray
    n: np.ndarray


def step_curve(values: np.ndarray, same: np.ndarray, ran: np.ndarray, intervals: bool = True) -> StepCurve:
    """Reduce ``values [prompt, step]`` over the prompts for which ``ran [prompt, step]``.

    ``same [prompt, step]`` is 1 where all logits are equal bit for bit.

    Examples
    --------
    >>> found = step_curve(np.array([[0.0, 2.0], [0.0, 4.0]]), np.eye(2), np.ones((2, 2), dtype=bool))
    >>> found.median.tolist(), found.same.tolist()
    ([0.0, 3.0], [1, 1])
    """
    keep = ran.any(axis=0)
    values, same, ran = values[:, keep], same[:, keep], ran[:, keep]
    steps = np.flatnonzero(keep)
    median, low, high = (np.full(len(steps), np.nan) for _ in range(3))
    for who in np.unique(ran, axis=1).T:  # prompts end at different steps: each group of steps has its own prompts
        at = (ran == who[:, None]).all(axis=0)
        group = values[who][:, at]
        median[at] = np.median(group, axis=0)
        if intervals:
            low[at], high[at] = bootstrap_interval(np.median, group)
    return StepCurve(steps, median, low, high, ((same == 1) & ran).sum(axis=0), ran.sum(axis=0))


def step_traces(
    curve: StepCurve, axis: LogAxis, *, name: str, colour: str, what: str = "", width: float = 2.0, dash: str = "solid",
    shade: bool = False, legend: bool = True,
) -> list[go.Scatter]:  # fmt: skip
    """Interval, line, and marks where the median is exactly zero or not finite; the line stops there.

    Parameters
    ----------
    curve, axis
        What to draw, and the axis that places zeros.
    name, what
        For the legend, and for the hover box.
    shade
        Draw the interval over prompts as a band.
    legend
        Whether the legend has an entry.
    """
    common = {"legendgroup": name}
    details = _details(curve)
    hover = f"<b>step %{{x}}</b><br>{what or name}: %{{customdata}}<extra></extra>"
    traces = []
    if shade and not np.isnan(curve.low).all():
        fill = f"rgba({','.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))},0.2)"
        traces.append(step_band(curve.steps, curve.low, curve.high, axis, fillcolor=fill, name=f"{name}: interval",
                                **common))  # fmt: skip
    ordinary = np.isfinite(curve.median) & (curve.median > 0)
    traces.append(
        go.Scatter(
            x=curve.steps, y=np.where(ordinary, curve.median, np.nan), mode="lines+markers", name=name,
            showlegend=legend, line={"color": colour, "width": width, "dash": dash},
            marker={"size": 3 + width, "color": colour}, customdata=details, hovertemplate=hover, **common,
        )
    )  # fmt: skip
    special = [
        (curve.median == 0, {"size": 16 - 2 * width, "symbol": "circle", "color": IDENTICAL,
                             "line": {"color": colour, "width": 1.5}}, "exactly zero"),
        (~np.isfinite(curve.median), {"size": 10, "symbol": "x", "color": NOT_FINITE}, "NaN or infinite"),
    ]  # fmt: skip
    for here, marker, kind in special:
        if here.any():
            place = axis.place(curve.median[here])
            place = np.where(np.isfinite(place), place, 10**axis.high)
            traces.append(
                go.Scatter(
                    x=curve.steps[here], y=place, mode="markers", name=f"{name}: {kind}", showlegend=False,
                    marker=marker, customdata=details[here], hovertemplate=hover, cliponaxis=False, **common,
                )
            )  # fmt: skip
    return traces


def step_band(steps: np.ndarray, low: np.ndarray, high: np.ndarray, axis: LogAxis, **style: Any) -> go.Scatter:
    """A filled band between two curves by step, broken where both are exactly zero or one is not a number."""
    keep = ~(np.isnan(low) | np.isnan(high)) & (high > 0)
    runs = np.split(np.arange(len(steps)), np.flatnonzero(np.diff(keep.astype(int))) + 1)
    x: list[float] = []
    y: list[float] = []
    for run in runs:
        if run.size and keep[run[0]]:
            at, top, bottom = steps[run].astype(float), axis.place(high[run]), axis.place(low[run])
            if run.size == 1:  # a step by itself would have no width
                at, top, bottom = np.array([at[0] - 0.15, at[0] + 0.15]), np.repeat(top, 2), np.repeat(bottom, 2)
            x += [*at, *at[::-1], np.nan]
            y += [*top, *bottom[::-1], np.nan]
    return go.Scatter(
        x=x, y=y, mode="lines", fill="toself", line={"width": 0}, hoverinfo="skip", showlegend=False, **style
    )


def zero_words(values: np.ndarray, same: np.ndarray) -> str:
    """What a distance of exactly zero means here: equal bits wherever it occurs, or not always.

    Examples
    --------
    >>> zero_words(np.array([0.0, 2.0]), np.array([1.0, 0.0])), zero_words(np.array([0.0]), np.array([0.0]))
    ('bit-identical', 'exactly 0')
    """
    return "bit-identical" if (same[values == 0] == 1).all() else "exactly 0"


def _details(curve: StepCurve) -> np.ndarray:
    """The median with its interval and how many prompts have equal bits, in words, ``[step]``."""
    medians = cell_text(curve.median, "exactly 0")
    low, high = cell_text(curve.low, "0"), cell_text(curve.high, "0")
    rows = []
    for i, text in enumerate(medians):
        n = int(curve.n[i])
        words = f"<b>{text}</b>"
        if n > 1:
            words += f", median of {n} prompts"
        if not np.isnan(curve.low[i]):
            words += f"<br>95 % interval over prompts: {low[i]} to {high[i]}"
        if curve.same[i]:
            words += "<br>all logits equal bit for bit" + (f" in {int(curve.same[i])} of {n}" if n > 1 else "")
        rows.append(words)
    return np.array(rows, dtype=object)
