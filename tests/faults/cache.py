"""Mistakes of the KV cache: what it stores, what it hands back, what it forgets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from faults.fault import attention_layers, can_crop, fault, has_cache, like_layers, second_attention_layer
from faults.passes import Pass, before_pass, cache_of
from faults.positions import is_rotary, rotary_modules
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvdrift.models.architecture import describe

KV = tuple[Tensor, Tensor]
NARROWER = {
    torch.float64: torch.bfloat16,
    torch.float32: torch.bfloat16,
    torch.bfloat16: torch.float8_e5m2,
    torch.float16: torch.float8_e5m2,
}
MANTISSA = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}
LOW_BIT = {torch.float64: 19, torch.float32: 19, torch.float16: 10, torch.bfloat16: 7}
INTEGER = {torch.float64: torch.int64, torch.float32: torch.int32, torch.float16: torch.int16}


@dataclass
class Update:
    """One call of ``Cache.update``.

    Attributes
    ----------
    cache, layer
        Where.
    key, value
        The new entries, ``[batch, kv_head, token, feature]``.
    proceed
        Stores entries and returns all that the kernel shall read.
    """

    cache: Cache
    layer: int
    key: Tensor
    value: Tensor
    proceed: Callable[[Tensor, Tensor], KV]

    @property
    def held(self) -> Any:
        """The cache's layer."""
        return self.cache.layers[self.layer]

    @property
    def decoding(self) -> bool:
        """One new token on top of some."""
        return self.key.shape[2] == 1 and self.held.get_seq_length() > 0

    def go_on(self) -> KV:
        """Do what the cache does."""
        return self.proceed(self.key, self.value)


