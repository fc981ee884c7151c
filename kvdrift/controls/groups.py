"""Products of groups of rows, each with a factor of its own, as experts are run by default."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvdrift.controls.operators import GROUPED, arguments_of, by_operator

GROUPED_OPERATORS = frozenset(by_operator(dict.fromkeys(GROUPED)))


@dataclass(frozen=True)
class Groups:
    """A product of groups of rows: rows ``[…, ends[0])`` of ``rows`` by ``factors[0]``, the next by ``factors[1]``, ….

    Attributes
    ----------
    rows
        ``[row, k]``.
    factors
        ``[group, k, n]``.
    ends
        Where each group ends; rows after the last end belong to none.
    dtype
        What the result is asked for in.
    """

    rows: Tensor
    factors: Tensor
    ends: Tensor
    dtype: torch.dtype

    @classmethod
    def of(cls, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Groups | None:
        """Read a call of one of `GROUPED`; None for forms that no forward pass of experts has."""
        call = arguments_of(op, args, kwargs)
        rows, factors = list(call.values())[:2]
        ends = call.get("offs")
        if ends is None or rows.dim() != 2 or factors.dim() != 3 or call.get("bias") is not None:
            return None
        return cls(rows, factors, ends, call.get("out_dtype") or rows.dtype)

    def __iter__(self) -> Any:
        """``(start, end, factor)`` of every group that has rows."""
        start = 0
        for factor, end in zip(self.factors, self.ends.tolist(), strict=True):
            if end > start:
                yield start, end, factor
            start = end

    def product(self, single: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The whole product, with ``single`` for that of one group; zeros in rows that belong to none."""
        parts = [single(self.rows[start:end], factor) for start, end, factor in self]
        n_rows, n_columns = self.rows.shape[0], self.factors.shape[2]
        missing = n_rows - sum(len(part) for part in parts)
        result = torch.cat([*parts, self.rows.new_zeros(missing, n_columns, dtype=parts[0].dtype if parts else None)])
        return result.to(self.dtype)
