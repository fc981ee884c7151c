"""What the two built-in paths share: forward passes inside an attention choice and a set of controls."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import Cache

from kvdrift.controls.combine import check_together

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvdrift.controls import Bound, Control
    from kvdrift.models.model import Model


class Execution:
    """Runs forward passes of one model with one attention implementation under some controls.

    Parameters
    ----------
    model
        The model to drive.
    attn
        Attention implementation, or None for the model's own.
    controls
        Changes of arithmetic, entered in order around every pass.
    call
        The manner of calling the model.

    Raises
    ------
    InputError
        If one control would undo another.
    """

    def __init__(self, model: Model, attn: str | None, controls: Sequence[Control], call: str = "explicit") -> None:
        check_together(controls)
        self.model, self.attn, self.call = model, attn, call
        self._bound: list[Bound] = [control.bind(model) for control in controls]

    def forward(self, tokens: Sequence[int], start: int, cache: Cache | None, left_padding: int = 0) -> Tensor:
        """Logits ``[vocab]`` after ``tokens`` at positions ``start…``."""
        ids = torch.tensor([list(tokens)], device=self.model.device)
        contexts: list[AbstractContextManager] = [self.model.evaluating(), self.model.backend.attention(self.attn)]
        with ExitStack() as stack:
            for context in [*contexts, *self._bound]:
                stack.enter_context(context)
            return self.model.backend.forward(ids, start, cache, left_padding, self.call)

    def close(self) -> None:
        """Free what the controls hold."""
        for bound in self._bound:
            bound.close()
