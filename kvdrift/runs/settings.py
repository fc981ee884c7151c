"""Two sets of settings side by side: what differs, by dotted name, in one line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

NAMED = 4
"""So many differences are spelled out."""
WIDTH = 60
"""A value is shortened to so many characters."""
_NOTHING = object()


def differences(there: Any, here: Any, skip: frozenset[str] = frozenset()) -> str:
    """Name what differs between two JSON values, with both values.

    Parameters
    ----------
    there, here
        The values; mappings and lists of one length are compared entry by entry.
    skip
        Dotted names that do not count.

    Returns
    -------
    str
        ``"software.torch: 2.12 there, 2.13 here; …"``, the shortest names first; empty if nothing differs.

    Examples
    --------
    >>> differences({"seed": 0, "software": {"torch": "2.12"}}, {"seed": 0, "software": {"torch": "2.13"}})
    'software.torch: 2.12 there, 2.13 here'
    """
    by_depth = sorted(_differences(there, here, "", skip), key=lambda difference: difference[0].count("."))
    found = [f"{name}: {said}" for name, said in by_depth]
    more = f"; and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return "; ".join(found[:NAMED]) + more


def _differences(there: Any, here: Any, name: str, skip: frozenset[str]) -> Iterator[tuple[str, str]]:
    if name in skip or _text(there) == _text(here):
        return
    if isinstance(there, dict) and isinstance(here, dict):
        for key in dict.fromkeys((*there, *here)):
            dotted = f"{name}.{key}" if name else str(key)
            yield from _differences(there.get(key, _NOTHING), here.get(key, _NOTHING), dotted, skip)
    elif isinstance(there, list) and isinstance(here, list):
        if len(there) != len(here):
            yield name, f"{len(there)} entries there, {len(here)} here"
            return
        for place, (one, other) in enumerate(zip(there, here, strict=True)):
            yield from _differences(one, other, f"{name}.{place}", skip)
    else:
        yield name, f"{_shown(there)} there, {_shown(here)} here"


def _text(value: Any) -> str | None:
    return None if value is _NOTHING else json.dumps(value, sort_keys=True)


def _shown(value: Any) -> str:
    if value is _NOTHING:
        return "nothing"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= WIDTH else text[: WIDTH - 1] + "…"
