"""Drift by layer and step, as a heat map."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from kvdrift.drift.layout import RESIDUAL_SITES
from kvdrift.drift.metrics import SITE_METRICS
from kvdrift.drift.result import Drift
from kvdrift.drift.tables import local_on_layers
from kvdrift.errors import InputError, SiteError
from kvdrift.views.parts import takeaway_drift as takeaway
from kvdrift.views.parts.choices import budget, check_prompt, menu, prompt_menu, stride_note, whole_numbers
from kvdrift.views.parts.labels import (
    METRICS_SHORT,
    cell_text,
    cell_texts,
    counts,
    escape,
    prompt_label,
    step_texts,
    versus,
)
from kvdrift.views.parts.scale import Scale
from kvdrift.views.parts.theme import lay_out, title_text


def layer_step(
    drift: Drift, *, site: str = "resid_post", metric: str = "rel_l2", prompt: int = 0, dark: bool = False
) -> go.Figure:
    """Heat map of one prompt's drift: step across, layer upwards, log10 colours.

    Where the title names a source below the first coloured row, the two differ by a bit of that layer's attention or
    MLP output that rounds away before it reaches the site shown; the title then names both layers.

    Parameters
    ----------
    drift
        What `kvdrift.compare` found.
    site, metric, prompt
        What is shown first; dropdowns offer the other residual sites, the other metrics and, with up to 12
        prompts of moderate size, the other prompts. Each cell is one value of
        ``drift.values(site, metric)[prompt]``, ``[step, layer]``.
    dark
        Use the dark template.

    Raises
    ------
    SiteError
        If the drift has no such site with a layer axis.
    InputError
        If it has no such metric or prompt.

    Examples
    --------
    >>> import kvdrift as kd
    >>> drift = kd.compare(kd.load(kd.models.tiny("llama")), [1, 2, 3], max_new_tokens=4, progress=False)
    >>> fig = kd.views.layer_step(drift, metric="max_ulp")
    """
    sites = [s for s in RESIDUAL_SITES if len(drift.layers(s)) and drift.has(s)]
    if site not in sites:
        have = ", ".join(sites) or "none"
        raise SiteError(
            f"layer_step cannot show {site!r}: this drift has these residual sites with layers: {have}; "
            f"run compare(..., sites=[..., {site!r}])."
        )
    metrics = [m for m in SITE_METRICS if all(drift.has(s, m) for s in sites)]
    if metric not in metrics:
        raise InputError(f"layer_step cannot show the metric {metric!r}: choose one of {', '.join(metrics)}.")
    check_prompt(drift, prompt)

    cells = sum(drift.values(s)[0].size for s in sites) * len(metrics)
    prompts, stride = budget(drift, prompt, cells)
    states = [(p, s) for p in prompts for s in sites]
    scales = {m: _scale(drift, sites, m) for m in metrics}
    colours = {m: [_colours(drift, p, s, m, scales[m], stride) for p, s in states] for m in metrics}
    texts = {p: step_texts(drift, p)[::stride] for p in prompts}
    n_layers = drift.architecture.n_layers
    fig = go.Figure()
    for (p, s), z in zip(states, colours[metric], strict=True):
        fig.add_heatmap(
            x=drift.steps[::stride],
            y=drift.layers(s),
            z=z,
            text=cell_texts(drift, drift.layers(s), texts[p]),
            name=f"{s}, prompt {p}",
            meta=[s, escape(prompt_label(drift, p))],
            coloraxis="coloraxis",
            visible=s == site,
            opacity=float(p == prompt),
            zorder=int(p == prompt),
            **_hover(drift, p, s, metrics, stride),
        )
    fig.update_layout(coloraxis=scales[metric].coloraxis())
    fig.update_xaxes(
        title_text="step (each step predicts one new token)", showgrid=False, **whole_numbers(len(drift.steps))
    )
    fig.update_yaxes(
        title_text="layer (0 reads the embeddings)",
        showgrid=False,
        range=[-0.5, n_layers - 0.5],
        **whole_numbers(n_layers),
    )

    titles = {
        s: title_text(
            takeaway.growth(drift, s),
            f"Drift by layer and step; the line above is about {s}, over all prompts. {versus(drift)}. "
            f"{counts(drift)}. Empty cells: not measured.",
            "" if len(prompts) > 1 else f"Shown: {prompt_label(drift, prompt, 80)}",
            stride_note("step", stride),
        )
        for s in sites
    }
    menus = [
        menu(
            "site", sites, site, [[{"visible": [s == c for _, s in states]}, {"title.text": titles[c]}] for c in sites]
        ),
        menu(
            "metric",
            [METRICS_SHORT[m] for m in metrics],
            METRICS_SHORT[metric],
            [[{"z": colours[m]}, {"coloraxis": scales[m].coloraxis()}] for m in metrics],
        ),
    ]
    # Sites switch visibility and metrics switch colours; prompts switch opacity and order, so that all three combine.
    shown = [
        [{"opacity": [float(p == c) for p, _ in states], "zorder": [int(p == c) for p, _ in states]}] for c in prompts
    ]
    menus += prompt_menu(drift, prompts, prompt, shown)
    return lay_out(fig, titles[site], dark=dark, menus=menus)


def _scale(drift: Drift, sites: list[str], metric: str) -> Scale:
    """One scale for all sites and prompts, so that colours compare."""
    return Scale.of(np.concatenate([drift.values(s, metric)[drift.measured].ravel() for s in sites]), metric)


def _colours(drift: Drift, prompt: int, site: str, metric: str, scale: Scale, stride: int) -> np.ndarray:
    """What the metric dropdown changes in one trace, ``[layer, step]``."""
    values = drift.values(site, metric)[prompt, ::stride]
    return scale.z(values, drift.measured[prompt, ::stride, None]).T


def _hover(drift: Drift, prompt: int, site: str, metrics: list[str], stride: int) -> dict[str, Any]:
    """Every metric of a cell, the floor and the local drift: texts ``[layer, step, field]`` and their template."""
    fields = [(METRICS_SHORT[m], drift.values(site, m), "0 (bit-identical)" if m == "rel_l2" else "0") for m in metrics]
    if drift.has(site, of="floor"):
        floor = np.median(drift.values(site, of="floor"), axis=0)
        fields.insert(1, ("rounding floor, median of the re-rolls", floor, "0"))
    if drift.has(site, of="local"):
        local = local_on_layers(drift, site, drift.values(site, of="local"))
        fields.insert(1, ("made by this layer alone", local, "0"))
    lines = [f"{name}: %{{customdata[{i}]}}" for i, (name, _, _) in enumerate(fields)]
    shown = [cell_text(values[prompt, ::stride], zero).T for _, values, zero in fields]
    return {
        "customdata": np.stack(shown, axis=-1),
        "hovertemplate": f"<b>step %{{x}}, layer %{{y}}, %{{meta[0]}}</b><br>%{{text}}<br>{'<br>'.join(lines)}"
        "<br>%{meta[1]}<extra></extra>",
    }
