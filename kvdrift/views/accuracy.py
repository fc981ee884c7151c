"""Accuracy of both paths under every strategy, and whether their difference stands out from re-rolls."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvdrift.evaluation.conditions import Condition, Rate
from kvdrift.evaluation.result import Evaluation
from kvdrift.summaries.evaluation import in_percent
from kvdrift.views.parts import takeaway_evaluation as takeaway
from kvdrift.views.parts.labels import escape
from kvdrift.views.parts.takeaway_evaluation import OUT, UNKNOWN, WITHIN
from kvdrift.views.parts.theme import FLOOR, FLOOR_LINE, NOT_FINITE, PATH_A, PATH_B, SERIES, lay_out, title_text
from kvdrift.words.numbers import interval, number, points

ROW = 104  # pixels from one condition to the next
MARK, SWARM = -0.24, 0.18  # where in its row a difference stands, and where its re-rolls
SPREAD = 0.44  # how high the re-rolls pile up
DIFFERENCE = SERIES[4]
VERDICTS = {OUT: NOT_FINITE, WITHIN: SERIES[2], UNKNOWN: FLOOR_LINE}
NULL_COLUMN, DIRECTION_COLUMN = 16, 152  # pixels to the right of the plot


@dataclass(frozen=True)
class _Held:
    """What is held against the re-rolls in one condition: a number with its interval, the null's, and the verdict."""

    value: float
    low: float
    high: float
    null: tuple[float, ...]
    verdict: str
    detail: str
    hover: str


def accuracy(evaluation: Evaluation, *, dark: bool = False) -> go.Figure:
    """Share of right answers of both paths, and their difference among those that re-rolls alone make.

    Left: both paths with 95 % intervals (``evaluation.to_dataframe()``). Right: the difference *a* − *b* (diamond, 95 %
    bootstrap interval over items) above one dot per re-roll of path *a*, whose range is the grey bar: a diamond inside
    the bar does nothing that another order of summation does not do. It is hollow where too few answers flip for the
    paired test to reach 5 %. Beside it, in words, whether it stands out from the re-rolls, and which path the paired
    test calls right more often. Without answers, the share of texts that part takes the place of the difference.

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
    >>> fig = kd.views.accuracy(found)
    """
    takeaway.check(evaluation, "accuracy")
    conditions, names = evaluation.conditions, takeaway.path_names(evaluation)
    answered = takeaway.scored(evaluation)
    held = [_difference(c, names) if answered else _divergence(c, names) for c in conditions]
    fig = make_subplots(
        cols=2 if answered else 1, shared_yaxes=True, horizontal_spacing=0.05,
        column_widths=[0.36, 0.64] if answered else None,
        subplot_titles=["right answers", f"{names[0]}<br>minus {names[1]}"] if answered else ["texts that part"],
    )  # fmt: skip
    if answered:
        for trace in _accuracies(conditions, names):
            fig.add_trace(trace, row=1, col=1)
        fig.update_xaxes(range=[-2, 102], ticksuffix=" %", title_text="share", row=1, col=1)
    column = 2 if answered else 1
    for trace in _against_null(held, conditions, answered, names):
        fig.add_trace(trace, row=1, col=column)
    span = _span(held, around_zero=answered)
    what = f"percentage points<br>← {names[1]} better<br>{names[0]} better →"
    fig.update_xaxes(range=span, title_text=what if answered else "share of texts, %", row=1, col=column)
    if answered:
        fig.add_vline(x=0, line={"color": FLOOR_LINE, "width": 1}, layer="below", row=1, col=column)
    _words(fig, conditions, held, names, answered)
    rows = list(range(len(conditions)))
    fig.update_yaxes(range=[len(rows) - 0.4, -0.62], showgrid=False, tickvals=rows)
    fig.update_yaxes(ticktext=[f"<b>{escape(c.strategy)}</b>" for c in conditions], col=1)
    title = title_text(takeaway.accuracy(evaluation), *_details(evaluation, answered, names))
    lay_out(
        fig, title, dark=dark, plot=ROW * len(rows), above=50, below=96 if answered else 64,
        right=DIRECTION_COLUMN + 150 if answered else 180,
    )  # fmt: skip
    return fig.update_layout(barmode="overlay")


