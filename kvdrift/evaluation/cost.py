"""What an evaluation will cost, said before it starts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from kvdrift.controls import Control
from kvdrift.controls.reroll import ReRoll
from kvdrift.evaluation.trial import Design
from kvdrift.models.model import Model
from kvdrift.paths.path import Path

WARM, TIMED = 1, 2


@dataclass(frozen=True)
class Cost:
    """An upper bound: texts that end early cost less.

    Attributes
    ----------
    items
        How many are still to run.
    tokens
        Tokens that all paths write and read together, at most.
    seconds
        Estimated time of one worker, at most, from a few timed steps of each path at the longest text.
    """

    items: int
    tokens: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.items} items, at most {self.tokens:,} tokens on all paths, at most about {_duration(self.seconds)} "
            "on one worker (texts that end early take less)"
        )


def estimate(model: Model, design: Design, prompts: Sequence[Sequence[int]], gold_tokens: Sequence[int]) -> Cost:
    """Time a few steps of each path and multiply.

    Parameters
    ----------
    model, design
        What will run.
    prompts
        Ids of the items that are still to run.
    gold_tokens
        Length of their gold texts.
    """
    if not prompts:
        return Cost(0, 0, 0.0)
    texts = len(design.strategies) * len(design.seeds)
    per_item = texts * design.max_new_tokens + (sum(gold_tokens) / len(gold_tokens) if gold_tokens else 0)
    middle = sorted(prompts, key=len)[len(prompts) // 2]
    end = int(median(map(len, prompts)) + design.max_new_tokens)
    limit = model.architecture.max_positions
    longest = [middle[i % len(middle)] for i in range(end if limit is None else min(end, limit - WARM - TIMED))]
    seconds = 0.0
    arms: list[tuple[Path, Control | None, int]] = [(design.a, None, 1), (design.b, None, 1)]
    arms += [(design.a, ReRoll(seed), len(design.null)) for seed in design.null[:1]]
    for path, extra, times in arms:
        seconds += times * _step_seconds(model, path, longest, extra) * per_item * len(prompts)
    return Cost(len(prompts), round((2 + len(design.null)) * per_item * len(prompts)), seconds)


def _step_seconds(model: Model, path: Path, ids: list[int], extra: Control | None) -> float:
    run = path.start(model, ids, None if extra is None else (*path.controls, extra))
    try:
        run.step()
        for _ in range(WARM):
            run.step(ids[0])
        start = time.perf_counter()
        for _ in range(TIMED):
            run.step(ids[0])
        return (time.perf_counter() - start) / TIMED
    finally:
        run.close()


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
