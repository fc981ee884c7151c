"""How wide text will be, estimated, so that lines are broken and lanes are reserved before a browser draws them."""

from __future__ import annotations

from functools import cache

_EM = {
    **dict.fromkeys("iljI|'.,:;! ", 0.32), **dict.fromkeys("ftr()[]{}/\\-\"·", 0.41),
    **dict.fromkeys("mMwW%@—←→⏎", 0.95), **dict.fromkeys("ABCDEFGHJKLNOPQRSTUVXYZ&‖", 0.71),
    **dict.fromkeys("+−=<>≤≥~±×", 0.84),
}  # fmt: skip
_OTHER, _WIDE, _BOLD = 0.62, 1.05, 1.13
"""Widths in em of a wide sans serif (DejaVu, Verdana); system fonts are narrower, so estimates err on the safe side."""


@cache
def width(text: str, size: float, bold: bool = False) -> float:
    """Pixels that one line of plain text takes in a font of ``size`` pixels.

    Examples
    --------
    >>> width("will", 12) < width("WILL", 12) < width("WILL", 12, bold=True)
    True
    """
    ems = sum(_EM.get(c, _OTHER if ord(c) < 0x1100 else _WIDE) for c in text)
    return ems * size * (_BOLD if bold else 1.0)


def wrap(text: str, pixels: float, size: float, bold: bool = False) -> list[str]:
    """Lines of at most ``pixels``, broken at spaces; a word that is longer than a line is cut.

    Examples
    --------
    >>> wrap("one two three", 60, 12)
    ['one two', 'three']
    >>> wrap("", 60, 12)
    []
    """
    lines: list[str] = []
    line = ""
    for word in text.split():
        joined = f"{line} {word}" if line else word
        if width(joined, size, bold) <= pixels:
            line = joined
            continue
        if line:
            lines.append(line)
        while width(word, size, bold) > pixels:
            fits = next(n for n in range(len(word) - 1, 0, -1) if n == 1 or width(word[:n], size, bold) <= pixels)
            lines.append(word[:fits])
            word = word[fits:]
        line = word
    return [*lines, line] if line else lines
