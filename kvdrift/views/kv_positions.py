"""Drift of K and V by layer and absolute position, with what a window has evicted."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvdrift.drift.result import Drift
from kvdrift.errors import InputError, SiteError
from kvdrift.views.parts import takeaway_drift as takeaway
from kvdrift.views.parts.choices import budget, check_prompt, prompt_menu, slider, stride_note, whole_numbers
from kvdrift.views.parts.labels import cell_text, cell_texts, escape, prompt_label, token_label, versus
from kvdrift.views.parts.scale import Scale
from kvdrift.views.parts.theme import BOUNDARY, FLIP, PATH_A, SLIDER, lay_out, title_text

SITES = ("k", "v")


def kv_positions(drift: Drift, *, prompt: int = 0, head: int | None = None, dark: bool = False) -> go.Figure:
    """Heat maps of ``rel_l2``: absolute position across, layer upwards, K above V, a slider over the kept steps.

    Positions outside a layer's window that a path no longer reads are hatched and stay empty (a cache has evicted
    them); the edge of the hatching is the window's boundary. A position inside the window that only one of the
    two paths reads is hatched in red.

    Parameters
    ----------
    drift
        What `kvdrift.compare` found, with ``k`` and ``v`` among its sites.
    prompt
        The prompt shown first; a dropdown offers the others (up to 12 prompts of moderate size).
    head
        One KV head; by default the largest value among the KV heads is shown. Values are
        ``drift.values("k", of="positions")[prompt, kept, layer, head, position]``.
    dark
        Use the dark template.

    Raises
    ------
    SiteError
        If K/V were not kept by position.
    InputError
        If there is no such prompt or head.

    Examples
    --------
    >>> import kvdrift as kd
    >>> model = kd.load(kd.models.tiny("gemma3"))
    >>> drift = kd.compare(model, [1, 2, 3], sites=["resid_post", "k", "v"], max_new_tokens=4, progress=False)
    >>> fig = kd.views.kv_positions(drift)
    """
    if not all(drift.has(site, of="positions") for site in SITES):
        raise SiteError(
            "kv_positions needs the drift of K and V by position, which was not kept: "
            "run compare(..., sites=[..., 'k', 'v'])."
        )
    check_prompt(drift, prompt)
    n_heads = drift.values("k", of="positions").shape[3]
    if head is not None and not 0 <= head < n_heads:
        raise InputError(f"head={head} is out of range: this drift has {n_heads} KV heads, counted from 0.")

    kept = drift.position_steps
    per_position = len(SITES) * len(kept) * len(drift.layers("k"))
    prompts, stride = budget(drift, prompt, per_position * _length(drift, None))
    panels = {(p, site, row): _panel(drift, p, site, row, head, stride)
              for p in prompts for site in SITES for row in range(len(kept))}  # fmt: skip
    scale = Scale.of(np.concatenate([panel["values"][panel["both"]] for panel in panels.values()]))
    states = [(p, site) for p in prompts for site in SITES]
    stops = [[t for p, site in states for t in _traces(panels[p, site, row], scale)] for row in range(len(kept))]
    owner = [p for p, _ in states for _ in range(len(stops[0]) // len(states))]

    fig = make_subplots(
        rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.1, subplot_titles=["K (keys)", "V (values)"]
    )
    shown = [row for row in range(len(kept)) if drift.measured[prompt, np.searchsorted(drift.steps, kept[row])]]
    first = shown[-1] if shown else len(kept) - 1
    for i, (p, changing) in enumerate(zip(owner, stops[first], strict=True)):
        site = states[i * len(states) // len(owner)][1]
        trace = _fixed(drift, p, site, changing["kind"], stride)
        trace["showlegend"] = changing["kind"] in ("outside", "one path", "prompt") and site == "k" and p == prompt
        fig.add_trace({**trace, **_changing(changing), "visible": p == prompt}, row=SITES.index(site) + 1, col=1)
    fig.update_layout(coloraxis=scale.coloraxis())
    longest, n_layers = max(_length(drift, p) for p in prompts), drift.architecture.n_layers
    fig.update_xaxes(showgrid=False, range=[-0.5, longest - 0.5], **whole_numbers(longest))
    fig.update_xaxes(title_text="absolute position (0 is the first prompt token)", row=2, col=1)
    fig.update_yaxes(title_text="layer", showgrid=False, range=[-0.6, n_layers - 0.4], **whole_numbers(n_layers))
    keys = ("z", "customdata", "x", "y", "meta")
    args = [[_restyle(stop, keys)] for stop in stops]
    fig.update_layout(sliders=[slider("step: ", [str(int(s)) for s in kept], first, args)])

    which = "largest of the KV heads" if head is None and n_heads > 1 else f"KV head {head or 0}"
    titles = {
        p: title_text(
            takeaway.positions(drift, p),
            f"Relative L2 drift of K and V by layer and position, {which}. {versus(drift)}.",
            "" if len(prompts) > 1 else f"Shown: {prompt_label(drift, p, 80)}",
            stride_note("position", stride),
        )
        for p in prompts
    }
    menus = prompt_menu(
        drift, prompts, prompt, [[{"visible": [p == c for p in owner]}, {"title.text": titles[c]}] for c in prompts]
    )
    return lay_out(fig, titles[prompt], dark=dark, menus=menus, plot=460, below=SLIDER)


def _length(drift: Drift, prompt: int | None) -> int:
    """How many positions exist at the last kept step, of one prompt or of the longest."""
    prompts = drift.prompts if prompt is None else [drift.prompts[prompt]]
    last = int(drift.position_steps.max(initial=0))
    width = drift.values("k", of="positions").shape[4]
    return min(width, max(len(p.ids) for p in prompts) + last)


def _panel(drift: Drift, prompt: int, site: str, row: int, head: int | None, stride: int) -> dict[str, Any]:
    """Values and masks ``[layer, position]`` of one panel at one kept step."""
    step = int(drift.position_steps[row])
    length = _length(drift, prompt)
    values = drift.values(site, of="positions")[prompt, row, :, :, :length]
    if head is None:
        values = np.where(np.isnan(values).all(axis=1), np.nan, np.nanmax(np.nan_to_num(values, nan=-1), axis=1))
    else:
        values = values[:, head]
    measured = drift.measured[prompt, np.searchsorted(drift.steps, step)]
    position = np.arange(0, length, stride)
    current = len(drift.prompts[prompt].ids) + step - 1
    a, b = (drift.visible(p)[prompt, row, :, position].T for p in "ab")
    exists = np.broadcast_to(measured & (position <= current), a.shape)
    inside = _inside(drift, drift.layers(site), position, current)
    one = exists & inside & (a ^ b)
    return {
        "step": step,
        "values": values[:, ::stride],
        "exists": exists,
        "both": exists & a & b,
        "one": one,
        "outside": exists & ~(a & b) & ~one,
        "layers": drift.layers(site),
        "position": position,
        "stride": stride,
        "prompt_length": len(drift.prompts[prompt].ids),
        "label": escape(prompt_label(drift, prompt)),
    }


def _inside(drift: Drift, layers: np.ndarray, position: np.ndarray, current: int) -> np.ndarray:
    """Which positions a layer's window holds at the current one, bool ``[layer, position]``."""
    infos = {info.index: info for info in drift.architecture.layers}
    first = []
    for number in layers:
        info = infos[int(number)]
        if info.window is None:
            first.append(0)
        elif info.attention == "chunked":
            first.append(current - current % info.window)
        else:
            first.append(current - info.window + 1)
    return position >= np.array(first)[:, None]


