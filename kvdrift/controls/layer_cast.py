"""LayerCast: weights stored in 16 bits, cast just in time, everything computed in float32."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

from kvdrift.controls.combine import ATTENTION_PRECISION, HEAD_PRECISION, PRODUCT_PRECISION
from kvdrift.controls.scope import Scope
from kvdrift.controls.true_float32 import TrueFloat32
from kvdrift.controls.upcast import HALVES, run_in_float32
from kvdrift.errors import InputError
from kvdrift.models.model import Model


@dataclass(frozen=True)
class LayerCast:
    """A control that stores weights in 16 bits and computes in float32 (arXiv 2506.09501).

    Each decoder block's weights are cast to float32 when the block is called and dropped when it returns; so are
    those of every module outside the blocks (embeddings, final norm, LM head). Activations, K/V cache and logits are
    float32. The arithmetic is that of a float32 model with the same weights, and on the CPU the same bits; only the
    memory differs: one block's float32 weights at a time. TensorFloat-32 is off, as in `TrueFloat32`. A model that
    rounds states to a weight's dtype before it calls the weight's module (Mamba, before its LM head) still rounds.

    Raises
    ------
    InputError
        When bound to a model that has no 16-bit weights.

    Examples
    --------
    >>> import torch
    >>> import kvdrift as kd
    >>> model = kd.load(kd.models.tiny("llama", dtype=torch.bfloat16), quiet=True)
    >>> kd.CacheOn(controls=(kd.LayerCast(),)).start(model, [1, 2, 3]).step().logits.dtype
    torch.float32
    """

    decides: ClassVar[frozenset[str]] = frozenset({ATTENTION_PRECISION, PRODUCT_PRECISION, HEAD_PRECISION})
    label: ClassVar[str] = "LayerCast"

    def bind(self, model: Model) -> Scope:
        """Prepare the forward passes of ``model``."""
        if not any(weight.dtype in HALVES for weight in model.hf.parameters()):
            raise InputError("LayerCast casts 16-bit weights, and this model has none; load it in bfloat16 or float16.")
        exact = TrueFloat32().bind(model)
        around = [part for part in model.modules if id(part) not in model.layer_of]
        outside = [part for part in around if part._parameters or part._buffers]

        def enter(stack: ExitStack) -> None:
            stack.enter_context(exact)
            for block in model.tree.blocks:
                run_in_float32(stack, block, whole=True)
            for part in outside:
                run_in_float32(stack, part, whole=False)

        return Scope(enter)
