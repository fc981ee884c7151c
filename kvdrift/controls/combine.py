"""Which controls go together: two that decide the same part of the arithmetic do not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from kvdrift.controls.control import Control
from kvdrift.tracing.seam import ATTENTION_KERNEL, Link, Order, both_decide

ATTENTION_PRECISION = "the precision of attention"
PRODUCT_PRECISION = "the precision of matrix products"
HEAD_PRECISION = "the precision of the LM head"
"""Parts of the arithmetic that one control at most may decide: the entries of a control's ``decides``."""


def check_together(controls: Sequence[Control | Link]) -> None:
    """Refuse controls, and links of the attention seam, of which one would undo another.

    Raises
    ------
    InputError
        If two decide the same; the sentence names both.

    Examples
    --------
    >>> import kvdrift as kd
    >>> check_together((kd.FixedShape(64), kd.WideSums(), kd.ReRoll(0)))
    >>> check_together((kd.FixedShape(64), kd.SdpaBackend("math")))
    Traceback (most recent call last):
    ...
    kvdrift.errors.InputError: FixedShape(max_length=64, tile=16) and SdpaBackend(name='math') both decide the kernel \
that attention runs, so one would undo the other; give one of them.
    """
    for one, other in combinations(controls, 2):
        shared = sorted(decided(one) & decided(other))
        if shared:
            raise both_decide(one, other, " and ".join(shared))


def with_arm(own: Sequence[Control], arm: Sequence[Control]) -> tuple[Control, ...]:
    """A path's own controls and then those of an arm, which takes the place of those that decide the same.

    Examples
    --------
    >>> import kvdrift as kd
    >>> with_arm((kd.SdpaBackend("math"), kd.ReRoll(0)), (kd.FixedShape(64),))
    (ReRoll(seed=0), FixedShape(max_length=64, tile=16))
    """
    taken = frozenset().union(*(decided(control) for control in arm))
    return (*(control for control in own if not decided(control) & taken), *arm)


def decided(control: Any) -> frozenset[str]:
    """What a control or link decides alone; a control of one's own need not say it, a link says it by its stage."""
    kernel = {ATTENTION_KERNEL} if getattr(control, "order", None) == Order.KERNEL else ()
    return frozenset(getattr(control, "decides", ())).union(kernel)
