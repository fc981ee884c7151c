"""How far a patch brings the recipient to the donor: pure functions of distances."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvdrift.statistics.resampling import MIN_PROMPTS, jackknife_error, ratio_above_one

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Recovery:
    """Recovery over some prompts, pooled: 1 − Σ d²(patched) / Σ d²(reference).

    Attributes
    ----------
    value
        1: the donor's logits, bit for bit or nearly; 0: no better than the reference; negative: farther. NaN
        where nothing is left to recover (the reference is as good as the donor).
    low, high
        95 % interval from a studentised bootstrap over prompts (`kvdrift.statistics.resampling.ratio_above_one`); NaN
        with fewer than five.
    p_value
        One-sided, of a recovery of 0 or less; NaN likewise.
    standard_error
        Standard error over prompts, by the jackknife (leave one prompt out); NaN with one.
    per_prompt
        The same number prompt by prompt, ``[prompt]``.
    spread
        Lowest and highest recovery of a single placebo held against the mean of all; NaN without two placebos.
    reference
        What it is held against: ``"placebo"`` or ``"unpatched"``.
    n
        Prompts with a defined recovery.
    """

    value: float
    low: float
    high: float
    p_value: float
    standard_error: float
    per_prompt: tuple[float, ...]
    spread: tuple[float, float]
    reference: str
    n: int


def recovery(
    patched: NDArray[np.floating], references: NDArray[np.floating], counted: NDArray[np.bool_], name: str = "placebo"
) -> Recovery:
    """Recovery of squared distances to the donor.

    Parameters
    ----------
    patched
        Squared distance of the patched recipient to the donor, ``[prompt, step]``, or ``[seed, prompt, step]``.
    references
        The same of each placebo (or of the unpatched recipient), ``[seed, prompt, step]``.
    counted
        The steps that count, ``[prompt, step]``.
    name
        What the reference is called.

    Examples
    --------
    >>> import numpy as np
    >>> counted = np.ones((1, 2), dtype=bool)
    >>> recovery(np.array([[1.0, 0.0]]), np.array([[[2.0, 2.0]]]), counted).value
    0.75
    """
    own = np.where(counted, patched if patched.ndim == 3 else patched[None], 0.0).sum(axis=2)
    seeds = np.where(counted, references, 0.0).sum(axis=2)
    pairs = np.stack([own.mean(axis=0), seeds.mean(axis=0)], axis=1)
    used = counted.any(axis=1)
    per_prompt = np.where(used, _one_minus_ratio(pairs), np.nan)
    if not used.any():
        return Recovery(np.nan, np.nan, np.nan, np.nan, np.nan, tuple(per_prompt), (np.nan, np.nan), name, 0)
    low, high, p_value = _interval(pairs[used])
    each = 1 - _ratio(seeds[:, used].sum(axis=1), pairs[used, 1].sum())
    spread = (float(each.min()), float(each.max())) if len(each) > 1 else (np.nan, np.nan)
    return Recovery(
        value=float(_one_minus_ratio(pairs[used].sum(axis=0))),
        low=low,
        high=high,
        p_value=p_value,
        standard_error=jackknife_error(_one_minus_ratio(pairs[used].sum(axis=0) - pairs[used])),
        per_prompt=tuple(float(x) for x in per_prompt),
        spread=spread,
        reference=name,
        n=int(np.isfinite(per_prompt).sum()),
    )


def _one_minus_ratio(pairs: Array) -> Array:
    return np.asarray(1 - _ratio(pairs[..., 0], pairs[..., 1]))


def _ratio(numerator: Array | float, denominator: Array | float) -> Array:
    """The ratio, NaN where the denominator is zero."""
    numerator, denominator = np.broadcast_arrays(np.asarray(numerator, float), np.asarray(denominator, float))
    return np.divide(numerator, denominator, out=np.full(numerator.shape, np.nan), where=denominator != 0)


def _interval(pairs: Array) -> tuple[float, float, float]:
    """Interval and p-value of the pooled recovery: those of the ratio of reference to patched, turned round."""
    if len(pairs) < MIN_PROMPTS or not pairs[:, 1].any():
        return np.nan, np.nan, np.nan
    ratio, p_value = ratio_above_one(pairs[:, 1], pairs[:, 0])
    low, high = (np.nan, np.nan) if ratio.interval is None else (1 - _ratio(1.0, end) for end in ratio.interval)
    low = -np.inf if ratio.interval is not None and ratio.interval[0] == 0 else low
    return float(low), float(high), p_value


NOTICED = 0.05
"""A recovery below this is too small to be divided among causes."""


def loses(rerolled: Recovery, plain: Recovery) -> bool:
    """Whether there is a recovery against no patch at all, and re-rolled sums take some of it away."""
    return bool(plain.value >= NOTICED and not plain.low <= 0 and rerolled.value < plain.value)
