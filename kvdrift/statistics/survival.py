"""How long texts stay together."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from kvdrift.errors import InputError
from kvdrift.statistics.items import item_by_seed
from kvdrift.statistics.rates import wilson


@dataclass(frozen=True)
class Incidence:
    """Cumulative incidence of divergence by number of tokens, the texts' end being a competing event.

    Attributes
    ----------
    tokens
        Numbers of generated tokens at which it rises, ``[time]``.
    value, low, high
        Share of texts that have diverged by then, with its 95 % interval, ``[time]``.
    horizon
        ``max_new_tokens``: what has not happened by then is censored.
    """

    tokens: tuple[int, ...]
    value: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    horizon: int

    @property
    def median(self) -> int | None:
        """The number of tokens by which half of all texts have diverged; None if they never have."""
        return next((tokens for tokens, share in zip(self.tokens, self.value, strict=True) if share >= 0.5), None)


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
    x = item_by_seed(steps)
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
