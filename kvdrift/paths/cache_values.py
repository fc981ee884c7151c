"""What the layers of a cache hold, as tensors by name and values that JSON can hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvdrift.errors import InputError


def state(cache: Any) -> dict[str, Any]:
    """Everything that the layers of a cache hold, by layer and name."""
    return {f"{n}.{name}": value for n, layer in enumerate(cache.layers) for name, value in vars(layer).items()}


def moved(value: Any, device: torch.device) -> Any:
    """A value whose tensors on the CPU, such as those of a loaded prefix, are on another device."""
    if isinstance(value, Tensor):
        return value.to(device) if value.device.type == "cpu" else value
    if isinstance(value, torch.device):
        return device if value.type == "cpu" else value
    return {key: moved(part, device) for key, part in value.items()} if isinstance(value, dict) else value


def packed(name: str, value: Any, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON holds it; tensors go to ``tensors`` under a name."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, (torch.dtype, torch.device)):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    if isinstance(value, Mapping):
        return {"mapping": [[key, packed(f"{name}.{key}", part, tensors)] for key, part in value.items()]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [packed(f"{name}.{n}", part, tensors) for n, part in enumerate(value)]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise InputError(f"This prefix's {name} is a {type(value).__name__}, which cannot be saved; make the prefix anew.")


def unpacked(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `packed` gave, as the value that it was."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dtype":
        return getattr(torch, content)
    if kind == "device":
        return torch.device("cpu")
    if kind == "mapping":
        return {key: unpacked(part, tensors) for key, part in content}
    return {"list": list, "tuple": tuple}[kind](unpacked(part, tensors) for part in content)
