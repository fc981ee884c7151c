"""What a paired test could have found."""

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

from kvdrift.errors import InputError
from kvdrift.statistics.paired import mcnemar, nonzero


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
    return len(nonzero(differences)) >= fewest_discordant(alpha)


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
    weight = scipy.stats.binom.pmf(k, n_items, discordant_share)
    critical = _critical(k, alpha)

    def lacking(q: float) -> float:
        rejected = scipy.stats.binom.cdf(critical, k, q) + scipy.stats.binom.sf(k - critical - 1, k, q)
        return float(weight @ rejected) - power

    if lacking(1.0) < 0:
        return None
    if lacking(0.5) >= 0:
        return 0.0
    q = float(scipy.optimize.brentq(lacking, 0.5, 1.0))
    return size * discordant_share * (2 * q - 1)


def _critical(k: NDArray[np.int_], alpha: float) -> NDArray[np.float64]:
    """The largest count c for which c or fewer of k discordant items on one side reject; −1 if none does."""
    c = scipy.stats.binom.ppf(alpha / 2, k, 0.5)
    return np.where(2 * scipy.stats.binom.cdf(c, k, 0.5) <= alpha, c, c - 1)


def _check_share(name: str, value: float) -> None:
    if not 0 < value <= 1:
        raise InputError(f"{name}={value!r}: give a number above 0 and at most 1.")
