"""Lines of text for a terminal: cells in columns, sentences in bullets."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

WIDTH = 100


def columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """One line per row, each column as wide as its widest cell.

    Examples
    --------
    >>> print("\\n".join(columns([("arm", "KL"), ("float32", "0"), ("wide", "0.1")])))
    arm      KL
    float32  0
    wide     0.1
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def bullets(reading: Iterable[str], notes: Iterable[str]) -> Iterator[str]:
    """Sentences behind ``•`` and notes behind ``!``, wrapped to `WIDTH`.

    Examples
    --------
    >>> list(bullets(["one sentence"], ["a note"]))
    ['• one sentence', '! a note']
    """
    for mark, sentences in (("•", reading), ("!", notes)):
        for sentence in sentences:
            yield from textwrap.wrap(sentence, WIDTH, initial_indent=f"{mark} ", subsequent_indent="  ") or [mark]
