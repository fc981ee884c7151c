"""The entries of a cache by position: which are stored, and other values in their place."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from kvdrift.errors import SiteError
from kvdrift.tracing.writer import Index, as_index, write_at

PLAIN = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer)
"""Layers whose entries lie one after the other, told apart by position."""


def stored(cache: Cache, layer: int, end: int, padding: int, begun: bool) -> range:
    """Absolute positions of the entries that a cache holds in ``layer``, after ``end`` real tokens behind ``padding``.

    Raises
    ------
    SiteError
        If the layer has no cache of its own, or one whose entries cannot be told apart by position.
    """
    kinds = cache.layers
    if layer >= len(kinds) or type(kinds[layer]) not in PLAIN:
        kind = type(kinds[layer]).__name__ if layer < len(kinds) else "no cache of its own"
        raise SiteError(f"The entries of layer {layer} ({kind}) cannot be overwritten; use write='read'.")
    start = int(cache.get_mask_sizes(1, layer)[1]) - padding
    keys: Tensor | None = getattr(kinds[layer], "keys", None)
    n_stored = 0 if keys is None else keys.shape[2]
    if begun and n_stored < end - start:
        raise SiteError(
            f"The cache of layer {layer} has evicted entries ({n_stored} of {end - start} are left), so that none can "
            "be overwritten by position; use write='read'."
        )
    return range(start, end)


def overwrite(cache: Cache, layer: int, name: str, heads: Index, slots: Sequence[int], value: Tensor) -> None:
    """Put ``value [1, kv_head, position, feature]`` into ``name`` (``"k"`` or ``"v"``) of a layer, where it stays.

    Raises
    ------
    SiteError
        If the entries are stored in another shape than the kernel reads.
    """
    kind, attribute, at = cache.layers[layer], "keys" if name == "k" else "values", as_index(slots)
    before: Tensor = getattr(kind, attribute)
    target = before if isinstance(kind, StaticLayer) else before.clone()  # a fork may share the others' memory
    if target[:, heads][:, :, at].shape != value.shape:
        raise SiteError(
            f"The cache of layer {layer} stores {name!r} in another shape than the kernel reads; use write='read'."
        )
    write_at(target, heads, at, value)
    setattr(kind, attribute, target)
