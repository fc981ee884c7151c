"""Statistics of an evaluation: paired over items, exact where few items are what there is.

Everything rests on ``scipy.stats`` and statsmodels; what is chosen here is which of their methods, and what happens
at the edges: no items, one item, all items alike. Arrays are ``[item, seed]``; items are independent, seeds of one
item are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, stats
from statsmodels.stats.proportion import proportion_confint

from kvdrift.errors import InputError
from kvdrift.evaluation.conditions import Difference, Incidence, Rate

CONFIDENCE = 0.95
N_BOOTSTRAP = 9999
N_PERMUTATIONS = 2**16
"""Sign flips up to this many are enumerated (16 items that differ), beyond it drawn at random."""
_ROUNDING = 1e-12
"""Means of thirds and tenths that are equal on paper may differ by this share."""
_NAN = float("nan")


def wilson(events: float, n: float) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of a share.

    All p for which ``|events / n − p| <= 1.96 sqrt(p (1 − p) / n)`` (Wilson, "Probable Inference, the Law of
    Succession, and Statistical Inference", 1927; statsmodels' ``proportion_confint(method="wilson")``). Unlike the
    textbook interval it neither leaves 0 to 1 nor shrinks to nothing at 0 or n events.

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
    low, high = proportion_confint(events, n, alpha=1 - CONFIDENCE, method="wilson")
    return float(low), float(high)


def item_rate(values: ArrayLike, *, seed: int = 0) -> Rate:
    """Return the share of true values, with its 95 % interval over items.

    With one seed the interval is `wilson`'s. With several, the seeds of an item are not independent, so items are
    resampled with all their seeds (the bootstrap of `paired_difference`); where every item has the same share a
    bootstrap has no width, and the interval is Wilson's with as many trials as items: right if the seeds of an item
    always agree, too wide if they do not.

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
    x = _item_by_seed(values)
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
        low, high = _bootstrap((hits, counts), _share, seed)
    return Rate(events / n, low, high, events, n)


