"""A task from your own prompts: a file with one JSON object a line, or a list of them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvdrift.errors import FileError, InputError, KvdriftError
from kvdrift.evaluation.scorers import Scorer, scorer_of
from kvdrift.evaluation.task import Item, Scored, items_hash
from kvdrift.settings import settings_of

Rows = str | os.PathLike[str] | Iterable[Mapping[str, Any] | str]


@dataclass(frozen=True)
class Row:
    """One JSON object, with where it came from for the sentence that refuses it.

    Attributes
    ----------
    values
        The object.
    where
        ``"questions.jsonl, line 3"``, or ``"item 2"`` of a list.
    error
        What to raise: `FileError` for a file, `InputError` for a list.
    """

    values: Mapping[str, Any]
    where: str
    error: type[KvdriftError]

    def refuse(self, why: str) -> KvdriftError:
        """The error to raise."""
        return self.error(f"{self.where}: {why}")

    def get(self, key: str) -> Any:
        """The value of a key that must be there."""
        if key not in self.values:
            found = ", ".join(map(repr, self.values)) or "none"
            raise self.refuse(f"there is no {key!r}; the keys are {found}.")
        return self.values[key]

    def text(self, key: str) -> str:
        """The value of a key that must be a text with something in it."""
        value = self.get(key)
        if not isinstance(value, str) or not value.strip():
            raise self.refuse(f"{key!r} must be a text that is not empty, not {_short(value)}.")
        return value


def read_rows(source: Rows) -> list[Row]:
    """Read a JSON-lines file, or take a list of mappings (a text stands for ``{"prompt": text}``).

    Parameters
    ----------
    source
        Path of a UTF-8 file with one object a line (empty lines do not count), or an iterable.

    Returns
    -------
    list
        At least one row.

    Raises
    ------
    FileError
        The file is missing, unreadable or empty, or a line is not a JSON object (with its number).
    InputError
        A list is empty, or holds something else.

    Examples
    --------
    >>> read_rows([{"prompt": "2 + 2 ="}])[0].get("prompt")
    '2 + 2 ='
    """
    rows = _file_rows(Path(source)) if isinstance(source, str | os.PathLike) else _list_rows(source)
    if not rows:
        if isinstance(source, str | os.PathLike):
            raise FileError(f"{source} is empty; one JSON object a line is needed.")
        raise InputError("An empty list of items was given; give at least one.")
    return rows


class JsonlTask:
    """Your own prompts, and answers if there are any, as a task.

    Parameters
    ----------
    source
        Path of a JSON-lines file, or a list of mappings (or of texts: prompts alone).
    prompt, answer, id, gold
        Keys. ``prompt``: text or token ids; every item needs it. ``answer``: text or number (or null); without it
        nothing is scored. ``id``: text or number; without it the items are counted from 0. ``gold``: the text whose
        log-probability is taken after the prompt; without it, the answer, after a space if it continues the prompt's
        line. A key that some items have and others lack is refused.
    stop
        Strings that end a text, such as ``("\\n",)`` for answers of one line.
    scorer
        One of `kvdrift.evaluation.scorers.SCORERS`: ``"exact"``, ``"normalised"`` (the whole text, as SQuAD compares
        answers), ``"contains"``, ``"first-number"``, ``"choice"``. Or a function: ``scorer(text, item)`` returns a
        `Scored`, or whether the text is right. It is asked only about items with an answer.
    chat
        Put the prompts into the tokenizer's chat template.
    name
        What tables call it. Default: the file's name.

    Raises
    ------
    FileError, InputError
        From a file or a list: see `read_rows`; a missing or unusable value (with line and keys), an id twice, an answer
        that the scorer cannot use. There is no scorer of that name.

    Examples
    --------
    >>> import kvdrift as kd
    >>> task = kd.JsonlTask([{"prompt": "2 + 2 =", "answer": 4}], stop=("\\n",))
    >>> task.items()[0]
    Item(id='0', prompt='2 + 2 =', answer='4', gold=' 4', chat=False)
    >>> task.score(" 4", task.items()[0])
    Scored(answer='4', correct=True)
    """

    def __init__(
        self,
        source: Rows,
        *,
        prompt: str = "prompt",
        answer: str | None = None,
        id: str | None = None,
        gold: str | None = None,
        stop: Sequence[str] = (),
        scorer: str | Scorer = "normalised",
        chat: bool = False,
        name: str | None = None,
    ) -> None:
        rows = read_rows(source)
        answer_key, id_key, gold_key = _key(rows, answer, "answer"), _key(rows, id, "id"), _key(rows, gold, "gold")
        self.name = name or (Path(source).stem if isinstance(source, str | os.PathLike) else "prompts")
        self.stop = stop_strings(stop)
        self.scorer = scorer
        self._score = scorer_of(scorer)
        self._items = []
        for i, row in enumerate(rows):
            asked = _prompt(row, prompt, chat)
            right = None if answer_key is None else _text_or_number(row, answer_key)
            told = _continuing(asked, right, chat) if gold_key is None else _text_or_number(row, gold_key)
            named = str(i) if id_key is None else _text_or_number(row, id_key)
            if named is None:
                raise row.refuse(f"{id_key!r} is null; give every item an id, or none.")
            self._items.append(Item(named, asked, right, told, chat))
        refuse_repeated_ids(rows, self._items)
        if isinstance(scorer, str):
            for row, item in zip(rows, self._items, strict=True):
                _refuse_unusable(row, item, self._score)

    def items(self) -> list[Item]:
        """All items, in the order of the file."""
        return list(self._items)

    def score(self, text: str, item: Item) -> Scored:
        """Score one text.

        Raises
        ------
        InputError
            The scorer returned neither a `Scored` nor True or False.
        """
        if item.answer is None:
            return Scored(None, None)
        scored = self._score(text, item)
        if isinstance(scored, Scored):
            return scored
        if scored not in (True, False):
            raise InputError(f"The scorer returned {scored!r} for item {item.id}; return True, False or a Scored.")
        return Scored(text.strip(), bool(scored))

    def settings(self) -> dict[str, Any]:
        """What decides items and scores: a hash of the items, the scorer, the stop strings."""
        return {"items": items_hash(self._items), "stop": list(self.stop), "scorer": settings_of(self.scorer)}


def stop_strings(stop: Sequence[str]) -> tuple[str, ...]:
    """Check stop strings: a sequence of texts, none of them empty.

    Examples
    --------
    >>> stop_strings(["\\n"])
    ('\\n',)
    """
    if isinstance(stop, str) or not all(isinstance(s, str) and s for s in stop):
        raise InputError(f"stop={stop!r}: give a list of texts that are not empty, such as ['\\n'].")
    return tuple(stop)


def refuse_repeated_ids(rows: Sequence[Row], items: Sequence[Item]) -> None:
    """Raise if two items have the same id, with where both stand."""
    first: dict[str, Row] = {}
    for row, item in zip(rows, items, strict=True):
        if item.id in first:
            raise row.refuse(f"the id {item.id!r} is that of {first[item.id].where} too; ids must be unique.")
        first[item.id] = row


def _refuse_unusable(row: Row, item: Item, scorer: Scorer) -> None:
    """Raise if a scorer can do nothing with an item's answer: before anything has run, with where it stands."""
    if item.answer is None:
        return
    try:
        scorer(item.answer, item)
    except InputError as error:
        raise row.refuse(str(error)) from error


