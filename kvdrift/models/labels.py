"""What results carry along to say where they come from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath


@dataclass(frozen=True)
class PathInfo:
    """How a path was executed."""

    label: str
    model: str
    dtype: str
    attn: str
    device: str
    controls: tuple[str, ...] = ()


def model_name(name: str) -> str:
    """A model's name without the folder it lies in; names and Hub ids stay as they are."""
    return PurePath(name).name if PurePath(name).is_absolute() else name


@dataclass(frozen=True)
class Prompt:
    """One prompt as the model saw it: its ids, the text of each id, and the text it came from (if any)."""

    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    text: str | None = None
