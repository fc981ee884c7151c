"""The re-roll: the same path with every sum adding its terms in another seeded order.

A matrix product, a norm or the weighted sum over keys of an attention is, mathematically, the same number in
whatever order its terms are added; in floating point it is not. The re-roll shuffles the terms: the contracted
dimension of both operands of each matrix product, the features that a norm averages, the keys that a decode
step attends to. Nothing is injected. How far a path moves under it is what the order of summation alone does
to this model in this dtype: the rounding floor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from kvdrift.controls.derived_weights import DerivedWeights
from kvdrift.controls.dispatch import OperatorMode
from kvdrift.controls.groups import GROUPED_OPERATORS, Groups
from kvdrift.controls.operators import PLACES, Kind, Use, arguments_of, axes_of, by_kind
from kvdrift.controls.scope import Scope
from kvdrift.models.model import Model

SHARE_OF_FREE_MEMORY = 0.05
"""How much of a device's free memory the reordered weights of one re-roll may take; the rest is reordered at each use.

A decode step that reorders every weight takes 2.5 to 3 times as long as one that finds them all, a comparison with
cache-OFF 1.4 times at 32 tokens and 1.1 times at 512.
"""


@dataclass(frozen=True)
class ReRoll:
    """A control that adds the terms of every sum in another order.

    Reordered are matrix products, sums, means, variances, norms, softmax denominators, and inside fused
    attention kernels the features of q·k and the keys. Left alone are the embeddings, convolutions, scans, and
    the key order where a fused kernel is given no mask but applies causality itself (whole-prompt passes).
    Attention kernels from outside PyTorch (the flash-attn package) keep their own order.

    Parameters
    ----------
    seed
        Decides the order. It depends on the seed and the number of terms alone: it is the same in every dtype,
        at every call and on every device.

    Examples
    --------
    >>> import torch
    >>> from kvdrift.controls.reroll import ReRoll
    >>> from kvdrift.models.tiny import tiny
    >>> model, ids = tiny("llama"), torch.tensor([[1, 2, 3]])
    >>> plain = model(ids).logits
    >>> with ReRoll(3).applied(model):
    ...     rerolled = model(ids).logits
    >>> torch.equal(plain, rerolled), torch.allclose(plain, rerolled, atol=1e-3)
    (False, True)
    """

    seed: int

    @property
    def label(self) -> str:
        """``"re-roll SEED"``."""
        return f"re-roll {self.seed}"

    def bind(self, model: Model) -> BoundReRoll:
        """Prepare the forward passes of ``model``; reordered weights that are kept live until the result is closed."""
        return BoundReRoll(self.seed, model.hf)

    @contextmanager
    def applied(self, module: nn.Module) -> Iterator[BoundReRoll]:
        """Re-roll what ``module`` computes inside the ``with`` block, and free everything at its end."""
        bound = BoundReRoll(self.seed, module)
        try:
            with bound:
                yield bound
        finally:
            bound.close()


class BoundReRoll(Scope):
    """A re-roll bound to one module: enter it around each forward pass, close it after the last one.

    Every PyTorch operation of this thread inside the context is re-rolled, so nothing but the forward pass
    belongs there. Entering it inside itself changes nothing more. Reordered weights are shared by all that are
    bound to the same module with the same seed, and freed when the last of them is closed.

    Attributes
    ----------
    counts
        How many operations of each kind have been reordered so far: ``matmul``, ``sum``, ``layer_norm``,
        ``softmax``, ``attention_features``, ``attention_keys``.
    weights
        Reordered weights that are kept; None before it is first entered and after it is closed.
    """

    def __init__(self, seed: int, module: nn.Module) -> None:
        self.seed, self.module = seed, module
        self.counts: Counter[str] = Counter()
        self.weights: DerivedWeights | None = None
        super().__init__(self._put_in_place)

    def _put_in_place(self, stack: ExitStack) -> None:
        if self.weights is None:
            self.weights = _shared_weights(self.seed, self.module)
        self.weights.refresh()
        stack.enter_context(_ReorderSums(self.seed, self.weights, self.counts))

    def close(self) -> None:
        """Let go of the reordered weights. Entering again makes them anew."""
        self.weights = None


_SHARED: WeakValueDictionary[tuple[int, int], DerivedWeights] = WeakValueDictionary()


def _shared_weights(seed: int, module: nn.Module) -> DerivedWeights:
    """Reordered weights of ``module`` for ``seed``: those in use, or new ones. They hold the module: its id is safe."""
    weights = _SHARED.get((id(module), seed))
    if weights is None:
        weights = DerivedWeights(module, partial(_reorder, seed), SHARE_OF_FREE_MEMORY)
        _SHARED[id(module), seed] = weights
    return weights


_Handler = Callable[["_ReorderSums", OpOverload, tuple[Any, ...], dict[str, Any]], Any]


class _ReorderSums(OperatorMode):
    """Hands every operation that adds terms to its handler, every other one through."""

    def __init__(self, seed: int, weights: DerivedWeights, counts: Counter[str]) -> None:
        super().__init__()
        self.seed, self.weights, self.counts = seed, weights, counts

    def treat(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hand a call to its operator's handler."""
        handler = _HANDLERS.get(op)
        return NotImplemented if handler is None else handler(self, op, args, kwargs)

    def reorder(self, tensor: Tensor, dim: int) -> Tensor:
        """``tensor`` with its entries along ``dim`` in the seeded order, in the same memory layout."""
        return _reorder(self.seed, tensor, dim)

    def restore(self, tensor: Tensor, dim: int) -> Tensor:
        """Undo `reorder`."""
        return _take(tensor, dim, _order(self.seed, tensor.shape[dim], tensor.device)[1])

    def operand(self, tensor: Tensor, dim: int) -> Tensor:
        """`reorder`, kept where ``tensor`` is a weight."""
        return self.weights.get(tensor, dim)


