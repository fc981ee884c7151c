"""What results carry along to say where they come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True)
class PathInfo:
    """How a path was executed."""

    label: str
    model: str
    dtype: str
    attn: str
    device: str
    controls: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Read what ``dataclasses.asdict`` made, also after it went through JSON."""
        return cls(**{**values, "controls": tuple(values["controls"])})


@dataclass(frozen=True)
class Prompt:
    """One prompt as the model saw it: its ids, the text of each id, and the text it came from (if any)."""

    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    text: str | None = None

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Read what ``dataclasses.asdict`` made, also after it went through JSON."""
        return cls(tuple(values["ids"]), tuple(values["tokens"]), values["text"])
