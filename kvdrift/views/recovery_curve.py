"""Distance to the donor by step: the patched recipient beside what it has to be told from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import plotly.graph_objects as go

from kvdrift.patching.outcome import Outcomes
from kvdrift.views.parts import takeaway_patching as takeaway
from kvdrift.views.parts.choices import menu, whole_numbers
from kvdrift.views.parts.curves import LogAxis
from kvdrift.views.parts.interventions import (
    ARM_COLOURS,
    ARM_NAMES,
    DISTANCES,
    check_cell,
    check_metric,
    check_outcomes,
    into,
    size,
    written_spans,
)
from kvdrift.views.parts.labels import escape
from kvdrift.views.parts.step_curves import StepCurve, step_band, step_curve, step_traces, zero_words
from kvdrift.views.parts.theme import FLOOR, PATH_A, lay_out, title_text

MAX_CELLS = 40  # cells up to which a dropdown offers them all
HIDDEN = ("one ulp", "re-rolled patched", "float32 donor")  # one click on the legend away
ORDER = ("placebo", "re-roll", "unpatched", *HIDDEN, "patched")
LEGEND = ("patched", "unpatched", "placebo", "re-roll", *HIDDEN)
DASHES = {"patched": "solid", "unpatched": "solid", "placebo": "dash"}
WRITTEN = "rgba(47,127,209,0.13)"


def recovery_curve(result: Outcomes, cell: int = 0, *, metric: str = "logit_l2", dark: bool = False) -> go.Figure:
    """How far each arm is from the donor at every step, all of them fed the donor's tokens.

    Lines are medians over prompts of the values in ``result.to_dataframe("steps")``; the shade around the patched arm
    is a 95 % bootstrap interval over prompts, the grey band the range of the placebos' medians over their seeds.
    Where a median is exactly zero (all logits of the donor, bit for bit) a grey mark stands at the bottom and the
    line stops. Steps at which the patch is written are shaded.

    The self-patch and the full patch are left out: they are the unpatched recipient and the donor, by construction.

    Parameters
    ----------
    result
        What `kvdrift.patch` or `kvdrift.sweep` found.
    cell
        The cell of a sweep shown first; a dropdown offers the others (up to 40 cells).
    metric
        ``"logit_l2"`` (centred over the vocabulary) or ``"kl"`` (nats).
    dark
        Use the dark template.

    Raises
    ------
    InputError
        If it is another kind of result, or has no such cell or metric.

    Examples
    --------
    >>> import kvdrift as kd
    >>> model = kd.load(kd.models.tiny("llama"), quiet=True)
    >>> result = kd.patch(model, [1, 2, 3], kd.Patch("kv"), max_new_tokens=4, progress=False)
    >>> fig = kd.views.recovery_curve(result)
    """
    check_outcomes("recovery_curve", result)
    check_cell(result, cell)
    check_metric(metric)
    cells = list(range(len(result.cells))) if len(result.cells) <= MAX_CELLS else [cell]
    shared: dict[str, StepCurve | _Band] = {
        role: _curve(result, 0, metric, role) for role in ("unpatched", "re-roll") if result.find(role)
    }
    lines = {c: shared | _lines(result, c, metric) for c in cells}
    axis = LogAxis.of([line.drawn if isinstance(line, _Band) else np.stack([line.median, line.low, line.high])
                       for found in lines.values() for line in found.values()])  # fmt: skip

    fig = go.Figure()
    owner: list[int] = []
    for c in cells:
        traces = _traces(lines[c], axis, c == cell)
        fig.add_traces(traces)
        owner += [c] * len(traces)
    last = max(int(result.n_steps.max(initial=1)) - 1, 1)
    fig.update_xaxes(
        title_text="step (each step predicts one new token; step 0 comes before any patch)", range=[-0.6, last + 0.6],
        **whole_numbers(last + 1),
    )  # fmt: skip
    zero = zero_words(result.arrays[metric], result.arrays["identical"])
    fig.update_yaxes(title_text=DISTANCES[metric], **axis.settings(zero))
    layouts = {c: {"title.text": _title(result, c, metric)} | _shading(result, c, last) for c in cells}
    fig.update_layout(shapes=layouts[cell]["shapes"], annotations=layouts[cell]["annotations"])
    menus = []
    if len(cells) > 1:
        visible = [trace.meta for trace in fig.data]
        labels = [escape(f"{c}: {result.cells[c].label}") for c in cells]
        args = [
            [{"visible": [v if o == c else False for v, o in zip(visible, owner, strict=True)]}, layouts[c]]
            for c in cells
        ]
        menus.append(menu("cell", labels, labels[cells.index(cell)], args))
    return lay_out(fig, layouts[cell]["title.text"], dark=dark, menus=menus, plot=400)


@dataclass(frozen=True)
class _Band:
    """The placebos: median over prompts of each seed ``[seed, step]``, and the curve of the median seed."""

    seeds: np.ndarray
    curve: StepCurve

    @property
    def drawn(self) -> np.ndarray:
        return np.concatenate([self.seeds, self.curve.median[None]])


def _lines(result: Outcomes, cell: int, metric: str) -> dict[str, StepCurve | _Band]:
    found: dict[str, StepCurve | _Band] = {}
    for role in ("placebo", *HIDDEN, "patched"):
        if not result.find(role, cell):
            continue
        if role == "placebo":
            each = [_curve(result, cell, metric, role, seed) for seed in range(len(result.find(role, cell)))]
            seeds = np.stack([curve.median for curve in each])
            middle = replace(each[0], median=np.median(seeds, axis=0), same=np.min([c.same for c in each], axis=0))
            found[role] = _Band(seeds, middle)
        else:
            found[role] = _curve(result, cell, metric, role)
    return found


def _curve(result: Outcomes, cell: int, metric: str, role: str, seed: int = 0) -> StepCurve:
    values, same = (result.values(name, role, cell)[seed] for name in (metric, "identical"))
    return step_curve(values, same, result.ran, intervals=role == "patched")


def _traces(lines: dict[str, Any], axis: LogAxis, shown: bool) -> list[go.Scatter]:
    traces: list[go.Scatter] = []
    for role in ORDER:
        if role not in lines:
            continue
        line, name = lines[role], ARM_NAMES[role]
        made: list[go.Scatter] = []
        look: dict[str, Any] = {"colour": ARM_COLOURS[role], "dash": DASHES.get(role, "dot"), "width": 1.8}
        if isinstance(line, _Band):
            if len(line.seeds) > 1:
                name = f"{name} (band: {len(line.seeds)} seeds)"
                low, high = line.seeds.min(axis=0), line.seeds.max(axis=0)
                made.append(
                    step_band(
                        line.curve.steps, low, high, axis, fillcolor=FLOOR, name=f"{name}: range", legendgroup=name
                    )
                )
            line = line.curve
        if role == "patched":
            look |= {"width": 3.0, "shade": True}
        made += step_traces(line, axis, name=name, **look)
        state = "legendonly" if role in HIDDEN else True
        change = {"meta": state, "visible": state if shown else False, "legendrank": LEGEND.index(role) + 1}
        traces += [trace.update(change) for trace in made]
    return traces


def _shading(result: Outcomes, cell: int, last: int) -> dict[str, Any]:
    """Where the patch is written: a shade per run of steps, and one label."""
    spans = written_spans(result.cells[cell], last)
    shapes = [
        {"type": "rect", "xref": "x", "yref": "paper", "x0": first - 0.35, "x1": end + 0.35, "y0": 0, "y1": 1,
         "fillcolor": WRITTEN, "line": {"width": 0}, "layer": "below"}
        for first, end in spans
    ]  # fmt: skip
    when = ", ".join(_span_words(first, end, last) for first, end in spans) or "no step of this run"
    label = {
        "xref": "x", "yref": "paper", "y": 0.995, "yanchor": "top", "showarrow": False, "font": {"color": PATH_A},
        "xanchor": "left", "x": min(spans[0][0] - 0.35 if spans else 0, 0.7 * last),
        "text": f"patch written at {when}",
    }  # fmt: skip
    return {"shapes": shapes, "annotations": [label]}


def _span_words(first: int, end: int, last: int) -> str:
    if first == end:
        return f"step {first} only"
    return f"every step from {first} on" if end == last else f"steps {first} to {end}"


def _title(result: Outcomes, cell: int, metric: str) -> str:
    return title_text(
        takeaway.patched(result, cell, metric),
        f"Distance to the donor by step, on the donor's tokens; median over prompts (shade: 95 % interval). "
        f"{into(result)}. {size(result)}.",
        f"Patch: {result.cells[cell].label}",
    )
