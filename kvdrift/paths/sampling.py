"""How the next token is chosen from logits; the paths know nothing of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from kvdrift.shapes import Logits


@runtime_checkable
class Sampler(Protocol):
    """Chooses a token from logits. It is given the step, so that its noise can be keyed by it."""

    def __call__(self, logits: Logits, step: int) -> int:
        """The next token."""
        ...


def following(tokens: Sequence[int]) -> Sampler:
    """Chooses given tokens, one after the other."""
    return lambda logits, step: tokens[step]


def greedy(logits: Logits, step: int) -> int:
    """The most likely token; ``torch.argmax`` of the stored values, as ``generate`` takes it."""
    return int(logits.argmax())
