"""What was handed to a cache, by position, and what it handed back: from both, which positions a kernel reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

KV = tuple[Tensor, Tensor]


@dataclass
class Written:
    """The entries that a run handed to its cache.

    Attributes
    ----------
    start
        Position of the first entry: below 0 for left padding.
    """

    start: int = 0
    _entries: dict[int, list[KV]] = field(default_factory=dict)
    _end: dict[int, int] = field(default_factory=dict)
    _back: dict[int, KV] = field(default_factory=dict)
    _slots: dict[int, Sequence[int] | str] = field(default_factory=dict)

    @contextmanager
    def watching(self, cache: Cache, position: int) -> Iterator[None]:
        """Note what one pass, whose first token is at ``position``, hands to a cache and gets back from it."""
        self._back, self._slots = {}, {}
        update, own = cache.update, vars(cache).get("update")  # an update of this one object is somebody else's

        def watched(key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> KV:
            self._append(layer, position, key, value)
            back = update(key, value, layer, *args, **kwargs)
            self._back[layer] = back
            self._slots.pop(layer, None)
            return back

        vars(cache)["update"] = watched
        try:
            yield
        finally:
            if own is None:
                del vars(cache)["update"]
            else:
                vars(cache)["update"] = own

    def _append(self, layer: int, position: int, key: Tensor, value: Tensor) -> None:
        entries = self._entries.setdefault(layer, [])
        left = self._end.get(layer, self.start) - position  # what was taken back
        while left > 0 and entries:
            last = entries.pop()
            kept = last[0].shape[2] - left
            left = -kept
            if kept > 0:
                entries.append((last[0][:, :, :kept], last[1][:, :, :kept]))
        entries.append((key.detach().clone(), value.detach().clone()))  # a cache may change them in place
        self._end[layer] = position + key.shape[2]

    def entries(self, layer: int, end: int | None = None) -> KV | None:
        """Keys and values ``[1, kv_head, position, feature]`` of the positions from ``start`` to ``end``.

        All of them by default; None if the layer handed over none.
        """
        if not self._entries.get(layer):
            return None
        parts = self._entries[layer]
        if len(parts) > 1:
            parts[:] = [(torch.cat([k for k, _ in parts], 2), torch.cat([v for _, v in parts], 2))]
        key, value = parts[0]
        n = key.shape[2] if end is None else end - self.start
        return key[:, :, :n], value[:, :, :n]

    @property
    def back(self) -> dict[int, KV]:
        """What the cache handed back in the latest pass, by layer."""
        return dict(self._back)

    @property
    def layers(self) -> list[int]:
        """The layers that handed entries over."""
        return sorted(self._entries)

    def positions(self, layer: int, n_keys: int) -> Sequence[int] | str | None:
        """The position of each key that the cache handed back in the latest pass, found bit by bit.

        Returns
        -------
        sequence of int, str or None
            None where as many were handed back as were written, or nothing was seen. A sentence where there are fewer
            and they cannot be told.
        """
        written, back = self.entries(layer), self._back.get(layer)
        if written is None or back is None or back[0].shape[2] != n_keys or n_keys >= written[0].shape[2]:
            return None
        if layer not in self._slots:
            self._slots[layer] = self.place(written, back)
        return self._slots[layer]

    def place(self, written: KV, back: KV) -> Sequence[int] | str:
        """The positions of entries read, found bit by bit among those written; a sentence if they cannot be told."""
        if any(x.shape[1] != y.shape[1] or x.shape[3] != y.shape[3] for x, y in zip(written, back, strict=True)):
            return "the cache hands back entries of another shape than it was given"
        heads = [match(*(x[0, head] for x in written), *(x[0, head] for x in back)) for head in range(back[0].shape[1])]
        if any(found is None for found in heads):
            return "the cache has evicted entries, and those it hands back are not what it was given, bit for bit"
        if any(found != heads[0] for found in heads):
            return "the cache has evicted entries, other ones in each head"
        assert heads[0] is not None
        return [self.start + slot for slot in heads[0]]

    def copy(self) -> Written:
        """Its own list of the same entries."""
        entries = {layer: list(parts) for layer, parts in self._entries.items()}
        return Written(self.start, entries, dict(self._end), dict(self._back), dict(self._slots))


def told_or_matched(
    cache: Cache, written: Written | None, layer: int, n_keys: int, consecutive: bool
) -> Sequence[int] | str | None:
    """Absolute positions of the keys that ``layer`` reads in the latest pass, where they are not simply consecutive.

    A cache that evicts is asked, if it has a method ``positions(layer)``; otherwise they are looked for among the
    entries ``written``, unless the keys are ``consecutive`` by the cache's own offset: nothing is missing then, or a
    window slides.

    Returns
    -------
    sequence of int, str or None
        Positions as the cache tells them, or as they were matched; a sentence if they cannot be told; None if none are
        missing.
    """
    tells = getattr(cache, "positions", None)
    if callable(tells) and not keeps_all(cache):
        told = list(tells(layer))
        if told and not isinstance(told[0], int):
            if any(list(head) != list(told[0]) for head in told):
                return "the cache has evicted entries, other ones in each head"
            told = list(told[0])
        if len(told) != n_keys:
            return f"the cache tells {len(told)} positions where {n_keys} keys are read"
        return told
    return None if written is None or consecutive else written.positions(layer, n_keys)


def match(key: Tensor, value: Tensor, read_key: Tensor, read_value: Tensor) -> list[int] | None:
    """Which entry, of those written, each entry read is, bit for bit; each at most once.

    Parameters
    ----------
    key, value
        What was written, ``[position, feature]``.
    read_key, read_value
        What was read, ``[slot, feature]``.

    Returns
    -------
    list of int or None
        The place of each slot; None if an entry is none of those written, or there are more of it.
    """
    if key.dtype != read_key.dtype or value.dtype != read_value.dtype:
        return None
    places: dict[bytes, list[int]] = {}
    for place, row in enumerate(_bytes(key, value)):
        places.setdefault(row, []).append(place)
    rows = _bytes(read_key, read_value)
    found: list[int] = []
    for row in reversed(rows):  # of entries that are alike the newest: caches let go of the oldest
        if not places.get(row):
            return None
        found.append(places[row].pop())
    return found[::-1]


def _bytes(key: Tensor, value: Tensor) -> list[bytes]:
    rows = [x.detach().cpu().contiguous().view(torch.uint8).numpy() for x in (key, value)]
    return [k.tobytes() + v.tobytes() for k, v in zip(*rows, strict=True)]


def keeps_all(cache: Cache) -> bool:
    """Whether a cache is transformers' own, whose offsets say which positions it holds."""
    kinds = [
        type(cache),
        *(type(layer) for layer in getattr(cache, "layers", ()) if isinstance(layer, CacheLayerMixin)),
    ]
    return all(kind.__module__.startswith("transformers.") for kind in kinds)
