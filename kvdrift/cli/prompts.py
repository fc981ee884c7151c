"""Prompts and number lists as they are typed at a terminal."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

from kvdrift.errors import InputError

KEYS = ("prompt", "question", "text", "ids")
_RANGE = re.compile(r"(\d{1,7})(?:-(\d{1,7}))?", re.ASCII)


def gather(texts: list[str] | None, file: Path | None) -> list[str | list[int]]:
    """The prompts of ``--prompt`` (repeatable), then those of ``--prompts``.

    Raises
    ------
    InputError
        If there is none, or the file cannot be used; the sentence names the line.
    """
    prompts: list[str | list[int]] = list(texts or [])
    if file is not None:
        prompts += read_jsonl(file)
    if not prompts:
        raise InputError("There is no prompt: give --prompt TEXT (repeatable) or --prompts FILE.jsonl.")
    for number, prompt in enumerate(prompts, start=1):
        if not prompt or (isinstance(prompt, str) and not prompt.strip()):
            raise InputError(f"Prompt {number} is empty; give at least one word or token id.")
    return prompts


def read_jsonl(file: Path) -> list[str | list[int]]:
    """One prompt a line: a JSON string, or an object with ``prompt``, ``question``, ``text`` or ``ids``.

    Raises
    ------
    InputError
        If the file cannot be read or a line holds something else.

    Examples
    --------
    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp(), "prompts.jsonl")
    >>> file.write_text('"One plus one is"\\n{"ids": [1, 2, 3]}\\n')
    37
    >>> read_jsonl(file)
    ['One plus one is', [1, 2, 3]]
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InputError(f"Cannot read the prompts in {file}: {reason}.") from error
    prompts = [_prompt(line, file, number) for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise InputError(f"{file} holds no prompt; write one JSON string or object a line.")
    return prompts


def _prompt(line: str, file: Path, number: int) -> str | list[int]:
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError) as error:  # also a number of too many digits, or brackets in brackets
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error).rstrip(".")
        raise InputError(f"{file}, line {number} is not JSON ({reason}).") from error
    if isinstance(value, dict):
        value = next((value[key] for key in KEYS if key in value), None)
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return value
    raise InputError(
        f"{file}, line {number} holds no prompt; expected a JSON string or an object with one of "
        f"{', '.join(KEYS)} (ids is a list of whole numbers)."
    )


def numbers(text: str, option: str) -> list[int]:
    """``"0,3,5-8"`` as ``[0, 3, 5, 6, 7, 8]``.

    Raises
    ------
    InputError
        If it is anything else.
    """
    found: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (0, -1) if match is None else (int(match[1]), int(match[2] or match[1]))
        if last < first:
            raise InputError(f"{option} takes whole numbers and ranges such as 0,3,5-8, not {text!r}.")
        found += range(first, last + 1)
    return found


def numbers_or_all(text: str | None, option: str) -> list[int] | None:
    """`numbers`, or None where the option was left out."""
    return None if text is None else numbers(text, option)


def places(text: str | None) -> Literal["current", "past", "all"] | list[int] | None:
    """What ``--positions`` names: a word, or a list of absolute positions.

    Raises
    ------
    InputError
        If it is neither.
    """
    if text == "current":
        return "current"
    if text == "past":
        return "past"
    if text == "all":
        return "all"
    try:
        return numbers_or_all(text, "--positions")
    except InputError:
        raise InputError(
            f"--positions takes current, past, all, or whole numbers and ranges such as 0,3,5-8, not {text!r}."
        ) from None


def names(text: str) -> list[str]:
    """``"a, b"`` as ``["a", "b"]``."""
    return [part.strip() for part in text.split(",") if part.strip()]
