"""What a cache says of itself, by its public methods alone: a class of somebody's own may keep its entries anywhere."""

from __future__ import annotations

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from kvdrift.errors import InputError


def taken_in(cache: Cache, layer: int) -> int:
    """How many tokens a layer of a cache has taken in, whatever it keeps of them; 0 for one without keys and values.

    Examples
    --------
    >>> from transformers import DynamicCache
    >>> taken_in(DynamicCache(), 3)
    0
    """
    layers = getattr(cache, "layers", ())
    if layer < len(layers) and not isinstance(layers[layer], CacheLayerMixin):
        return 0
    return int(cache.get_seq_length(layer))


def length(cache: Cache) -> int:
    """How many tokens a cache has taken in.

    Examples
    --------
    >>> from transformers import DynamicCache
    >>> length(DynamicCache())
    0
    """
    return max(taken_in(cache, layer) for layer in range(max(len(getattr(cache, "layers", ())), 1)))


def first_positions(cache: Cache, n_layers: int, queries: int) -> dict[int, int]:
    """Absolute position of the first key that a pass over ``queries`` more tokens reads, by layer with entries."""
    filled = [layer for layer in range(n_layers) if taken_in(cache, layer)]
    return {layer: int(cache.get_mask_sizes(queries, layer)[1]) for layer in filled}


def room(cache: Cache) -> int | None:
    """How many tokens a cache can hold; None without a limit. Layers with a window let go of what leaves it.

    Examples
    --------
    >>> import kvdrift as kd
    >>> from transformers import DynamicCache, StaticCache
    >>> room(StaticCache(config=kd.models.tiny("llama").config, max_cache_len=24)), room(DynamicCache())
    (24, None)
    """
    sliding = getattr(cache, "is_sliding", [])
    limits = [int(cache.get_max_length(layer)) for layer, slides in enumerate(sliding) if not slides]
    return min((limit for limit in limits if limit > 0), default=None)


def refuse_full(cache: Cache, n_tokens: int) -> None:
    """Refuse to let a cache take more tokens than it has room for.

    Raises
    ------
    InputError
        If it would hold ``n_tokens``, and cannot.
    """
    limit = room(cache)
    if limit is not None and n_tokens > limit:
        raise InputError(
            f"The cache ({type(cache).__name__}) holds {limit} entries, and the run needs {n_tokens}: make it longer, "
            "or ask for fewer tokens."
        )


def refuse_offloading(cache: Cache, device: torch.device) -> None:
    """Refuse a cache that moves its entries to the CPU for a model that is on it already.

    Raises
    ------
    InputError
        If the model is on the CPU.
    """
    if getattr(cache, "offloading", False) and device.type == "cpu":
        raise InputError(
            f"The cache ({type(cache).__name__}) offloads its entries to the CPU, where the model is already: make it "
            "without offloading, or put the model on another device."
        )
