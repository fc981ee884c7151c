"""Forks of a cache: a copy that goes on by itself, proved once for every kind of cache."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvdrift.bits import same_bits
from kvdrift.errors import InputError
from kvdrift.models.model import Model
from kvdrift.paths.path import Step

_GROWS: dict[type, Any] = {layer: layer.update for layer in (DynamicLayer, DynamicSlidingWindowLayer)}
"""Layers that grow by concatenation: they never write into their tensors, so that forks can share these."""
_PLAIN = (Tensor, int, float, str, type(None), torch.dtype, torch.device)
_OWN = frozenset(vars(DynamicCache()))


class _Run(Protocol):
    """A run with a cache, as forks are proved on it."""

    model: Model
    cache: Cache
    overwritten: bool

    @property
    def begun(self) -> bool: ...

    def step(self, token: int | None = None) -> Step: ...

    def again(self) -> Self: ...

    def around(self, cache: Cache) -> Self: ...


Way = Callable[["_Run"], Cache]
_PROVED: dict[tuple[Any, ...], Way] = {}
"""Kind of cache → how its forks are made."""


def forked(run: _Run) -> Cache:
    """A cache in the state of a run's own, which goes on by itself.

    Transformers' dynamic caches share their tensors, its static ones are copied. Any other is copied deeply, or, where
    a copy cannot be made or goes on otherwise, made anew by consuming the run's tokens again. Which of the two is right
    is found out at the first fork of a kind: on a second run over the same tokens the fork takes a step, then the
    original, and both must give the same bits.

    Raises
    ------
    InputError
        If neither is.
    """
    cache = run.cache
    if shares_tensors(cache):
        return copied(cache, run.model)
    if type(cache) is StaticCache and set(vars(cache)) <= _OWN:
        return copied(cache, run.model)
    kind = (type(cache), frozenset(vars(cache)), frozenset(map(type, getattr(cache, "layers", ()))))
    if kind not in _PROVED:
        _PROVED[kind] = _proved(run)
    return _PROVED[kind](run)


def shares_tensors(cache: Cache) -> bool:
    """Whether copies can share a cache's tensors: it is transformers' dynamic cache, with nothing of anybody's in it.

    Examples
    --------
    >>> class Mine(DynamicCache):
    ...     pass
    >>> shares_tensors(DynamicCache()), shares_tensors(Mine())
    (True, False)
    """
    return (
        type(cache) is DynamicCache
        and not cache.offloading
        and set(vars(cache)) <= _OWN
        and all(
            getattr(type(layer), "update", None) is _GROWS.get(type(layer), layer)
            and all(isinstance(value, _PLAIN) for value in vars(layer).values())
            for layer in cache.layers
        )
    )


def copied(cache: Cache, model: Model) -> Cache:
    """A copy of a cache; a model that it holds on to is not copied with it."""
    if shares_tensors(cache):
        other = copy.copy(cache)
        other.layers = [copy.copy(layer) for layer in cache.layers]
        return other
    parts = (*model.hf.modules(), *model.hf.parameters(), *model.hf.buffers())
    return copy.deepcopy(cache, {id(part): part for part in (*parts, model, model.backend)})


def _by_copy(run: _Run) -> Cache:
    return copied(run.cache, run.model)


def _by_tokens(run: _Run) -> Cache:
    if run.overwritten:
        raise InputError(
            f"A run whose {type(run.cache).__name__} was overwritten cannot be forked, since only its tokens could "
            "bring it back; patch with write='read'."
        )
    return run.again().cache


def _next(run: _Run) -> Tensor:
    """The logits of one more step."""
    return run.step(0 if run.begun else None).logits


def _proved(run: _Run) -> Way:
    """The first way of forking a run's cache that goes on as the cache itself does."""
    said = []
    for way, name in ((_by_copy, "a copy of it"), (_by_tokens, "a second run over the same tokens")):
        try:
            original = run.again()
            fork = original.around(way(original))
            alike = same_bits(_next(fork), _next(original))
        except Exception as error:  # whatever a cache of somebody's own raises
            said.append(f"{name} fails ({type(error).__name__}: {' '.join(str(error).split())})")
            continue
        if alike:
            return way
        said.append(f"{name} goes on otherwise")
    raise InputError(
        f"A run with the cache {type(run.cache).__name__} cannot be forked: {' and '.join(said)}; give it a "
        "__deepcopy__, or, for kd.compare, use local=False."
    )
