"""Two paths over the same items."""

from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

from kvdrift.errors import InputError
from kvdrift.statistics.items import item_differences
from kvdrift.statistics.resampling import expanded_percentile

N_PERMUTATIONS = 2**16
"""Sign flips up to this many are enumerated (16 items that differ), beyond it drawn at random."""
_ROUNDING = 1e-12
"""Means of thirds and tenths that are equal on paper may differ by this share."""
_NAN = float("nan")


@dataclass(frozen=True)
class Difference:
    """A mean paired difference a − b with its 95 % bootstrap interval over items.

    Attributes
    ----------
    value, low, high
        The mean and its interval; NaN where there is none.
    """

    value: float
    low: float
    high: float


def paired_difference(a: ArrayLike, b: ArrayLike, *, seed: int = 0) -> Difference:
    """Return the mean of ``a − b`` over items, with a 95 % bootstrap interval over items.

    The differences of an item are averaged over its seeds first, and items are resampled (`expanded_percentile`).

    Parameters
    ----------
    a, b
        ``[item, seed]`` of path a and path b: right or wrong, or a log-probability. Pairs with a NaN are left out.
    seed
        Of the resampling.

    Returns
    -------
    Difference
        The ends are NaN with fewer than two items, and where all items differ by the same amount: resampling equal
        values gives an interval without width, which would pass for certainty. The value is NaN without items.

    Raises
    ------
    InputError
        The shapes differ, or are not ``[item, seed]``.

    Examples
    --------
    >>> difference = paired_difference([[1], [1], [0], [1]], [[0], [1], [0], [0]])
    >>> difference.value, difference.low, difference.high
    (0.5, 0.0, 1.0)
    """
    d = item_differences(a, b)
    if len(d) == 0:
        return Difference(_NAN, _NAN, _NAN)
    if np.ptp(d) == 0:
        return Difference(float(d.mean()), _NAN, _NAN)
    low, high = expanded_percentile((d,), np.mean, seed=seed)
    return Difference(float(d.mean()), low, high)


def mcnemar(only_a: int, only_b: int) -> float:
    """Return the exact two-sided p of McNemar's test: do the items on which the paths disagree favour one of them?

    Of the ``only_a + only_b`` discordant items each is as likely to favour either path (McNemar 1947, in the exact,
    binomial form; ``scipy.stats.binomtest``). Items on which both paths agree say nothing about direction and do not
    count.

    Parameters
    ----------
    only_a, only_b
        Items that only path a, or only path b, answered rightly.

    Returns
    -------
    float
        1 where no item is discordant.

    Examples
    --------
    >>> mcnemar(6, 0), mcnemar(5, 0)
    (0.03125, 0.0625)
    """
    if only_a + only_b == 0:
        return 1.0
    return float(scipy.stats.binomtest(only_a, only_a + only_b).pvalue)


def sign_flip(differences: ArrayLike, *, seed: int = 0) -> float:
    """Return the two-sided p of the sign-flip test: could the items' differences as well have had the other sign?

    Under the null hypothesis each item's difference is as likely as its negative, and the mean is compared with those
    of all sign patterns (Fisher's randomisation test; ``scipy.stats.permutation_test``,
    ``permutation_type="samples"``). It is exact up to 16 items that differ; beyond that `N_PERMUTATIONS` patterns are
    drawn at random, and p is at least ``2 / (1 + N_PERMUTATIONS)``. With one seed it is `mcnemar`. Items without a
    difference change nothing and are left out.

    Parameters
    ----------
    differences
        ``[item]``, averaged over seeds (and conditions).
    seed
        Of the patterns drawn.

    Returns
    -------
    float
        1 where no item differs, or one.

    Raises
    ------
    InputError
        ``differences`` is not ``[item]``, or not finite.

    Examples
    --------
    >>> sign_flip([0.5, 1.0, 0.5, 0.25, 1.0, 0.5, 0.0, 0.0])
    0.03125
    """
    d = nonzero(differences)
    if len(d) < 2:  # scipy asks for two; of one, both signs are as far from zero
        return 1.0
    test = scipy.stats.permutation_test(
        (d,),
        np.mean,
        permutation_type="samples",
        n_resamples=N_PERMUTATIONS,
        batch=1024,
        vectorized=True,
        rng=np.random.default_rng(seed),
    )
    return float(test.pvalue)


def nonzero(differences: ArrayLike) -> NDArray[np.float64]:
    """Return the differences ``[item]`` that are more than what rounding left of zero.

    Raises
    ------
    InputError
        ``differences`` is not ``[item]``, or not finite.
    """
    d = np.asarray(differences, dtype=np.float64)
    if d.ndim != 1 or not np.isfinite(d).all():
        raise InputError(f"Differences of shape {d.shape} given; finite numbers [item] are needed.")
    return d[np.abs(d) > _ROUNDING * np.abs(d).max(initial=0)]
