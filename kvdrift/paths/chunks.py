"""A prompt in several passes: how long each is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from typing import Any

from kvdrift.errors import InputError


def chunk_lengths(given: Any) -> int | tuple[int, ...] | None:
    """Read ``prefill_chunk``.

    Raises
    ------
    InputError
        If it is no length, and no list of lengths.
    """
    if given is None:
        return None
    lengths: list[Any] = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    if not lengths or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in lengths):
        raise InputError(
            f"prefill_chunk={given!r}: chunks hold at least one token; give a length, or a list of the lengths of the "
            "first passes."
        )
    return tuple(map(int, lengths)) if isinstance(given, Iterable) else int(given)


def chunks(tokens: Sequence[int], lengths: int | Sequence[int] | None, first: int = 0) -> list[list[int]]:
    """Tokens cut into passes.

    Parameters
    ----------
    tokens
        What is to be consumed.
    lengths
        As `chunk_lengths` reads them; what they leave is consumed in one more pass.
    first
        The length of a pass before those; 0 for none.

    Examples
    --------
    >>> chunks([1, 2, 3, 4, 5], (1, 2)), chunks([1, 2, 3], 2, first=1), chunks([1, 2], None)
    ([[1], [2, 3], [4, 5]], [[1], [2, 3]], [[1, 2]])
    """
    rest, found = list(tokens), []
    for size in chain([first] if first else [], repeat(lengths) if isinstance(lengths, int) else lengths or ()):
        if not rest:
            break
        found.append(rest[:size])
        rest = rest[size:]
    return [*found, rest] if rest else found
