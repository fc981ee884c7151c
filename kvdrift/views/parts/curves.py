"""Drift by layer as a curve: median and interval over prompts, and the band of the rounding floor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from kvdrift.drift import findings
from kvdrift.drift.layout import RESIDUAL_SITES
from kvdrift.drift.result import Drift
from kvdrift.errors import SiteError
from kvdrift.statistics.resampling import bootstrap_interval
from kvdrift.views.parts.labels import cell_text, layer_kinds
from kvdrift.views.parts.scale import log_ticks
from kvdrift.views.parts.theme import FLOOR, FLOOR_LINE, NOT_FINITE
from kvdrift.words.numbers import plural

BAND_LIMIT = 20  # floor curves up to which the band shows their whole range


@dataclass(frozen=True)
class Curve:
    """Drift of one site by layer.

    Attributes
    ----------
    layers
        Layer numbers, int ``[layer]``.
    depth
        Relative depth ``(layer + 1) / n_layers``, ``[layer]``.
    prompts
        Median over the counted steps of each prompt, ``[prompt, layer]``; NaN where nothing was measured.
    median
        Median of ``prompts`` over prompts, ``[layer]``.
    low, high
        95 % bootstrap interval of that median over prompts, ``[layer]``; NaN with one prompt.
    floor
        Median over the counted steps of each re-roll, ``[seed * prompt, layer]``; no rows without a floor.
    seeds
        How many re-rolls each prompt has.
    """

    layers: np.ndarray
    depth: np.ndarray
    prompts: np.ndarray
    median: np.ndarray
    low: np.ndarray
    high: np.ndarray
    floor: np.ndarray
    seeds: int

    @property
    def floor_median(self) -> np.ndarray:
        """Median of the floor curves, ``[layer]``."""
        return np.asarray(np.median(self.floor, axis=0))

    @property
    def floor_band(self) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper edge of the floor, ``[layer]`` each: all of it, or its middle 90 %."""
        if len(self.floor) > BAND_LIMIT:
            low, high = np.quantile(self.floor, [0.05, 0.95], axis=0)
            return low, high
        return self.floor.min(axis=0), self.floor.max(axis=0)

    @property
    def drawn(self) -> list[np.ndarray]:
        """Everything a figure may draw of this curve, to fit an axis to."""
        edges = [self.floor_median, *self.floor_band] if len(self.floor) else []
        return [self.prompts, self.median, self.low, self.high, *edges]

    @property
    def floor_words(self) -> str:
        """What the band shows."""
        what = "5 to 95 % of" if len(self.floor) > BAND_LIMIT else "range of"
        prompts = len(self.floor) // max(1, self.seeds)
        rolls = f"{self.seeds} {plural(self.seeds, 're-roll')}"
        return f"rounding floor ({what} {rolls}{f' in each of {prompts} prompts' if prompts > 1 else ''})"


def curve_sites(drift: Drift) -> list[str]:
    """Residual sites that have a layer axis."""
    return [s for s in RESIDUAL_SITES if len(drift.layers(s)) and drift.has(s)]


def curve(drift: Drift, site: str) -> Curve:
    """Reduce one site of a drift to its curve.

    Raises
    ------
    SiteError
        If the drift has no such site with layers.
    """
    if site not in curve_sites(drift):
        have = ", ".join(curve_sites(drift)) or "none"
        raise SiteError(
            f"No drift by layer at {site!r}; this drift has it at: {have}. Run compare(..., sites=[..., {site!r}])."
        )
    prompts = drift.per_prompt(site)
    counted = drift.counted.any(axis=1)
    low = high = np.full(prompts.shape[1], np.nan)
    if counted.any():
        low, high = bootstrap_interval(np.median, prompts[counted])
    layers = drift.layers(site)
    return Curve(
        layers=layers,
        depth=(layers + 1) / drift.architecture.n_layers,
        prompts=prompts,
        median=np.asarray(findings.over_prompts(drift, site)),
        low=low,
        high=high,
        floor=_floor(drift, site),
        seeds=len(drift.values(site, of="floor")) if drift.has(site, of="floor") else 0,
    )


def _floor(drift: Drift, site: str) -> np.ndarray:
    if not drift.has(site, of="floor"):
        return np.empty((0, len(drift.layers(site))))
    values = drift.values(site, of="floor")  # [seed, prompt, step, layer]
    rows = [
        np.median(values[seed, prompt][keep], axis=0)
        for prompt, keep in enumerate(drift.counted)
        for seed in range(len(values))
        if keep.any()
    ]
    return np.array(rows).reshape(len(rows), values.shape[3])


