"""Plain data that JSON can hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np


def not_finite(value: float) -> bool:
    """Whether a number is NaN or infinite."""
    return not math.isfinite(value)


def json_safe(value: Any, none: Callable[[float], bool] | None = None) -> Any:
    """Tuples and arrays as lists, numpy scalars as Python's, NaN and infinities as text or, where asked for, as None.

    Parameters
    ----------
    value
        Dictionaries, sequences, arrays and scalars, nested.
    none
        Which numbers have no value and become None, such as ``math.isnan`` or `not_finite`.

    Examples
    --------
    >>> json_safe({"a": (1.0, float("inf")), "b": None})
    {'a': [1.0, 'inf'], 'b': None}
    >>> json_safe([float("nan"), float("inf")], none=math.isnan)
    [None, 'inf']
    """
    if isinstance(value, dict):
        return {str(key): json_safe(item, none) for key, item in value.items()}
    if isinstance(value, np.ndarray | list | tuple):
        return [json_safe(item, none) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and none is not None and none(value):
        return None
    return str(value) if isinstance(value, float) and not_finite(value) else value
