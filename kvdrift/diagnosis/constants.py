"""Constants that a model holds in float32: how far their own rounding is what two paths differ by in float64.

Tables of decays and the like are computed once, in float32, and kept in buffers. An algorithm for many tokens may read
another entry of such a table than one that goes token by token, and the two entries fit together to 1e-8 only. No
float64 copy mends that. What tells it from a fault: a fault's difference stays what it is when constants move by less
than their own rounding, and this one becomes another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

LARGEST = 1e-6
"""Of the largest logit: what constants with errors of 6e-8 may come to."""
STABLE = 0.1
"""Up to this share of its size a fault's difference may change; that of constants changes by about all of it."""
_NUDGE = 2.0**-25


@contextmanager
def nudged_constants(module: nn.Module) -> Iterator[bool]:
    """Move every float64 buffer whose numbers are those of float32 by less than float32 resolves, and put it back.

    Yields whether there is one. The noise follows from the buffer's name and shape alone.
    """
    kept: list[tuple[Tensor, Tensor]] = []
    for name, buffer in module.named_buffers():
        if buffer.dtype == torch.float64 and torch.equal(buffer.float().double(), buffer):
            generator = torch.Generator().manual_seed(sum(name.encode()) + buffer.numel())
            noise = torch.rand(buffer.shape, generator=generator, dtype=torch.float64).to(buffer.device)
            kept.append((buffer, buffer.clone()))
            buffer.mul_(1 + _NUDGE * (2 * noise - 1))
    try:
        yield bool(kept)
    finally:
        for buffer, before in kept:
            buffer.copy_(before)


def is_unstable(before: Tensor, after: Tensor) -> bool:
    """Whether a difference became another when constants moved.

    Examples
    --------
    >>> fault = torch.tensor([1e-7, -2e-7])
    >>> is_unstable(fault, fault * (1 + 1e-6)), is_unstable(fault, torch.tensor([2e-7, 1e-7]))
    (False, True)
    """
    return bool((after - before).norm() > STABLE * before.norm())
