"""The LM head in float32, to tell the head's own rounding from the drift of the states it reads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from kvdrift.models.model import Model
from kvdrift.shapes import Logits

After = Callable[[Tensor], Tensor]


class Float32Head:
    """Computes logits in float32 from the states that the model's own head reads.

    Made by `find`, which first checks in the model's own dtype that head and what follows it (soft-cap, logit
    scale) give back the model's logits in every bit.

    Parameters
    ----------
    weight, bias
        The head's weight ``[vocab, d_model]`` and bias ``[vocab]`` (or None), cast to float32 once.
    after
        What the model does to the head's output.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, after: After) -> None:
        self.weight = weight.float()
        self.bias = None if bias is None else bias.float()
        self.after = after

    @torch.no_grad()
    def __call__(self, states: Float[Tensor, "state d_model"]) -> Float[Tensor, "state vocab"]:
        """Logits in float32. The weight is read once for all states, and as the left factor: much the fastest."""
        logits = (self.weight @ states.float().T).T
        return self.after(logits if self.bias is None else logits + self.bias)

    @classmethod
    @torch.no_grad()
    def find(cls, model: Model, state: Float[Tensor, "1 d_model"], logits: Logits) -> Float32Head | None:
        """The head of ``model``, or None where ``state`` and its weights do not explain ``logits`` bit for bit."""
        head = model.tree.head
        weight = getattr(head, "weight", None)
        if head is None or not isinstance(weight, Tensor) or weight.ndim != 2 or weight.is_meta:
            return None
        native = head(state.to(weight.dtype)[None])[0]
        for after in _afters(model):
            if torch.equal(after(native)[0], logits):
                return cls(weight, getattr(head, "bias", None), after)
        return None


def _afters(model: Model) -> list[After]:
    """What models are known to do to the head's output: nothing, a factor, a divisor, a soft-cap."""
    config = model.hf.config.get_text_config()
    candidates: list[After] = [lambda x: x]
    if (scale := getattr(config, "logit_scale", None)) is not None:
        candidates.append(lambda x: x * scale)
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        candidates.append(lambda x: x / divisor)
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        candidates.append(lambda x: torch.tanh(x / cap) * cap)
    return candidates
