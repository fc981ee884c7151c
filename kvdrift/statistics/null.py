"""A number against a simulated null."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from kvdrift.errors import InputError

_ROUNDING = 1e-12  # numbers that are equal on paper may differ by this share


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
        return float("nan")
    if tail == "two-sided":
        observed, null = abs(observed), np.abs(null)
    extreme = (null >= observed) | np.isclose(null, observed, rtol=_ROUNDING, atol=0)
    return (1 + int(extreme.sum())) / (1 + len(null))
