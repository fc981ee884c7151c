"""Masks that do not fit the keys: wrong alignment, wrong chunk boundary, lost padding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from faults.fault import fault, has_cache
from faults.passes import Pass, before_pass, watched
from transformers import Cache


@fault(has_cache)
def mask_aligned_top_left(hf: Any) -> Iterator[None]:
    """The mask takes the queries of a cached pass for the first ones of the sequence."""
    with patch.object(Cache, "get_query_offset", lambda self, layer_idx=0: 0):
        yield


@fault(has_cache, signature="at a chunk boundary")
def chunk_mask_one_off(hf: Any) -> Iterator[None]:
    """In a later chunk of the prompt each token sees one position too few: its own is hidden."""
    original = Cache.get_query_offset
    with watched(hf.base_model) as now:

        def offset(self: Cache, layer_idx: int = 0) -> int:
            return original(self, layer_idx) - now.later_chunk

        with patch.object(Cache, "get_query_offset", offset):
            yield


@fault(has_cache, signature="with left padding")
def left_padding_seen_at_decode(hf: Any) -> Iterator[None]:
    """The padding mask is lost at decode, so that decoded tokens see the padding."""

    def change(now: Pass, kwargs: dict[str, Any]) -> None:
        if now.decoding:
            kwargs["attention_mask"] = None

    with before_pass(hf.base_model, change):
        yield


@fault(has_cache, signature="in a pass of several tokens")
def mask_of_drafts_one_off(hf: Any) -> Iterator[None]:
    """In a pass of 2 to 4 tokens on top of a cache each token sees one position too few: its own is hidden."""
    original = Cache.get_query_offset
    with watched(hf.base_model) as now:

        def offset(self: Cache, layer_idx: int = 0) -> int:
            return original(self, layer_idx) - now.drafted

        with patch.object(Cache, "get_query_offset", offset):
            yield
