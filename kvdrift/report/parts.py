"""What a section of the page is made of, and the pieces that all kinds of results share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from kvdrift.models.architecture import Architecture
from kvdrift.models.labels import PathInfo, Prompt, model_name
from kvdrift.provenance import prompt_hash
from kvdrift.report.figures import Figure, Missing


@dataclass(frozen=True)
class Tile:
    """One number to see first; ``tone`` is ``""``, ``"quiet"`` or ``"warn"``."""

    label: str
    value: str
    detail: str
    tone: str = ""


@dataclass(frozen=True)
class Column:
    """A table's column: its heading, and whether it holds numbers."""

    name: str
    number: bool = True


@dataclass(frozen=True)
class Table:
    """Rows of ready-made text; without rows, only the caption is shown."""

    heading: str
    caption: str
    columns: tuple[Column, ...]
    rows: list[list[str]]
    open: bool = False


@dataclass(frozen=True)
class Group:
    """A named block of provenance: ``(name, value)`` pairs."""

    name: str
    rows: list[tuple[str, str]]


@dataclass(frozen=True)
class Section:
    """One result on the page."""

    id: str
    heading: str
    what: str
    tiles: list[Tile]
    reading: list[str]
    notes: list[str]
    figures: list[Figure]
    missing: list[Missing]
    tables: list[Table]
    provenance: list[Group]
    command: str | None


def subject(path: PathInfo) -> str:
    """What was looked at, as in ``smollm2-135m in bfloat16``."""
    return f"{model_name(path.model)} in {path.dtype}"


# --- prompts


PROMPT_COLUMNS = (Column("prompt"), Column("hash of its tokens", False), Column("tokens"), Column("text", False))


def prompt_table(
    prompts: Sequence[Prompt], columns: Sequence[Column] = (), values: Sequence[Sequence[str]] = ()
) -> Table:
    """One row per prompt: its hash, its length, what became of it (``values``, one row each), its text."""
    *first, last = PROMPT_COLUMNS
    rows = [
        [
            str(number),
            prompt_hash(prompt.ids),
            str(len(prompt.ids)),
            *(values[number] if values else ()),
            beginning(prompt),
        ]
        for number, prompt in enumerate(prompts)
    ]
    return Table("Prompts", "Equal hashes mean equal token ids.", (*first, *columns, last), rows)


def beginning(prompt: Prompt, limit: int = 140) -> str:
    """The start of a prompt's text on one line."""
    flat = " ".join((prompt.text if prompt.text is not None else "".join(prompt.tokens)).split())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


# --- provenance


def provenance(paths: dict[str, PathInfo], architecture: Architecture, found: dict[str, Any]) -> list[Group]:
    """Everything the numbers depend on, as groups of names and values."""
    groups = [Group("paths", path_rows(paths)), Group("architecture", [("summary", str(architecture))])]
    loose = {}
    for name, value in found.items():
        if name == "command":
            continue
        if isinstance(value, dict):
            groups.append(Group(spaced(name), [(spaced(key), plain(item)) for key, item in value.items()]))
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            for item in value:
                groups.append(Group(spaced(name), [(spaced(key), plain(x)) for key, x in item.items()]))
        else:
            loose[name] = value
    if loose:
        groups.append(Group("other", [(spaced(name), plain(value)) for name, value in loose.items()]))
    return [group for group in groups if group.rows]


def weights(section: Section) -> list[str]:
    """What a preset's weights are, for each of a section's models that is one."""
    rows = [row for group in section.provenance if group.name == "models" for row in group.rows]
    return list(dict.fromkeys(value for name, value in rows if name == "weights"))


def path_rows(paths: dict[str, PathInfo]) -> list[tuple[str, str]]:
    """How the paths were executed; what they share once, what differs with their names."""
    (first, one), *_ = paths.items()
    rows = []
    for field in fields(one):
        values = {name: plain(getattr(path, field.name)) for name, path in paths.items()}
        same = len(set(values.values())) == 1
        text = values[first] if same else "; ".join(f"{name}: {value}" for name, value in values.items())
        rows.append((spaced(field.name), text))
    return rows


def spaced(name: str) -> str:
    """A key as words."""
    return str(name).replace("_", " ")


def plain(value: Any) -> str:
    """Any value as a reader would write it."""
    if value is None or value in ([], (), {}):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return "; ".join(f"{key} = {plain(item)}" for key, item in value.items())
    if isinstance(value, list | tuple) and _is_range(value):
        return f"{value[0]} to {value[-1]}"
    if isinstance(value, list | tuple):
        nested = any(isinstance(item, list | tuple) for item in value)
        return ("; " if nested else ", ").join(plain(item) for item in value)
    text = str(value)
    return model_name(text)


def _is_range(values: Sequence[Any]) -> bool:
    """Whether these are more than three whole numbers that follow each other."""
    if len(values) < 4 or any(type(value) is not int for value in values):
        return False
    return list(values) == list(range(values[0], values[0] + len(values)))
