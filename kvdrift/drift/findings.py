"""The numbers that a summary speaks about, taken from a drift in one place: pure, without words."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvdrift.drift.peaks import SITE
from kvdrift.drift.profile import Growth, Onset
from kvdrift.drift.result import Drift


@dataclass(frozen=True)
class Flip:
    """One measured step at which the paths' top-1 tokens differ.

    `margin` is the larger of the two paths' distances between their best and second-best logit (None if it was
    not measured), `tie` whether either path has an exact tie there.
    """

    prompt: int
    step: int
    token_a: int
    token_b: int
    margin: float | None
    tie: bool


def flips(drift: Drift) -> tuple[Flip, ...]:
    """Every flip, by prompt and step; step 0 is included, for with a chunked prefill it can flip.

    Examples
    --------
    >>> import kvdrift as kd
    >>> model = kd.load(kd.models.tiny("llama"))
    >>> flips(kd.compare(model, [1, 2, 3], b=kd.CacheOn(), max_new_tokens=4, progress=False))
    ()
    """
    a, b = drift.top1("a"), drift.top1("b")
    return tuple(
        Flip(
            prompt=int(p),
            step=int(drift.steps[s]),
            token_a=int(a[p, s]),
            token_b=int(b[p, s]),
            margin=_larger(_at(drift, "margin_a", p, s), _at(drift, "margin_b", p, s)),
            tie=bool(_at(drift, "tie_a", p, s)) or bool(_at(drift, "tie_b", p, s)),
        )
        for p, s in np.argwhere(drift.flips)
    )


def counted_logits(drift: Drift, metric: str, of: str = "drift") -> np.ndarray:
    """A logit metric at the counted cells (measured, steps ≥ 1), float ``[cell]``; a floor gives all seeds' cells.

    Empty where the metric was not measured.
    """
    if not drift.has("logits", metric, of):
        return np.empty(0)
    return np.asarray(drift.values("logits", metric, of), dtype=float)[..., drift.counted].ravel()


def mean(values: np.ndarray) -> float | None:
    """Mean, in which NaN and inf show; None of nothing."""
    with np.errstate(invalid="ignore", over="ignore"):
        return float(np.mean(values)) if values.size else None


def largest(values: np.ndarray) -> float | None:
    """Largest value, in which NaN shows; None of nothing."""
    return float(np.max(values)) if values.size else None


def over_prompts(drift: Drift, site: str, of: str = "drift") -> np.ndarray | None:
    """Median over prompts of each prompt's median over steps ≥ 1 (and seeds), ``[layer]``; None if not measured."""
    if not drift.has(site, of=of):
        return None
    rows = drift.per_prompt(site, of=of)
    rows = rows[drift.counted.any(axis=1)]
    return np.median(rows, axis=0) if len(rows) else np.full(rows.shape[1:], np.nan)


def share_differing(drift: Drift) -> float | None:
    """Share of the counted steps at which the residual stream differs after the last layer; None if unknown."""
    if not drift.has(SITE) or not drift.counted.any():
        return None
    return float((drift.values(SITE)[drift.counted][:, -1] != 0).mean())


def shows_from(drift: Drift, site: str = SITE) -> int | None:
    """The first layer whose residual site differs at any counted step; None if none does, or it was not measured.

    It can lie above the source of drift: a bit that differs in a layer's attention or MLP output can round away where
    that output is added to the residual stream.
    """
    if not drift.has(site):
        return None
    differs = np.flatnonzero((drift.values(site)[drift.counted] != 0).any(axis=0))
    return int(drift.layers(site)[differs[0]]) if differs.size else None


def growth(drift: Drift) -> Growth | None:
    """Growth at ``resid_post``; None where that site was not measured."""
    return drift.growth(SITE) if drift.has(SITE) else None


def onset(drift: Drift) -> Onset | None:
    """Onset at ``resid_post``; None where local drift was not measured."""
    return drift.onset(SITE) if drift.has(SITE, of="local") else None


def _at(drift: Drift, metric: str, prompt: int, step: int) -> float | None:
    return float(drift.values("logits", metric)[prompt, step]) if drift.has("logits", metric) else None


def _larger(first: float | None, second: float | None) -> float | None:
    both = [value for value in (first, second) if value is not None]
    return max(both) if both else None
