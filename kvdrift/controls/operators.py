"""PyTorch's operators by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def by_operator(named: Mapping[str, T]) -> dict[Any, T]:
    """Key a table by the operators that its names stand for, leaving out those that this PyTorch does not have.

    Parameters
    ----------
    named
        ``"mm"`` or, with an overload, ``"mean.dim"`` → anything.

    Examples
    --------
    >>> by_operator({"mm": 1, "mean.dim": 2, "no_such_operator": 3})[torch.ops.aten.mean.dim]
    2
    """
    found: dict[Any, T] = {}
    for name, value in named.items():
        packet, _, overload = name.partition(".")
        if hasattr(torch.ops.aten, packet):
            found[getattr(getattr(torch.ops.aten, packet), overload or "default")] = value
    return found