def _traces(panel: dict[str, Any], scale: Scale) -> list[dict[str, Any]]:
    """What the slider changes, per trace: the heat map, what is outside, what one path reads, the prompt's end."""
    text = cell_text(panel["values"])
    text[panel["outside"]] = "outside the window"
    text[panel["one"]] = "read by one path only"
    text[~panel["exists"]] = "–"
    layers, position = panel["layers"], panel["position"]
    edge = panel["prompt_length"] - 0.5
    step = panel["step"]
    return [
        {"kind": "heat", "z": scale.z(panel["values"], panel["both"]), "customdata": text, "x": position,
         "y": layers, "meta": [f"step {step}", panel["label"]]},
        {"kind": "outside", **_outline(panel["outside"], layers, position, panel["stride"])},
        {"kind": "one path", **_outline(panel["one"], layers, position, panel["stride"])},
        {"kind": "prompt", "x": [edge, edge], "y": [layers.min() - 0.5, layers.max() + 0.5]},
    ]  # fmt: skip


def _changing(trace: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in trace.items() if key != "kind"}


def _restyle(stop: list[dict[str, Any]], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: [trace.get(key, []) for trace in stop] for key in keys}


def _fixed(drift: Drift, prompt: int, site: str, kind: str, stride: int) -> dict[str, Any]:
    """What stays the same in one trace while the slider moves."""
    if kind == "heat":
        return {
            "type": "heatmap",
            "coloraxis": "coloraxis",
            "text": _hover_text(drift, prompt, site, stride),
            "name": site.upper(),
            "hovertemplate": f"{site.upper()} · layer %{{y}} · position %{{x}} · %{{meta[0]}}<br>"
            "relative L2: <b>%{customdata}</b><br>%{text}<br>%{meta[1]}<extra></extra>",
        }
    if kind == "prompt":
        return {
            "type": "scatter", "mode": "lines", "name": "end of the prompt", "hoverinfo": "skip",
            "line": {"color": PATH_A, "width": 1.5, "dash": "dot"}, "legendgroup": kind,
        }  # fmt: skip
    outside = kind == "outside"
    colour = BOUNDARY if outside else FLIP
    return {
        "type": "scatter", "mode": "lines", "fill": "toself", "fillcolor": "rgba(0,0,0,0)", "hoverinfo": "skip",
        "name": "outside the window (evicted)" if outside else "read by one path only", "legendgroup": kind,
        "line": {"color": colour, "width": 1.5},
        "fillpattern": {"shape": "/" if outside else "x", "fgcolor": colour, "bgcolor": "rgba(0,0,0,0)",
                        "size": 7, "solidity": 0.15},
    }  # fmt: skip


