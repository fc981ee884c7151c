"""Colours for drift: log10 with decade ticks, exact zeros in their own grey, non-finite values in red.

Plotly colour bars have no logarithmic type and no second colour for special values. So a value is turned into
its log10, an exact zero into a place just below the scale and a non-finite value into a place just above it;
the colour bar shows those places as labelled blocks. Cells that were not measured stay empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from plotly.colors import get_colorscale

from kvdrift.views.parts.labels import METRICS, decade
from kvdrift.views.parts.theme import IDENTICAL, NOT_FINITE

RARE = 0.01  # share of the smallest values that may share the lowest colour
BAND = 0.06  # height of a special block, as a share of the scale's height


@dataclass(frozen=True)
class Scale:
    """A colour scale fitted to values; `of` makes one.

    Attributes
    ----------
    metric
        What is drawn; ``identical`` is linear from 0 to 1, everything else logarithmic.
    low, high
        Ends of the ordinary part, in log10 (or linear) units.
    zeros, non_finite
        Whether the blocks for exact zeros and for NaN or infinity are needed.
    ordinary
        Whether there is any value for the ordinary part; without one the bar shows the blocks alone.
    clipped
        Whether a few values lie below ``low`` and are drawn in its colour (the lowest tick says ≤): a handful of
        tiny ones would otherwise take most of the colours.
    """

    metric: str
    low: float
    high: float
    zeros: bool
    non_finite: bool
    ordinary: bool = True
    clipped: bool = False

    @classmethod
    def of(cls, values: np.ndarray, metric: str = "rel_l2") -> Scale:
        """Fit to ``values`` (any shape) of measured cells."""
        values = np.asarray(values, dtype=float)
        finite = np.isfinite(values)
        broken = bool((~finite).any())
        if metric == "identical":
            return cls(metric, 0.0, 1.0, bool((values == 1).any()), broken)
        positive = values[finite & (values > 0)]
        if positive.size == 0:
            return cls(metric, -1.0, 0.0, bool((values == 0).any()), broken, ordinary=False)
        low, high = float(np.log10(positive.min())), float(np.log10(positive.max()))
        usual = float(np.log10(np.quantile(positive, RARE)))
        clipped = usual - low > 1
        if clipped:
            low = float(np.floor(usual))
        if high - low < 1.5:
            low, high = float(np.floor(low)), float(np.ceil(high))
            high += high == low
        return cls(metric, low, high, bool((values <= 0)[finite].any()), broken, clipped=clipped)

    @property
    def linear(self) -> bool:
        """Whether values are drawn as they are, not as log10."""
        return self.metric == "identical"

    @property
    def band(self) -> float:
        """Height of a special block in units of the scale."""
        return BAND * (self.high - self.low)

    def z(self, values: np.ndarray, measured: np.ndarray) -> np.ndarray:
        """What a heat map draws, same shape; NaN (empty) where not ``measured``.

        Parameters
        ----------
        values
            Drift, any shape.
        measured
            Bool, broadcastable to ``values``.
        """
        values = np.asarray(values, dtype=float)
        special = values == 1 if self.linear else values <= 0
        below, above = self.low - self.band, self.high + self.band
        with np.errstate(divide="ignore", invalid="ignore"):
            z = values if self.linear else np.log10(np.where(values > 0, values, np.nan))
        if self.clipped:
            z = np.maximum(z, self.low)
        z = np.where(special, above if self.linear else below, z)
        z = np.where(np.isfinite(values), z, (below if self.linear else above))
        return np.where(np.broadcast_to(measured, values.shape), np.round(z, 5), np.nan)

    def coloraxis(self, title: str | None = None) -> dict[str, Any]:
        """``layout.coloraxis`` settings: range, colours, ticks and title.

        The block for "bit-identical" lies below a logarithmic scale and above the linear one (share 1).
        """
        colour_low, colour_high = (NOT_FINITE, IDENTICAL) if self.linear else (IDENTICAL, NOT_FINITE)
        has_low, has_high = (self.non_finite, self.zeros) if self.linear else (self.zeros, self.non_finite)
        low = self.low - 2 * self.band * has_low
        high = self.high + 2 * self.band * has_high
        start, end = (self.low - low) / (high - low), (self.high - low) / (high - low)
        palette = get_colorscale("cividis" if self.linear else "viridis")
        if not self.ordinary:
            palette = [[0.0, colour_low], [1.0, colour_low]]
        middle = [[start + p * (end - start), colour] for p, colour in palette]
        colours = [[0.0, colour_low], [start, colour_low]] * has_low + middle
        colours += [[end, colour_high], [1.0, colour_high]] * has_high
        ticks = self.ticks()
        labels = {IDENTICAL: self.zero_label, NOT_FINITE: "NaN / inf"}
        ticks = [(self.low - self.band, labels[colour_low])] * has_low + ticks
        ticks += [(self.high + self.band, labels[colour_high])] * has_high
        return {
            "cmin": low,
            "cmax": high,
            "colorscale": colours,
            "colorbar": {
                "tickmode": "array",
                "tickvals": [place for place, _ in ticks],
                "ticktext": [label for _, label in ticks],
                "title": {"text": title or METRICS[self.metric], "side": "right"},
            },
        }

    @property
    def zero_label(self) -> str:
        """What the grey block means; a cosine distance of 0 does not promise equal bits."""
        return "exactly 0" if self.metric == "cosine" else "bit-identical"

    def ticks(self) -> list[tuple[float, str]]:
        """Places and labels of the ordinary ticks: decades, with 2 and 5 between them on a short scale."""
        if not self.ordinary:
            return []
        if self.linear:
            return [(x / 4, f"{x * 25} %") for x in range(5)]
        ticks = log_ticks(self.low, self.high)
        return [(ticks[0][0], f"≤ {ticks[0][1]}"), *ticks[1:]] if self.clipped else ticks


def log_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Decade ticks between two log10 values, every second or third decade on a long scale."""
    first, last = int(np.ceil(low - 1e-9)), int(np.floor(high + 1e-9))
    every = max(1, -(-(last - first) // 8))
    ticks = [(float(e), decade(e)) for e in range(first, last + 1, every)]
    if high - low <= 2.5:
        between = [(e + np.log10(f), decade(e, f)) for e in range(first - 1, last + 1) for f in (2, 5)]
        ticks = sorted(ticks + [(float(x), label) for x, label in between if low <= x <= high])
    return ticks
