"""What an evaluation keeps of every item: all paths' texts, where they part, the gold text's log-probability."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvdrift.models.labels import PathInfo
from kvdrift.statistics.paired import Difference

STOPS = ("eos", "stop string", "length", "diverged")
"""Why a text ended: the model's end token, one of the task's stop strings, ``max_new_tokens``, or (with
``stop_at_divergence``) the first token that differs from path a's."""


@dataclass(frozen=True)
class Answer:
    """One path's text for one item, under one strategy and seed.

    Attributes
    ----------
    tokens
        Generated ids, the end token included.
    text
        Their text, cut at the stop string if there was one.
    answer
        What the task extracted: ``"[invalid]"`` if there was nothing to extract, None if the item has no answer, or the
        text was not scored (with ``stop_at_divergence`` only path a's are).
    correct
        Whether it is right; None like ``answer``.
    stop
        One of `STOPS`.
    """

    tokens: tuple[int, ...]
    text: str
    answer: str | None
    correct: bool | None
    stop: str


@dataclass(frozen=True)
class Compared(Answer):
    """A path's text held against path a's: each path feeds itself (free running).

    Attributes
    ----------
    divergence
        The first step at which it took another token than path a (one of the two ending counts), or None.
    unequal
        The first step at which its logits differed from path a's in any bit, while both had read the same tokens;
        None if they never did.
    margins
        At the divergence, how far the best token was ahead of the second in path a and in this path: top-2 gap of what
        decided (logits under greedy; processed logits plus noise under sampling), None where no second token was
        allowed. None without a divergence.
    """

    divergence: int | None
    unequal: int | None
    margins: tuple[float | None, float | None] | None


@dataclass(frozen=True)
class Trial:
    """One strategy and seed over one item: path a, path b, and the re-rolls of path a.

    Attributes
    ----------
    strategy, seed
        Which.
    a, b
        The two paths' texts.
    null
        Path a with re-rolled sums, one text per replicate.
    """

    strategy: str
    seed: int
    a: Answer
    b: Compared
    null: tuple[Compared, ...] = ()


@dataclass(frozen=True)
class Gold:
    """The log-probability (nats) that each path gives to the gold text after the prompt, fed token by token.

    Attributes
    ----------
    n_tokens
        Length of the gold text.
    a, b
        Sums over its tokens.
    null
        The same for the re-rolls of path a.
    """

    n_tokens: int
    a: float
    b: float
    null: tuple[float, ...] = ()


@dataclass(frozen=True)
class ItemRecord:
    """Everything about one finished item: one line of the store.

    Attributes
    ----------
    item
        The item's id.
    prompt
        Its text, or None if it was given as ids.
    prompt_hash, n_prompt
        `kvdrift.provenance.prompt_hash` of its ids, and how many they are.
    reference
        The right answer, or None.
    gold
        None if the item has no gold text, or it was not asked for.
    trials
        One per strategy and seed.
    """

    item: str
    prompt: str | None
    prompt_hash: str
    n_prompt: int
    reference: str | None
    gold: Gold | None
    trials: tuple[Trial, ...]


class Recorded(Protocol):
    """What an `Evaluation` has that its conditions are computed from."""

    @property
    def a(self) -> PathInfo:
        """How path a was executed."""

    @property
    def strategies(self) -> tuple[str, ...]:
        """Names, in order."""

    @property
    def seeds(self) -> tuple[int, ...]:
        """Of the sampling."""

    @property
    def max_new_tokens(self) -> int:
        """Where texts were cut off."""

    @property
    def replicates(self) -> int:
        """Re-rolls of path a per item."""

    @property
    def records(self) -> tuple[ItemRecord, ...]:
        """One per item."""

    @property
    def gold(self) -> Difference | None:
        """Mean log-probability of the gold texts, a − b (nats)."""

    @property
    def gold_null(self) -> tuple[float, ...]:
        """The same of path a − its re-roll, ``[replicate]``."""

    def rows(self, items: list[str]) -> list[int]:
        """Where items stand in ``records``."""
