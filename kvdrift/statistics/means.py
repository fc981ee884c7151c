"""Means over prompts and ratios of paired means."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvdrift.statistics.resampling import bootstrap_interval


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
    low, high = bootstrap_interval(np.mean, known)
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
    return float(_quotients(data, axis=0)), float(low), float(high)


def _quotients(samples: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    """The chain of quotients of the means over prompts, of ``[..., prompt, column]``."""
    means = samples.mean(axis=axis)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = means[..., 0] / means[..., 1]
        for place in range(2, means.shape[-1], 2):
            value = value / (means[..., place] / means[..., place + 1])
    return np.asarray(value)