def _hover_text(drift: Drift, prompt: int, site: str, stride: int) -> list[list[str]]:
    """``[layer][position]``: kind of layer and the token that stands there."""
    length = _length(drift, prompt)
    ids = [*drift.prompts[prompt].ids, *(int(t) for t in drift.fed[prompt])][:length]
    ids += [-1] * (length - len(ids))
    tokens = [token_label(drift.token_texts.get(t, "")) if t >= 0 else "" for t in ids][::stride]
    return cell_texts(drift, drift.layers(site), [f"“{token}”" for token in tokens])


def _outline(mask: np.ndarray, layers: np.ndarray, position: np.ndarray, stride: int) -> dict[str, list[Any]]:
    """Rectangles around the true cells of ``mask [layer, position]``, neighbouring equal layers joined."""
    xs: list[float | None] = []
    ys: list[float | None] = []
    start = 0
    for row in range(1, len(mask) + 1):
        if row < len(mask) and (mask[row] == mask[start]).all() and layers[row] == layers[row - 1] + 1:
            continue
        padded = np.concatenate([[False], mask[start], [False]])
        edges = np.flatnonzero(padded[1:] != padded[:-1])
        low, high = float(layers[start]) - 0.5, float(layers[row - 1]) + 0.5
        for left, right in zip(edges[::2], edges[1::2], strict=True):
            x0, x1 = float(position[left]) - stride / 2, float(position[right - 1]) + stride / 2
            xs += [x0, x1, x1, x0, x0, None]
            ys += [low, low, high, high, low, None]
        start = row
    return {"x": xs, "y": ys}