@lru_cache(maxsize=128)
def _order(seed: int, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A seeded order of ``n`` terms and its inverse, both int ``[n]``."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + n) % 2**63)
    order = torch.randperm(n, generator=generator)
    return order.to(device), order.argsort().to(device)


def _reorder(seed: int, tensor: Tensor, dim: int) -> Tensor:
    return _take(tensor, dim, _order(seed, tensor.shape[dim], tensor.device)[0])


def _take(tensor: Tensor, dim: int, order: Tensor) -> Tensor:
    """``tensor.index_select(dim, order)`` with the strides of ``tensor``, so that the same kernels run.

    Axes are taken as they lie in memory, and two bytes as an integer: ten times faster, in the same bits.
    """
    if tensor.stride(dim) == 0:  # one entry, expanded
        return tensor
    axes = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    stored, at = tensor.permute(axes), axes.index(dim % tensor.dim())
    for axis, stride in enumerate(stored.stride()):
        if stride == 0:  # an expanded axis is stored once
            stored = stored.narrow(axis, 0, 1)
    strides = [max(stride, 1) for stride in stored.stride()]
    out = torch.empty_strided(stored.shape, strides, dtype=tensor.dtype, device=tensor.device)
    source, target = (x.view(torch.int16) if x.dtype.itemsize == 2 else x for x in (stored, out))
    if strides[at] == 1:  # several times faster than index_select along neighbouring entries
        index = order.view([-1 if axis == at else 1 for axis in range(tensor.dim())])
        torch.gather(source, at, index.expand(source.shape), out=target)
    else:
        torch.index_select(source, at, order, out=target)
    return out.permute([axes.index(axis) for axis in range(tensor.dim())]).expand(tensor.shape)


def _matmul(mode: _ReorderSums, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``[…, terms] @ […, terms, n]``."""
    left = PLACES[op] or 0
    a, b = args[left], args[left + 1]
    if op in GROUPED_OPERATORS and Groups.of(op, args, kwargs) is None:  # its groups may be parts of the sum itself
        return op(*args, **kwargs)
    axis = -2 if b.dim() > 1 else -1
    if a.shape[-1] < 2 or a.shape[-1] != b.shape[axis]:
        return op(*args, **kwargs)
    mode.counts["matmul"] += 1
    return op(*args[:left], mode.operand(a, -1), mode.operand(b, axis), *args[left + 2 :], **kwargs)


def _reduction(mode: _ReorderSums, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A sum, mean, variance or norm."""
    tensor = args[0]
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return op(*args, **kwargs)
    axes = axes_of(op, args)
    axes = range(tensor.dim()) if axes is None else axes
    reordered = tensor
    for axis in [axes] if isinstance(axes, int) else axes:
        if tensor.shape[axis] > 1:
            reordered = mode.reorder(reordered, axis)
    mode.counts["sum"] += reordered is not tensor
    return op(reordered, *args[1:], **kwargs)


def _softmax(mode: _ReorderSums, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A (log-)softmax over axis ``args[1]``: reordered, computed, put back."""
    tensor, axis = args[0], args[1]
    if tensor.dim() == 0 or tensor.shape[axis] < 2:
        return op(*args, **kwargs)
    mode.counts["softmax"] += 1
    return mode.restore(op(mode.reorder(tensor, axis), *args[1:], **kwargs), axis)


def _layer_norm(mode: _ReorderSums, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A fused norm ``(input, shape, weight, bias…) -> (output, statistics…)``: features reordered and put back."""
    tensor = args[0]
    if tensor.shape[-1] < 2:
        return op(*args, **kwargs)
    mode.counts["layer_norm"] += 1
    scale_and_shift = [mode.operand(arg, -1) if isinstance(arg, Tensor) else arg for arg in args[2:]]
    output, *statistics = op(mode.reorder(tensor, -1), args[1], *scale_and_shift, **kwargs)
    return mode.restore(output, -1), *statistics


def _attention(mode: _ReorderSums, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A fused attention: the features of q·k, and the keys unless the kernel hides some by their order (is_causal).

    ``query`` is ``[batch, head, query, feature]``, ``key`` and ``value`` ``[batch, kv_head, key, feature]``.
    """
    call = arguments_of(op, args, kwargs)
    if call["query"].shape[-1] > 1:
        mode.counts["attention_features"] += 1
        call["query"], call["key"] = mode.reorder(call["query"], -1), mode.reorder(call["key"], -1)
    if call["key"].shape[-2] > 1 and not call.get("is_causal", False):
        mode.counts["attention_keys"] += 1
        call["key"], call["value"] = mode.reorder(call["key"], -2), mode.reorder(call["value"], -2)
        for name in ("attn_mask", "attn_bias"):  # not every kernel takes one
            mask = call.get(name)
            if mask is not None and mask.shape[-1] > 1:
                call[name] = mode.reorder(mask, -1)
    return op(**call)


_HANDLERS: dict[Any, _Handler] = by_kind(
    Use.RE_ROLL,
    {
        Kind.PRODUCT: _matmul,
        Kind.REDUCTION: _reduction,
        Kind.SOFTMAX: _softmax,
        Kind.NORM: _layer_norm,
        Kind.ATTENTION: _attention,
    },
)