@dataclass(frozen=True)
class LogAxis:
    """A logarithmic axis with a row of its own, below the smallest number, for exact zeros.

    Attributes
    ----------
    low, high
        Ends of the ordinary part in log10 units.
    zero
        Where exact zeros stand (a number to plot), or None if there are none.
    ordinary
        Whether there is any number to label the axis by.
    """

    low: float
    high: float
    zero: float | None
    ordinary: bool = True

    @classmethod
    def of(cls, values: Sequence[np.ndarray]) -> LogAxis:
        """Fit to all values that will be drawn."""
        flat = np.concatenate([np.asarray(v, dtype=float).ravel() for v in values])
        flat = flat[np.isfinite(flat)]
        positive = flat[flat > 0]
        low, high = (np.log10(positive.min()), np.log10(positive.max())) if positive.size else (-1.0, 0.0)
        ordinary = bool(positive.size)
        pad = max(0.12, 0.05 * (high - low))
        low, high = float(low - pad), float(high + 1.6 * pad)
        if not (flat == 0).any():
            return cls(low, high, None, ordinary)
        return cls(low, high, float(10 ** (low - 0.08 * (high - low))), ordinary)

    def place(self, values: np.ndarray) -> np.ndarray:
        """Values to plot: zeros on their row, infinity at the top, NaN as it is."""
        values = np.asarray(values, dtype=float)
        top = 10**self.high
        return np.where(values == 0, self.zero or np.nan, np.where(np.isinf(values), top, values))

    def settings(self, zero_label: str = "bit-identical") -> dict[str, Any]:
        """Settings of the Plotly axis."""
        ticks = log_ticks(self.low, self.high) if self.ordinary else []
        low = self.low
        if self.zero is not None:
            low = float(np.log10(self.zero)) - 0.05 * (self.high - self.low)
            ticks = [(float(np.log10(self.zero)), zero_label), *ticks]
        return {
            "type": "log",
            "range": [low, self.high],
            "tickmode": "array",
            "tickvals": [10**place for place, _ in ticks],
            "ticktext": [label for _, label in ticks],
        }


def band(x: np.ndarray, low: np.ndarray, high: np.ndarray, **style: Any) -> go.Scatter:
    """A filled band between two curves."""
    keep = ~(np.isnan(low) | np.isnan(high))
    outline = np.concatenate([high[keep], low[keep][::-1]])
    return go.Scatter(
        x=np.concatenate([x[keep], x[keep][::-1]]),
        y=outline,
        mode="lines",
        fill="toself",
        hoverinfo="skip",
        **style,
    )


def floor_traces(shape: Curve, x: np.ndarray, axis: LogAxis, **style: Any) -> list[go.Scatter]:
    """The band of the rounding floor and its median; nothing without a floor."""
    if not len(shape.floor):
        return []
    low, high = (axis.place(edge) for edge in shape.floor_band)
    median = shape.floor_median
    return [
        band(x, low, high, fillcolor=FLOOR, line={"width": 0}, name=shape.floor_words, legendgroup="floor",
             **style),
        go.Scatter(
            x=x, y=axis.place(median), mode="lines", name="rounding floor, median", legendgroup="floor",
            line={"color": FLOOR_LINE, "width": 1.5, "dash": "dash"}, customdata=cell_text(median),
            hovertemplate="rounding floor, median of the re-rolls: %{customdata}<extra></extra>", **style,
        ),
    ]  # fmt: skip


def curve_traces(
    drift: Drift, shape: Curve, x: np.ndarray, axis: LogAxis, *, name: str, colour: str, **style: Any
) -> list[go.Scatter]:
    """Interval (with two prompts or more) and median of one curve."""
    traces = []
    fill = f"rgba({','.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))},0.22)"
    if not np.isnan(shape.low).all():
        low, high = axis.place(shape.low), axis.place(shape.high)
        traces.append(
            band(x, low, high, fillcolor=fill, line={"width": 0}, name="95 % interval over prompts",
                 legendgroup=name, showlegend=False, **style)
        )  # fmt: skip
    finite = np.isfinite(shape.median)
    details = hover(drift, shape)
    traces.append(
        go.Scatter(
            x=x, y=np.where(finite, axis.place(shape.median), np.nan), mode="lines+markers", name=name,
            legendgroup=name, line={"color": colour, "width": 2.5}, customdata=details, hovertemplate=HOVER,
            marker={"size": 6, "symbol": np.where(shape.median == 0, "circle-open", "circle").tolist()}, **style,
        )
    )  # fmt: skip
    if drift.counted.any() and not finite.all():
        traces.append(
            go.Scatter(
                x=x[~finite], y=np.full((~finite).sum(), 10**axis.high), mode="markers", name=f"{name}: NaN / inf",
                legendgroup=name, marker={"size": 10, "symbol": "x", "color": NOT_FINITE}, cliponaxis=False,
                customdata=details[~finite], hovertemplate=HOVER, **style,
            )
        )  # fmt: skip
    return traces


HOVER = (
    "layer %{customdata[0]} (%{customdata[1]})<br>drift: <b>%{customdata[2]}</b>%{customdata[3]}"
    "<br>rounding floor: %{customdata[4]}%{customdata[5]}<extra>%{fullData.name}</extra>"
)


def hover(drift: Drift, shape: Curve) -> np.ndarray:
    """What `HOVER` shows, ``[layer, field]``: layer, kind, median, interval, floor, ratio."""
    kinds = layer_kinds(drift, shape.layers)
    texts = cell_text(shape.median)
    low, high = cell_text(shape.low, "0"), cell_text(shape.high, "0")
    interval = [
        "" if np.isnan(edge) else f" (95 % interval over prompts {a} to {b})"
        for edge, a, b in zip(shape.low, low, high, strict=True)
    ]
    floor, over = ["not measured"] * len(kinds), [""] * len(kinds)
    if len(shape.floor):
        floor = cell_text(shape.floor_median).tolist()
        over = [
            f", drift is {d / f:.2g}× that" if f > 0 and np.isfinite(d) else ""
            for d, f in zip(shape.median, shape.floor_median, strict=True)
        ]
    rows = zip(shape.layers.tolist(), kinds, texts, interval, floor, over, strict=True)
    return np.array([list(row) for row in rows], dtype=object)
