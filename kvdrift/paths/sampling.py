"""How the next token is chosen from logits; the paths know nothing of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor


@runtime_checkable
class Sampler(Protocol):
    """Chooses a token from logits. It is given the step, so that its noise can be keyed by it."""

    def __call__(self, logits: Float[Tensor, " vocab"], step: int) -> int:
        """The next token."""
        ...


def following(tokens: Sequence[int]) -> Sampler:
    """Chooses given tokens, one after the other."""
    return lambda logits, step: tokens[step]


def greedy(logits: Float[Tensor, " vocab"], step: int) -> int:
    """The most likely token; ``torch.argmax`` of the stored values, as ``generate`` takes it."""
    return int(logits.argmax())
