"""The main dtype and the control dtype side by side."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvdrift.drift.result import Drift
from kvdrift.errors import InputError
from kvdrift.views.parts import takeaway_drift as takeaway
from kvdrift.views.parts.choices import whole_numbers
from kvdrift.views.parts.curves import LogAxis, curve, curve_traces, floor_traces
from kvdrift.views.parts.labels import cell_text, counts, escape, prompt_label, versus
from kvdrift.views.parts.theme import FLIP, PATH_A, PATH_B, lay_out, title_text


def precision(drift: Drift, *, site: str = "resid_post", dark: bool = False) -> go.Figure:
    """Growth in the main dtype, growth in the control dtype, and the KL of both, on the same tokens.

    The first two panels share one log axis and each stands over its own rounding floor; the third shows KL of
    every counted step of every prompt, with a red cross where the top-1 tokens differ.

    Parameters
    ----------
    drift
        What ``kvdrift.compare(..., also_in="float32")`` found.
    site
        A residual site that both have.
    dark
        Use the dark template.

    Raises
    ------
    InputError
        If there is no control.
    SiteError
        If one of the two has no such site.

    Examples
    --------
    >>> import kvdrift as kd
    >>> import torch
    >>> model = kd.load(kd.models.tiny("llama", dtype=torch.bfloat16))
    >>> drift = kd.compare(model, [1, 2, 3], also_in="float32", max_new_tokens=4, progress=False)
    >>> fig = kd.views.precision(drift)
    """
    control = drift.control
    if control is None:
        raise InputError('This drift has no control to show beside it: run compare(..., also_in="float32").')
    pair = [(drift, PATH_A), (control, PATH_B)]
    curves = [curve(d, site) for d, _ in pair]
    axis = LogAxis.of([x for c in curves for x in c.drawn])
    names = [_name(d) for d, _ in pair]
    kl_axis = LogAxis.of([_kl(d) for d, _ in pair])

    fig = make_subplots(
        rows=1, cols=3, column_widths=[0.37, 0.37, 0.26], horizontal_spacing=0.09,
        subplot_titles=[f"<b>{name}</b>" for name in names] + ["<b>KL of the next token</b>"],
    )  # fmt: skip
    for col, ((d, colour), shape, name) in enumerate(zip(pair, curves, names, strict=True), start=1):
        for trace in floor_traces(shape, shape.layers, axis, showlegend=col == 1):
            fig.add_trace(trace, row=1, col=col)
        for trace in curve_traces(d, shape, shape.layers, axis, name=name, colour=colour):
            fig.add_trace(trace, row=1, col=col)
        fig.add_trace(_kl_trace(d, kl_axis, name, colour, x=col - 1), row=1, col=3)
    fig.add_scatter(
        x=[None],
        y=[None],
        mode="markers",
        name="step with a flip",
        marker={"symbol": "x", "size": 8, "color": FLIP},
    )
    fig.update_xaxes(title_text="layer", **whole_numbers(drift.architecture.n_layers))
    fig.update_xaxes(
        title_text="dtype",
        tickmode="array",
        tickvals=[0, 1],
        ticktext=names,
        dtick=None,
        range=[-0.6, 1.6],
        showgrid=False,
        row=1,
        col=3,
    )
    fig.update_yaxes(**axis.settings(), matches="y")
    fig.update_yaxes(title_text="relative L2 drift, ‖a−b‖ / ‖b‖", row=1, col=1)
    fig.update_yaxes(showticklabels=False, row=1, col=2)
    fig.update_yaxes(title_text="KL(b‖a) in nats", matches=None, **kl_axis.settings("exactly 0"), row=1, col=3)
    title = title_text(
        takeaway.precision(drift, control, site),
        f"Drift by layer at {site}, and KL at every step, in two dtypes on the same tokens. {versus(drift)}; "
        f"control in {names[1]}. {counts(drift)}.",
    )
    return lay_out(fig, title, dark=dark, plot=400)


def _name(drift: Drift) -> str:
    return drift.a.dtype if drift.a.dtype == drift.b.dtype else f"{drift.a.dtype} / {drift.b.dtype}"


def _kl(drift: Drift) -> np.ndarray:
    if not drift.has("logits", "kl"):
        return np.empty(0)
    return np.maximum(drift.values("logits", "kl")[drift.counted], 0)


def _kl_trace(drift: Drift, axis: LogAxis, name: str, colour: str, x: int) -> go.Scatter:
    """One dot per counted step, spread sideways by its order so that dots do not hide each other."""
    prompt, row = np.nonzero(drift.counted) if drift.has("logits", "kl") else (np.empty(0, int),) * 2
    values = _kl(drift)
    flip = drift.flips[prompt, row]
    spread = ((np.arange(len(values)) * 0.618034) % 1 - 0.5) * 0.6
    texts = [
        f"{escape(prompt_label(drift, int(p)))}<br>step {drift.steps[r]}{', a flip' if f else ''}"
        for p, r, f in zip(prompt, row, flip, strict=True)
    ]
    return go.Scatter(
        x=x + spread, y=axis.place(values), mode="markers", name=f"KL, {name}", showlegend=False,
        marker={
            "size": np.where(flip, 8, 5), "color": np.where(flip, FLIP, colour).tolist(), "opacity": 0.8,
            "symbol": np.where(flip, "x", "circle").tolist(),
        },
        customdata=cell_text(values, "0"), text=texts,
        hovertemplate=f"{name}<br>KL: <b>%{{customdata}}</b> nats<br>%{{text}}<extra></extra>",
    )  # fmt: skip
