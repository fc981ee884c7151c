"""What an evaluation's numbers allow to say, in a few words; and the sentence that leads each of its figures."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvdrift.errors import InputError
from kvdrift.evaluation.conditions import Condition, NullNumbers
from kvdrift.evaluation.records import Trial
from kvdrift.evaluation.result import Evaluation
from kvdrift.models.labels import model_name
from kvdrift.summaries.evaluation import ALPHA, FEWEST_REPLICATES, in_percent
from kvdrift.words.numbers import count, p_value, plural

OUT, WITHIN, UNKNOWN = "stands out", "as re-rolls do", "cannot tell"


def check(evaluation: object, view: str) -> None:
    """Refuse what the views of an evaluation cannot show.

    Raises
    ------
    InputError
        If it is another kind of result, or no item has run.
    """
    if not isinstance(evaluation, Evaluation):
        raise InputError(f"{view} was given a {type(evaluation).__name__}; it shows what kvdrift.evaluate returns.")
    if not evaluation.records:
        raise InputError(f"No item of this evaluation has run, so {view} has nothing to show.")


def path_names(evaluation: Evaluation) -> tuple[str, str]:
    """What the two paths are called; ``path a`` and ``path b`` if their labels are equal."""
    names = evaluation.a.label, evaluation.b.label
    return ("path a", "path b") if names[0] == names[1] else names


def against_null(null: NullNumbers | None, p: float) -> tuple[str, str]:
    """Whether a number of path b stands out from the re-rolls, and why: one of three verdicts, and a detail.

    Parameters
    ----------
    null
        The re-rolls of a condition.
    p
        One of its ``p_…``.
    """
    if null is None:
        return UNKNOWN, "no re-rolls ran"
    if null.refused:
        return UNKNOWN, "re-rolls refused"
    n = len(null.differences)
    if math.isnan(p):
        return UNKNOWN, "nothing was scored"
    if n < FEWEST_REPLICATES and p <= 1 / (1 + n):
        return UNKNOWN, f"beyond all of only {n} {plural(n, 're-roll')}"
    return (OUT if p <= ALPHA else WITHIN), p_words(p)


def p_words(p: float) -> str:
    """A p-value, as in ``p = 0.3`` or ``p < 0.001``; ``no p`` if there is none."""
    said = p_value(p)
    return "no p" if math.isnan(p) else f"p {said}" if said.startswith("<") else f"p = {said}"


def direction(condition: Condition, names: tuple[str, str]) -> tuple[str, str]:
    """Which path the paired test calls right more often, after Holm; and what it stands on."""
    flips = condition.only_a + condition.only_b
    if math.isnan(condition.p):
        return UNKNOWN, "nothing was scored"
    if not condition.enough:
        return UNKNOWN, f"only {flips} {plural(flips, 'answer')} flipped" if flips else "no answer flipped"
    counted = f"flips {condition.only_a} : {condition.only_b}, {p_words(condition.p_holm)}"
    if condition.p_holm > ALPHA:
        return "none shown", counted
    return f"{names[condition.difference.value < 0]} ahead", counted


def scored(evaluation: Evaluation) -> bool:
    """Whether any answer of both paths was scored."""
    return any(not math.isnan(condition.difference.value) for condition in evaluation.conditions)


def setting(evaluation: Evaluation) -> str:
    """What was run, as in ``smollm2-135m in bfloat16, gsm8k: 20 items, up to 128 tokens, cache-ON (a) …``."""
    a, b = evaluation.a, evaluation.b
    n = len(evaluation.records)
    seeds = f", {len(evaluation.seeds)} seeds" if len(evaluation.seeds) > 1 else ""
    names = path_names(evaluation)
    paths = f"{names[0]} against {names[1]}"
    if (a.model, a.dtype) != (b.model, b.dtype):
        paths = f"{names[0]} against {names[1]} of {model_name(b.model)} in {b.dtype}"
    return (
        f"{model_name(a.model)} in {a.dtype} on {evaluation.task}: {paths}, {n} {plural(n, 'item')}{seeds}, "
        f"up to {evaluation.max_new_tokens} tokens"
    )


def accuracy(evaluation: Evaluation) -> str:
    """In how many strategies the accuracy difference stands out, and in how many it has a direction."""
    conditions, names = evaluation.conditions, path_names(evaluation)
    if not scored(evaluation):
        return f"No answers were scored, so only whether texts part can be shown: {_parted(evaluation)}"
    ahead = [direction(condition, names)[0] for condition in conditions]
    n = len(conditions)
    unknown = ahead.count(UNKNOWN)
    found = n - unknown - ahead.count("none shown")
    rest = f" (in {unknown} too few answers flip to tell)" if unknown else ""
    known = [v for v in (_null(condition, "difference") for condition in conditions) if v != UNKNOWN]
    if not known:
        where = f"A systematic direction shows in {found} of {count(n, 'strategy')}{rest}"
        return f"{where}; nothing is known of what re-rolls alone would do"
    return (
        f"In {known.count(OUT)} of {count(len(known), 'strategy')} the accuracy difference {names[0]} − {names[1]} "
        f"stands out from re-rolls of {names[0]}; a systematic direction shows in {found} of {n}{rest}"
    )


def agreement(evaluation: Evaluation) -> str:
    """How many texts part, and in how many strategies more of them than under re-rolls."""
    return f"Within {evaluation.max_new_tokens} tokens {_parted(evaluation)}"


def answers(evaluation: Evaluation, flips: Sequence[Trial], parted: int, n: int) -> str:
    """How many answers flip, to which side; how many texts part if none does."""
    names = path_names(evaluation)
    texts = f"{n} {plural(n, 'text')}"
    if flips:
        only_a = sum(bool(trial.a.correct) for trial in flips)
        return (
            f"The answer flips in {len(flips)} of {texts}: only {names[0]} is right in {only_a}, "
            f"only {names[1]} in {len(flips) - only_a}"
        )
    if parted:
        rest = "no answer flips" if scored(evaluation) else "no answers were scored"
        return f"{parted} of {texts} part{'s' * (parted == 1)}; {rest}"
    items = len(evaluation.records)
    return f"No text differed in {items} {plural(items, 'item')}"


def _parted(evaluation: Evaluation) -> str:
    conditions, name = evaluation.conditions, path_names(evaluation)[0]
    rates = sorted(condition.divergence.value for condition in conditions)
    low, high = in_percent(rates[0]), in_percent(rates[-1])
    text = f"{low} of texts part" if low == high else f"{low} to {high} of texts part"
    verdicts = [v for v in (_null(condition, "divergence") for condition in conditions) if v != UNKNOWN]
    if not verdicts:
        return text
    return (
        f"{text}; in {verdicts.count(OUT)} of {count(len(verdicts), 'strategy')} that is more than re-rolls of {name} "
        "alone make part"
    )


def _null(condition: Condition, what: str) -> str:
    null = condition.null
    return against_null(null, math.nan if null is None else getattr(null, f"p_{what}"))[0]