def _details(evaluation: Evaluation, answered: bool, names: tuple[str, str]) -> list[str]:
    """The lines under the takeaway."""
    lines = [f"{takeaway.setting(evaluation)}."]
    null = next((c.null for c in evaluation.conditions if c.null is not None), None)
    if null is None:
        lines.append(f"No re-rolls ran, so whether {names[1]} does more than rounding is open.")
    elif null.refused:
        lines.append(f"The re-rolls say nothing: {null.refused}.")
    else:
        each = "one dot per re-roll, grey bar: their range"
        lines.append(f"Re-rolls are {names[0]} with its sums in another order, {evaluation.replicates} times ({each}).")
    if answered and any(not c.enough for c in evaluation.conditions):
        lines.append("Hollow: so few answers flip that the paired test could not reach 5 % whatever they were.")
    if answered and len(evaluation.conditions) > 1:
        found = evaluation.overall()
        lines.append(
            f"Over all {found.n_conditions} strategies {names[0]} scores higher in {found.a_higher}, {names[1]} in "
            f"{found.b_higher}; item by item (sign flip) {takeaway.p_words(found.p)}"
            f"{'' if found.enough else ': cannot tell, too few items differ'}."
        )
    gold = evaluation.gold
    if gold is not None:
        verdict = "" if null is None else f": {', '.join(takeaway.against_null(null, null.p_gold))}"
        lines.append(
            f"Log-probability of the gold answer, {names[0]} − {names[1]}: {number(gold.value)} nats "
            f"({interval(gold.low, gold.high)}){verdict}."
        )
    return lines


# --- left: each path


def _accuracies(conditions: Sequence[Condition], names: tuple[str, str]) -> list[go.Scatter]:
    traces = []
    for path, name, colour, symbol, shift in (
        ("a", names[0], PATH_A, "circle", -0.16), ("b", names[1], PATH_B, "diamond", 0.16)
    ):  # fmt: skip
        rates = [getattr(c, f"accuracy_{path}") for c in conditions]
        invalid, cut = ([getattr(c, f"{what}_{path}") for c in conditions] for what in ("invalid", "truncated"))
        hover = [
            [escape(c.strategy), f"{rate.events} of {rate.n} right", _share(rate), str(bad), str(long)]
            for c, rate, bad, long in zip(conditions, rates, invalid, cut, strict=True)
        ]
        traces.append(
            go.Scatter(
                x=[100 * rate.value for rate in rates], y=[row + shift for row in range(len(rates))], mode="markers",
                name=name, marker={"size": 11, "color": colour, "symbol": symbol}, customdata=hover,
                error_x=_bars([(rate.value, rate.low, rate.high) for rate in rates], colour),
                hovertemplate=f"<b>{escape(name)}</b>, %{{customdata[0]}}: %{{customdata[1]}}<br>%{{customdata[2]}}"
                "<br>no answer to be found in %{customdata[3]}, cut off in %{customdata[4]}<extra></extra>",
            )
        )  # fmt: skip
    return traces


def _share(rate: Rate) -> str:
    return f"{in_percent(rate.value)} ({interval(rate.low, rate.high, in_percent)})"


def _bars(values: Sequence[tuple[float, float, float]], colour: str) -> dict[str, object]:
    table = 100 * np.array(values, dtype=float).reshape(-1, 3)
    return {
        "type": "data", "symmetric": False, "color": colour, "thickness": 2, "width": 4,
        "array": table[:, 2] - table[:, 0], "arrayminus": table[:, 0] - table[:, 1],
    }  # fmt: skip


# --- right: what is held against the re-rolls


def _difference(c: Condition, names: tuple[str, str]) -> _Held:
    null = () if c.null is None or c.null.refused else c.null.differences
    verdict, detail = takeaway.against_null(c.null, math.nan if c.null is None else c.null.p_difference)
    d = c.difference
    detectable = "none could be" if c.detectable is None else f"{100 * c.detectable:.1f} points"
    hover = (
        f"<b>{escape(c.strategy)}</b>: {names[0]} − {names[1]} = {points(d.value)} points"
        f"<br>{interval(d.low, d.high, points)} (bootstrap over items)"
        f"<br>only {names[0]} right: {c.only_a}, only {names[1]} right: {c.only_b}"
        f"<br>{c.test}: {takeaway.p_words(c.p)}, after Holm {takeaway.p_words(c.p_holm)}"
        f"<br>smallest true difference seen with 80 % power: {detectable}"
        f"<br>against re-rolls: {verdict} ({detail})"
    )
    return _Held(d.value, d.low, d.high, null, verdict, detail, hover)


def _divergence(c: Condition, names: tuple[str, str]) -> _Held:
    null = () if c.null is None or c.null.refused else c.null.divergence
    verdict, detail = takeaway.against_null(c.null, math.nan if c.null is None else c.null.p_divergence)
    rate = c.divergence
    hover = (
        f"<b>{escape(c.strategy)}</b>: {rate.events} of {rate.n} texts of {names[1]} leave {names[0]}'s"
        f"<br>{_share(rate)}<br>against re-rolls: {verdict} ({detail})"
    )
    return _Held(rate.value, rate.low, rate.high, null, verdict, detail, hover)


