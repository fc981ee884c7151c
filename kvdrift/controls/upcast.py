"""Numbers handed on in a wider dtype: inputs of operators and attention calls, weights of modules while they run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kvdrift.controls.derived_weights import DerivedWeights
from kvdrift.controls.dispatch import OperatorMode
from kvdrift.controls.groups import GROUPED_OPERATORS, Groups
from kvdrift.controls.operators import arguments_of, name_of
from kvdrift.tracing.seam import AttentionCall, Order, Output

HALVES = (torch.float16, torch.bfloat16)

Cast = Callable[[Tensor], Tensor]


def narrower(value: Any, dtype: torch.dtype) -> bool:
    """Whether ``value`` is a floating-point tensor of fewer bits than ``dtype`` has.

    Examples
    --------
    >>> narrower(torch.ones(2, dtype=torch.bfloat16), torch.float32), narrower(torch.ones(2), torch.float32)
    (True, False)
    """
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize < dtype.itemsize


def upcast(value: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A tensor in ``dtype`` if it is narrower; tuples, lists and dicts of them; anything else as it is.

    Examples
    --------
    >>> upcast(torch.ones(2, dtype=torch.bfloat16)).dtype, upcast("text")
    (torch.float32, 'text')
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if narrower(value, dtype) else value
    if type(value) in (tuple, list):
        return type(value)(upcast(item, dtype) for item in value)
    if type(value) is dict:
        return {name: upcast(item, dtype) for name, item in value.items()}
    return value


class WideAttention:
    """A link that executes attention calls in ``dtype`` and rounds what they return.

    Attributes
    ----------
    calls
        How many calls were narrower and so were widened.
    """

    order = Order.EXECUTE

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.calls = dtype, 0

    def __call__(self, call: AttentionCall, proceed: Callable[[AttentionCall], Output]) -> Output:
        """Execute one attention call."""
        if not narrower(call.query, self.dtype):
            return proceed(call)
        self.calls += 1
        query, key, value, mask = upcast((call.query, call.key, call.value, call.mask), self.dtype)
        wide = replace(call, query=query, key=key, value=value, mask=mask, kwargs=upcast(call.kwargs, self.dtype))
        output, pattern = proceed(wide)
        dtype = call.query.dtype
        return output.to(dtype), None if pattern is None else pattern.to(dtype)


class WideOperators(OperatorMode):
    """Hands the inputs of some operators on in ``dtype`` and rounds what they return.

    Parameters
    ----------
    operators
        Which; see `kvdrift.controls.operators`.
    dtype
        What they compute in.
    weights
        Makes tensors of that dtype, and keeps those of weights.

    Attributes
    ----------
    counts
        How many calls of each operator had narrower inputs and so were widened.
    """

    def __init__(self, operators: Collection[Any], dtype: torch.dtype, weights: DerivedWeights) -> None:
        super().__init__()
        self.operators, self.dtype, self.weights = operators, dtype, weights
        self.counts: Counter[str] = Counter()

    def treat(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Widen a call that has narrower inputs."""
        given = next((arg for arg in args if narrower(arg, self.dtype)), None) if op in self.operators else None
        return NotImplemented if given is None else self._widened(op, given.dtype, args, kwargs)

    def _widened(self, func: Any, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        asked = arguments_of(func, args, kwargs).get("dtype")
        if asked is not None and not asked.is_floating_point:  # counts, which nothing rounds
            return func(*args, **kwargs)
        name, groups = name_of(func), None
        if func in GROUPED_OPERATORS:
            groups = Groups.of(func, args, kwargs)
            if groups is None:
                return func(*args, **kwargs)
        self.counts[name] += 1
        if groups is not None:  # one by one: there is no kernel for groups in every wider dtype
            wide = replace(groups, rows=self._wide(groups.rows), factors=self._wide(groups.factors))
            return wide.product(torch.mm)
        if asked is not None:  # another dtype than that of the input
            dtype, args = asked, tuple(self.dtype if arg is asked else arg for arg in args)
            kwargs = {**kwargs, "dtype": self.dtype} if "dtype" in kwargs else kwargs
        if name in ("_softmax", "_log_softmax") and args[2]:  # half to float in one go
            dtype, args = torch.float32, (*args[:2], False)
        result = func(*(self._wide(arg) for arg in args), **kwargs)
        if isinstance(result, Tensor):
            return result.to(dtype)
        return tuple(part.to(dtype) if isinstance(part, Tensor) else part for part in result)

    def _wide(self, arg: Any) -> Any:
        return self.weights.get(arg) if narrower(arg, self.dtype) else arg


def run_in_float32(stack: ExitStack, unit: nn.Module, *, whole: bool, cast: Cast = Tensor.float) -> None:
    """Hook ``unit`` so that, while it runs, its half-precision weights and inputs are float32.

    Parameters
    ----------
    stack
        Takes what removes the hooks.
    unit
        A module.
    whole
        Cast the weights of all modules in it, not only its own.
    cast
        Makes the float32 weight; by default a fresh one at every call.
    """
    kept: list[tuple[dict[str, Any], str, Any]] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        for owner in unit.modules() if whole else [unit]:
            stores: list[dict[str, Any]] = [owner.__dict__["_parameters"], owner.__dict__["_buffers"]]
            for held in stores:
                for name, value in held.items():
                    if narrower(value, torch.float32):
                        kept.append((held, name, value))
                        held[name] = _like(value, cast(value.detach()))
        return upcast(args), upcast(kwargs)

    def after(*_: Any) -> None:
        while kept:
            held, name, value = kept.pop()
            held[name] = value

    stack.callback(unit.register_forward_pre_hook(before, with_kwargs=True).remove)
    stack.callback(unit.register_forward_hook(after, always_call=True).remove)


def _like(before: Tensor, value: Tensor) -> Tensor:
    return nn.Parameter(value, requires_grad=False) if isinstance(before, nn.Parameter) else value
