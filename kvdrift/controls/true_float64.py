"""True float64: hard-coded float32 casts are promoted."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvdrift.controls.combine import ATTENTION_PRECISION, HEAD_PRECISION, PRODUCT_PRECISION
from kvdrift.controls.precision import promote_float32
from kvdrift.controls.scope import Scope
from kvdrift.errors import InputError
from kvdrift.models.model import Model


@dataclass(frozen=True)
class TrueFloat64:
    """A control under which a float64 model computes in float64 throughout.

    Many models cast softmax, norms, routers and rotary embeddings to a hard-coded float32; see
    `kvdrift.controls.promote_float32`.

    Raises
    ------
    InputError
        When bound to a model whose weights are not float64.

    Examples
    --------
    >>> import torch
    >>> import kvdrift as kd
    >>> model = kd.models.tiny("llama", dtype=torch.float64)
    >>> exact = (kd.TrueFloat64(),)
    >>> on, off = kd.CacheOn(controls=exact), kd.CacheOff(controls=exact)
    >>> drift = kd.compare(model, [1, 2, 3], a=on, b=off, max_new_tokens=4, floor=0, local=False, progress=False)
    >>> float(drift.values("logits", "logit_max").max()) < 1e-12
    True
    """

    decides: ClassVar[frozenset[str]] = frozenset({ATTENTION_PRECISION, PRODUCT_PRECISION, HEAD_PRECISION})
    label: ClassVar[str] = "true float64"

    def bind(self, model: Model) -> Scope:
        """Prepare the forward passes of ``model``."""
        if not all(weight.dtype == torch.float64 for weight in model.hf.parameters() if weight.is_floating_point()):
            raise InputError(
                "TrueFloat64 promotes what a float64 model casts down; this model's weights are not float64."
            )

        def enter(stack: ExitStack) -> None:
            stack.enter_context(promote_float32())

        return Scope(enter)
