"""Reductions over what was measured: NaN is left out, and infinity counts unless the name says otherwise."""

import numpy as np
from numpy.typing import NDArray


def mean_measured(x: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    """Return the mean along an axis without its NaNs, NaN where nothing else is there."""
    present = ~np.isnan(x)
    return quotient(np.where(present, x, 0.0).sum(axis=axis), present.sum(axis=axis).astype(np.float64))


def median_measured(x: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    """Return the median along an axis without its NaNs, NaN where nothing else is there; infinities count."""
    ordered = np.moveaxis(np.sort(x, axis=axis), axis, 0)  # NaN sorts last
    count = (~np.isnan(ordered)).sum(axis=0)
    lower, upper = np.maximum(count - 1, 0) // 2, np.minimum(count // 2, len(ordered) - 1)
    low, high = (np.take_along_axis(ordered, i[None], axis=0)[0] for i in (lower, upper))
    return np.where(lower == upper, low, low / 2 + high / 2)


def quotient(numerator: NDArray[np.float64], denominator: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a quotient: x/0 is inf, 0/0 and inf/inf are NaN."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.asarray(numerator / denominator)


def mean_finite(x: NDArray[np.float64]) -> float:
    """Return the mean of everything finite, NaN of nothing."""
    known = x[np.isfinite(x)]
    return float(known.mean()) if known.size else float("nan")