def _against_null(
    held: Sequence[_Held], conditions: Sequence[Condition], answered: bool, names: tuple[str, str]
) -> list[go.Scatter | go.Bar]:
    name = f"{names[0]} − {names[1]}" if answered else f"{names[1]} leaves {names[0]}"
    rows = [row for row, one in enumerate(held) if not math.isnan(one.value)]
    hollow = [answered and not c.enough for c in conditions]
    legs = [(row, 100 * held[row].value) for row in rows if held[row].null]
    traces: list[go.Scatter | go.Bar] = [*_null_range(held), *_swarms(held, conditions)]
    traces.append(
        go.Scatter(
            x=[x for _, value in legs for x in (value, value, None)],
            y=[y for row, _ in legs for y in (row + MARK, row + SWARM + SPREAD / 2, None)],
            mode="lines", line={"color": DIFFERENCE, "width": 1.5, "dash": "dot"}, hoverinfo="skip", showlegend=False,
        )
    )  # fmt: skip
    traces.append(
        go.Scatter(
            x=[100 * held[row].value for row in rows], y=[row + MARK for row in rows], mode="markers", name=name,
            marker={
                "size": 15, "color": DIFFERENCE, "line": {"width": 2, "color": DIFFERENCE},
                "symbol": ["diamond-open" if hollow[row] else "diamond" for row in rows],
            },
            error_x=_bars([(held[row].value, held[row].low, held[row].high) for row in rows], DIFFERENCE),
            customdata=[[held[row].hover] for row in rows], hovertemplate="%{customdata[0]}<extra></extra>",
        )
    )  # fmt: skip
    return traces


def _null_range(held: Sequence[_Held]) -> list[go.Bar]:
    rows = [row for row, one in enumerate(held) if one.null]
    if not rows:
        return []
    lows, highs = ([100 * edge(held[row].null) for row in rows] for edge in (min, max))
    return [
        go.Bar(
            base=lows, x=[high - low for low, high in zip(lows, highs, strict=True)], y=[row + SWARM for row in rows],
            width=SPREAD + 0.12, orientation="h", name="range of the re-rolls", hoverinfo="skip",
            marker={"color": FLOOR, "line": {"width": 1, "color": FLOOR_LINE}},
        )
    ]  # fmt: skip


def _swarms(held: Sequence[_Held], conditions: Sequence[Condition]) -> list[go.Scatter]:
    """One dot per re-roll, equal ones piled up around the middle of their row."""
    x: list[float] = []
    y: list[float] = []
    hover: list[list[str]] = []
    for row, (one, condition) in enumerate(zip(held, conditions, strict=True)):
        seen: Counter[float] = Counter()
        values = [round(100 * value, 9) for value in one.null]
        piles = Counter(values)
        for replicate, value in enumerate(values):
            pitch = min(0.075, SPREAD / max(1, piles[value] - 1))
            x.append(100 * one.null[replicate])
            y.append(row + SWARM + pitch * (seen[value] - (piles[value] - 1) / 2))
            seen[value] += 1
            hover.append([escape(condition.strategy), str(replicate), f"{value:.3g}", str(piles[value])])
    if not x:
        return []
    return [
        go.Scatter(
            x=x, y=y, mode="markers", name="one re-roll", marker={"size": 6, "color": FLOOR_LINE, "opacity": 0.85},
            customdata=hover,
            hovertemplate="re-roll %{customdata[1]}, %{customdata[0]}: %{customdata[2]} (%{customdata[3]} of them here)"
            "<extra></extra>",
        )
    ]  # fmt: skip


def _span(held: Sequence[_Held], around_zero: bool) -> list[float]:
    if not around_zero:
        return [-2, 102]
    values = np.array([x for one in held for x in (one.value, one.low, one.high, *one.null)], dtype=float)
    values = 100 * np.abs(values[~np.isnan(values)])
    end = 1.12 * max(float(values.max(initial=0)), 2.0)
    return [-end, end]


# --- the words beside


def _words(
    fig: go.Figure, conditions: Sequence[Condition], held: Sequence[_Held], names: tuple[str, str], answered: bool
) -> None:
    """Verdicts to the right of each condition."""
    _beside(fig, NULL_COLUMN, -0.56, "<b>against re-rolls</b>")
    if answered:
        _beside(fig, DIRECTION_COLUMN, -0.56, "<b>direction</b>")
    for row, (condition, one) in enumerate(zip(conditions, held, strict=True)):
        _beside(fig, NULL_COLUMN, row, _verdict(one.verdict, one.detail, VERDICTS[one.verdict]))
        if answered:
            word, detail = takeaway.direction(condition, names)
            colour = VERDICTS[UNKNOWN] if word in (UNKNOWN, "none shown") else NOT_FINITE
            _beside(fig, DIRECTION_COLUMN, row, _verdict(word, detail, colour))


def _verdict(word: str, detail: str, colour: str) -> str:
    return f'<span style="color:{colour};font-size:15px"><b>{escape(word)}</b></span><br>{escape(detail)}'


def _beside(fig: go.Figure, shift: int, y: float, text: str) -> None:
    fig.add_annotation(
        x=1,
        xref="paper",
        xanchor="left",
        xshift=shift,
        y=y,
        text=text,
        showarrow=False,
        align="left",
        font={"size": 12},
    )
