"""Attention alone in float32."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from kvdrift.controls.combine import ATTENTION_PRECISION
from kvdrift.controls.scope import Scope
from kvdrift.controls.true_float32 import TrueFloat32
from kvdrift.controls.upcast import WideAttention
from kvdrift.errors import ModelError
from kvdrift.models.model import Model
from kvdrift.tracing.seam import seam


@dataclass(frozen=True)
class AttentionFloat32:
    """A control that runs the attention function in float32 and rounds its result back.

    Queries, keys and values come in as stored in 16 bits (the K/V cache too); scores, softmax and the weighted sum are
    float32 throughout. Projections, norms and MLPs are left alone.

    Raises
    ------
    ModelError
        In a forward pass in which no attention call in half precision came by: the control would do nothing.

    Examples
    --------
    >>> import torch
    >>> import kvdrift as kd
    >>> model = kd.load(kd.models.tiny("llama", dtype=torch.bfloat16), quiet=True)
    >>> kd.CacheOn(controls=(kd.AttentionFloat32(),)).start(model, [1, 2, 3]).step().logits.dtype
    torch.bfloat16
    """

    decides: ClassVar[frozenset[str]] = frozenset({ATTENTION_PRECISION})
    label: ClassVar[str] = "attention in float32"

    def bind(self, model: Model) -> Scope:
        """Prepare the forward passes of ``model``."""
        exact = TrueFloat32().bind(model)

        def enter(stack: ExitStack) -> None:
            link = WideAttention(torch.float32)
            stack.push(partial(_check, link))
            stack.enter_context(exact)
            stack.enter_context(seam(model.hf, link))

        return Scope(enter)


def _check(link: WideAttention, kind: type[BaseException] | None, *_: object) -> None:
    """Refuse a pass that ended well without a call."""
    if kind is None and not link.calls:
        raise ModelError(
            "No attention call in half precision came by, so there is nothing to run in float32: the model is in "
            "float32 already, or its attention does not go through transformers' attention table."
        )
