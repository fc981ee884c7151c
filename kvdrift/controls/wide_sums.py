"""Every sum in float64, everything stored as before."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvdrift.controls.combine import ATTENTION_PRECISION, PRODUCT_PRECISION
from kvdrift.controls.derived_weights import DerivedWeights
from kvdrift.controls.operators import Use, by_operator, treated
from kvdrift.controls.scope import Scope
from kvdrift.controls.upcast import WideAttention, WideOperators
from kvdrift.errors import InputError
from kvdrift.models.model import Model
from kvdrift.tracing.seam import seam


@dataclass(frozen=True)
class WideSums:
    """A control that adds in float64 and stores as before.

    Matrix products, means, norms, softmax and whole attention calls are computed in float64 from the stored numbers,
    and their results are rounded to the dtype in which the model stores them. Storage rounds as it always does; what
    is gone is the error of accumulating sums, and with it nearly every trace of the order in which terms are added:
    sums in two orders round to different numbers only where they straddle a rounding boundary by 1e-16. Convolutions
    and scans are left alone.

    Raises
    ------
    InputError
        When bound to a float64 model: nothing is wider.

    Examples
    --------
    >>> import torch
    >>> import kvdrift as kd
    >>> model = kd.load(kd.models.tiny("llama", dtype=torch.bfloat16), quiet=True)
    >>> kd.CacheOn(controls=(kd.WideSums(),)).start(model, [1, 2, 3]).step().logits.dtype
    torch.bfloat16
    """

    decides: ClassVar[frozenset[str]] = frozenset({ATTENTION_PRECISION, PRODUCT_PRECISION})
    label: ClassVar[str] = "sums in float64"

    def bind(self, model: Model) -> Scope:
        """Prepare the forward passes of ``model``; float64 weights are kept until the result is closed."""
        if all(weight.dtype == torch.float64 for weight in model.hf.parameters()):
            raise InputError("WideSums adds in float64, and this model is in float64 already.")
        weights = DerivedWeights(model.hf, Tensor.double)

        def enter(stack: ExitStack) -> None:
            weights.refresh()
            stack.enter_context(seam(model.hf, WideAttention(torch.float64)))
            stack.enter_context(WideOperators(_OPERATORS, torch.float64, weights))

        return Scope(enter, weights.clear)


_OPERATORS = by_operator(dict(treated(Use.WIDE)))
