"""An evaluation in plain sentences and plain data. Direction (which path is right more often) and rate (how often texts
part) are kept apart, and each is held against path a's own re-rolls."""

from __future__ import annotations

import math
from dataclasses import asdict
from functools import partial
from typing import Any

from kvdrift import markup
from kvdrift.evaluation.conditions import Condition
from kvdrift.evaluation.result import Evaluation
from kvdrift.models.labels import model_name
from kvdrift.words.json import json_safe
from kvdrift.words.layout import bullets, columns
from kvdrift.words.numbers import count, interval, number, p_value, percent, points, span

ALPHA = 0.05
FEWEST_REPLICATES = 19
"""With fewer, no share of the null can be as small as 5 %."""
COLUMNS = (
    "strategy",
    "right, a",
    "right, b",
    "a − b",
    "only a : only b",
    "p (Holm)",
    "texts that part",
    "null",
    "median token",
)


in_percent = partial(percent, below_ten="decimal", unknown="–")
"""A share of texts or items in per cent."""
count_of = partial(count, thousands="")


def headline(evaluation: Evaluation) -> str:
    """What was compared, and over how much."""
    a, b = evaluation.a, evaluation.b
    seeds = "" if len(evaluation.seeds) == 1 else f" × {len(evaluation.seeds)} seeds"
    return (
        f"{model_name(a.model)} · {a.dtype} · a = {a.label}, b = {b.label} · {evaluation.task}: "
        f"{count_of(len(evaluation.records), 'item')} × {count_of(len(evaluation.strategies), 'strategy')}{seeds}, "
        f"at most {evaluation.max_new_tokens} tokens, {count_of(evaluation.replicates, 're-roll')}"
    )


def summary(evaluation: Evaluation) -> str:
    """The headline, one line per condition, the reading, the notes."""
    rows = [COLUMNS, *(cells(evaluation, condition) for condition in evaluation.conditions)]
    return "\n".join([headline(evaluation), *columns(rows), *bullets(reading(evaluation), evaluation.notes)])


def html(evaluation: Evaluation) -> str:
    """The same for Jupyter."""
    return markup.block(
        headline(evaluation),
        markup.table((cells(evaluation, condition) for condition in evaluation.conditions), COLUMNS),
        markup.listing((*reading(evaluation), *evaluation.notes)),
    )


def as_dict(evaluation: Evaluation) -> dict[str, Any]:
    """An evaluation as plain data: NaN (no value) as None."""
    return json_safe(
        {
            "model": evaluation.a.model,
            "dtype": evaluation.a.dtype,
            "task": evaluation.task,
            "a": asdict(evaluation.a),
            "b": asdict(evaluation.b),
            "items": len(evaluation.records),
            "seeds": list(evaluation.seeds),
            "max_new_tokens": evaluation.max_new_tokens,
            "replicates": evaluation.replicates,
            "conditions": [asdict(condition) for condition in evaluation.conditions],
            "overall": asdict(evaluation.overall()) if evaluation.records else None,
            "reading": reading(evaluation),
            "notes": list(evaluation.notes),
        },
        none=math.isnan,
    )


def cells(evaluation: Evaluation, condition: Condition) -> list[str]:
    """One row under `COLUMNS`."""
    scored = condition.scored
    null = condition.null
    median = condition.incidence.median
    return [
        condition.strategy,
        in_percent(condition.accuracy_a.value) if scored else "–",
        in_percent(condition.accuracy_b.value) if scored else "–",
        points(condition.difference.value) if scored else "–",
        f"{condition.only_a} : {condition.only_b}" if scored else "–",
        p_value(condition.p_holm) if scored else "–",
        in_percent(condition.divergence.value),
        "–" if null is None else "refused" if null.refused else _range(null.divergence),
        "–" if median is None else str(median),
    ]


# --- the reading


def reading(evaluation: Evaluation) -> list[str]:
    """What the table says, in sentences."""
    if not evaluation.records:
        return ["no item has run"]
    return [
        *(_rate(evaluation, condition) for condition in evaluation.conditions),
        *(_direction(evaluation, condition) for condition in evaluation.conditions if condition.scored),
        *_overall(evaluation),
        *_gold(evaluation),
        *_null(evaluation),
    ]


