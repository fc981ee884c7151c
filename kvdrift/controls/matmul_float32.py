"""Matrix products alone in float32."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from kvdrift.controls.combine import PRODUCT_PRECISION
from kvdrift.controls.derived_weights import DerivedWeights
from kvdrift.controls.operators import Kind, Use, by_operator, treated
from kvdrift.controls.scope import Scope
from kvdrift.controls.true_float32 import TrueFloat32
from kvdrift.controls.upcast import WideOperators
from kvdrift.errors import ModelError
from kvdrift.models.model import Model

_PRODUCTS = by_operator(dict(treated(Use.WIDE, Kind.PRODUCT)))


@dataclass(frozen=True)
class MatmulFloat32:
    """A control that computes every matrix product in float32 from the stored factors and rounds the result back.

    Products inside a fused attention kernel are not seen; under eager attention they are. What stays in 16 bits is
    what is stored between two operations, and everything that is no product: norms, softmax, activations, residual
    sums. Float32 copies of weights are kept where memory allows.

    Raises
    ------
    ModelError
        In a forward pass without a product in half precision: the control would do nothing.

    Examples
    --------
    >>> import torch
    >>> import kvdrift as kd
    >>> model = kd.load(kd.models.tiny("llama", dtype=torch.bfloat16), quiet=True)
    >>> kd.CacheOn(controls=(kd.MatmulFloat32(),)).start(model, [1, 2, 3]).step().logits.dtype
    torch.bfloat16
    """

    decides: ClassVar[frozenset[str]] = frozenset({PRODUCT_PRECISION})
    label: ClassVar[str] = "products in float32"

    def bind(self, model: Model) -> Scope:
        """Prepare the forward passes of ``model``; float32 weights are kept until the result is closed."""
        exact, weights = TrueFloat32().bind(model), DerivedWeights(model.hf, Tensor.float)

        def enter(stack: ExitStack) -> None:
            mode = WideOperators(_PRODUCTS, torch.float32, weights)
            weights.refresh()
            stack.push(partial(_check, mode))
            stack.enter_context(exact)
            stack.enter_context(mode)

        return Scope(enter, weights.clear)


def _check(mode: WideOperators, kind: type[BaseException] | None, *_: object) -> None:
    """Refuse a pass that ended well without a product."""
    if kind is None and not mode.counts:
        raise ModelError("No matrix product in half precision came by: the model is in float32 already.")
