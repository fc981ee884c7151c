"""What became of one arm of a ladder, beside its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvdrift.ladder.arms import UNIT_ROUNDOFF

Status = Literal["ran", "not finite", "not run"]


@dataclass(frozen=True)
class Rung:
    """One arm as it was run.

    Attributes
    ----------
    name, what
        The arm's name and what it does.
    dtype
        The dtype of its weights.
    stored
        The dtype in which numbers are kept between two operations.
    attn
        The attention implementation.
    kernels
        The kernels of scaled_dot_product_attention that were seen to run; empty under eager attention.
    a, b
        How the two paths are labelled, with their controls.
    status
        ``"ran"``, ``"not finite"`` (NaN or infinity came out) or ``"not run"`` (the machine or the model cannot).
    reason
        Why it did not run, or where the first value that is not finite comes from.
    weights_changed
        Share of the model's weights that casting to `dtype` rounds; 0 without a cast.
    """

    name: str
    what: str
    dtype: str
    stored: str
    attn: str
    kernels: tuple[str, ...] = ()
    a: str = "cache-ON"
    b: str = "cache-OFF"
    status: Status = "ran"
    reason: str | None = None
    weights_changed: float = 0.0

    @property
    def ran(self) -> bool:
        """Whether there are numbers."""
        return self.status == "ran"

    @property
    def unit_roundoff(self) -> float:
        """The largest relative error of rounding one number that is stored."""
        return UNIT_ROUNDOFF[self.stored]
