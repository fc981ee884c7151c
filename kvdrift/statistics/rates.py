"""Shares and their intervals."""

import math
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import ArrayLike

from kvdrift.errors import InputError
from kvdrift.statistics.items import item_by_seed
from kvdrift.statistics.resampling import CONFIDENCE, expanded_percentile

_NAN = float("nan")


@dataclass(frozen=True)
class Rate:
    """A share with its 95 % interval (Wilson with one seed; a bootstrap over items with several).

    Attributes
    ----------
    value, low, high
        The share and its interval, 0 to 1; NaN where nothing was counted.
    events, n
        What it was counted from.
    """

    value: float
    low: float
    high: float
    events: int
    n: int


def wilson(events: float, n: float) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of a share.

    All p for which ``|events / n − p| <= 1.96 sqrt(p (1 − p) / n)`` (Wilson, "Probable Inference, the Law of
    Succession, and Statistical Inference", 1927; ``scipy.stats.binomtest`` has it for whole counts only). Unlike
    the textbook interval it neither leaves 0 to 1 nor shrinks to nothing at 0 or n events.

    Parameters
    ----------
    events, n
        ``events`` of ``n``; an effective count need not be whole.

    Returns
    -------
    (low, high)
        NaN and NaN where ``n`` is 0.

    Raises
    ------
    InputError
        ``events`` is negative or above ``n``.

    Examples
    --------
    >>> [round(end, 3) for end in wilson(0, 20)]
    [0.0, 0.161]
    """
    if not 0 <= events <= n:
        raise InputError(f"{events} events of {n}: give a count from 0 to n.")
    if n == 0:
        return _NAN, _NAN
    share, z = events / n, float(-scipy.special.ndtri((1 - CONFIDENCE) / 2))
    shrink = 1 + z**2 / n
    centre = (share + z**2 / (2 * n)) / shrink
    half = z * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2)) / shrink
    return max(centre - half, 0.0), min(centre + half, 1.0)


def item_rate(values: ArrayLike, *, seed: int = 0) -> Rate:
    """Return the share of true values, with its 95 % interval over items.

    With one seed the interval is `wilson`'s. With several, the seeds of an item are not independent, so items are
    resampled with all their seeds (`expanded_percentile`); where every item has the same share a bootstrap has no
    width, and the interval is Wilson's with as many trials as items: right if the seeds of an item always agree, too
    wide if they do not.

    Parameters
    ----------
    values
        ``[item, seed]``, true or false; NaN where nothing was scored.
    seed
        Of the resampling.

    Returns
    -------
    Rate
        All NaN, of 0 events in 0, where nothing was scored.

    Raises
    ------
    InputError
        ``values`` is not ``[item, seed]``, or something in it is neither 0, 1 nor NaN.

    Examples
    --------
    >>> rate = item_rate([[True], [False], [True], [True]])
    >>> rate.value, rate.events, rate.n
    (0.75, 3, 4)
    """
    x = item_by_seed(values)
    known = ~np.isnan(x)
    if not np.isin(x[known], (0, 1)).all():
        raise InputError(
            "A rate is counted from true and false (or NaN where nothing was scored); other numbers given."
        )
    hits, counts = np.where(known, x, 0).sum(axis=1), known.sum(axis=1)
    hits, counts = hits[counts > 0], counts[counts > 0]
    events, n = int(hits.sum()), int(counts.sum())
    if n == 0:
        return Rate(_NAN, _NAN, _NAN, 0, 0)
    if x.shape[1] == 1:
        low, high = wilson(events, n)
    elif np.ptp(hits / counts) == 0:
        low, high = wilson(len(hits) * events / n, len(hits))
    else:
        low, high = expanded_percentile((hits, counts), _share, seed=seed)
    return Rate(events / n, low, high, events, n)


def upper_bound(events: int, n: int) -> float:
    """Return the exact one-sided 95 % upper bound of a rate after ``events`` in ``n`` trials (Clopper-Pearson).

    The p at which so few events have a chance of 5 % (``scipy.special.bdtri``; ``scipy.stats.binomtest`` searches for
    the same root, to eight digits where n is large); without any event that is `rule_of_three`.

    Returns
    -------
    float
        NaN without a trial.

    Examples
    --------
    >>> round(upper_bound(0, 10), 3), round(upper_bound(2, 10), 3), upper_bound(10, 10)
    (0.259, 0.507, 1.0)
    """
    if n < 1:
        return _NAN
    if events >= n:
        return 1.0
    return float(scipy.special.bdtri(events, n, 1 - CONFIDENCE)) if events else rule_of_three(n)


def rule_of_three(n: int) -> float:
    """Return the upper 95 % confidence bound of a rate after zero events in `n` trials.

    The exact bound 1 − 0.05^(1/n), which is about 3/n for large n (and a little below it).

    Raises
    ------
    InputError
        `n` is below 1.

    Examples
    --------
    >>> round(rule_of_three(100), 4)
    0.0295
    """
    if n < 1:
        raise InputError(f"n={n} trials given; a bound needs at least one.")
    return float(-np.expm1(np.log(0.05) / n))


def _share(hits: np.ndarray, counts: np.ndarray, axis: int) -> np.ndarray:
    return np.asarray(hits.sum(axis=axis) / counts.sum(axis=axis))
