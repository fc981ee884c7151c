"""What results carry along to say where they come from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PathInfo:
    """How a path was executed."""

    label: str
    model: str
    dtype: str
    attn: str
    device: str
    controls: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prompt:
    """One prompt as the model saw it: its ids, the text of each id, and the text it came from (if any)."""

    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    text: str | None = None
