"""Small HTML for Jupyter: every text is escaped, and no colour is set, so that light and dark themes both read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any


def block(headline: str, *parts: str) -> str:
    """A bold headline over parts that are HTML already; empty ones are left out.

    Examples
    --------
    >>> block("a < b", listing(["so"]))
    '<div><p><b>a &lt; b</b></p><ul><li>so</li></ul></div>'
    """
    return f"<div><p><b>{escape(headline)}</b></p>{''.join(parts)}</div>"


def paragraph(text: str) -> str:
    """A paragraph, or nothing for an empty text."""
    return f"<p>{escape(text)}</p>" if text else ""


def listing(sentences: Iterable[str], numbered: bool = False) -> str:
    """A list of sentences, or nothing if there is none."""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    kind = "ol" if numbered else "ul"
    return f"<{kind}>{items}</{kind}>" if items else ""


def table(rows: Iterable[Sequence[Any]], columns: Sequence[str] = ()) -> str:
    """A table. Without ``columns`` the first cell of each row heads it; nothing if there is no row.

    Examples
    --------
    >>> table([("layers", 30)])
    '<table><tbody><tr><th>layers</th><td>30</td></tr></tbody></table>'
    """
    body = ""
    for row in rows:
        cells = [f"<td>{escape(str(cell))}</td>" for cell in row]
        if not columns:
            cells[0] = f"<th>{escape(str(row[0]))}</th>"
        body += f"<tr>{''.join(cells)}</tr>"
    if not body:
        return ""
    heads = "".join(f"<th>{escape(name)}</th>" for name in columns)
    return f"<table>{f'<thead><tr>{heads}</tr></thead>' if columns else ''}<tbody>{body}</tbody></table>"
