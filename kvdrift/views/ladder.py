"""The precision ladder: KL of every arm on one log axis, beside what drift and roundoff predict."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from kvdrift.errors import InputError
from kvdrift.ladder.result import Ladder
from kvdrift.models.labels import model_name
from kvdrift.views.parts.curves import LogAxis
from kvdrift.views.parts.labels import escape
from kvdrift.views.parts.theme import FLOOR_LINE, IDENTICAL, NOT_FINITE, PATH_A, PATH_B, SERIES, lay_out, title_text
from kvdrift.words.numbers import number, percent, plural

GROUPS = {
    "precision": ("float64", "float32", "layercast", "float16", "bfloat16"),
    "one part in float32": ("head-float32", "matmul-float32", "attention-float32"),
    "attention kernel": ("eager", "sdpa-math", "sdpa-flash", "sdpa-efficient", "sdpa-cudnn"),
    "sums": ("re-roll", "rounding-floor", "wide-sums"),
    "shape": ("fixed-shape",),
}
"""The arms by what they test, from top to bottom."""
LABELS = {
    "layercast": "LayerCast",
    "head-float32": "LM head float32",
    "matmul-float32": "products float32",
    "attention-float32": "attention float32",
    "eager": "eager",
    "sdpa-math": "sdpa math",
    "sdpa-flash": "sdpa flash",
    "sdpa-efficient": "sdpa efficient",
    "sdpa-cudnn": "sdpa cuDNN",
    "re-roll": "both re-rolled",
    "rounding-floor": "ON vs re-rolled ON",
    "wide-sums": "sums in float64",
    "fixed-shape": "fixed shape",
}
PREDICTIONS = {
    "drift_squared": ("predicted by the measured drift²", PATH_B, "diamond-open"),
    "roundoff_squared": ("predicted by unit roundoff² (storage only)", SERIES[2], "line-ns-open"),
}
"""Columns of ``ratios()`` that become markers: name, colour, symbol."""
ROW = 26  # pixels from one arm to the next
COLUMNS = ((12, "KL (nats)"), (88, "flips [≤]"), (166, "ties [≤]"))  # pixels to the right of the plot


def ladder(ladder: Ladder, *, reference: str | None = None, dark: bool = False) -> go.Figure:
    """KL of every arm with its 95 % interval over prompts, and where two laws put it, seen from a reference arm.

    A blue dot is the mean over prompts (column ``kl`` of ``ladder.to_dataframe()``), faint dots are single prompts. The
    diamond is the reference arm's KL times the ratio of measured drifts, squared; the bar times the ratio of unit
    roundoffs, squared (``ladder.ratios(reference)``). An arm whose logits are equal at every step stands in a grey
    column of its own. Arms that overflowed or could not run say so.

    Parameters
    ----------
    ladder
        What `kvdrift.falsify` found.
    reference
        The arm that predictions start from; the base arm by default.
    dark
        Use the dark template.

    Raises
    ------
    InputError
        If it is another kind of result, or the reference arm did not run.

    Examples
    --------
    >>> import kvdrift as kd
    >>> found = kd.falsify(kd.models.tiny("llama"), [1, 2, 3], arms=["float64"], max_new_tokens=4, progress=False)
    >>> fig = kd.views.ladder(found)
    """
    if not isinstance(ladder, Ladder):
        raise InputError(f"ladder was given a {type(ladder).__name__}; it shows what kvdrift.falsify returns.")
    reference = reference or ladder.base
    table, ratios = ladder.to_dataframe().set_index("arm"), ladder.ratios(reference).set_index("arm")
    rows = _rows(ladder)
    each = {arm: ladder.per_prompt(arm) for arm in rows if ladder.rung(arm).ran}
    start = float(table.loc[reference, "kl"])
    predicted = {column: start * ratios[column] for column in PREDICTIONS}
    finite = [table["kl"].to_numpy(float), *each.values(), *(values.to_numpy(float) for values in predicted.values())]
    axis = LogAxis.of(finite)

    fig = go.Figure()
    for arm, values in each.items():
        fig.add_trace(_prompts(values, rows[arm], axis, LABELS.get(arm, arm), first=arm == next(iter(each))))
    if start > 0:
        fig.add_vline(x=start, line={"color": FLOOR_LINE, "width": 1, "dash": "dot"})
        for column, (name, colour, symbol) in PREDICTIONS.items():
            shown = {arm: predicted[column][arm] for arm in each if arm != reference and predicted[column][arm] > 0}
            fig.add_trace(
                go.Scatter(
                    x=list(shown.values()), y=[rows[arm] for arm in shown], mode="markers", name=name, legendrank=3,
                    marker={"symbol": symbol, "size": 13, "color": colour, "line": {"width": 2.5, "color": colour}},
                    customdata=[[LABELS.get(arm, arm), number(value)] for arm, value in shown.items()],
                    hovertemplate="%{customdata[0]}: %{customdata[1]} nats<br>"
                    f"{name}, from {reference}<extra></extra>",
                )
            )  # fmt: skip
    fig.add_trace(_measured(ladder, table, rows, axis, [arm for arm in each if table.loc[arm, "kl"] > 0]))
    fig.add_trace(_zeros(ladder, rows, axis, [arm for arm in each if table.loc[arm, "kl"] == 0]))
    for arm, row in rows.items():
        _beside(fig, ladder, arm, row)
    for shift, heading in COLUMNS:
        _text(fig, shift, -1.0, f"<b>{heading}</b>")
    bottom = max(rows.values()) + 0.7
    fig.update_yaxes(
        tickmode="array", tickvals=list(rows.values()), range=[bottom, -1.6], showgrid=True,
        ticktext=[f"<b>{LABELS.get(arm, arm)}</b>" if arm == reference else LABELS.get(arm, arm) for arm in rows],
    )  # fmt: skip
    for group, place in _headings(rows).items():
        fig.add_annotation(
            x=0, xref="paper", xanchor="left", xshift=4, y=place, text=f"<i>{group}</i>", showarrow=False,
            font={"size": 12, "color": FLOOR_LINE},
        )  # fmt: skip
    fig.update_xaxes(**axis.settings("bit-<br>identical"), title_text="KL(b‖a) in nats, mean over prompts", tickangle=0)
    n, steps = len(ladder.prompts), int(ladder.counted.sum())
    title = title_text(
        takeaway(ladder),
        f"cache-ON (a) against cache-OFF (b) of {model_name(ladder.model.model)}, {n} {plural(n, 'prompt')}, {steps} "
        "counted steps, the same tokens in every arm. Bars: 95 % interval over prompts. Predictions start from "
        f"{reference} (dotted line). In brackets: 95 % upper bound of the share of prompts with a flip or a tie.",
    )
    return lay_out(fig, title, dark=dark, plot=round(ROW * (bottom + 1.6)), above=8, below=90, right=250)


def takeaway(ladder: Ladder) -> str:
    """The one sentence that leads the figure."""
    for coarse, fine in (("float16", "float32"), ("bfloat16", "float32"), ("float32", "float64")):
        if not (coarse in ladder.names and fine in ladder.names):
            continue
        if not (ladder.rung(coarse).ran and ladder.rung(fine).ran):
            continue
        row = ladder.ratios(coarse).set_index("arm").loc[fine]
        if row["kl"] > 0 and row["drift_squared"] > 0 and math.isfinite(row["kl"]):
            kl, drift, law = (-math.log10(row[name]) for name in ("kl", "drift_squared", "roundoff_squared"))
            return (
                f"{coarse} → {fine}: KL falls by {kl:.1f} orders of magnitude; the measured drift predicts "
                f"{drift:.1f}, unit roundoff alone {law:.1f}"
            )
    if "fixed-shape" in ladder.names and ladder.identical("fixed-shape") == 1:
        return "At one fixed shape the two paths are bit-identical: the shapes of kernels are all that differs"
    kl = ladder.mean(ladder.base).value
    return f"In {ladder.base} cache-ON and cache-OFF are {number(kl)} nats apart"


def _rows(ladder: Ladder) -> dict[str, float]:
    """Where each arm stands, from top to bottom; each group after its heading."""
    rows: dict[str, float] = {}
    place = 0.0
    for arms in GROUPS.values():
        shown = [arm for arm in arms if arm in ladder.names]
        for arm in shown:
            rows[arm] = place
            place += 1
        place += 0.9 * bool(shown)
    return rows


def _headings(rows: dict[str, float]) -> dict[str, float]:
    firsts = {group: next((rows[arm] for arm in arms if arm in rows), None) for group, arms in GROUPS.items()}
    return {group: place - 0.85 for group, place in firsts.items() if place is not None}


def _prompts(values: np.ndarray, row: float, axis: LogAxis, name: str, first: bool) -> go.Scatter:
    return go.Scatter(
        x=axis.place(np.where(values == 0, np.nan, values)), y=np.full(len(values), row), mode="markers",
        name="one prompt", legendrank=5,
        legendgroup="prompts", showlegend=first, marker={"size": 5, "color": PATH_A, "opacity": 0.35},
        customdata=[[p, number(float(value))] for p, value in enumerate(values)],
        hovertemplate=f"{name}, prompt %{{customdata[0]}}: %{{customdata[1]}} nats<extra></extra>",
    )  # fmt: skip


HOVER = (
    "<b>%{customdata[0]}</b>: %{customdata[1]}<br>KL %{customdata[2]} nats%{customdata[3]}"
    "<br>with the LM head in float32 %{customdata[4]}<br>centred logit L2 %{customdata[5]}"
    "<br>drift after the last layer %{customdata[6]}<br>equal logits at %{customdata[7]} of steps"
    "<br>%{customdata[8]}<extra></extra>"
)


def _details(ladder: Ladder, table: pd.DataFrame, arms: Sequence[str]) -> list[list[str]]:
    """What `HOVER` shows of each arm."""
    found = []
    for arm in arms:
        row, rung = table.loc[arm], ladder.rung(arm)
        interval = "" if math.isnan(row["kl_low"]) else f" (95 % {number(row['kl_low'])} to {number(row['kl_high'])})"
        kernels = f"attention {rung.attn}" + (f", kernel {row['kernels']}" if row["kernels"] else "")
        same = f"; the same numbers as {row['same_as']}" if isinstance(row["same_as"], str) else ""
        values = (number(float(row[name])) for name in ("kl_float32_head", "logit_l2", "drift"))
        found.append(
            [arm, escape(rung.what), number(float(row["kl"])), interval, *values, percent(float(row["identical"]), ""),
             escape(kernels + same)]
        )  # fmt: skip
    return found


def _measured(
    ladder: Ladder, table: pd.DataFrame, rows: dict[str, float], axis: LogAxis, arms: Sequence[str]
) -> go.Scatter:
    kl, low, high = (table.loc[list(arms), name].to_numpy(float) for name in ("kl", "kl_low", "kl_high"))
    style: dict[str, Any] = {"type": "data", "symmetric": False, "color": PATH_A, "thickness": 2, "width": 4}
    floor = 10**axis.low
    return go.Scatter(
        x=kl, y=[rows[arm] for arm in arms], mode="markers", name="measured", legendrank=1,
        marker={"size": 11, "color": PATH_A},
        error_x={
            **style,
            "array": np.nan_to_num(high - kl),
            "arrayminus": np.nan_to_num(kl - np.maximum(low, np.minimum(floor, kl))),
        },
        customdata=_details(ladder, table, arms), hovertemplate=HOVER,
    )  # fmt: skip


def _zeros(ladder: Ladder, rows: dict[str, float], axis: LogAxis, arms: Sequence[str]) -> go.Scatter:
    table = ladder.to_dataframe().set_index("arm")
    return go.Scatter(
        x=[axis.zero] * len(arms), y=[rows[arm] for arm in arms], mode="markers", name="exactly 0: bit-identical",
        legendrank=2, showlegend=bool(arms), marker={"size": 12, "color": IDENTICAL, "symbol": "square"},
        customdata=_details(ladder, table, arms), hovertemplate=HOVER,
    )  # fmt: skip


def _beside(fig: go.Figure, ladder: Ladder, arm: str, row: float) -> None:
    """The numbers of an arm to the right of the plot, or why it has none."""
    rung = ladder.rung(arm)
    if not rung.ran:
        colour = NOT_FINITE if rung.status == "not finite" else FLOOR_LINE
        fig.add_annotation(
            x=1, xshift=COLUMNS[0][0], xref="paper", xanchor="left", y=row, text=f"<b>{rung.status}</b>",
            showarrow=False,
            font={"size": 12, "color": colour}, hovertext="<br>".join(map(escape, textwrap.wrap(rung.reason or ""))),
        )  # fmt: skip
        return
    _text(fig, COLUMNS[0][0], row, number(ladder.mean(arm).value))
    for (place, _), metric in zip(COLUMNS[1:], ("flip", "tie"), strict=True):
        events, _, bound = ladder.count(arm, metric)
        _text(fig, place, row, f"{events} [{percent(bound, '')}]")


def _text(fig: go.Figure, shift: float, y: float, text: str) -> None:
    fig.add_annotation(
        x=1, xshift=shift, xref="paper", xanchor="left", y=y, text=text, showarrow=False, font={"size": 12}
    )
