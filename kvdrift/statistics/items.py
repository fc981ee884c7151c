"""Arrays ``[item, seed]``: items are independent, the seeds of one item are not."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvdrift.errors import InputError


def item_differences(a: ArrayLike, b: ArrayLike) -> NDArray[np.float64]:
    """Return ``a − b`` of every item, averaged over its seeds: what `paired.sign_flip` takes.

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
    x, y = item_by_seed(a), item_by_seed(b)
    if x.shape != y.shape:
        raise InputError(f"Pairs are needed, but a is {x.shape} and b is {y.shape} [item, seed].")
    with np.errstate(invalid="ignore"):  # −inf on both sides: no difference that has a size
        d = x - y
    known = ~np.isnan(d)
    counts = known.sum(axis=1)
    return np.where(known, d, 0).sum(axis=1)[counts > 0] / counts[counts > 0]


def item_by_seed(values: ArrayLike) -> NDArray[np.float64]:
    """Return the values as a float64 array.

    Raises
    ------
    InputError
        They are not ``[item, seed]``.
    """
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 2:
        raise InputError(f"An array of shape {x.shape} given; [item, seed] is needed.")
    return x