def updating(around: Callable[[Update], KV]) -> AbstractContextManager[Any]:
    """Put ``around`` in the place of ``Cache.update``."""
    original = Cache.update

    def update(self: Cache, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> KV:
        def proceed(key: Tensor, value: Tensor) -> KV:
            return original(self, key, value, layer_idx, *args, **kwargs)

        if layer_idx >= len(self.layers):  # a cache that makes its layers as they come
            return proceed(key, value)
        return around(Update(self, layer_idx, key, value, proceed))

    return patch.object(Cache, "update", update)


def has_like_layers(hf: Any) -> bool:
    """Whether two layers have keys and values of the same shapes."""
    return like_layers(hf) is not None


def has_kv_heads(hf: Any) -> bool:
    """Whether the cache keeps more than one KV head."""
    return describe(hf).n_kv_heads > 1 and not keeps_latents(hf)


def keeps_latents(hf: Any) -> bool:
    """Whether the cache keeps latents and the rotated part of the keys (MLA) in the places of keys and values."""
    return getattr(hf.config, "kv_lora_rank", None) is not None


@fault(has_cache, second_attention_layer, "from the first decode step")
def stale_last_key(hf: Any, layer: int) -> Iterator[None]:
    """In one layer a decoded token stores the key of the token before it."""

    def around(update: Update) -> KV:
        if update.layer == layer and update.decoding:
            update.key = update.held.keys[:, :, -1:]
        return update.go_on()

    with updating(around):
        yield


@fault(has_cache)
def one_key_dropped(hf: Any) -> Iterator[None]:
    """Before the first decoded token the cache loses an entry in the middle of the prompt."""

    def change(now: Pass, kwargs: dict[str, Any]) -> None:
        cache = cache_of(kwargs)
        if now.decoding and now.past > 1 and not hasattr(cache, "dropped"):
            cache.dropped = True
            for held in (layer for layer in cache.layers if isinstance(layer, DynamicLayer)):
                _drop(held, held.keys.shape[2] // 2)
        if hasattr(cache, "dropped") and kwargs.get("attention_mask") is not None:
            kwargs["attention_mask"] = kwargs["attention_mask"][:, 1:]

    with before_pass(hf.base_model, change):
        yield


def _drop(held: DynamicLayer, slot: int) -> None:
    """Lose an entry; where the window is full, the oldest one is then there twice."""
    rest = [other for other in range(held.keys.shape[2]) if other != slot]
    if isinstance(held, DynamicSlidingWindowLayer):
        if held.cumulative_length >= held.sliding_window:
            rest.insert(0, 0)
        else:
            held.cumulative_length -= 1
    held.keys, held.values = held.keys[:, :, rest], held.values[:, :, rest]


@fault(has_kv_heads, second_attention_layer, "from the first decode step")
def heads_swapped(hf: Any, layer: int) -> Iterator[None]:
    """In one layer a decoded token stores its keys and values under the neighbouring head."""

    def around(update: Update) -> KV:
        if update.layer == layer and update.decoding:
            update.key, update.value = update.key.roll(1, 1), update.value.roll(1, 1)
        return update.go_on()

    with updating(around):
        yield


@fault(has_like_layers, lambda hf: (like_layers(hf) or (None, None))[1], "from the first decode step")
def values_of_another_layer(hf: Any, layer: int) -> Iterator[None]:
    """At decode one layer reads the values of an earlier layer."""
    donor = like_layers(hf)[0]
    earlier: dict[int, Tensor] = {}

    def around(update: Update) -> KV:
        decoding = update.decoding
        key, value = update.go_on()
        if update.layer == donor:
            earlier[donor] = value
        return (key, earlier[donor]) if update.layer == layer and decoding else (key, value)

    with updating(around):
        yield


@fault(has_like_layers, lambda hf: (like_layers(hf) or (None, None))[0], "from the first decode step")
def layers_share_storage(hf: Any, layer: int) -> Iterator[None]:
    """Two layers share their storage, so that the earlier one finds the later one's entries at the next pass."""
    writer = like_layers(hf)[1]

    def around(update: Update) -> KV:
        read = update.go_on()
        if update.layer == writer:
            victim = update.cache.layers[layer]
            victim.keys, victim.values = update.held.keys, update.held.values
        return read

    with updating(around):
        yield


@fault(has_cache)
def undeclared_narrow_storage(hf: Any) -> Iterator[None]:
    """The cache keeps its entries in a narrower dtype and says so nowhere."""

    def around(update: Update) -> KV:
        held, dtype = update.held, update.key.dtype
        if held.get_seq_length():
            held.keys, held.values = held.keys.to(dtype), held.values.to(dtype)
        read = update.go_on()
        held.keys, held.values = held.keys.to(NARROWER[dtype]), held.values.to(NARROWER[dtype])
        return read

    with updating(around):
        yield


@fault(has_cache)
def entries_rounded_on_storing(hf: Any) -> Iterator[None]:
    """Entries are rounded to a narrower dtype on their way into the cache, whose tensors do not show it."""

    def around(update: Update) -> KV:
        dtype = update.key.dtype
        update.key, update.value = (x.to(NARROWER[dtype]).to(dtype) for x in (update.key, update.value))
        return update.go_on()

    with updating(around):
        yield


@fault(has_cache, signature="from the first decode step")
def cache_never_filled(hf: Any) -> Iterator[None]:
    """Nothing is stored: every pass sees its own tokens alone."""
    with updating(lambda update: (update.key, update.value)):
        yield


@fault(has_cache, second_attention_layer, "from the first decode step")
def writes_into_the_past(hf: Any, layer: int) -> Iterator[None]:
    """In one layer a decoded token also overwrites the oldest entry."""

    def around(update: Update) -> KV:
        if update.layer == layer and update.decoding:
            update.held.keys = torch.cat([update.key, update.held.keys[:, :, 1:]], dim=2)
            update.held.values = torch.cat([update.value, update.held.values[:, :, 1:]], dim=2)
        return update.go_on()

    with updating(around):
        yield


@fault(lambda hf: has_cache(hf) and is_rotary(hf), second_attention_layer, "from the first decode step")
def rope_applied_twice(hf: Any, layer: int) -> Iterator[None]:
    """In one layer the cached keys, rotated when they were stored, are rotated again when they are read."""
    module = rotary_modules(hf)[0]
    frequencies = next(b for n, b in module.named_buffers(recurse=False) if n.endswith("inv_freq"))
    latents = keeps_latents(hf)

    def around(update: Update) -> KV:
        decoding = update.layer == layer and update.decoding
        key, value = update.go_on()
        if not decoding:
            return key, value
        return (key, _rotated(value, frequencies)) if latents else (_rotated(key, frequencies), value)

    with updating(around):
        yield


def _rotated(key: Tensor, frequencies: Tensor) -> Tensor:
    """All keys but the newest rotated by their slot."""
    half = len(frequencies)
    turned, rest = key[..., : 2 * half], key[..., 2 * half :]
    angles = torch.arange(key.shape[2], device=key.device)[:, None].double() * frequencies.repeat(2).double()
    angles[-1] = 0
    across = torch.cat([-turned[..., half:], turned[..., :half]], dim=-1)
    turned = (turned * angles.cos() + across * angles.sin()).to(key.dtype)
    return torch.cat([turned, rest], dim=-1)


@fault(has_cache, second_attention_layer, "from the first decode step")
def one_bit_of_one_key(hf: Any, layer: int) -> Iterator[None]:
    """In one layer a low mantissa bit of one feature of the last cached key is read flipped."""
    low = LOW_BIT[hf.dtype]  # the same bit in copies of the model in other dtypes

    def around(update: Update) -> KV:
        decoding = update.layer == layer and update.decoding
        key, value = update.go_on()
        if decoding:
            key = key.clone()
            bits = key.view(INTEGER.get(key.dtype, torch.int16))
            bits[:, 0, -2, 0] ^= 1 << max(MANTISSA[key.dtype] - low, 0)
        return key, value

    with updating(around):
        yield


@fault(has_cache)
def stale_prefix_of_an_earlier_prompt(hf: Any) -> Iterator[None]:
    """A prefix cache keyed by length alone: later prompts get their first four entries from the first prompt ever."""
    store: dict[int, KV] = {}

    def around(update: Update) -> KV:
        if update.held.get_seq_length() or update.key.shape[2] < 4:
            return update.go_on()
        key, value = store.setdefault(update.layer, (update.key[:, :, :4], update.value[:, :, :4]))
        update.key = torch.cat([key.to(update.key.dtype), update.key[:, :, 4:]], dim=2)
        update.value = torch.cat([value.to(update.value.dtype), update.value[:, :, 4:]], dim=2)
        return update.go_on()

    with updating(around):
        yield


# --- crop


@fault(can_crop, signature="after a crop")
def crop_leaves_a_token(hf: Any) -> Iterator[None]:
    """Cropping n tokens removes n − 1."""
    original = Cache.crop
    with patch.object(Cache, "crop", lambda self, tokens: original(self, min(tokens + 1, 0))):
        yield


@fault(lambda hf: can_crop(hf) and bool(attention_layers(hf, "full")), signature="after a crop")
def crop_from_the_front(hf: Any) -> Iterator[None]:
    """Cropping removes the oldest entries in place of the newest."""

    def crop(self: DynamicLayer, tokens: int) -> None:
        if tokens and self.is_initialized:
            self.keys, self.values = self.keys[:, :, -tokens:], self.values[:, :, -tokens:]

    with patch.object(DynamicLayer, "crop", crop):
        yield


@fault(can_crop, signature="after a crop of drafted tokens")
def crop_of_drafts_leaves_a_token(hf: Any) -> Iterator[None]:
    """Cropping after a pass of several tokens keeps one too many."""
    original = Cache.crop

    def note(now: Pass, kwargs: dict[str, Any]) -> None:
        if now.cached:
            cache_of(kwargs).drafted = now.drafted

    def crop(self: Cache, tokens: int) -> None:
        original(self, min(tokens + getattr(self, "drafted", False), 0))

    with before_pass(hf.base_model, note), patch.object(Cache, "crop", crop):
        yield
