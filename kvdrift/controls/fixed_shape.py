"""Shape-invariant execution: every row is computed at one shape, so that only faults tell two paths apart.

Cache-ON and cache-OFF differ by rounding because they run the same rows through kernels at other shapes. Under
this control every row of every matrix product, norm, elementwise function and attention call is computed at one
fixed shape, with keys and values at their absolute positions. Two paths that compute the same function then
agree in every bit; no tolerance is needed to tell rounding from a bug.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from kvdrift.controls.combine import ATTENTION_KERNEL
from kvdrift.controls.fixed_attention import FixedAttention
from kvdrift.controls.row_tiles import RowTiles
from kvdrift.controls.scope import Scope
from kvdrift.errors import InputError
from kvdrift.models.load import load
from kvdrift.models.model import Model
from kvdrift.tracing.seam import eager_function, seam


@dataclass(frozen=True)
class FixedShape:
    """A control that computes every row at one fixed shape.

    Both paths of a comparison need the same ``max_length`` and ``tile``. Layers that cannot be promised are named
    by `not_covered`; `kvdrift.controls.self_test` checks that the promise holds on the machine in use.

    Parameters
    ----------
    max_length
        The longest sequence, prompt and new tokens together. Attention is computed over so many positions.
    tile
        Rows per tile.

    Raises
    ------
    InputError
        If one of them is below 1; in a forward pass, if a sequence is longer than ``max_length``.

    Examples
    --------
    >>> import kvdrift as kd
    >>> from kvdrift.controls.fixed_shape import FixedShape
    >>> model, fixed = kd.models.tiny("llama"), (FixedShape(64),)
    >>> on, off = kd.CacheOn(controls=fixed), kd.CacheOff(controls=fixed)
    >>> drift = kd.compare(model, [1, 2, 3], a=on, b=off, max_new_tokens=4, floor=0, progress=False)
    >>> float(drift.values("logits", "logit_max").max())
    0.0
    """

    decides: ClassVar[frozenset[str]] = frozenset({ATTENTION_KERNEL})

    max_length: int
    tile: int = 16

    def __post_init__(self) -> None:
        for name in ("max_length", "tile"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)}: give a whole number of at least 1.")

    @property
    def label(self) -> str:
        """``"fixed shape MAX_LENGTH"``."""
        return f"fixed shape {self.max_length}"

    def bind(self, model: Model) -> BoundFixedShape:
        """Prepare the forward passes of ``model``."""
        return BoundFixedShape(self, model)


class BoundFixedShape(Scope):
    """Fixed shape bound to one model: enter it around forward passes.

    Every PyTorch operation of this thread inside the context is run on tiles, so nothing but forward passes
    belongs there. Entering it inside itself changes nothing more.

    Attributes
    ----------
    control
        What was bound.
    tiles
        The mode that runs row-wise operators on tiles.
    """

    def __init__(self, control: FixedShape, model: Model) -> None:
        self.control = control
        self.tiles = RowTiles(control.tile)
        self._model = model
        self._attention = FixedAttention(self._model, control.max_length, self.tiles)
        super().__init__(self._put_in_place)

    def _put_in_place(self, stack: ExitStack) -> None:
        hf, attention = self._model.hf, self._attention
        decoder = hf.get_submodule(self._model.tree.prefix.rpartition(".")[0])
        stack.callback(decoder.register_forward_pre_hook(attention.before_pass, with_kwargs=True).remove)
        stack.callback(decoder.register_forward_hook(attention.after_pass, always_call=True).remove)
        stack.enter_context(seam(hf, attention))
        stack.enter_context(self.tiles)


@contextmanager
def fixed_shape(model: Any, max_length: int, tile: int = 16) -> Iterator[BoundFixedShape]:
    """Compute every row at one fixed shape inside the ``with`` block, for loops of your own.

    Parameters
    ----------
    model
        Anything `kvdrift.load` takes; a loaded module or a `Model` is used as it is.
    max_length
        The longest sequence.
    tile
        Rows per tile.

    Examples
    --------
    >>> import torch
    >>> import kvdrift as kd
    >>> from kvdrift.controls.fixed_shape import fixed_shape
    >>> model, ids = kd.models.tiny("llama"), torch.tensor([[1, 2, 3, 4, 5]])
    >>> with torch.no_grad(), fixed_shape(model, max_length=64):
    ...     alone, beside = model(ids[:, :3]).logits, model(ids).logits[:, :3]
    >>> torch.equal(alone, beside)
    True
    """
    bound = FixedShape(max_length, tile).bind(load(model, quiet=True))
    try:
        with bound:
            yield bound
    finally:
        bound.close()


def not_covered(model: Any) -> dict[int, str]:
    """Layers for which fixed shape promises nothing, each with its reason.

    Examples
    --------
    >>> import kvdrift as kd
    >>> from kvdrift.controls.fixed_shape import not_covered
    >>> not_covered(kd.models.tiny("gemma3"))
    {}
    """
    model = load(model, quiet=True)
    reasons: dict[int, str] = {}
    cache = model.backend.new_cache().layers
    for layer, module in enumerate(model.tree.attention_modules):
        kind = model.architecture.layers[layer].attention
        kept = cache[layer] if layer < len(cache) else None
        if kind in ("linear", "conv") or isinstance(kept, LinearAttentionCacheLayerMixin):
            reasons[layer] = "recurrent or convolutional: one token and many are computed by other algorithms"
        elif kind in ("mlp", "moe"):
            continue
        elif module is None or layer not in model.coverage.table_layers:
            reasons[layer] = "attention does not go through transformers' attention table"
        elif not model.coverage.table_layers[layer] or type(kept).__module__ == type(model.hf).__module__:
            reasons[layer] = "attention reads other keys than one per token"
        elif not _has_eager(module):
            reasons[layer] = f"{type(module).__name__} has no eager attention function beside its forward"
    return reasons


def _has_eager(module: nn.Module) -> bool:
    try:
        eager_function(module)
    except LookupError:
        return False
    return True