def _file_rows(path: Path) -> list[Row]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        why = error.strerror or error
        raise FileError(f"Cannot read {path}: {why}; give a file with one JSON object a line.") from error
    except UnicodeDecodeError as error:
        raise FileError(f"{path} is not UTF-8 text ({error.reason}); one JSON object a line is needed.") from error
    numbered = [(f"{path}, line {n}", line) for n, line in enumerate(lines, 1) if line.strip()]
    return [Row(_object(line, where), where, FileError) for where, line in numbered]


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise FileError(f"{where}: not JSON ({error.msg}, column {error.colno}); give one object a line.") from error
    except (ValueError, RecursionError) as error:  # a number of too many digits, or brackets in brackets
        raise FileError(f"{where}: cannot be read ({error}); give one object a line.") from error
    if not isinstance(values, dict):
        raise FileError(f"{where}: {_short(values)} is not an object; one a line is needed.")
    return values


def _list_rows(source: Iterable[Mapping[str, Any] | str]) -> list[Row]:
    rows = []
    for i, values in enumerate(source):
        if isinstance(values, str):
            values = {"prompt": values}
        if not isinstance(values, Mapping):
            raise InputError(f"item {i}: {_short(values)} is neither a mapping nor a text.")
        rows.append(Row(values, f"item {i}", InputError))
    return rows


def _key(rows: Sequence[Row], given: str | None, default: str) -> str | None:
    """The key to read: the one given, or the default if any item has it (then all must)."""
    if given is not None:
        return given
    return default if any(default in row.values for row in rows) else None


def _prompt(row: Row, key: str, chat: bool) -> str | list[int]:
    value = row.get(key)
    if isinstance(value, str) or not isinstance(value, Sequence):
        return row.text(key)
    if not value or not all(isinstance(token, int) and not isinstance(token, bool) for token in value):
        raise row.refuse(f"{key!r} must be a text or a list of token ids, not {_short(value)}.")
    if chat:
        raise row.refuse(f"{key!r} holds token ids, which a chat template cannot take; give texts, or leave out chat.")
    return list(value)


def _text_or_number(row: Row, key: str) -> str | None:
    value = row.get(key)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise row.refuse(f"{key!r} must be a text, a number or null, not {_short(value)}.")


def _continuing(prompt: str | list[int], answer: str | None, chat: bool) -> str | None:
    """The answer as it would be written after the prompt."""
    if answer is None or chat or (isinstance(prompt, str) and prompt[-1].isspace()):
        return answer
    return f" {answer}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
