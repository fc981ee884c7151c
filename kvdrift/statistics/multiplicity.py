"""Several tests at once."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvdrift.errors import InputError


def holm(p_values: ArrayLike) -> NDArray[np.float64]:
    """Return Holm's step-down adjusted p-values.

    The i-th smallest of m (i from 1) becomes the largest of (m − j + 1) · p₍ⱼ₎ over j ≤ i, at most 1. NaN (not
    tested) stays NaN and is not counted in m.

    Raises
    ------
    InputError
        A p-value lies outside 0 to 1, or the array is not one-dimensional.

    Examples
    --------
    >>> holm([0.01, 0.04, 0.03]).round(6).tolist()
    [0.03, 0.06, 0.06]
    """
    p = np.asarray(p_values, dtype=np.float64)
    if p.ndim != 1 or np.any((p < 0) | (p > 1)):
        raise InputError(f"p-values {p_values!r} given; a flat list of numbers from 0 to 1 is needed.")
    order = np.argsort(p, kind="stable")[: int((~np.isnan(p)).sum())]  # NaN sorts last
    adjusted = np.full(p.shape, np.nan)
    steps = np.arange(len(order), 0, -1) * p[order]
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return adjusted
