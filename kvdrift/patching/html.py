"""Results of patching for Jupyter: their summaries, with what is a table as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvdrift import markup
from kvdrift.patching.words import NAMES, headline

if TYPE_CHECKING:
    from kvdrift.patching.factorial_result import Factorial
    from kvdrift.patching.result import PatchResult, Sweep

DISTANCE, RESTORED, FLIPS = "mean distance to the donor (centred logit L2)", "restored bit for bit", "flips"
PAIRS = ("pair", "distance (centred logit L2)", "bit for bit equal", "what differs")


def patch(result: PatchResult) -> str:
    """One patch: every arm in a table, then the sentences of its summary."""
    rest = [line for line in result.summary().splitlines()[1:] if not line.startswith("mean distance")]
    spans = [span for span in (["written"] if result.ends() else []) + ["after"] if result.counted(steps=span).any()]
    if not spans:
        return markup.block(headline(result), markup.listing(rest))
    where = {"written": "at the written steps", "after": "after the first write"}
    columns = [f"{name}, {where[span]}" for span in spans for name in (DISTANCE, RESTORED, FLIPS)]
    rows = []
    for role in dict.fromkeys(arm.role for arm in result.arms):
        row: list[object] = [NAMES[role]]
        for span in spans:
            row += [
                f"{np.nanmean(result.distance(role, steps=span)):.3g}",
                f"{result.restored(steps=span, role=role):.0%}",
                result.flips(steps=span, role=role),
            ]
        rows.append(row)
    return markup.block(headline(result), markup.table(rows, ("arm", *columns)), markup.listing(rest))


def sweep(result: Sweep) -> str:
    """The sentences of its summary."""
    return markup.lines(result.summary())


def factorial(result: Factorial) -> str:
    """The distances in a table, then the sentences of the summary."""
    from kvdrift.patching.factorial_result import EDGES, PLACEBOS, WHOLE

    head, *rest = result.summary().splitlines()
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
    return markup.block(head, markup.table(rows, PAIRS), markup.listing(rest[len(rows) :]))
