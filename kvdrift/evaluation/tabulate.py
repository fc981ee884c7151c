"""From records to conditions: one row per strategy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvdrift.evaluation.conditions import Condition, NullNumbers
from kvdrift.evaluation.records import Answer, Compared, Recorded, Trial
from kvdrift.evaluation.task import INVALID
from kvdrift.statistics.detectable import detectable_difference, enough_to_tell
from kvdrift.statistics.items import item_differences
from kvdrift.statistics.multiplicity import holm
from kvdrift.statistics.null import null_share
from kvdrift.statistics.paired import mcnemar, paired_difference, sign_flip
from kvdrift.statistics.rates import item_rate
from kvdrift.statistics.survival import cumulative_incidence

Grid = NDArray[np.float64]


def conditions(evaluation: Recorded) -> tuple[Condition, ...]:
    """One condition per strategy, with Holm's correction over them."""
    found = [_Strategy(evaluation, strategy) for strategy in evaluation.strategies]
    adjusted = holm([each.p for each in found]).tolist()
    return tuple(each.condition(p) for each, p in zip(found, adjusted, strict=True))


def accuracy_differences(evaluation: Recorded, replicate: int | None = None) -> dict[str, Grid]:
    """Strategy → path a's right answers minus path b's (or a re-roll's), ``[item, seed]``."""
    grids = {}
    for strategy in evaluation.strategies:
        each = _Strategy(evaluation, strategy)
        other = each.b if replicate is None else each.null[replicate]
        grids[strategy] = _grid(each.a, _correct) - _grid(other, _correct)
    return grids


def _grid(answers: Sequence[Sequence[Answer]], read: Callable[[Answer], float]) -> Grid:
    """``[item, seed]``, NaN where there is nothing to read."""
    values = np.array([[read(answer) for answer in row] for row in answers], dtype=np.float64)
    return values.reshape(len(answers), -1 if answers else 0)


def _correct(answer: Answer) -> float:
    return math.nan if answer.correct is None else float(answer.correct)


def _diverged(answer: Answer) -> float:
    assert isinstance(answer, Compared), "path a is not held against itself"
    return float(answer.divergence is not None)


def _divergence(answer: Answer) -> float:
    assert isinstance(answer, Compared), "path a is not held against itself"
    return math.nan if answer.divergence is None else float(answer.divergence)


class _Strategy:
    """The trials of one strategy, ``[item][seed]``, of a, b and every re-roll."""

    def __init__(self, evaluation: Recorded, strategy: str) -> None:
        self.evaluation, self.strategy = evaluation, strategy
        trials: list[list[Trial]] = [
            [trial for trial in record.trials if trial.strategy == strategy] for record in evaluation.records
        ]
        self.a = [[trial.a for trial in row] for row in trials]
        self.b = [[trial.b for trial in row] for row in trials]
        self.null = [[[trial.null[r] for trial in row] for row in trials] for r in range(evaluation.replicates)]
        self.right_a, self.right_b = _grid(self.a, _correct), _grid(self.b, _correct)
        self.differences = item_differences(self.right_a, self.right_b)
        self.only_a = int((self.right_a > self.right_b).sum())
        self.only_b = int((self.right_b > self.right_a).sum())
        self.one_seed = len(evaluation.seeds) == 1

    @property
    def p(self) -> float:
        """Of no systematic direction; NaN without answers."""
        if not len(self.differences):
            return math.nan
        if self.one_seed:
            return mcnemar(self.only_a, self.only_b)
        return sign_flip(self.differences)

    def condition(self, p_holm: float) -> Condition:
        """Everything about it."""
        evaluation = self.evaluation
        n, differing = len(self.differences), self.differences[self.differences != 0]
        size = float(np.abs(differing).mean()) if len(differing) else 1.0
        return Condition(
            model=evaluation.a.model,
            strategy=self.strategy,
            n_items=len(evaluation.records),
            n_seeds=len(evaluation.seeds),
            accuracy_a=item_rate(self.right_a),
            accuracy_b=item_rate(self.right_b),
            difference=paired_difference(self.right_a, self.right_b),
            only_a=self.only_a,
            only_b=self.only_b,
            test="McNemar" if self.one_seed else "sign flip",
            p=self.p,
            p_holm=p_holm,
            enough=enough_to_tell(self.differences),
            detectable=detectable_difference(n, len(differing) / n, size=size) if n else None,
            divergence=item_rate(_grid(self.b, _diverged)),
            incidence=cumulative_incidence(_grid(self.b, _divergence), evaluation.max_new_tokens),
            invalid_a=_count(self.a, lambda answer: answer.answer == INVALID),
            invalid_b=_count(self.b, lambda answer: answer.answer == INVALID),
            truncated_a=_count(self.a, lambda answer: answer.stop == "length"),
            truncated_b=_count(self.b, lambda answer: answer.stop == "length"),
            gold=evaluation.gold,
            null=self._null() if evaluation.replicates else None,
        )

    def _null(self) -> NullNumbers:
        everyone = [answer for texts in self.null for row in texts for answer in row]
        moved = any(answer.unequal is not None for answer in everyone)
        rights = [_grid(texts, _correct) for texts in self.null]
        differences = tuple(_mean_difference(self.right_a, right) for right in rights)
        divergence = tuple(float(_grid(texts, _diverged).mean()) for texts in self.null)
        gold = self.evaluation.gold_null
        refused = None
        shares = (math.nan, math.nan, math.nan)
        if not moved:
            refused = (
                f"the re-rolls of {self.evaluation.a.label} changed no bit of any logits, so they say nothing about "
                "what the order of summation does; use longer texts, or another dtype"
            )
        else:
            observed = self.evaluation.gold
            shares = (
                null_share(float(_grid(self.b, _diverged).mean()), divergence),
                null_share(_mean_difference(self.right_a, self.right_b), differences, "two-sided"),
                math.nan if observed is None else null_share(observed.value, gold, "two-sided"),
            )
        return NullNumbers(differences, divergence, gold, refused, *shares)


def _count(answers: Sequence[Sequence[Answer]], which: Callable[[Answer], bool]) -> int:
    return sum(which(answer) for row in answers for answer in row)


def _mean_difference(a: Grid, b: Grid) -> float:
    differences = item_differences(a, b)
    return float(differences.mean()) if len(differences) else math.nan
