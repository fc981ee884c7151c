"""Faults behind a declared loss: more than what is declared, or something else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from faults.cache import KV, Update, heads_swapped, stale_last_key, updating
from faults.fault import fault, has_cache, has_window
from faults.positions import positions_one_too_high_at_decode
from torch import Tensor

import kvdrift as kd

FIRST, LAST = 2, 6


@fault(has_cache)
def _rounded(hf: Any) -> Iterator[None]:
    """Entries are declared to be kept in eight bits, and are kept in four."""

    def four_bits(x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 7
        return (x / scale).round() * scale

    with updating(lambda update: update.proceed(four_bits(update.key), four_bits(update.value))):
        yield


@fault(lambda hf: has_cache(hf) and not has_window(hf))
def _dropped(hf: Any) -> Iterator[None]:
    """Of the entries that are declared to be kept the cache lets one more go."""

    def around(update: Update) -> KV:
        keys, values = update.go_on()
        n = keys.shape[2]
        if n > FIRST + LAST - 1:
            kept = [*range(FIRST), *range(n - LAST + 1, n)]
            update.held.keys, update.held.values = keys[:, :, kept], values[:, :, kept]
        return keys, values

    with updating(around):
        yield


four_bits_where_eight_are_declared = replace(
    _rounded, name="four-bits-where-eight-are-declared", lossy=kd.Rounded(relative=1 / 127)
)
one_kept_too_few = replace(_dropped, name="one-kept-fewer-than-declared", lossy=kd.Dropped(first=FIRST, last=LAST))
heads_swapped_under_a_declaration = replace(
    heads_swapped, name="heads-swapped-under-a-declaration", lossy="keys in 8 bits"
)
stale_key_under_a_declaration = replace(
    stale_last_key, name="stale-key-under-a-declaration", lossy="drops entries beyond 1000 tokens"
)
positions_under_a_declaration = replace(
    positions_one_too_high_at_decode, name="positions-too-high-under-a-declaration", lossy=kd.Rounded(dtype="float16")
)
del _rounded, _dropped
