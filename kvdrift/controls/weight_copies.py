"""Reordered copies of a module's weights, kept within a memory budget and never stale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvdrift.tracing.trace import free_memory

SHARE_OF_FREE_MEMORY = 0.2
"""How much of a device's free memory the copies of one control may take."""

_Key = tuple[int, int, torch.Size, tuple[int, ...], torch.dtype, int]


@dataclass(frozen=True)
class _Copy:
    """A reordered weight, and the weight as it was then: holding it keeps its address from being reused."""

    source: Tensor
    version: int
    value: Tensor


class WeightCopies:
    """Reordered copies of the parameters of one module.

    A copy is used only for the very memory it was made from, at the same version: an in-place edit of the
    weight, or another tensor put in its place, makes a new copy. The exception are edits that PyTorch itself
    cannot see, such as ``weight.data.mul_(2)``: call `clear` after one.

    Beyond `SHARE_OF_FREE_MEMORY` of what is free on the weight's device when its first copy is made, nothing
    more is kept there and weights are reordered at each use.

    Parameters
    ----------
    module
        The module whose parameters are kept; any other tensor is reordered at each use.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._addresses: frozenset[int] = frozenset()
        self._copies: dict[_Key, _Copy] = {}
        self._free: dict[torch.device, int] = {}

    @property
    def n_bytes(self) -> int:
        """Memory taken by the copies, in bytes."""
        return sum(_n_bytes(copy.value) for copy in self._copies.values())

    def refresh(self) -> None:
        """Look where the module's parameters are now, and drop the copies of those that have gone."""
        addresses = {_address(parameter) for parameter in self._module.parameters()}
        if addresses != self._addresses:
            self._addresses = frozenset(addresses)
            for key in [key for key in self._copies if key[0] not in addresses]:
                self._drop(key)

    def clear(self) -> None:
        """Free every copy."""
        self._copies.clear()
        self._free.clear()

    def get(self, tensor: Tensor, dim: int, reorder: Callable[[Tensor, int], Tensor]) -> Tensor:
        """``reorder(tensor, dim)``, from a copy where ``tensor`` is (a view of) a parameter of the module."""
        address = _address(tensor)
        if address not in self._addresses or tensor.is_inference():
            return reorder(tensor, dim)
        key = (address, int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype, dim)
        copy = self._copies.get(key)
        if copy is not None and copy.version == tensor._version:
            return copy.value
        if copy is not None:
            self._drop(key)
        value = reorder(tensor, dim)
        free = self._free.setdefault(tensor.device, int(SHARE_OF_FREE_MEMORY * free_memory(tensor.device)))
        if _n_bytes(value) <= free:
            self._copies[key] = _Copy(tensor, tensor._version, value)
            self._free[tensor.device] = free - _n_bytes(value)
        return value

    def _drop(self, key: _Key) -> None:
        value = self._copies.pop(key).value
        self._free[value.device] += _n_bytes(value)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _n_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
