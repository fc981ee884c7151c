"""The LM head alone in float32."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvdrift.controls.combine import HEAD_PRECISION
from kvdrift.controls.derived_weights import DerivedWeights
from kvdrift.controls.scope import Scope
from kvdrift.controls.true_float32 import TrueFloat32
from kvdrift.controls.upcast import HALVES, run_in_float32
from kvdrift.errors import ModelError
from kvdrift.models.model import Model


@dataclass(frozen=True)
class HeadFloat32:
    """A control that computes the logits in float32 from the 16-bit states that the LM head reads.

    The logits stay float32, and so does what the model does to them (soft-cap, scale). The blocks are left alone. The
    float32 weight is kept where memory allows.

    Raises
    ------
    ModelError
        When bound to a model without an LM head in half precision.

    Examples
    --------
    >>> import torch
    >>> import kvdrift as kd
    >>> model = kd.load(kd.models.tiny("llama", dtype=torch.bfloat16), quiet=True)
    >>> kd.CacheOn(controls=(kd.HeadFloat32(),)).start(model, [1, 2, 3]).step().logits.dtype
    torch.float32
    """

    decides: ClassVar[frozenset[str]] = frozenset({HEAD_PRECISION})
    label: ClassVar[str] = "LM head in float32"

    def bind(self, model: Model) -> Scope:
        """Prepare the forward passes of ``model``; the float32 weight is kept until the result is closed."""
        head = model.tree.head
        if head is None or not any(weight.dtype in HALVES for weight in head.parameters()):
            raise ModelError("This model has no LM head in half precision, so there is none to run in float32.")
        exact, weights = TrueFloat32().bind(model), DerivedWeights(head, Tensor.float)

        def enter(stack: ExitStack) -> None:
            weights.refresh()
            stack.enter_context(exact)
            run_in_float32(stack, head, whole=True, cast=weights.get)

        return Scope(enter, weights.clear)
