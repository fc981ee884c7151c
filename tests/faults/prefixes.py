"""Saved prefixes that are not what the model gives for their tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from faults.fault import Fault, has_cache, nowhere
from faults.positions import reads_positions
from transformers import Cache, DynamicCache

from kvdrift.backends.hf import HFBackend

TOKENS = tuple(range(30, 48))
"""What every one of these prefixes says that it holds."""


def kept(hf: Any, tokens: Sequence[int], start: int = 0) -> Cache:
    """The cache that a prefill over ``tokens`` leaves, the first of which sits at position ``start``."""
    cache = DynamicCache(config=hf.config)
    HFBackend(hf).forward(torch.tensor([list(tokens)]), start, cache)
    return cache


@contextmanager
def _nothing(_: Any) -> Iterator[None]:
    yield


def saved(applies: Callable[[Any], bool]) -> Callable[[Callable[[Any], Cache]], Fault]:
    """Turn a function that makes the cache for `TOKENS` into a `Fault` named and described by it."""

    def wrap(make: Callable[[Any], Cache]) -> Fault:
        name, doc = make.__name__.replace("_", "-"), " ".join((make.__doc__ or "").split())
        return Fault(name, doc, _nothing, applies, nowhere, "in a saved prefix", make)

    return wrap


@saved(has_cache)
def saved_prefix_of_other_tokens(hf: Any) -> Cache:
    """A saved prefix is of another prompt with as many tokens."""
    return kept(hf, [token + 100 for token in TOKENS])


@saved(lambda hf: has_cache(hf) and reads_positions(hf))
def saved_prefix_shifted_by_one(hf: Any) -> Cache:
    """A saved prefix was made behind one more token: every key sits one position too high."""
    return kept(hf, TOKENS, start=1)


@saved(has_cache)
def saved_prefix_of_another_model(hf: Any) -> Cache:
    """A saved prefix was made by a model of the same shape with other weights."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        other = type(hf)(hf.config).to(hf.dtype).eval()
        return kept(other, TOKENS)
