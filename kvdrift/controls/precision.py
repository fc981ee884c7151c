"""Precision as a control: the same base weights in another dtype, and a clean float64 reference."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kvdrift.errors import InputError, ModelError

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def cast_copy(module: ModuleT, dtype: torch.dtype) -> ModuleT:
    """A copy of ``module`` with its weights in ``dtype``; the original is not touched.

    Floating-point parameters and persistent buffers are cast (upwards exactly), and tied weights stay tied. What
    ``from_pretrained(dtype=...)`` would keep in float32 stays float32: non-persistent buffers such as rotary
    frequencies and, beside half-precision weights, what the model's class names (router biases, say). Evaluation
    mode, devices, hooks and the attention implementation are those of the original; the copy's config names the
    new dtype. In float64 experts run one by one, since grouped products have no float64 kernel.

    Returns
    -------
    nn.Module
        A module of the same class that shares no memory with ``module``.

    Raises
    ------
    InputError
        If ``dtype`` is not a floating-point dtype.
    ModelError
        If weights are offloaded or quantized, so that they are not there to be cast.

    Examples
    --------
    >>> import torch
    >>> from kvdrift.controls import cast_copy
    >>> from kvdrift.models.tiny import tiny
    >>> cast_copy(tiny("llama", dtype=torch.bfloat16), torch.float32).dtype
    torch.float32
    """
    if not dtype.is_floating_point:
        raise InputError(f"dtype={dtype}: weights can be cast to floating-point dtypes only, such as torch.float32.")
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            raise ModelError(
                f"The weight {name} is offloaded, so no copy in {dtype} can be made; load the model with all "
                "weights on devices, or load it a second time in that dtype."
            )
    if getattr(module, "is_quantized", False):
        raise ModelError(
            f"The model is quantized, so a copy in {dtype} would not have the same weights; dequantize it on load."
        )
    memo: dict[int, Any] = {}
    for name, parameter in module.named_parameters():
        cast = parameter.detach().to(_target(module, name, parameter, dtype), copy=True)
        memo[id(parameter)] = nn.Parameter(cast, requires_grad=parameter.requires_grad)
    passing = _non_persistent(module)
    for name, buffer in module.named_buffers():
        if name not in passing or buffer.dtype != torch.float32:
            memo[id(buffer)] = buffer.detach().to(_target(module, name, buffer, dtype), copy=True)
    result = copy.deepcopy(module, memo)
    for config in _configs(result):
        config.dtype = dtype
    model: Any = result
    if dtype == torch.float64 and experts_in(model) not in (None, "eager"):
        model.set_experts_implementation("eager")  # grouped products have no float64 kernel
    return result


def experts_in(module: Any) -> str | None:
    """How a transformers model runs its experts; None if it has none to choose for."""
    return getattr(getattr(module, "config", None), "_experts_implementation", None)


def experts_note(module: Any) -> str | None:
    """The sentence on a model whose experts run otherwise in float64; None if they do not."""
    experts = experts_in(module)
    if experts in (None, "eager"):
        return None
    return f"in float64 experts run one by one: {experts!r}, in which this model runs them, has no float64 kernel"


def _target(module: nn.Module, name: str, tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype that a weight gets: ``dtype``, unless it holds integers or stays float32 beside half precision."""
    if not tensor.is_floating_point():
        return tensor.dtype
    if dtype.itemsize >= torch.float32.itemsize or tensor.dtype.itemsize < torch.float32.itemsize:
        return dtype
    if tensor.dtype == torch.float32 and getattr(module, "dtype", torch.float32).itemsize < torch.float32.itemsize:
        return torch.float32  # beside half precision already
    patterns = set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        patterns |= set(getattr(module, "_keep_in_fp32_modules", None) or ())
    return torch.float32 if any(re.search(p.replace("*", ".*"), name) for p in patterns) else dtype


def _non_persistent(module: nn.Module) -> set[str]:
    """Full names of the buffers that a checkpoint does not hold."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, owner in module.named_modules()
        for name in owner._non_persistent_buffers_set
    }


def _configs(module: nn.Module) -> list[Any]:
    """The distinct transformers configs in ``module`` that name a dtype."""
    configs = [getattr(owner, "config", None) for owner in module.modules()]
    return list({id(config): config for config in configs if getattr(config, "dtype", None) is not None}.values())


class promote_float32(TorchFunctionMode):
    """Compute in float64 wherever a float64 model asks for float32.

    Many models cast softmax, norms, routers and rotary embeddings to a hard-coded float32, so that
    ``model.double()`` is a float64 reference only down to 1e-7. Inside this context every ``torch.float32`` handed
    to a PyTorch function is read as ``torch.float64``, and ``tensor.float()`` as ``tensor.double()``. Use it
    around forward passes of float64 models alone.

    Examples
    --------
    >>> import torch
    >>> from kvdrift.controls import promote_float32
    >>> with promote_float32():
    ...     torch.ones(2, dtype=torch.float64).softmax(-1, dtype=torch.float32).dtype
    torch.float64
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        promoted = {name: _promoted(value) for name, value in (kwargs or {}).items()}
        return func(*(_promoted(value) for value in args), **promoted)


def _promoted(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
