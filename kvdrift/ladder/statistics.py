"""Numbers over prompts: means with their errors, ratios of paired means, bounds on rates. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvdrift.drift.profile import bootstrap_interval, rule_of_three


@dataclass(frozen=True)
class Mean:
    """A mean over prompts.

    Attributes
    ----------
    value
        The mean; NaN of nothing.
    error
        Its standard error; NaN with fewer than two prompts.
    low, high
        95 % percentile bootstrap interval over prompts; NaN with fewer than two.
    median
        The median over prompts.
    n
        How many prompts.
    """

    value: float
    error: float
    low: float
    high: float
    median: float
    n: int


def mean(per_prompt: NDArray[np.float64]) -> Mean:
    """The mean of ``[prompt]``, prompts without a value (NaN) left out.

    Examples
    --------
    >>> found = mean(np.array([1.0, 3.0, np.nan]))
    >>> found.value, found.error, found.n
    (2.0, 1.0, 2)
    """
    known = per_prompt[~np.isnan(per_prompt)]
    if not known.size:
        return Mean(math.nan, math.nan, math.nan, math.nan, math.nan, 0)
    error = float(known.std(ddof=1) / math.sqrt(known.size)) if known.size > 1 else math.nan
    low, high = bootstrap_interval(lambda x: x.mean(axis=1), known)
    return Mean(float(known.mean()), error, float(low), float(high), float(np.median(known)), int(known.size))


def ratio(*columns: NDArray[np.float64]) -> tuple[float, float, float]:
    """(mean a / mean b) / (mean c / mean d) / … over prompts, with its paired 95 % bootstrap interval.

    Parameters
    ----------
    columns
        An even number of ``[prompt]`` arrays; a prompt without a value in any of them is left out.

    Returns
    -------
    value, low, high
        NaN where a quotient is 0/0; the ends NaN with fewer than two prompts.

    Examples
    --------
    >>> ratio(np.array([2.0, 4.0]), np.array([1.0, 2.0]))
    (2.0, 2.0, 2.0)
    """
    data = np.stack(columns, axis=1)
    data = data[~np.isnan(data).any(axis=1)]
    if not len(data):
        return math.nan, math.nan, math.nan
    low, high = bootstrap_interval(_quotients, data)
    return float(_quotients(data[None])[0]), float(low), float(high)


def _quotients(samples: NDArray[np.float64]) -> NDArray[np.float64]:
    """``[resample, prompt, column] -> [resample]``."""
    means = samples.mean(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = means[:, 0] / means[:, 1]
        for place in range(2, means.shape[1], 2):
            value = value / (means[:, place] / means[:, place + 1])
    return np.asarray(value)


def upper_bound(events: int, n: int) -> float:
    """The exact one-sided 95 % upper bound of a rate after ``events`` in ``n`` trials (Clopper-Pearson).

    The p at which so few events have a chance of 5 %; with no event 1 − 0.05^(1/n), about 3/n. NaN without a trial.

    Examples
    --------
    >>> round(upper_bound(0, 10), 3), round(upper_bound(2, 10), 3), upper_bound(10, 10)
    (0.259, 0.507, 1.0)
    """
    if n < 1:
        return math.nan
    if events >= n:
        return 1.0
    if events == 0:
        return rule_of_three(n)
    low, high = events / n, 1.0
    for _ in range(60):
        p = (low + high) / 2
        chance = sum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(events + 1))
        low, high = (p, high) if chance > 0.05 else (low, p)
    return (low + high) / 2
