"""How soon texts part: the share that has diverged by number of tokens, for every strategy, beside re-rolls."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvdrift.evaluation.conditions import Condition
from kvdrift.evaluation.result import Evaluation
from kvdrift.summaries.evaluation import in_percent
from kvdrift.views.parts import takeaway_evaluation as takeaway
from kvdrift.views.parts.curves import band
from kvdrift.views.parts.labels import escape
from kvdrift.views.parts.theme import FLOOR_LINE, SERIES, lay_out, title_text
from kvdrift.words.numbers import interval

COLUMNS = 3
ROW = 340  # pixels of one row of panels


def agreement(evaluation: Evaluation, *, dark: bool = False) -> go.Figure:
    """Cumulative incidence of divergence: the share of path *b*'s texts that have left path *a*'s after so many tokens.

    One panel per strategy: the curve with its 95 % interval (``condition.incidence``), the same of every re-roll of
    path *a* as a thin grey line, and a diamond where half of the texts have parted. A text that ends before it parts
    can no longer part: it stays in the count (a competing event) and is not taken for a text that was cut off.

    Parameters
    ----------
    evaluation
        What `kvdrift.evaluate` found.
    dark
        Use the dark template.

    Raises
    ------
    InputError
        If it is another kind of result, or no item has run.

    Examples
    --------
    >>> import kvdrift as kd
    >>> found = kd.evaluate(kd.models.tiny("llama"), [[1, 2, 3], [4, 5]], max_new_tokens=4, progress=False)
    >>> fig = kd.views.agreement(found)
    """
    takeaway.check(evaluation, "agreement")
    conditions, names = evaluation.conditions, takeaway.path_names(evaluation)
    columns = min(COLUMNS, len(conditions))
    rows = -(-len(conditions) // columns)
    fig = make_subplots(
        rows=rows, cols=columns, shared_yaxes=True, shared_xaxes=True, horizontal_spacing=0.03,
        vertical_spacing=0.22 / rows, subplot_titles=[_heading(condition) for condition in conditions],
    )  # fmt: skip
    for place, condition in enumerate(conditions):
        for trace in _panel(evaluation, condition, names, SERIES[place % len(SERIES)], first=place == 0):
            fig.add_trace(trace, row=place // columns + 1, col=place % columns + 1)
    end = evaluation.max_new_tokens
    fig.update_xaxes(range=[0, end * 1.01])
    fig.update_yaxes(range=[-3, 103], ticksuffix=" %")
    fig.update_xaxes(title_text="tokens written", row=rows)
    fig.update_yaxes(title_text="texts that have parted", col=1)
    title = title_text(
        takeaway.agreement(evaluation),
        f"{takeaway.setting(evaluation)}. Each path reads its own text.",
        "A text that ends before it parts can no longer part and stays in the count (a competing event); only texts "
        f"of {end} tokens are cut off.",
        _null_words(evaluation, names),
    )
    return lay_out(fig, title, dark=dark, plot=ROW * rows, above=56)


def null_incidence(evaluation: Evaluation, strategy: str) -> list[tuple[list[int], list[float]]]:
    """Per re-roll: numbers of tokens at which its share of parted texts rises, and the share from there on."""
    trials = [trial for record in evaluation.records for trial in record.trials if trial.strategy == strategy]
    curves = []
    for replicate in range(evaluation.replicates):
        steps = [trial.null[replicate].divergence for trial in trials]
        parted = sorted(step + 1 for step in steps if step is not None)
        tokens = sorted(set(parted))
        curves.append((tokens, [float(np.searchsorted(parted, t, side="right")) / len(trials) for t in tokens]))
    return curves


def _heading(condition: Condition) -> str:
    """Three short lines, so that narrow panels do not run into each other."""
    rate, half, null = condition.divergence, condition.incidence.median, condition.null
    lines = [f"{in_percent(rate.value)} of {rate.n} part, {'half never' if half is None else f'half by token {half}'}"]
    if null is not None and not null.refused:
        lines.append(f"re-rolls: {in_percent(min(null.divergence))} to {in_percent(max(null.divergence))}")
    small = "<br>".join(f'<span style="font-size:12px">{line}</span>' for line in lines)
    return f"<b>{escape(condition.strategy)}</b><br>{small}"


def _null_words(evaluation: Evaluation, names: tuple[str, str]) -> str:
    nulls = [condition.null for condition in evaluation.conditions]
    if not any(nulls):
        return "No re-rolls ran, so what the order of summation alone would do is not shown."
    refused = next((null.refused for null in nulls if null is not None and null.refused), None)
    if refused:
        return f"The re-rolls say nothing: {refused}."
    return f"Grey: {names[0]} with its sums in another order, held against {names[0]}, one line per re-roll."


def _panel(
    evaluation: Evaluation, condition: Condition, names: tuple[str, str], colour: str, *, first: bool
) -> list[go.Scatter]:
    shape, end = condition.incidence, evaluation.max_new_tokens
    x, share, low, high = _stairs(shape.tokens, end, shape.value, shape.low, shape.high)
    fill = f"rgba({','.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))},0.18)"
    traces = []
    if condition.null is not None and not condition.null.refused:
        traces.append(_null(evaluation, condition, first))
    traces.append(
        band(x, low, high, fillcolor=fill, line={"width": 0}, name="95 % interval", legendgroup="interval",
             showlegend=first)
    )  # fmt: skip
    against = takeaway.against_null(condition.null, math.nan if condition.null is None else condition.null.p_divergence)
    verdict = f"whole rate against re-rolls: {', '.join(against)}"
    hover = [
        [escape(condition.strategy), in_percent(s / 100), interval(a / 100, b / 100, in_percent), verdict]
        for s, a, b in zip(share, low, high, strict=True)
    ]
    traces.append(
        go.Scatter(
            x=x, y=share, mode="lines", name=f"{names[1]} has left {names[0]}", legendgroup="share", showlegend=first,
            line={"color": colour, "width": 3}, meta="share", customdata=hover,
            hovertemplate="<b>%{customdata[0]}</b>: after %{x} tokens %{customdata[1]} have parted"
            "<br>%{customdata[2]}<br>%{customdata[3]}<extra></extra>",
        )
    )  # fmt: skip
    half = condition.incidence.median
    if half is not None:
        traces.append(
            go.Scatter(
                x=[half], y=[50], mode="markers", name="half of the texts have parted", legendgroup="half",
                showlegend=False, marker={"size": 12, "symbol": "diamond", "color": colour}, meta="half",
                hovertemplate="half of the texts have parted after %{x} tokens<extra></extra>",
            )
        )  # fmt: skip
    if first:
        traces.append(
            go.Scatter(
                x=[None], y=[None], mode="markers", name="half of the texts have parted", legendgroup="half",
                marker={"size": 11, "symbol": "diamond", "color": FLOOR_LINE}, hoverinfo="skip",
            )
        )  # fmt: skip
    return traces


def _null(evaluation: Evaluation, condition: Condition, first: bool) -> go.Scatter:
    """All re-rolls as one trace, with gaps between them."""
    xs: list[np.ndarray] = []
    ys: list[np.ndarray] = []
    hover: list[list[str]] = []
    for replicate, (tokens, shares) in enumerate(null_incidence(evaluation, condition.strategy)):
        x, y = _stairs(tokens, evaluation.max_new_tokens, shares)
        xs += [x, np.array([np.nan])]
        ys += [y, np.array([np.nan])]
        hover += [[str(replicate), in_percent(share / 100)] for share in y] + [["", ""]]
    return go.Scatter(
        x=np.concatenate(xs), y=np.concatenate(ys), mode="lines", name="one re-roll", legendgroup="null",
        showlegend=first, line={"color": FLOOR_LINE, "width": 1}, opacity=0.55, customdata=hover, meta="null",
        hovertemplate="re-roll %{customdata[0]}: after %{x} tokens %{customdata[1]} have parted<extra></extra>",
    )  # fmt: skip


def _stairs(tokens: Sequence[int], end: int, *levels: Sequence[float]) -> tuple[np.ndarray, ...]:
    """A step curve from 0 to the last token: where it rises, and each level in per cent."""
    x = np.concatenate([[0], np.repeat(np.asarray(tokens, dtype=float), 2), [end]])
    found = []
    for level in levels:
        after = 100 * np.concatenate([[0.0], np.asarray(level, dtype=float)])
        found.append(np.repeat(after, 2))
    return (x, *found)
