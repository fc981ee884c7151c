"""The result of `kvdrift.evaluate`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from kvdrift.evaluation.conditions import Condition, Difference, Overall
from kvdrift.evaluation.overall import overall
from kvdrift.evaluation.records import Answer, Compared, ItemRecord
from kvdrift.evaluation.tabulate import conditions
from kvdrift.files import write_atomically
from kvdrift.models.architecture import Architecture
from kvdrift.models.labels import PathInfo
from kvdrift.plain import from_plain, to_plain
from kvdrift.result import Result, Saved, say, table_maker
from kvdrift.shapes import Shaped
from kvdrift.statistics.items import item_differences
from kvdrift.statistics.paired import paired_difference

What = Literal["conditions", "trials", "items"]


@dataclass(frozen=True, repr=False)
class Evaluation(Saved, Result):
    """Both paths' texts and answers over the items of a task, and path a's re-rolls beside them.

    Every path feeds itself (free running); the noise of a sampling strategy is the same for all paths.

    Attributes
    ----------
    a, b
        How the two paths were executed.
    architecture
        Of path a's model.
    task
        Its name.
    strategies, seeds
        Crossed, in order.
    max_new_tokens
        Where texts were cut off.
    replicates
        Re-rolls of path a per item.
    records
        One per item, in the task's order.
    token_texts
        The text of every token id in the records.
    settings, provenance
        What decides the numbers, and what they were made with.
    notes
        What the reader should know.

    Examples
    --------
    >>> import kvdrift as kd
    >>> found = kd.evaluate(kd.models.tiny("llama"), [[1, 2, 3], [4, 5, 6]], max_new_tokens=4, progress=False)
    >>> [(each.strategy, each.n_items) for each in found.conditions]
    [('greedy', 2)]
    """

    saved_as: ClassVar[str] = "evaluation"
    in_tensors: ClassVar[tuple[str, ...]] = ("records",)

    a: PathInfo
    b: PathInfo
    architecture: Architecture
    task: str
    strategies: tuple[str, ...]
    seeds: tuple[int, ...]
    max_new_tokens: int
    replicates: int
    records: tuple[ItemRecord, ...]
    token_texts: dict[int, str]
    settings: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def _shapes(self) -> Iterator[Shaped]:
        for record in self.records:
            for null in (each.null for each in (record.gold, *record.trials) if each is not None):
                yield f"null of {record.item}", (len(null),), ("replicate",)

    def _lengths(self) -> dict[str, int]:
        return {"replicate": self.replicates}

    # --- numbers

    @cached_property
    def conditions(self) -> tuple[Condition, ...]:
        """One per strategy: both paths, paired, with the null beside them."""
        return conditions(self)

    @cached_property
    def gold(self) -> Difference | None:
        """Mean over items of the gold text's log-probability, path a − path b (nats); None if not taken."""
        golds = [record.gold for record in self.records if record.gold is not None]
        if not golds:
            return None
        a, b = (np.array([[value] for value in column]) for column in zip(*((g.a, g.b) for g in golds), strict=True))
        return paired_difference(a, b)

    @cached_property
    def gold_null(self) -> tuple[float, ...]:
        """The same of path a − its re-roll, ``[replicate]``; like it without items that both rule out."""
        golds = [record.gold for record in self.records if record.gold is not None]
        if not golds:
            return ()
        a = [[gold.a] for gold in golds]
        gaps = [item_differences(a, [[gold.null[r]] for gold in golds]) for r in range(self.replicates)]
        return tuple(float(gap.mean()) if len(gap) else math.nan for gap in gaps)

    def overall(self, *others: Evaluation) -> Overall:
        """All conditions together, those of evaluations of other models over the same items too.

        Raises
        ------
        InputError
            If the evaluations do not share their items.
        """
        return overall([self, *others])

    # --- items

    def rows(self, items: list[str]) -> list[int]:
        """Where items stand in ``records``."""
        place = {record.item: number for number, record in enumerate(self.records)}
        return [place[item] for item in items]

    def texts(self, items: list[str]) -> list[str | None]:
        """The prompts of items."""
        return [self.records[row].prompt for row in self.rows(items)]

    # --- tables and words

    def to_dataframe(self, what: What = "conditions") -> Any:
        """A `pandas.DataFrame`.

        Parameters
        ----------
        what
            ``"conditions"``: one row per strategy, named as in `kvdrift.evaluation.conditions.Condition` (rates and
            differences with their ``_low`` and ``_high``). ``"trials"``: one row per item, strategy, seed and arm
            (``a``, ``b``, ``null 0``, …), with tokens, text, answer, stop reason, divergence and margins. ``"items"``:
            one row per item, with the gold log-probabilities.

        Raises
        ------
        InputError
            For another word.
        """
        import pandas as pd

        makers = {"conditions": _condition_rows, "trials": _trial_rows, "items": _item_rows}
        return pd.DataFrame(table_maker(what, makers)(self))

    def to_parquet(self, path: str | Path) -> Path:
        """Write the trials to a Parquet file, atomically; needs ``kvdrift[eval]``."""
        return write_atomically(path, lambda temporary: self.to_dataframe("trials").to_parquet(temporary, index=False))

    def reading(self) -> list[str]:
        """What the evaluation says, in sentences: direction and rate apart, each against its null."""
        return say(self, "reading")

    # --- its file: the records as JSON in one tensor, which a header would not hold

    def _to_tensors(self) -> dict[str, Tensor]:
        text = json.dumps(to_plain(self.records)).encode()
        return {"records": torch.frombuffer(bytearray(text), dtype=torch.uint8)}

    @classmethod
    def _from_tensors(cls, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> dict[str, Any]:
        return {"records": from_plain(tuple[ItemRecord, ...], json.loads(tensors["records"].numpy().tobytes()))}


def _condition_rows(evaluation: Evaluation) -> list[dict[str, Any]]:
    rows = []
    for condition in evaluation.conditions:
        row: dict[str, Any] = {}
        for name, value in asdict(condition).items():
            if name in ("incidence", "null"):
                continue
            if isinstance(value, dict):
                row |= {name: value["value"], f"{name}_low": value["low"], f"{name}_high": value["high"]}
            else:
                row[name] = value
        null = condition.null
        row |= {
            "p_null_divergence": None if null is None else null.p_divergence,
            "p_null_difference": None if null is None else null.p_difference,
            "p_null_gold": None if null is None else null.p_gold,
        }
        rows.append(row)
    return rows


def _trial_rows(evaluation: Evaluation) -> list[dict[str, Any]]:
    rows = []
    for record in evaluation.records:
        for trial in record.trials:
            arms: dict[str, Answer] = {"a": trial.a, "b": trial.b}
            arms |= {f"null {number}": answer for number, answer in enumerate(trial.null)}
            for arm, answer in arms.items():
                key = {"item": record.item, "strategy": trial.strategy, "seed": trial.seed, "arm": arm}
                rows.append(key | _answer_row(answer))
    return rows


def _item_rows(evaluation: Evaluation) -> list[dict[str, Any]]:
    rows = []
    for record in evaluation.records:
        gold = record.gold
        rows.append(
            {
                "item": record.item,
                "prompt": record.prompt,
                "n_prompt": record.n_prompt,
                "reference": record.reference,
                "gold_tokens": None if gold is None else gold.n_tokens,
                "gold_a": None if gold is None else gold.a,
                "gold_b": None if gold is None else gold.b,
                "gold_null": None if gold is None else list(gold.null),
            }
        )
    return rows


def _answer_row(answer: Answer) -> dict[str, Any]:
    compared = answer if isinstance(answer, Compared) else None
    margins = (compared.margins if compared is not None else None) or (None, None)
    return {
        "answer": answer.answer,
        "correct": answer.correct,
        "stop": answer.stop,
        "n_tokens": len(answer.tokens),
        "divergence": None if compared is None else compared.divergence,
        "unequal": None if compared is None else compared.unequal,
        "margin_a": margins[0],
        "margin": margins[1],
        "text": answer.text,
        "tokens": list(answer.tokens),
    }
