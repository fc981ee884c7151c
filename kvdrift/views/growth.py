"""Drift by layer, on a log axis, with the rounding floor behind it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import plotly.graph_objects as go

from kvdrift.drift.result import Drift
from kvdrift.views.parts import takeaway_drift as takeaway
from kvdrift.views.parts.choices import MAX_PROMPTS, menu, whole_numbers
from kvdrift.views.parts.curves import Curve, LogAxis, curve, curve_sites, curve_traces, floor_traces
from kvdrift.views.parts.labels import cell_text, counts, escape, layer_kind, prompt_label, versus
from kvdrift.views.parts.local_drift import Local, local
from kvdrift.views.parts.theme import PATH_A, SERIES, lay_out, title_text
from kvdrift.words.numbers import count, times

LOCAL = SERIES[2]
SOURCE = SERIES[3]


def growth(drift: Drift, *, site: str = "resid_post", dark: bool = False) -> go.Figure:
    """Drift by layer: median over prompts with its interval, over the band of the rounding floor.

    Each prompt counts with its median over the steps from 1 on (``drift.per_prompt(site)``); the curve is the
    median of those over prompts, the shade around it a 95 % bootstrap interval over prompts. The grey band spans
    the re-rolls (every seed and prompt). Where local drift was measured, its mean over steps stands beside the mean
    of its floor, and two layers are marked: *source* (the first with any local drift) and *excess* (the first above
    its floor with confidence).

    Parameters
    ----------
    drift
        What `kvdrift.compare` found.
    site
        The residual site shown first; a dropdown offers the others.
    dark
        Use the dark template.

    Raises
    ------
    SiteError
        If the drift has no such site with layers.

    Examples
    --------
    >>> import kvdrift as kd
    >>> drift = kd.compare(kd.load(kd.models.tiny("llama")), [1, 2, 3], max_new_tokens=4, progress=False)
    >>> fig = kd.views.growth(drift)
    """
    chosen = curve(drift, site)
    sites = curve_sites(drift)
    curves = {s: chosen if s == site else curve(drift, s) for s in sites}
    alone = {s: local(drift, s) for s in sites}
    besides = {s: [] if one is None else [one.mean, one.floor] for s, one in alone.items()}
    axes = {s: LogAxis.of([*curves[s].drawn, *besides[s]]) for s in sites}
    fig = go.Figure()
    owner: list[str | None] = []
    for s in sites:
        traces = _site_traces(drift, curves[s], alone[s], axes[s])
        fig.add_traces([trace.update(visible=_visible(trace, s == site)) for trace in traces])
        owner += [s] * len(traces)
    strip = _layer_strip(drift)
    fig.add_traces(strip)
    owner += [None] * len(strip)

    n_layers = drift.architecture.n_layers
    fig.update_xaxes(title_text="layer", range=[-0.6, n_layers - 0.4], **whole_numbers(n_layers))
    fig.update_yaxes(title_text="relative L2 drift, ‖a−b‖ / ‖b‖", **axes[site].settings())
    if strip:
        fig.update_layout(
            yaxis={"domain": [0.09, 1]},
            yaxis2={"domain": [0, 0.05], "range": [-0.5, 0.5], "showticklabels": False, "showgrid": False,
                    "ticks": "", "showline": False, "fixedrange": True},
            xaxis={"anchor": "y2"},
        )  # fmt: skip
    menus = []
    if len(sites) > 1:
        args = [
            [
                {"visible": [o is None or _visible(t, o == s) for o, t in zip(owner, fig.data, strict=True)]},
                {"title.text": _title(drift, s)} | {f"yaxis.{k}": v for k, v in axes[s].settings().items()},
            ]
            for s in sites
        ]
        menus.append(menu("site", sites, site, args))
    return lay_out(fig, _title(drift, site), dark=dark, menus=menus, plot=440)


def _title(drift: Drift, site: str) -> str:
    return title_text(
        takeaway.growth(drift, site),
        f"Drift by layer at {site}. {versus(drift)}. Median over prompts (shade: 95 % interval) of each prompt's "
        f"median over steps ≥ 1; {counts(drift)}.",
    )


def _visible(trace: Any, shown: bool) -> bool | str:
    """Single prompts start hidden, one click on the legend away."""
    if not shown:
        return False
    return "legendonly" if trace.meta == "prompt" else True


def _site_traces(drift: Drift, shape: Curve, alone: Local | None, axis: LogAxis) -> list[go.Scatter]:
    x = shape.layers
    traces = floor_traces(shape, x, axis)
    traces += curve_traces(drift, shape, x, axis, name=f"{drift.a.label} against {drift.b.label}", colour=PATH_A)
    if alone is not None:
        traces += _local_traces(x, alone, axis) + _onset(drift, axis)
    if 1 < len(shape.prompts) <= MAX_PROMPTS:
        for number, row in enumerate(shape.prompts):
            traces.append(
                go.Scatter(
                    x=x, y=axis.place(row), mode="lines", meta="prompt",
                    name=escape(prompt_label(drift, number, 22)), customdata=cell_text(row),
                    line={"width": 1, "color": SERIES[(number + 4) % len(SERIES)]},
                    hovertemplate="layer %{x}<br>drift: <b>%{customdata}</b><extra>%{fullData.name}</extra>",
                )
            )  # fmt: skip
    return traces


def _local_traces(x: np.ndarray, alone: Local, axis: LogAxis) -> list[go.Scatter]:
    """What each layer makes by itself, and the floor of that."""
    details = np.stack([cell_text(alone.mean), [f"{share:.0%}" for share in alone.share], cell_text(alone.floor)], 1)
    traces = [
        go.Scatter(
            x=x, y=axis.place(alone.mean), mode="markers", name="made by the layer alone (local drift, mean)",
            marker={"color": LOCAL, "size": 7, "symbol": "diamond-open"}, customdata=details,
            hovertemplate="layer %{x}, on bitwise equal inputs<br>local drift: <b>%{customdata[0]}</b> (mean), "
            "nonzero in %{customdata[1]} of steps<br>its floor: %{customdata[2]}<extra></extra>",
        )
    ]  # fmt: skip
    if not np.isnan(alone.floor).all():
        traces.append(
            go.Scatter(
                x=x, y=axis.place(alone.floor), mode="lines", name="floor of local drift, mean",
                line={"color": LOCAL, "width": 1, "dash": "dot"}, customdata=cell_text(alone.floor),
                hovertemplate="layer %{x}<br>floor of local drift: %{customdata}<extra></extra>",
            )
        )  # fmt: skip
    return traces


def _onset(drift: Drift, axis: LogAxis) -> list[go.Scatter]:
    """Vertical lines at the source and at the excess layer."""
    if not drift.has("resid_post", of="local"):
        return []
    onset = drift.onset("resid_post")
    marks: list[tuple[int, str, str, str, str]] = []
    if onset.source_layer is not None:
        where = {"attn": "its attention", "mlp": "its MLP"}.get(onset.source_module or "", "the block")
        label = f"source: layer {onset.source_layer}, {where}"
        words = f"first layer with local drift, in {onset.source_share or 0:.0%} of the measured steps"
        marks.append((onset.source_layer, "source", label, "dot", words))
    if onset.excess_layer is not None and onset.excess_ratio is not None:
        label = f"excess: layer {onset.excess_layer}"
        words = f"first layer whose local drift ({times(onset.excess_ratio.value)} its floor) is surely above it"
        marks.append((onset.excess_layer, "excess", label, "dashdot", words))
    settings = axis.settings()
    low, high = (10**end for end in settings["range"])
    return [
        go.Scatter(
            x=[layer, layer], y=[low, high], mode="lines+text", name=label, text=["", f" {kind} "],
            textposition="bottom right" if layer < 0.8 * drift.architecture.n_layers else "bottom left",
            textfont={"color": SOURCE}, line={"color": SOURCE, "width": 1.8, "dash": dash},
            hovertemplate=f"{label}<br>{words}<extra></extra>",
        )
        for layer, kind, label, dash, words in marks
    ]  # fmt: skip


def _layer_strip(drift: Drift) -> list[go.Scatter]:
    """A row of squares below the curve that tags each layer's kind of attention; nothing if all are full."""
    kinds: dict[str, list[int]] = {}
    for info in drift.architecture.layers:
        kinds.setdefault(layer_kind(info), []).append(info.index)
    if list(kinds) == ["full attention"]:
        return []
    colours = itertools.cycle(("#5aa9a3", "#d2a93a", "#8d6cc9", "#8a929e"))
    return [
        go.Scatter(
            x=layers, y=[0] * len(layers), yaxis="y2", mode="markers",
            name=f"{kind}: {count(len(layers), 'layer', thousands='')}",
            marker={"symbol": "square", "size": 11, "color": colour}, legendgroup="kinds",
            hovertemplate=f"layer %{{x}}: {kind}<extra></extra>",
        )
        for (kind, layers), colour in zip(kinds.items(), colours, strict=False)
    ]  # fmt: skip
