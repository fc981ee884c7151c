"""A factorial in plain sentences and plain data: what changes bits, never how much a factor owns."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvdrift import markup
from kvdrift.models.ending import nothing_followed, other_notes
from kvdrift.patching.factorial_result import EDGES, METRICS, PAIRS, PLACEBOS, WHOLE, Factorial
from kvdrift.words.json import json_safe, not_finite
from kvdrift.words.numbers import plural

COLUMNS = ("pair", "distance (centred logit L2)", "bit for bit equal", "what differs")


def summary(result: Factorial) -> str:
    """The four distances in words, beside the whole and the placebo factor."""
    n, steps = len(result.prompts), int(result.counted.sum())
    lines = [
        f"{result.on.model} · {result.on.dtype} · K/V state × kernel · {n} {plural(n, 'prompt')}, "
        f"{steps} {plural(steps, 'step')}",
    ]
    if not result.counted.any():
        why = nothing_followed(result.arrays, result.provenance, result.notes)
        return "\n".join([*lines, why, *other_notes(result.notes)])
    for pair, what in {WHOLE: f"{result.on.label} against {result.off.label}", **EDGES, **PLACEBOS}.items():
        distance, same = result.per_prompt(pair), result.per_prompt(pair, "identical")
        lines.append(
            f"{pair}: {np.nanmean(distance):.3g}, bit for bit equal at {np.nanmean(same):.0%} of steps ({what})"
        )
    whole = np.nanmean(result.per_prompt(WHOLE))
    if whole == 0:
        return "\n".join([*lines, "the two paths agree bit for bit at every step: there is nothing to explain"])
    silent = [EDGES[pair] for pair in EDGES if np.nanmean(result.per_prompt(pair, "identical")) == 1]
    lines += [f"this factor changes no bit: {what}" for what in silent]
    placebo = max(np.nanmean(result.per_prompt(pair)) for pair in PLACEBOS)
    lines.append(
        f"one entry moved by one ulp scores {placebo:.3g} where the whole path scores {whole:.3g}: drift runs to a "
        "plateau whatever sets it off, so these distances say what changes bits, not how much a factor owns"
        if placebo > whole / 2
        else f"one entry moved by one ulp scores {placebo:.3g}, the whole path {whole:.3g}"
    )
    return "\n".join([*lines, *result.notes])


def html(result: Factorial) -> str:
    """The distances in a table, then the sentences of the summary."""
    head, *rest = summary(result).splitlines()
    if not result.counted.any():
        return markup.block(head, markup.listing(rest))
    pairs = {WHOLE: f"{result.on.label} against {result.off.label}", **EDGES, **PLACEBOS}
    rows = [
        (
            pair,
            f"{np.nanmean(result.per_prompt(pair)):.3g}",
            f"{np.nanmean(result.per_prompt(pair, 'identical')):.0%}",
            what,
        )
        for pair, what in pairs.items()
    ]
    return markup.block(head, markup.table(rows, COLUMNS), markup.listing(rest[len(rows) :]))


def as_dict(result: Factorial) -> dict[str, Any]:
    """A factorial as plain data."""

    def mean(pair: str, metric: str) -> float | None:
        return np.nanmean(result.per_prompt(pair, metric)) if result.counted.any() else None

    return json_safe(
        {
            "on": result.on.label,
            "off": result.off.label,
            "model": result.on.model,
            "dtype": result.on.dtype,
            "prompts": len(result.prompts),
            "steps": result.arrays["n_steps"],
            "pairs": {pair: {metric: mean(pair, metric) for metric in METRICS} for pair in PAIRS},
            "notes": list(result.notes),
        },
        not_finite,
    )
