"""Tensors derived from a module's weights (other dtype, other order), kept within a memory budget and never stale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvdrift.tracing.trace import free_memory

SHARE_OF_FREE_MEMORY = 0.2
"""How much of a device's free memory one control's casts of weights may take."""

_Key = tuple[object, ...]


@dataclass(frozen=True)
class _Derived:
    """What was derived, and the weight as it was then: holding it keeps its address from being reused."""

    source: Tensor
    version: int
    value: Tensor


class DerivedWeights:
    """What one function makes of the parameters of one module: casts to another dtype, or another order.

    It is used only for the very memory it was made from, at the same version: an in-place edit of the weight, or
    another tensor put in its place, has it made anew. The exception are edits that PyTorch itself cannot see, such as
    ``weight.data.mul_(2)``: call `clear` after one.

    Beyond ``share`` of what is free on the weight's device when the first one is made, nothing more is kept there and
    weights are derived at each use.

    Parameters
    ----------
    module
        The module whose parameters these are; from any other tensor it is derived at each use.
    derive
        Given a tensor, and an axis if it asks for one: what is kept.
    share
        Share of free memory.
    """

    def __init__(self, module: nn.Module, derive: Callable[..., Tensor], share: float = SHARE_OF_FREE_MEMORY) -> None:
        self._module, self._derive, self._share = module, derive, share
        self._addresses: frozenset[int] = frozenset()
        self._kept: dict[_Key, _Derived] = {}
        self._free: dict[torch.device, int] = {}

    @property
    def n_bytes(self) -> int:
        """Memory taken, in bytes."""
        return sum(_n_bytes(derived.value) for derived in self._kept.values())

    def refresh(self) -> None:
        """Look where the module's parameters are now, and drop what came from those that have gone."""
        addresses = {_address(parameter) for parameter in self._module.parameters()}
        if addresses != self._addresses:
            self._addresses = frozenset(addresses)
            for key in [key for key in self._kept if key[0] not in addresses]:
                self._drop(key)

    def clear(self) -> None:
        """Free everything."""
        self._kept.clear()
        self._free.clear()

    def get(self, tensor: Tensor, *axis: int) -> Tensor:
        """``derive(tensor, *axis)``, kept where ``tensor`` is (a view of) a parameter of the module."""
        address = _address(tensor)
        if address not in self._addresses or tensor.is_inference():
            return self._derive(tensor, *axis)
        key = (address, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, *axis)
        known = self._kept.get(key)
        if known is not None and known.version == tensor._version:
            return known.value
        if known is not None:
            self._drop(key)
        value = self._derive(tensor, *axis)
        free = self._free.setdefault(tensor.device, int(self._share * free_memory(tensor.device)))
        if _n_bytes(value) <= free:
            self._kept[key] = _Derived(tensor, tensor._version, value)
            self._free[tensor.device] = free - _n_bytes(value)
        return value

    def _drop(self, key: _Key) -> None:
        value = self._kept.pop(key).value
        self._free[value.device] += _n_bytes(value)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _n_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
