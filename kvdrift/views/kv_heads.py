"""Drift of K and V by layer and KV head, step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvdrift.drift.result import Drift
from kvdrift.drift.tables import head_exists
from kvdrift.errors import SiteError
from kvdrift.models.sites import HEAD_SITES
from kvdrift.views.parts import takeaway_drift as takeaway
from kvdrift.views.parts.choices import budget, check_prompt, prompt_menu, slider, stride_note, whole_numbers
from kvdrift.views.parts.labels import cell_text, counts, escape, layer_kinds, prompt_label, step_texts, versus
from kvdrift.views.parts.scale import Scale
from kvdrift.views.parts.theme import SLIDER, lay_out, title_text

NAMES = {"q": "Q, per query head", "k": "K, per KV head", "v": "V, per KV head", "z": "z, per query head"}


def kv_heads(drift: Drift, *, prompt: int = 0, sites: tuple[str, ...] = ("k", "v"), dark: bool = False) -> go.Figure:
    """Heat maps of ``rel_l2`` over all shared positions: layer across, head upwards, one panel per site.

    Parameters
    ----------
    drift
        What `kvdrift.compare` found, with ``k`` and ``v`` among its sites.
    prompt
        The prompt shown first; a dropdown offers the others (up to 12 prompts of moderate size). The first stop
        of the slider is the median over the counted steps, ``drift.per_prompt(site)[prompt]``,
        ``[layer, head]``; the others are single steps, ``drift.values(site)[prompt, step]``.
    sites
        Any of ``q``, ``k``, ``v``, ``z``.
    dark
        Use the dark template.

    Raises
    ------
    SiteError
        If a site was not measured per head.
    InputError
        If there is no such prompt.

    Examples
    --------
    >>> import kvdrift as kd
    >>> model = kd.load(kd.models.tiny("llama"))
    >>> drift = kd.compare(model, [1, 2, 3], sites=["resid_post", "k", "v"], max_new_tokens=4, progress=False)
    >>> fig = kd.views.kv_heads(drift)
    """
    for site in sites:
        if site not in HEAD_SITES or not drift.has(site):
            raise SiteError(
                f"kv_heads needs the drift of {site!r} per head, which was not measured: "
                f"run compare(..., sites=[..., {', '.join(repr(s) for s in sites)}])."
            )
    check_prompt(drift, prompt)

    prompts, stride = budget(drift, prompt, sum(drift.values(site)[0].size for site in sites))
    rows = [None, *range(0, len(drift.steps), stride)]

    scale = Scale.of(np.concatenate([_existing(drift, site) for site in sites]))
    states = [(p, site) for p in prompts for site in sites]
    texts = {p: step_texts(drift, p) for p in prompts}
    stops = [[_stop(drift, p, site, row, scale, texts[p]) for p, site in states] for row in rows]
    first = 0 if drift.counted[prompt].any() else 1  # with step 0 alone there is no median
    fig = make_subplots(
        rows=len(sites), cols=1, shared_xaxes=True, vertical_spacing=0.12, subplot_titles=[NAMES[s] for s in sites]
    )
    for (p, site), cells in zip(states, stops[first], strict=True):
        fig.add_heatmap(
            x=drift.layers(site),
            y=np.arange(drift.values(site).shape[3]),
            text=[layer_kinds(drift, drift.layers(site))] * drift.values(site).shape[3],
            name=f"{site}, prompt {p}",
            coloraxis="coloraxis",
            visible=p == prompt,
            xgap=1,
            ygap=1,
            hovertemplate=f"{site.upper() if site in 'kvq' else site} · layer %{{x}} · head %{{y}}<br>"
            "relative L2: <b>%{customdata}</b><br>%{text}<br>%{meta[0]}<br>%{meta[1]}<extra></extra>",
            row=sites.index(site) + 1,
            col=1,
            **cells,
        )
    fig.update_layout(coloraxis=scale.coloraxis())
    n_layers = drift.architecture.n_layers
    fig.update_xaxes(showgrid=False, range=[-0.5, n_layers - 0.5], **whole_numbers(n_layers))
    fig.update_xaxes(title_text="layer", row=len(sites), col=1)
    for row, site in enumerate(sites, start=1):
        count = drift.values(site).shape[3]
        fig.update_yaxes(
            title_text="head", showgrid=False, range=[-0.5, count - 0.5], dtick=max(1, count // 8), row=row, col=1
        )
    labels = ["median of all"] + [str(int(drift.steps[row])) for row in rows if row is not None]
    keys = ("z", "customdata", "meta")
    args = [[{key: [cells[key] for cells in stop] for key in keys}] for stop in stops]
    fig.update_layout(sliders=[slider("step: ", labels, first, args)])

    titles = {
        p: title_text(
            takeaway.heads(drift, sites, p),
            f"Drift by layer and head, over all positions both paths read. {versus(drift)}. {counts(drift)}.",
            "" if len(prompts) > 1 else f"Shown: {prompt_label(drift, p, 80)}",
            stride_note("step", stride),
        )
        for p in prompts
    }
    choices = [[{"visible": [p == c for p, _ in states]}, {"title.text": titles[c]}] for c in prompts]
    menus = prompt_menu(drift, prompts, prompt, choices)
    return lay_out(fig, titles[prompt], dark=dark, menus=menus, below=SLIDER)


def _existing(drift: Drift, site: str) -> np.ndarray:
    """All values of heads that exist at measured steps, flat."""
    values = drift.values(site)[drift.measured]
    return values[:, head_exists(drift, site)].ravel()


def _stop(drift: Drift, prompt: int, site: str, row: int | None, scale: Scale, texts: list[str]) -> dict[str, Any]:
    """What one stop of the slider shows in one trace; ``row=None`` is the median over the counted steps."""
    if row is None:
        values, measured = drift.per_prompt(site)[prompt], drift.counted[prompt].any()
        when = "median over steps ≥ 1"
    else:
        values, measured = drift.values(site)[prompt, row], drift.measured[prompt, row]
        when = f"step {int(drift.steps[row])}: {texts[row]}"
    return {
        "z": scale.z(values, measured & head_exists(drift, site)).T,
        "customdata": cell_text(values).T,
        "meta": [when, escape(prompt_label(drift, prompt))],
    }
