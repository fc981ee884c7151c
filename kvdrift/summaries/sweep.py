"""A sweep in plain sentences and plain data: its best cells, and what cannot be told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from kvdrift import markup
from kvdrift.models.ending import other_notes
from kvdrift.patching.result import Sweep
from kvdrift.statistics.resampling import MIN_PROMPTS
from kvdrift.summaries.patch import at_steps, headline, nothing_after
from kvdrift.summaries.recovery import REFERENCES, short
from kvdrift.words.json import json_safe, not_finite
from kvdrift.words.numbers import count


def summary(sweep: Sweep) -> str:
    """The best cells of a sweep, and how they stand to the placebos."""
    return "\n".join([headline(sweep), *sentences(sweep), *other_notes(sweep.notes, _counts(sweep))])


def html(sweep: Sweep) -> str:
    """The same for Jupyter."""
    return markup.block(headline(sweep), markup.listing([*sentences(sweep), *other_notes(sweep.notes, _counts(sweep))]))


def _counts(sweep: Sweep) -> bool:
    """Whether a step follows any cell's first write."""
    return any(sweep.counted(cell).any() for cell in range(len(sweep.cells)))


def sentences(sweep: Sweep) -> list[str]:
    """The summary without its headline and without notes."""
    lines = [f"{len(sweep.cells)} cells over {', '.join(sweep.over) or 'the patches given'}"]
    table = sweep.to_dataframe()
    known = table[table["recovery"].notna() & ~table["trivial"]]
    if known.empty:
        said = [*_best_written(sweep), *_trivial_written(table)]
        if not _counts(sweep):
            return [*lines, *said, nothing_after(sweep, min(cell.first for cell in sweep.cells))]
        none = "no cell has a defined recovery: without a patch there is nothing to recover"
        return [*lines, none, *said]
    shown = [int(cell) for cell in sweep.best(3)["cell"] if not math.isnan(table["recovery"][cell])]
    lines += [f"{sweep.cells[cell].label}: {_cell(sweep, cell)}" for cell in shown]
    lines += _best_written(sweep, shown)
    against = " or ".join(REFERENCES[name] for name in dict.fromkeys(known["reference"]))
    if known["p_holm"].notna().any():
        above = int((known["p_holm"] < 0.05).sum())
        lines.append(f"{above} of {len(known)} cells recover more than {against} with confidence (Holm over the cells)")
    else:
        lines.append(f"fewer than {MIN_PROMPTS} prompts: no cell can be told from {against} by more than its number")
    silent = [cell for cell in known["cell"] if sweep.same_as_unpatched(cell)]
    if silent:
        one = len(silent) == 1
        idle = sum(sweep.wrote_nothing(cell) for cell in silent)
        who = f"{idle} of them write" if idle < len(silent) else "it writes" if one else "they write"
        why = f": what {who} is what the recipient has" if idle else ""
        lines.append(f"{count(len(silent), 'cell', thousands='')} change{'s' * one} no bit of the logits{why}")
    trivial = int(table["trivial"].sum())
    if trivial:
        lines.append(f"{trivial} left out, 1 by construction: the donor's last residual is written at every step")
    return [*lines, *_trivial_written(table)]


def as_dict(sweep: Sweep) -> dict[str, Any]:
    """A sweep as plain data."""
    rows = sweep.to_dataframe().to_dict(orient="records")
    return json_safe(
        {
            "recipient": sweep.recipient.label,
            "donor": sweep.donor.label,
            "model": sweep.recipient.model,
            "dtype": sweep.recipient.dtype,
            "prompts": len(sweep.prompts),
            "steps": sweep.n_steps,
            "over": list(sweep.over),
            "cells": rows,
            "notes": list(sweep.notes),
        },
        not_finite,
    )


def _cell(sweep: Sweep, cell: int) -> str:
    """Recovery of one cell in a line: over the steps that follow, and, if it ends, at the written ones too."""
    found, restored = sweep.recovery(cell), f"restored at {sweep.restored(cell):.0%}"
    if not sweep.ends(cell):
        return f"{short(found)}, {restored} of steps"
    return f"{short(found)} over the steps that follow, {restored}; {_cell_written(sweep, cell)}"


def _cell_written(sweep: Sweep, cell: int) -> str:
    if sweep.trivial(cell, "written"):
        return f"1 by construction {at_steps(sweep, cell, 'written')}"
    found, restored = sweep.recovery(cell, steps="written"), sweep.restored(cell, "written")
    return f"{short(found)} {at_steps(sweep, cell, 'written')}, restored at {restored:.0%}"


def _best_written(sweep: Sweep, shown: Sequence[int] = ()) -> list[str]:
    """The cell that recovers most where it is written, if its patch ends and it is not among those shown."""
    ranked = sweep.best(len(sweep.cells), steps="written")
    ending = ranked[ranked["recovery"].notna() & ranked["cell"].map(sweep.ends)]
    if ending.empty or ending["cell"].iloc[0] in shown:
        return []
    cell = int(ending["cell"].iloc[0])
    return [f"best where it is written: {sweep.cells[cell].label}: {_cell_written(sweep, cell)}"]


def _trivial_written(table: pd.DataFrame) -> list[str]:
    """How many cells are 1 by construction at the written steps alone."""
    n = int((table["trivial_written"] & ~table["trivial"]).sum())
    if not n:
        return []
    return [f"{n} of the cells: 1 by construction at the written steps, where the donor's last residual is written"]