def paired_difference(a: ArrayLike, b: ArrayLike, *, seed: int = 0) -> Difference:
    """Return the mean of ``a − b`` over items, with a 95 % bootstrap interval over items.

    The differences of an item are averaged over its seeds first, and items are resampled
    (``scipy.stats.bootstrap``). The plain percentile interval is too narrow with few items, as if the variance were
    divided by n instead of n − 1 and Student's t were normal: of 10 normal differences it covers the mean in 88 % of
    samples. BCa does no better (87 %; with 20 items of which three differ on average, 90 % where the percentiles have
    96 %), and a studentised bootstrap has nothing to divide by where no resampled item differs. So the percentiles are
    those of Hesterberg's expanded percentile interval ("What Teachers Should Know About the Bootstrap", 2015):
    ``Φ(±sqrt(n / (n − 1)) t)``, t being the 97.5 % point of Student's distribution with n − 1 degrees of freedom.

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
    low, high = _bootstrap((d,), np.mean, seed)
    return Difference(float(d.mean()), low, high)


def item_differences(a: ArrayLike, b: ArrayLike) -> NDArray[np.float64]:
    """Return ``a − b`` of every item, averaged over its seeds: what `sign_flip` and `enough_to_tell` take.

    Parameters
    ----------
    a, b
        ``[item, seed]``. Pairs with a NaN are left out, and items of which none is left.

    Returns
    -------
    array
        ``[item]``.

    Raises
    ------
    InputError
        The shapes differ, or are not ``[item, seed]``.

    Examples
    --------
    >>> item_differences([[1, 1], [0, 1]], [[0, 1], [0, 1]]).tolist()
    [0.5, 0.0]
    """
    x, y = _item_by_seed(a), _item_by_seed(b)
    if x.shape != y.shape:
        raise InputError(f"Pairs are needed, but a is {x.shape} and b is {y.shape} [item, seed].")
    with np.errstate(invalid="ignore"):  # −inf on both sides: no difference that has a size
        d = x - y
    known = ~np.isnan(d)
    counts = known.sum(axis=1)
    return np.where(known, d, 0).sum(axis=1)[counts > 0] / counts[counts > 0]


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
    return float(stats.binomtest(only_a, only_a + only_b).pvalue)


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
    d = _nonzero(differences)
    if len(d) < 2:  # scipy asks for two; of one, both signs are as far from zero
        return 1.0
    test = stats.permutation_test(
        (d,),
        np.mean,
        permutation_type="samples",
        n_resamples=N_PERMUTATIONS,
        batch=1024,
        vectorized=True,
        rng=np.random.default_rng(seed),
    )
    return float(test.pvalue)


def fewest_discordant(alpha: float = 0.05) -> int:
    """Return how many discordant items `mcnemar` needs to reach ``alpha`` at all: 6 for 5 %.

    Of n discordant items the most extreme outcome, all one way, has p = 2 · 2⁻ⁿ.

    Parameters
    ----------
    alpha
        Above 0, at most 1.

    Raises
    ------
    InputError
        ``alpha`` is out of range.

    Examples
    --------
    >>> fewest_discordant(0.05), fewest_discordant(0.01)
    (6, 8)
    """
    _check_share("alpha", alpha)
    n = 0
    while mcnemar(n, 0) > alpha:
        n += 1
    return n


def enough_to_tell(differences: ArrayLike, alpha: float = 0.05) -> bool:
    """Whether these items could have reached ``alpha`` in `sign_flip` (or `mcnemar`), had all differences had one sign.

    Whatever the sizes of n differences, only two of the 2ⁿ sign patterns have a mean as extreme as all of one sign: the
    smallest p is 2 · 2⁻ⁿ, and the rule is that of `fewest_discordant`.

    Parameters
    ----------
    differences
        ``[item]``, averaged over seeds.
    alpha
        Above 0, at most 1.

    Raises
    ------
    InputError
        ``alpha`` is out of range, or ``differences`` not ``[item]`` or not finite.

    Examples
    --------
    >>> enough_to_tell([0.5, -1, 0.5, 0, 0.5, 1, 0.5]), enough_to_tell([0.5, -1, 0.5, 0, 0.5, 1])
    (True, False)
    """
    return len(_nonzero(differences)) >= fewest_discordant(alpha)


def detectable_difference(
    n_items: int, discordant_share: float, power: float = 0.8, alpha: float = 0.05, *, size: float = 1.0
) -> float | None:
    """Return the smallest true accuracy difference that `mcnemar` would find with the given power.

    The model: every item is, independently, discordant with probability ``discordant_share`` = d, and a discordant
    item favours path a with probability q, so that the accuracies differ by d (2q − 1), at most d. The number k of
    discordant items is binomial (n, d), and how many favour a is binomial (k, q); the power sums the exact test's
    rejection probability over all k (Duffy, "Asymptotic and Exact Power for the McNemar Test",
    1984). It grows with q; the q at which it reaches ``power`` is solved for.

    Parameters
    ----------
    n_items
        How many items.
    discordant_share
        Share of items on which the paths disagree, held fixed.
    power, alpha
        Wanted power, and the level of the test.
    size
        By how much a discordant item differs: 1 with one seed. With several, the mean of the nonzero
        ``|differences|``; the result then is that of a sign test, an approximation to `sign_flip`'s.

    Returns
    -------
    float or None
        None if not even all discordant items favouring one path would be found with this power.

    Raises
    ------
    InputError
        A share is out of range, or ``n_items`` negative.

    Examples
    --------
    >>> round(detectable_difference(200, 0.10), 3)
    0.064
    >>> detectable_difference(20, 0.10) is None
    True
    """
    if n_items < 0 or not 0 <= discordant_share <= 1:
        raise InputError(
            f"{n_items} items, a share of {discordant_share} discordant: give a count from 0 and a share 0 to 1."
        )
    _check_share("power", power)
    _check_share("alpha", alpha)
    k = np.arange(n_items + 1)
    weight = stats.binom.pmf(k, n_items, discordant_share)
    critical = _critical(k, alpha)

    def lacking(q: float) -> float:
        rejected = stats.binom.cdf(critical, k, q) + stats.binom.sf(k - critical - 1, k, q)
        return float(weight @ rejected) - power

    if lacking(1.0) < 0:
        return None
    if lacking(0.5) >= 0:
        return 0.0
    q = float(optimize.brentq(lacking, 0.5, 1.0))
    return size * discordant_share * (2 * q - 1)


def cumulative_incidence(steps: ArrayLike, horizon: int) -> Incidence:
    """Return the share of texts that have diverged by each number of tokens.

    A text that ends without diverging can never diverge: its end is a competing event, not censoring (which would
    inflate the curve). Texts are censored by ``max_new_tokens`` alone, so up to there everybody's fate is known and
    the estimator of Aalen and Johansen (1978; statsmodels' ``CumIncidenceRight``) is the plain share of texts that
    have diverged. The intervals are `wilson`'s at each time by itself, with as many trials as items: with several
    seeds they are right if the seeds of an item always agree and too wide if not.

    Parameters
    ----------
    steps
        ``[item, seed]``: the first step (from 0) at which the tokens differ; NaN for a text that never diverged,
        however it ended. A divergence at step t is counted from t + 1 tokens on.
    horizon
        ``max_new_tokens``.

    Returns
    -------
    Incidence
        One entry per number of tokens at which the share rises; empty if nothing diverged.

    Raises
    ------
    InputError
        ``steps`` is not ``[item, seed]``, or a step is negative or not below the horizon.

    Examples
    --------
    >>> cumulative_incidence([[4], [float("nan")], [9], [4]], horizon=16).tokens
    (5, 10)
    >>> cumulative_incidence([[4], [float("nan")], [9], [4]], horizon=16).value
    (0.5, 0.75)
    """
    x = _item_by_seed(steps)
    diverged = x[~np.isnan(x)]
    if ((diverged < 0) | (diverged >= horizon)).any():
        raise InputError(
            f"Divergence at step {diverged.min():g} to {diverged.max():g}; {horizon} tokens have steps from 0."
        )
    times, counts = np.unique(diverged, return_counts=True)
    value = np.cumsum(counts) / max(x.size, 1)
    ends = [wilson(share * len(x), len(x)) for share in value]
    return Incidence(
        tokens=tuple(int(t) + 1 for t in times),
        value=tuple(value.tolist()),
        low=tuple(low for low, _ in ends),
        high=tuple(high for _, high in ends),
        horizon=horizon,
    )


def null_share(observed: float, replicates: Sequence[float], tail: Literal["high", "two-sided"] = "high") -> float:
    """Return the share of a simulated null that is at least as extreme as what was observed, itself included.

    ``(1 + #) / (1 + R)`` of R replicates: a valid p (Davison and Hinkley, "Bootstrap Methods and their Application",
    1997, section 4.2), never below ``1 / (1 + R)``, so that 19 replicates are the fewest that can reach 5 %.

    Parameters
    ----------
    observed
        The number in question.
    replicates
        The same number of every replicate, ``[replicate]``.
    tail
        ``"high"``: as high or higher. ``"two-sided"``: as far from zero or farther.

    Returns
    -------
    float
        NaN where a number is NaN.

    Raises
    ------
    InputError
        Another tail is asked for.

    Examples
    --------
    >>> null_share(0.4, [0.1] * 19)
    0.05
    """
    if tail not in ("high", "two-sided"):
        raise InputError(f"tail={tail!r}: choose 'high' or 'two-sided'.")
    null = np.asarray(replicates, dtype=np.float64)
    if np.isnan(observed) or np.isnan(null).any():
        return _NAN
    if tail == "two-sided":
        observed, null = abs(observed), np.abs(null)
    extreme = (null >= observed) | np.isclose(null, observed, rtol=_ROUNDING, atol=0)
    return (1 + int(extreme.sum())) / (1 + len(null))


def _bootstrap(data: tuple[NDArray[np.float64], ...], statistic: object, seed: int) -> tuple[float, float]:
    """Hesterberg's expanded percentile interval over the first axis of ``data``."""
    n = len(data[0])
    t = stats.t.ppf((1 + CONFIDENCE) / 2, n - 1)
    tail = stats.norm.cdf(-np.sqrt(n / (n - 1)) * t)
    interval = stats.bootstrap(
        data,
        statistic,
        n_resamples=N_BOOTSTRAP,
        batch=500,
        vectorized=True,
        paired=len(data) > 1,
        confidence_level=float(1 - 2 * tail),
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(interval.low), float(interval.high)


def _share(hits: NDArray[np.float64], counts: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    return hits.sum(axis=axis) / counts.sum(axis=axis)


def _critical(k: NDArray[np.int_], alpha: float) -> NDArray[np.float64]:
    """The largest count c for which c or fewer of k discordant items on one side reject; −1 if none does."""
    c = stats.binom.ppf(alpha / 2, k, 0.5)
    return np.where(2 * stats.binom.cdf(c, k, 0.5) <= alpha, c, c - 1)


def _item_by_seed(values: ArrayLike) -> NDArray[np.float64]:
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 2:
        raise InputError(f"An array of shape {x.shape} given; [item, seed] is needed.")
    return x


def _nonzero(differences: ArrayLike) -> NDArray[np.float64]:
    d = np.asarray(differences, dtype=np.float64)
    if d.ndim != 1 or not np.isfinite(d).all():
        raise InputError(f"Differences of shape {d.shape} given; finite numbers [item] are needed.")
    return d[np.abs(d) > _ROUNDING * np.abs(d).max(initial=0)]


def _check_share(name: str, value: float) -> None:
    if not 0 < value <= 1:
        raise InputError(f"{name}={value!r}: give a number above 0 and at most 1.")
