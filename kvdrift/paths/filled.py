"""Caches that hold tokens when a run begins: told from new ones, held against a model, emptied."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakSet

from torch import Tensor
from transformers import Cache, DynamicCache

from kvdrift.backends.cache_state import length
from kvdrift.errors import InputError, StaleCacheError
from kvdrift.fingerprint import first_in_job
from kvdrift.models.model import Model
from kvdrift.paths.cache_values import packed, state
from kvdrift.paths.entries import PLAIN

_USED: WeakSet[object] = WeakSet()
"""Caches, and layers of caches, that a run has written to."""


def mark_used(cache: Cache) -> None:
    """Remember that a run writes to this cache."""
    _USED.update([cache, *getattr(cache, "layers", ())])


def refuse_used(factory: Callable[[], Cache], cache: Cache) -> None:
    """Refuse a cache that another run has written to, or that holds more than the factory's first one in this job did.

    Raises
    ------
    StaleCacheError
        If it is not a new one.
    """
    held = length(cache)
    grown = held > first_in_job(factory, held)
    if grown or (held and any(one in _USED for one in (cache, *getattr(cache, "layers", ())))):
        raise stale(held)


def stale(held: int) -> StaleCacheError:
    """What is raised where a new run's cache holds so many tokens of another run."""
    return StaleCacheError(
        f"A new run's cache holds {held} tokens of an earlier run: cache= must make a new one at every call."
    )


def emptied(cache: Cache, make: Callable[[], Cache]) -> Cache:
    """A cache of the same kind that holds nothing.

    Raises
    ------
    InputError
        If there is no way to get one.
    """
    if type(cache) is DynamicCache:
        return make()
    for empty in (lambda: cache.crop(-length(cache)), cache.reset):
        with suppress(RuntimeError, NotImplementedError, AttributeError, ValueError):
            empty()
        if not length(cache):
            return cache
    raise InputError(
        f"This prefix is in a {type(cache).__name__} that cannot be emptied, and is to be computed in another "
        "arithmetic: give it as prefix=, and cache= for empty ones."
    )


def counts(cache: Cache) -> bool:
    """Whether a filled cache knows how many tokens it has taken in: not one of recurrent states alone (Mamba)."""
    try:
        cache.get_seq_length()
    except ValueError:  # as transformers says it
        return False
    return True


def holds_state(cache: Cache) -> bool:
    """Whether a cache of recurrent states alone, which counts no tokens, holds any."""
    if counts(cache):
        return False
    tensors: dict[str, Tensor] = {}
    for name, value in state(cache).items():
        packed(name, value, tensors)
    return any(value.dim() > 1 and bool(value.any()) for value in tensors.values())


def check_fits(model: Model, cache: Any) -> None:
    """Refuse a filled cache whose entries are of another dtype or shape than the model's.

    Raises
    ------
    InputError
        With the first such layer.
    """
    infos = model.architecture.layers
    for number, layer in enumerate(getattr(cache, "layers", ())):
        keys = getattr(layer, "keys", None)
        if type(layer) not in PLAIN or not isinstance(keys, Tensor) or not keys.numel() or number >= len(infos):
            continue
        if keys.dtype != model.dtype:
            raise InputError(
                f"The prefix is in {str(keys.dtype).removeprefix('torch.')}, {model.name} in {model.dtype_name}; make "
                "it with this model."
            )
    if len(cache.layers) > len(infos):
        raise InputError(
            f"The prefix has {len(cache.layers)} layers and {model.name} has {len(infos)}; make it with this model."
        )
