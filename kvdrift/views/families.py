"""Growth of drift in several models over one axis of relative depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from kvdrift.drift.result import Drift
from kvdrift.errors import InputError
from kvdrift.models.labels import model_name
from kvdrift.views.parts import takeaway_drift as takeaway
from kvdrift.views.parts.curves import LogAxis, curve, curve_traces
from kvdrift.views.parts.labels import cell_text, escape
from kvdrift.views.parts.theme import SERIES, lay_out, title_text
from kvdrift.words.numbers import count


def families(
    drifts: Mapping[str, Drift] | Sequence[Drift], *, site: str = "resid_post", dark: bool = False
) -> go.Figure:
    """Drift by relative depth, one colour per model, each with its own rounding floor dashed.

    Parameters
    ----------
    drifts
        Drifts by name, or a list (then named by model and dtype).
    site
        A residual site that all of them have.
    dark
        Use the dark template.

    Raises
    ------
    InputError
        If there are none.
    SiteError
        If one has no such site; the sentence names it.

    Examples
    --------
    >>> import kvdrift as kd
    >>> models = {name: kd.load(kd.models.tiny(name)) for name in ("llama", "gpt2")}
    >>> drifts = {n: kd.compare(m, [1, 2, 3], max_new_tokens=4, progress=False) for n, m in models.items()}
    >>> fig = kd.views.families(drifts)
    """
    named = _named(drifts)
    if not named:
        raise InputError("families needs at least one drift: give a dict of name to drift, or a list.")
    curves = [curve(drift, site) for _, drift in named]
    axis = LogAxis.of([x for c in curves for x in c.drawn])
    fig = go.Figure()
    for i, ((name, drift), shape) in enumerate(zip(named, curves, strict=True)):
        colour = SERIES[i % len(SERIES)]
        if len(shape.floor):
            floor = shape.floor_median
            fig.add_scatter(
                x=shape.depth, y=axis.place(floor), mode="lines", name=f"{escape(name)}: rounding floor",
                line={"color": colour, "width": 1.5, "dash": "dash"}, legendgroup=name, customdata=cell_text(floor),
                hovertemplate="rounding floor, median of the re-rolls: %{customdata}"
                "<extra>%{fullData.name}</extra>",
            )  # fmt: skip
        fig.add_traces(curve_traces(drift, shape, shape.depth, axis, name=escape(name), colour=colour))
    fig.update_xaxes(title_text="relative depth, (layer + 1) / number of layers", range=[-0.01, 1.03], tickformat=".0%")
    fig.update_yaxes(title_text="relative L2 drift, ‖a−b‖ / ‖b‖", **axis.settings())
    title = title_text(
        takeaway.families(named, site),
        f"Drift at {site} over relative depth, {count(len(named), 'model', thousands='')}; "
        "shade: 95 % interval over prompts, dashed: the model's own rounding floor (re-rolled sums).",
    )
    return lay_out(fig, title, dark=dark)


def _named(drifts: Mapping[str, Drift] | Sequence[Drift]) -> list[tuple[str, Drift]]:
    """Names and drifts; equal names in a list are numbered."""
    if isinstance(drifts, Mapping):
        return [(str(name), drift) for name, drift in drifts.items()]
    if isinstance(drifts, Drift):
        raise InputError("families takes several drifts: give a dict of name to drift, or a list.")
    names = [f"{model_name(d.a.model)}, {d.a.dtype}" for d in drifts]
    seen: dict[str, int] = {}
    result = []
    for name, drift in zip(names, drifts, strict=True):
        seen[name] = seen.get(name, 0) + 1
        result.append((name if names.count(name) == 1 else f"{name} ({seen[name]})", drift))
    return result
