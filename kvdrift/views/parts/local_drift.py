"""Local drift by layer: what a layer makes by itself, beside its own floor."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvdrift.drift.result import Drift
from kvdrift.drift.tables import local_on_layers


@dataclass(frozen=True)
class Local:
    """Local drift of one site by layer; NaN at layers where it was not measured.

    Attributes
    ----------
    mean
        Mean over the counted steps of each prompt, then over prompts, ``[layer]``. A median would be zero
        wherever a layer drifts in fewer than half of the steps, which in half precision is the rule.
    share
        Share of the counted steps with any local drift, ``[layer]``.
    floor
        The local floor's mean, over seeds too, ``[layer]``; NaN without one.
    """

    mean: np.ndarray
    share: np.ndarray
    floor: np.ndarray


def local(drift: Drift, site: str) -> Local | None:
    """Reduce local drift at ``site``; None where it was not measured."""
    if not drift.has(site, of="local"):
        return None
    values = local_on_layers(drift, site, drift.values(site, of="local"))
    floor = np.full(values.shape, np.nan)
    if (seeds := drift.floor(site, "local")) is not None:
        floor = local_on_layers(drift, site, np.mean(seeds, axis=0))
    return Local(
        mean=_mean(drift, values),
        share=_mean(drift, np.where(np.isnan(values), np.nan, values > 0)),
        floor=_mean(drift, floor),
    )


def _mean(drift: Drift, values: np.ndarray) -> np.ndarray:
    """Mean over the counted steps of each prompt ``[prompt, step, layer]``, then over prompts."""
    rows = [row[keep].mean(axis=0) for row, keep in zip(values, drift.counted, strict=True) if keep.any()]
    return np.mean(rows, axis=0) if rows else np.full(values.shape[2], np.nan)
