"""The architecture experiment: accumulated and local drift by layer, of a model and of its counterfactuals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvdrift.experiments.paper_architecture import ARMS, PaperArchitecture
from kvdrift.views.parts.choices import whole_numbers
from kvdrift.views.parts.curves import LogAxis, band
from kvdrift.views.parts.labels import cell_text, counts, escape, versus
from kvdrift.views.parts.theme import FLOOR, FLOOR_LINE, PATH_A, PATH_B, SERIES, lay_out, title_text

PANELS = {"drift": "accumulated drift", "local": "made by the layer alone (local drift)"}
STYLES: dict[str, dict[str, Any]] = {
    "original": {"colour": PATH_A, "width": 7, "dash": "solid", "symbol": "circle", "opacity": 0.45},
    "kv_heads": {"colour": PATH_B, "width": 2.5, "dash": "solid", "symbol": "diamond", "opacity": 1},
    "windows": {"colour": SERIES[2], "width": 2.5, "dash": "dash", "symbol": "square", "opacity": 1},
    "both": {"colour": SERIES[3], "width": 1.5, "dash": "dot", "symbol": "x", "opacity": 1},
}
"""The original is drawn broad and pale, so that a copy with the same numbers shows on top of it."""
SAME = " (same numbers)"


def architectures(result: PaperArchitecture, *, dark: bool = False) -> go.Figure:
    """Drift by layer of the original and of each counterfactual, over the original's rounding floor.

    Left: accumulated drift at ``resid_post``; right: what each layer makes by itself. Everything drawn is in
    ``result.to_dataframe("layers")``: means over prompts, the shade a 95 % interval, the grey band the range of the
    original's re-rolls.

    Parameters
    ----------
    result
        What `kvdrift.experiments.paper_architecture` found.
    dark
        Use the dark template.

    Examples
    --------
    >>> import kvdrift as kd
    >>> model = kd.models.tiny("llama")
    >>> found = kd.experiments.paper_architecture(model, [1, 2, 3], max_new_tokens=3, progress=False)
    >>> fig = kd.views.architectures(found)
    """
    table, summary = result.to_dataframe("layers"), result.to_dataframe()
    fig = make_subplots(cols=2, horizontal_spacing=0.11, subplot_titles=list(PANELS.values()))
    for column, of in enumerate(PANELS, start=1):
        panel = table[table["of"] == of]
        axis = LogAxis.of([panel[name].to_numpy() for name in ("value", "low", "high", "floor_low", "floor_high")])
        for trace in _floor(panel[panel["arm"] == ARMS["original"]], axis, legend=column == 1):
            fig.add_trace(trace, row=1, col=column)
        for field, arm in ARMS.items():
            rows = panel[panel["arm"] == arm]
            if len(rows):
                name = _label(summary, arm)
                shade = field == "original" or not name.endswith(SAME)  # the original's own shade is there already
                for trace in _arm(rows, axis, name, STYLES[field], legend=column == 1, shade=shade):
                    fig.add_trace(trace, row=1, col=column)
        fig.update_xaxes(
            title_text="layer", range=[-0.6, table["layer"].max() + 0.6], col=column,
            **whole_numbers(int(table["layer"].max()) + 1),
        )  # fmt: skip
        fig.update_yaxes(col=column, **axis.settings())
    fig.update_yaxes(title_text="relative L2 drift, ‖a−b‖ / ‖b‖", col=1)
    original = result.original
    title = title_text(
        result.headline(),
        f"{versus(original)}, in copies that compute the same function. Means over prompts (shade: 95 % interval); "
        f"{counts(original)}.",
    )
    return lay_out(fig, title, dark=dark)


def _label(summary: pd.DataFrame, arm: str) -> str:
    """An arm's name with its heads and windows, as in ``original: GQA 9:3``."""
    row = summary[summary["arm"] == arm].iloc[0]
    windows = "" if row["windows"] == "none" else f", windows {row['windows']}"
    same = SAME if row["same_numbers"] and arm != ARMS["original"] else ""
    return escape(f"{arm}: {row['grouping']}{windows}{same}")


def _floor(rows: pd.DataFrame, axis: LogAxis, *, legend: bool) -> list[go.Scatter]:
    if rows["floor"].isna().all():
        return []
    x, floor = rows["layer"].to_numpy(), rows["floor"].to_numpy()
    low, high = (axis.place(rows[name].to_numpy()) for name in ("floor_low", "floor_high"))
    name = "rounding floor of the original (range of its re-rolls)"
    return [
        band(x, low, high, fillcolor=FLOOR, line={"width": 0}, name=name, legendgroup="floor", showlegend=legend),
        go.Scatter(
            x=x, y=axis.place(floor), mode="lines", name="rounding floor, mean", legendgroup="floor", showlegend=False,
            line={"color": FLOOR_LINE, "width": 1.5, "dash": "dash"}, customdata=cell_text(floor), meta="floor",
            hovertemplate="rounding floor, mean of the re-rolls: %{customdata}<extra></extra>",
        ),
    ]  # fmt: skip


def _arm(
    rows: pd.DataFrame, axis: LogAxis, name: str, style: dict[str, Any], *, legend: bool, shade: bool
) -> list[go.Scatter]:
    x, value = rows["layer"].to_numpy(), rows["value"].to_numpy()
    traces = []
    colour = style["colour"]
    if shade and not rows["low"].isna().all():
        low, high = (axis.place(rows[edge].to_numpy()) for edge in ("low", "high"))
        fill = f"rgba({','.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))},0.15)"
        traces.append(band(x, low, high, fillcolor=fill, line={"width": 0}, legendgroup=name, showlegend=False))
    details = np.stack(
        [cell_text(value), _interval(rows, "low", "high"), cell_text(rows["floor"].to_numpy()), _changes(rows)], axis=1
    )
    traces.append(
        go.Scatter(
            x=x, y=axis.place(value), mode="lines+markers", name=name, legendgroup=name, showlegend=legend, meta="arm",
            opacity=style["opacity"], line={"color": colour, "width": style["width"], "dash": style["dash"]},
            marker={"size": 5, "symbol": style["symbol"]}, customdata=details,
            hovertemplate="layer %{x}<br>drift: <b>%{customdata[0]}</b>%{customdata[1]}<br>rounding floor: "
            "%{customdata[2]}%{customdata[3]}<extra>%{fullData.name}</extra>",
        )
    )  # fmt: skip
    return traces


def _interval(rows: pd.DataFrame, low: str, high: str) -> np.ndarray:
    edges = (cell_text(rows[name].to_numpy(), "0") for name in (low, high))
    known = ~rows[low].isna().to_numpy()
    texts = [f" (95 % interval {a} to {b})" if k else "" for a, b, k in zip(*edges, known, strict=True)]
    return np.array(texts, dtype=object)


def _changes(rows: pd.DataFrame) -> np.ndarray:
    """The paired difference to the original; nothing for the original itself."""
    if rows["arm"].iloc[0] == ARMS["original"]:
        return np.full(len(rows), "", dtype=object)
    values = cell_text(rows["change"].to_numpy(), "0")
    p = rows["p_holm"].to_numpy()
    texts = [
        f"<br>minus the original: {value}{interval}, p after Holm {adjusted:.2g}"
        for value, interval, adjusted in zip(values, _interval(rows, "change_low", "change_high"), p, strict=True)
    ]
    return np.array(texts, dtype=object)
