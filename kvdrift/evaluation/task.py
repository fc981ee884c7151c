"""What an evaluation asks a model: items with prompts, a scorer, stop strings. A task of your own is a small class."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

INVALID = "[invalid]"
"""The answer of a text in which there was nothing to extract."""


@dataclass(frozen=True)
class Item:
    """One question.

    Attributes
    ----------
    id
        Unique within the task. Sampling noise and stored records go by it, so it must not depend on how many items are
        asked for.
    prompt
        Text, or token ids.
    answer
        The right answer, or None if there is none to compare with.
    gold
        The text whose log-probability is taken right after the prompt (a leading space is part of it), or None.
    chat
        Put the prompt into the tokenizer's chat template.

    Examples
    --------
    >>> Item("q1", "2 + 2 =", answer="4", gold=" 4").chat
    False
    """

    id: str
    prompt: str | list[int]
    answer: str | None = None
    gold: str | None = None
    chat: bool = False


@dataclass(frozen=True)
class Scored:
    """What a scorer makes of a text.

    Attributes
    ----------
    answer
        What was extracted, `INVALID` if there was nothing to extract, None if the item has no answer.
    correct
        Whether it is right, None if the item has no answer.

    Examples
    --------
    >>> Scored("4", True).correct
    True
    """

    answer: str | None
    correct: bool | None


class Task(Protocol):
    """A set of questions and how to score the answers.

    `kvdrift.evaluation.jsonl.JsonlTask` and `kvdrift.evaluation.gsm8k.GSM8K` are two; one of your own is a class with
    these members (for ``engine="ray"`` it must be picklable).

    Examples
    --------
    >>> class Sums:
    ...     name = "sums"
    ...     stop = ("\\n",)
    ...     def items(self):
    ...         return [Item(f"{n}", f"{n} + {n} =", answer=str(2 * n), gold=f" {2 * n}") for n in range(50)]
    ...     def score(self, text, item):
    ...         return Scored(text.strip(), text.strip() == item.answer)
    ...     def settings(self):
    ...         return {"items": items_hash(self.items())}
    >>> Sums().score(" 4", Sums().items()[2])
    Scored(answer='4', correct=True)
    """

    @property
    def name(self) -> str:
        """What tables and figures call it."""
        ...

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end a text; what follows one, and the string itself, is cut off before scoring."""
        ...

    def items(self) -> Sequence[Item]:
        """All items, in an order that never changes, with unique ids."""
        ...

    def score(self, text: str, item: Item) -> Scored:
        """Score one text, from the text and the item alone."""
        ...

    def settings(self) -> Mapping[str, Any]:
        """All that decides items and scores, as JSON holds it: a results store refuses to mix two that differ."""
        ...


def items_hash(items: Iterable[Item]) -> str:
    """SHA-256 (hex) of items, in order: the same exactly if every field of every item is.

    Examples
    --------
    >>> items_hash([Item("1", "One")]) == items_hash([Item("1", "One")])
    True
    """
    digest = hashlib.sha256()
    for item in items:
        digest.update(json.dumps(asdict(item)).encode() + b"\n")
    return digest.hexdigest()