def _rate(evaluation: Evaluation, condition: Condition) -> str:
    rate, null = condition.divergence, condition.null
    median = condition.incidence.median
    half = "" if median is None else f", half of all texts by token {median}"
    said = (
        f"{condition.strategy}: {rate.events} of {rate.n} texts of {evaluation.b.label} leave those of "
        f"{evaluation.a.label} ({in_percent(rate.value)}, 95 % interval "
        f"{span(rate.low, rate.high, in_percent)}){half}"
    )
    if null is None or null.refused:
        return f"{said}; without a null nothing says whether that is more than the order of summation does"
    n = len(null.divergence)
    return (
        f"{said}; re-rolled sums alone part {in_percent(sum(null.divergence) / n)} of them ({_range(null.divergence)} "
        f"over {count_of(n, 're-roll')}), so this rate {_stands_out(null.p_divergence, n)}"
    )


def _direction(evaluation: Evaluation, condition: Condition) -> str:
    a, b = evaluation.a.label, evaluation.b.label
    difference = condition.difference
    ends = interval(difference.low, difference.high, points, ", 95 % interval ", "")
    said = (
        f"{condition.strategy}: {a} is right in {in_percent(condition.accuracy_a.value)}, {b} in "
        f"{in_percent(condition.accuracy_b.value)} (difference {points(difference.value)} percentage points{ends}); "
        f"{condition.only_a} answered rightly by {a} alone, {condition.only_b} by {b} alone"
    )
    if not condition.enough:
        return (
            f"{said}: cannot tell, since with so few discordant items the test could not reach 5 % whatever they said"
        )
    verdict = "a direction" if condition.p_holm <= ALPHA else "no direction shown"
    detectable = condition.detectable
    size = (
        "no difference could be detected with 80 % power"
        if detectable is None
        else f"80 % power from a true difference of {points(detectable, sign=False)} points on"
    )
    null = condition.null
    beside = ""
    if null is not None and not null.refused:
        beside = (
            f"; {count_of(sum(abs(x) >= abs(difference.value) for x in null.differences), 're-roll')} of "
            f"{len(null.differences)} differ from {a} by as much or more"
        )
    return (
        f"{said}: {verdict} ({condition.test} p = {p_value(condition.p)}, {p_value(condition.p_holm)} after Holm; "
        f"{size}{beside})"
    )


def _overall(evaluation: Evaluation) -> list[str]:
    if len(evaluation.conditions) < 2 or not any(condition.scored for condition in evaluation.conditions):
        return []
    found = evaluation.overall()
    said = (
        f"over all {found.n_conditions} conditions {evaluation.a.label} scores higher in {found.a_higher} and "
        f"{evaluation.b.label} in {found.b_higher}; item by item the sign-flip test gives p = {p_value(found.p)}"
    )
    if not found.enough:
        said += ": cannot tell, too few discordant items"
    if found.null_a_higher:
        favoured = ", ".join(map(str, sorted(found.null_a_higher, reverse=True)))
        said += f"; against its own re-rolls {evaluation.a.label} scores higher in so many conditions: {favoured}"
    return [said]


def _gold(evaluation: Evaluation) -> list[str]:
    gold = evaluation.gold
    if gold is None:
        return []
    ends = interval(gold.low, gold.high, lead=", 95 % interval ", unknown="")
    said = (
        f"the gold text is {number(abs(gold.value))} nats {'more' if gold.value >= 0 else 'less'} likely under "
        f"{evaluation.a.label} (mean over items{ends})"
    )
    null = evaluation.conditions[0].null
    if null is not None and not null.refused and null.gold:
        low, high = min(null.gold), max(null.gold)
        said += (
            f"; against its re-rolls the same number runs from {span(low, high)}, so it "
            f"{_stands_out(null.p_gold, len(null.gold))}"
        )
    return [said]


def _null(evaluation: Evaluation) -> list[str]:
    found = [
        f"{condition.strategy}: the null is refused: {condition.null.refused}"
        for condition in evaluation.conditions
        if condition.null is not None and condition.null.refused
    ]
    if 0 < evaluation.replicates < FEWEST_REPLICATES:
        found.append(
            f"with {count_of(evaluation.replicates, 're-roll')} no share of the null can be below "
            f"{p_value(1 / (1 + evaluation.replicates))}: {FEWEST_REPLICATES} or more can reach 5 %"
        )
    return found


def _stands_out(p: float, replicates: int) -> str:
    if math.isnan(p):
        return "cannot be held against them"
    if p <= ALPHA:
        return f"stands out from them (p = {p_value(p)})"
    if replicates < FEWEST_REPLICATES and p <= 1 / (1 + replicates):
        return f"lies beyond all of them, which are too few to say more (p = {p_value(p)})"
    return f"does not stand out from them (p = {p_value(p)})"


def _range(shares: tuple[float, ...]) -> str:
    return span(min(shares), max(shares), in_percent)
