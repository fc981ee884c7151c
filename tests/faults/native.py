"""Mistakes inside the native attention function, where the shape-invariant arm does not look."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from faults.attention import attention_modules
from faults.fault import fault, second_attention_layer
from torch import Tensor, nn

from kvdrift.tracing.seam import AttentionCall, Order, Output, attention_tables, seam


@dataclass
class _Count:
    """Counts attention calls."""

    order: Order = Order.OBSERVE
    calls: int = 0

    def __call__(self, call: AttentionCall, proceed: Callable[[AttentionCall], Output]) -> Output:
        self.calls += 1
        return proceed(call)


@torch.no_grad()
def uses_the_table(hf: Any) -> bool:
    """Whether every attention layer calls the attention table."""
    count = _Count()
    with seam(hf, count):
        hf(torch.tensor([[1, 2]]))
    return count.calls == len(attention_modules(hf)) > 0


@dataclass
class Native:
    """One call of the native function.

    Attributes
    ----------
    layer
        Which layer calls.
    query, key, value, mask, kwargs
        What it is called with.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    kwargs: dict[str, Any]

    @property
    def layer(self) -> int:
        return int(self.module.layer_idx)

    @property
    def decoding(self) -> bool:
        """One query on more than one key."""
        return self.query.shape[2] == 1 < self.key.shape[2]

    def drop_key(self, slot: int) -> None:
        """Attend as if this key were not there."""
        slots = [i for i in range(self.key.shape[2]) if i != slot]
        self.key, self.value = self.key[:, :, slots], self.value[:, :, slots]
        self.mask = None if self.mask is None else self.mask[..., slots]

    def show(self, seen: Tensor) -> None:
        """Put a mask ``[query, key]`` in the place of the one given."""
        if self.mask is None or self.mask.dtype == torch.bool:
            self.mask = seen[None, None]
        else:
            none = torch.zeros(1, 1, *seen.shape, dtype=self.mask.dtype, device=seen.device)
            self.mask = none.masked_fill(~seen, torch.finfo(self.mask.dtype).min)


@contextmanager
def native(hf: Any, change: Callable[[Native], None]) -> Iterator[None]:
    """Let ``change`` spoil every call of the attention function that this model uses."""

    def spoiled(original: Callable[..., Output]) -> Callable[..., Output]:
        def attention(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
        ) -> Output:
            call = Native(module, query, key, value, attention_mask, kwargs)
            change(call)
            return original(module, call.query, call.key, call.value, call.mask, **call.kwargs)

        return attention

    name = hf.config._attn_implementation
    with ExitStack() as stack:
        if name == "eager":
            files = [inspect.unwrap(type(m).forward).__globals__ for m in attention_modules(hf).values()]
            for file in {id(file): file for file in files}.values():
                stack.enter_context(_entry(file, "eager_attention_forward", spoiled(file["eager_attention_forward"])))
        else:
            for table in attention_tables(hf):
                stack.enter_context(_entry(table, name, spoiled(table[name])))
        yield


@contextmanager
def _entry(table: Any, name: str, value: Any) -> Iterator[None]:
    """Another entry in a table; transformers' tables have a layer of their own above a common one."""
    local = getattr(table, "_local_mapping", table)
    before = {name: local[name]} if name in local else {}
    local[name] = value
    try:
        yield
    finally:
        del local[name]
        local.update(before)


@fault(uses_the_table, signature="from the first decode step")
def native_drops_a_key_at_decode(hf: Any) -> Iterator[None]:
    """The attention function leaves out the oldest key when there is one query."""

    def change(call: Native) -> None:
        if call.decoding:
            call.drop_key(0)

    with native(hf, change):
        yield


@fault(uses_the_table, second_attention_layer, "from the first decode step")
def native_drops_the_newest_key(hf: Any, layer: int) -> Iterator[None]:
    """In one layer the attention function leaves out the newest key when there is one query."""

    def change(call: Native) -> None:
        if call.decoding and call.layer == layer:
            call.drop_key(call.key.shape[2] - 1)

    with native(hf, change):
        yield


@fault(uses_the_table)
def native_wrong_at_multiples_of_16(hf: Any) -> Iterator[None]:
    """The attention function leaves out the newest key when the number of keys is a multiple of 16."""

    def change(call: Native) -> None:
        if call.key.shape[2] % 16 == 0:
            call.drop_key(call.key.shape[2] - 1)

    with native(hf, change):
        yield


@fault(uses_the_table, second_attention_layer, "from the first decode step")
def native_scale_off_by_2_percent(hf: Any, layer: int) -> Iterator[None]:
    """In one layer the attention function scales the scores of a single query by 2 % too much."""

    def change(call: Native) -> None:
        if call.decoding and call.layer == layer:
            scale = call.kwargs.get("scaling")
            call.kwargs["scaling"] = 1.02 * (call.query.shape[-1] ** -0.5 if scale is None else scale)

    with native(hf, change):
        yield


@fault(uses_the_table)
def native_ignores_the_mask(hf: Any) -> Iterator[None]:
    """The attention function does as if it were given no mask."""

    def change(call: Native) -> None:
        call.mask = None

    with native(hf, change):
        yield


@fault(uses_the_table, signature="at a chunk boundary")
def native_causal_top_left(hf: Any) -> Iterator[None]:
    """For several queries on more keys the attention function aligns its causal mask at the first key."""

    def change(call: Native) -> None:
        queries, keys = call.query.shape[2], call.key.shape[2]
        if 1 < queries < keys:
            call.show(torch.ones(queries, keys, dtype=torch.bool, device=call.key.device).tril())

    with native(hf, change):
        yield
