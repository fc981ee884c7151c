"""What the two built-in paths share: forward passes inside an attention choice, a set of controls, and links."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import Cache

from kvdrift.controls.combine import check_together
from kvdrift.controls.scope import Scope
from kvdrift.tracing.seam import Link, seam

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
    links
        Links of the attention seam that belong to the path: in place during its own passes, and then only.

    Raises
    ------
    InputError
        If one control or link would undo another.
    """

    def __init__(
        self,
        model: Model,
        attn: str | None,
        controls: Sequence[Control],
        call: str = "explicit",
        links: Sequence[Link] = (),
    ) -> None:
        check_together((*controls, *links))
        self.model, self.attn, self.call = model, attn, call
        self._bound: list[Bound] = [control.bind(model) for control in controls]
        if links:
            self._bound.append(Scope(lambda stack: [stack.enter_context(seam(model.hf, link)) for link in links]))

    def forward(
        self, tokens: Sequence[int], start: int, cache: Cache | None, left_padding: int = 0, rows: int = 1
    ) -> Float[Tensor, "row vocab"]:
        """Logits of the last ``rows`` of ``tokens``, which sit at positions ``start…``."""
        ids = torch.tensor([list(tokens)], device=self.model.device)
        contexts: list[AbstractContextManager] = [self.model.evaluating(), self.model.backend.attention(self.attn)]
        with ExitStack() as stack:
            for context in [*contexts, *self._bound]:
                stack.enter_context(context)
            logits = self.model.backend.forward(ids, start, cache, left_padding, self.call, rows)
            return logits.reshape(rows, -1)

    def close(self) -> None:
        """Free what the controls hold."""
        for bound in self._bound:
            bound.close()
