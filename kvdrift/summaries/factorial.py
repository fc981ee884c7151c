"""A factorial in plain sentences and plain data: what changes bits, never how much a factor owns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvdrift import markup
from kvdrift.models.ending import nothing_followed, other_notes
from kvdrift.patching.factorial_result import EDGES, METRICS, PAIRS, PLACEBOS, WHOLE, Factorial
from kvdrift.words.json import json_safe, not_finite
from kvdrift.words.numbers import plural

COLUMNS = ("pair", "distance (centred logit L2)", "bit for bit equal", "what differs")


def headline(result: Factorial) -> str:
    """What was crossed, and over how much."""
    n, steps = len(result.prompts), int(result.counted.sum())
    return (
        f"{result.on.model} · {result.on.dtype} · K/V state × kernel · {n} {plural(n, 'prompt')}, "
        f"{steps} {plural(steps, 'step')}"
    )


def summary(result: Factorial) -> str:
    """The distances in words, beside the whole and the placebo factor."""
    return "\n".join([headline(result), *sentences(result), *_notes(result)])


def html(result: Factorial) -> str:
    """The distances in a table, then the sentences of the summary."""
    rest = markup.listing([*_reading(result), *_notes(result)])
    return markup.block(headline(result), markup.table(_rows(result), COLUMNS), rest)


def sentences(result: Factorial) -> list[str]:
    """The summary without its headline and without notes."""
    distances = [
        f"{pair}: {distance}, bit for bit equal at {same} of steps ({what})"
        for pair, distance, same, what in _rows(result)
    ]
    return [*distances, *_reading(result)]


def _rows(result: Factorial) -> list[tuple[str, str, str, str]]:
    """One row per pair under `COLUMNS`."""
    pairs = {WHOLE: f"{result.on.label} against {result.off.label}", **EDGES, **PLACEBOS}
    return [
        (pair, f"{_mean(result, pair):.3g}", f"{_mean(result, pair, 'identical'):.0%}", what)
        for pair, what in pairs.items()
        if result.counted.any()
    ]


def _reading(result: Factorial) -> list[str]:
    if not result.counted.any():
        return [nothing_followed(result)]
    whole = _mean(result, WHOLE)
    if whole == 0:
        return ["the two paths agree bit for bit at every step: there is nothing to explain"]
    placebo = max(_mean(result, pair) for pair in PLACEBOS)
    return [
        *(
            f"this factor changes no bit: {what}"
            for pair, what in EDGES.items()
            if _mean(result, pair, "identical") == 1
        ),
        f"one entry moved by one ulp scores {placebo:.3g} where the whole path scores {whole:.3g}: drift runs to a "
        "plateau whatever sets it off, so these distances say what changes bits, not how much a factor owns"
        if placebo > whole / 2
        else f"one entry moved by one ulp scores {placebo:.3g}, the whole path {whole:.3g}",
    ]


def _notes(result: Factorial) -> Sequence[str]:
    return () if _mean(result, WHOLE) == 0 else other_notes(result.notes, result.counted.any())


def as_dict(result: Factorial) -> dict[str, Any]:
    """A factorial as plain data."""

    return json_safe(
        {
            "on": result.on.label,
            "off": result.off.label,
            "model": result.on.model,
            "dtype": result.on.dtype,
            "prompts": len(result.prompts),
            "steps": result.n_steps,
            "pairs": {pair: {metric: _mean(result, pair, metric) for metric in METRICS} for pair in PAIRS},
            "notes": list(result.notes),
        },
        not_finite,
    )


def _mean(result: Factorial, pair: str, metric: str = "logit_l2") -> float:
    """Mean over prompts; NaN where no step counts."""
    return float(np.nanmean(result.per_prompt(pair, metric))) if result.counted.any() else math.nan
