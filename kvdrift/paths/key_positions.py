"""Where the keys sit that a kernel reads from a cache which may have let go of some."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import Cache

from kvdrift.paths.written import Written, keeps_all


def told_or_matched(
    cache: Cache, written: Written | None, layer: int, n_keys: int, consecutive: bool
) -> Sequence[int] | str | None:
    """Absolute positions of the keys that ``layer`` reads in the latest pass, where they are not simply consecutive.

    A cache that evicts is asked, if it has a method ``positions(layer)``; otherwise they are looked for among the
    entries that it was given.

    Parameters
    ----------
    cache
        The cache of a run.
    written
        What was handed to it, where it may lose some.
    layer, n_keys
        Which layer, and how many keys its kernel reads.
    consecutive
        Whether the keys end with the pass by the cache's own offset: nothing is missing then, or a window slides.

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
