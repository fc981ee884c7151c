"""Running one item: every path writes its text for every strategy and seed, and reads the gold text."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from kvdrift.controls.reroll import ReRoll
from kvdrift.evaluation.records import Answer, Compared, Gold, ItemRecord, Trial
from kvdrift.evaluation.strategies import Decision, Strategy
from kvdrift.evaluation.task import Item, Task
from kvdrift.models.ending import stops
from kvdrift.models.model import Model
from kvdrift.paths.path import Path
from kvdrift.paths.sampling import following
from kvdrift.paths.stepper import Shown, Stepper, started
from kvdrift.paths.text import write
from kvdrift.plain import to_plain
from kvdrift.provenance import prompt_hash


@dataclass(frozen=True)
class Design:
    """What is run for every item.

    Attributes
    ----------
    task
        Scores the texts and knows where they stop.
    a, b
        The paths under test.
    strategies, seeds
        Crossed.
    null
        Seeds of the re-rolls of path a.
    max_new_tokens
        Where a text is cut off.
    gold
        Whether the gold text's log-probability is taken.
    stop_at_divergence
        Whether b and the re-rolls stop at the first token that differs from a's.
    ignore_eos
        Whether a text goes on past an end-of-sequence token.
    """

    task: Task
    a: Path
    b: Path
    strategies: tuple[Strategy, ...]
    seeds: tuple[int, ...]
    null: tuple[int, ...]
    max_new_tokens: int
    gold: bool
    stop_at_divergence: bool
    ignore_eos: bool = False

    def models(self, model: Model) -> tuple[Model, Model]:
        """What paths a and b run, where ``model`` is the one given to the verb."""
        return self.a.model or model, self.b.model or model


@dataclass
class _Text:
    """A text as it grows: its tokens, digests of the logits while they are compared, how far each choice was ahead."""

    tokens: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    margins: list[float | None] = field(default_factory=list)
    text: str = ""
    stop: str = "length"


class ItemRunner:
    """Runs items one after another on one model."""

    def __init__(self, model: Model, design: Design) -> None:
        self.model, self.design = model, design

    def __call__(self, item: Item) -> dict:
        """The record of one item, as JSON holds it.

        Raises
        ------
        NonFiniteError
            If a path gives logits that are not finite.
        """
        design, ids = self.design, self.model.encode(item.prompt, item.chat)
        gold_ids = self.gold_ids(item, ids)
        texts_a, gold_a = self._path(design.a, item, ids, gold_ids, None)
        texts_b, gold_b = self._path(design.b, item, ids, gold_ids, texts_a)
        nulls = [self._path(design.a, item, ids, gold_ids, texts_a, ReRoll(seed)) for seed in design.null]
        trials = tuple(
            Trial(
                strategy.label,
                seed,
                Answer(**self._answer(a, item, scored=True)),
                self._compared(b, a, item),
                tuple(self._compared(texts[number], a, item) for texts, _ in nulls),
            )
            for number, ((strategy, seed), a, b) in enumerate(zip(self._cells(), texts_a, texts_b, strict=True))
        )
        gold = None
        if gold_a is not None and gold_b is not None:
            gold = Gold(len(gold_ids), gold_a, gold_b, tuple(value for _, value in nulls if value is not None))
        prompt = item.prompt if isinstance(item.prompt, str) else None
        record = ItemRecord(item.id, prompt, prompt_hash(ids), len(ids), item.answer, gold, trials)
        return dict(to_plain(record))

    def gold_ids(self, item: Item, ids: list[int]) -> list[int]:
        """The gold text's tokens after the prompt; none if there is no gold text, or it is not asked for.

        Prompt and gold text are tokenized together where that leaves the prompt's own tokens as they are.
        """
        if item.gold is None or not self.design.gold or not isinstance(item.prompt, str):
            return []
        together = self.model.encode(item.prompt + item.gold) if not item.chat else []
        if together[: len(ids)] == ids:
            return together[len(ids) :]
        return list(self.model.tokenizer(item.gold, add_special_tokens=False)["input_ids"])

    def _cells(self) -> Iterator[tuple[Strategy, int]]:
        return ((strategy, seed) for strategy in self.design.strategies for seed in self.design.seeds)

    # --- running

    def _path(
        self,
        path: Path,
        item: Item,
        ids: list[int],
        gold_ids: Sequence[int],
        others: list[_Text] | None,
        reroll: ReRoll | None = None,
    ) -> tuple[list[_Text], float | None]:
        """All texts of one path, and its log-probability of the gold text: the prompt is consumed once for all."""
        controls = None if reroll is None else (*path.controls, reroll)
        texts, gold = [], None
        with started(path, self.model, ids, controls=controls) as start:
            first = start.step()
            for number, (strategy, seed) in enumerate(self._cells()):
                other = None if others is None else others[number]
                with start.fork() as fork:
                    texts.append(self._write(fork, first, strategy.sampler(seed, item.id), other))
            if gold_ids:
                with start.fork() as fork:
                    gold = _read(fork, first, gold_ids)
        return texts, gold

    def _write(self, stepper: Stepper, first: Shown, decision: Decision, other: _Text | None) -> _Text:
        """Free running: the path feeds itself until its text ends.

        Beside ``other`` (path a's text) logits are digested only until they differ from its own, or the tokens do: what
        comes later is never compared, and each digest costs a copy from the device.
        """
        text, comparing = _Text(), True

        def choose(logits: Tensor, step: int) -> int:
            scores = decision.scores(logits, step)
            text.margins.append(_margin(scores))
            return int(scores.argmax())

        for step, (shown, token) in enumerate(write(stepper, choose, first=first)):
            text.tokens.append(token)
            if comparing:
                text.digests.append(_digest(shown.logits))
                comparing = other is None or (text.digests[-1], token) == (other.digests[step], other.tokens[step])
            if self._ends(text, other):
                break
        return text

    def _ends(self, text: _Text, other: _Text | None) -> bool:
        """Whether the text is finished; notes why, and what it says."""
        watched = other if self.design.stop_at_divergence else None
        if watched is not None and text.tokens[-1] != watched.tokens[len(text.tokens) - 1]:
            text.stop = "diverged"
        elif text.tokens[-1] in stops(self.model, self.design.ignore_eos):
            text.stop = "eos"
        elif self._cut(text) is not None:
            text.stop = "stop string"
        elif len(text.tokens) < self.design.max_new_tokens:
            return False
        text.text = self._decode(text.tokens)
        if (end := self._cut(text)) is not None:
            text.text = text.text[:end]
        return True

    def _cut(self, text: _Text) -> int | None:
        """Where the first stop string begins, or None."""
        if self.model.tokenizer is None or not self.design.task.stop:
            return None
        whole = self._decode(text.tokens)
        found = [place for place in map(whole.find, self.design.task.stop) if place >= 0]
        return min(found, default=None)

    # --- text

    def _decode(self, tokens: list[int]) -> str:
        if self.model.tokenizer is None:
            return " ".join(map(str, tokens))
        return str(self.model.tokenizer.decode(tokens, skip_special_tokens=True))

    # --- records

    def _answer(self, text: _Text, item: Item, scored: bool) -> dict:
        found = self.design.task.score(text.text, item) if scored else None
        return {
            "tokens": tuple(text.tokens),
            "text": text.text,
            "answer": found.answer if found else None,
            "correct": None if found is None or found.correct is None else bool(found.correct),
            "stop": text.stop,
        }

    def _compared(self, text: _Text, a: _Text, item: Item) -> Compared:
        """A text held against path a's. Once they have parted, only the place where they did counts.

        Where texts stop at the divergence none is scored: those that are left did not diverge, and prove nothing.
        """
        pairs = list(zip(a.tokens, text.tokens, strict=False))
        divergence = next((step for step, (x, y) in enumerate(pairs) if x != y), None)
        digests = zip(a.digests, text.digests, strict=False)
        unequal = next((step for step, (x, y) in enumerate(digests) if x != y), None)
        margins = None if divergence is None else (a.margins[divergence], text.margins[divergence])
        answer = self._answer(text, item, scored=not self.design.stop_at_divergence)
        return Compared(**answer, divergence=divergence, unequal=unequal, margins=margins)


def _read(stepper: Stepper, first: Shown, gold: Sequence[int]) -> float:
    """Forced: log-probability (nats) of the gold tokens, one by one, in float64."""
    total = 0.0
    for shown, token in islice(write(stepper, following(gold), first=first), len(gold)):
        total += float(shown.logits.double().log_softmax(-1)[token])
    return total


def _digest(logits: Tensor) -> bytes:
    """Equal digests mean equal bits."""
    return hashlib.blake2b(logits.contiguous().view(torch.uint8).cpu().numpy().tobytes(), digest_size=16).digest()


def _margin(scores: Tensor) -> float | None:
    """How far the best score is ahead of the second; None if every other token is ruled out."""
    best, second = scores.double().topk(2).values.tolist()
    return None if second == -math.inf else best - second
