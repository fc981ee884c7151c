"""The sections of a patch and of a sweep: tiles, reading, figures, tables."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from kvdrift import views
from kvdrift.models.labels import model_name
from kvdrift.patching.outcome import Outcomes
from kvdrift.patching.recovery import Recovery
from kvdrift.patching.result import PatchResult, Sweep
from kvdrift.report import parts
from kvdrift.report.figures import Figure, Missing, View, draw, sort
from kvdrift.report.parts import Column, Section, Table, Tile
from kvdrift.statistics.measured import mean_finite
from kvdrift.statistics.resampling import MIN_PROMPTS
from kvdrift.summaries import patch
from kvdrift.summaries import sweep as swept
from kvdrift.views.parts.interventions import of_steps
from kvdrift.words.numbers import count, interval, number, signed, span

MAX_CELLS = 1000

RECOVERY = View(
    "recovery",
    "Recovery",
    "1 is the donor's logits, 0 no nearer than the placebo. Hold each value against what the recipient scores without "
    "a patch: noise in the placebo does harm, and not being harmed is no recovery.",
)
CURVE = View(
    "recovery_curve",
    "Distance to the donor, step by step",
    "Every arm is fed the donor's tokens. The patch is of use where its arm stays below the unpatched one; a grey mark "
    "at the bottom is a step with the donor's logits, bit for bit.",
)
TEXTS = View(
    "trajectories",
    "The texts",
    "Donor, unpatched and patched recipient, each feeding itself. After the first different token the contexts differ, "
    "so later steps do not compare.",
)


def patch_section(result: PatchResult, id: str) -> Section:
    """Everything the page says about one patch."""
    figures = [
        draw(CURVE, f"{id}-recovery_curve", partial(views.recovery_curve, result)),
        draw(RECOVERY, f"{id}-recovery", partial(views.recovery, result)),
        draw(TEXTS, f"{id}-trajectories", partial(views.trajectories, result)),
    ]
    return _section(result, id, "patch", patch.sentences(result), tiles(result, 0), figures, 0)


def sweep_section(sweep: Sweep, id: str) -> Section:
    """Everything the page says about one sweep; tiles and controls are those of its best cell."""
    cell = best_cell(sweep)
    shown = 0 if cell is None else cell
    figures = [
        draw(RECOVERY, f"{id}-recovery", partial(views.recovery, sweep)),
        draw(CURVE, f"{id}-recovery_curve", partial(views.recovery_curve, sweep, shown)),
    ]
    heading = f"sweep of {count(len(sweep.cells), 'cell', thousands='')}"
    return _section(sweep, id, heading, swept.sentences(sweep), tiles(sweep, cell), figures, shown)


def _section(
    result: Any, id: str, kind: str, reading: list[str], made: list[Tile], figures: list[Figure | Missing], cell: int
) -> Section:
    drawn, missing = sort(figures)
    direction = f"{result.recipient.label} ← {result.donor.label}"
    return Section(
        id=id,
        heading=f"{parts.subject(result.recipient)}: {kind}, {direction}",
        what=_headline(result),
        tiles=made,
        reading=reading,
        notes=list(result.notes),
        figures=drawn,
        missing=missing,
        tables=[cell_table(result), arm_table(result, cell), prompt_table(result, cell)],
        provenance=parts.provenance(
            {"donor": result.donor, "recipient": result.recipient}, result.architecture, result.provenance
        ),
        command=result.provenance.get("command"),
    )


def _headline(result: Outcomes) -> str:
    """The summary's headline, without the folder that the model lies in."""
    return patch.headline(result).replace(result.recipient.model, model_name(result.recipient.model))


def best_cell(sweep: Sweep) -> int | None:
    """The cell with the highest recovery that is not 1 by construction; None if none is defined."""
    found = sweep.best()
    known = found[found["recovery"].notna()]
    return None if known.empty else int(known["cell"].iloc[0])


# --- tiles


def tiles(result: Outcomes, cell: int | None) -> list[Tile]:
    """The five-second reading of one cell."""
    n, steps = len(result.prompts), int(result.n_steps.sum())
    first = Tile(
        "prompts", str(n), f"{steps:,} steps{f'; fewer than {MIN_PROMPTS}: no intervals' if n < MIN_PROMPTS else ''}"
    )
    if cell is None:
        return [first, Tile("recovery", "undefined", "no cell has anything to recover", "quiet")]
    name = result.cells[cell].label
    if result.trivial(cell):
        return [first, Tile("recovery", "1 by construction", f"{name}: proves nothing", "warn")]
    found, bare = result.recovery(cell), result.recovery(cell, role="unpatched")
    label = "best recovery" if len(result.cells) > 1 else "recovery"
    ends = interval(found.low, found.high, signed, "; 95 % interval ", "")
    total = float(result.n_steps.mean())
    followed = [mean_finite(result.followed(role, cell)) for role in ("patched", "unpatched")]
    made = [first, Tile(label, signed(found.value), f"{name}{ends}")]
    if found.reference == "placebo":
        spread = found.spread
        detail = "one placebo" if math.isnan(spread[0]) else f"single placebos {span(*spread, signed)}"
        made.append(Tile("without a patch", signed(bare.value), f"on the same scale; {detail}"))
    made.append(
        Tile(
            "restored bit for bit",
            of_steps(result.restored(cell)),
            f"of {count(int(result.counted(cell).sum()), 'step')}",
        )
    )
    if result.ends(cell):
        made.insert(2, _written_tile(result, cell))
    if not any(map(math.isnan, followed)):
        made.append(Tile("tokens followed", f"{followed[0]:.3g}", f"of {total:.3g}; unpatched {followed[1]:.3g}"))
    return made


def _written_tile(result: Outcomes, cell: int) -> Tile:
    """What a patch that ends does where it is written."""
    if result.trivial(cell, "written"):
        return Tile("where it is written", "1 by construction", "the donor's last residual: proves nothing", "warn")
    found, n = result.recovery(cell, steps="written"), int(result.counted(cell, "written").sum())
    restored = of_steps(result.restored(cell, "written"))
    return Tile("where it is written", signed(found.value), f"{restored} restored, of {count(n, 'step')}")


# --- tables


def cell_table(result: Outcomes) -> Table:
    """One row per cell, as ``to_dataframe()`` has it."""
    table = result.to_dataframe()
    columns = (
        Column("cell"), Column("patch", False), Column("recovery"), Column("where written"), Column("p (Holm)"),
        Column("placebos"), Column("against no patch"), Column("distance"), Column("reference"), Column("unpatched"),
        Column("restored"), Column("flips"), Column("followed"), Column("n"), Column("note", False),
    )  # fmt: skip
    rows = [_cell_row(result, row) for _, row in table.head(MAX_CELLS).iterrows()]
    left = f" The first {MAX_CELLS:,} of {len(table):,} are listed." if len(table) > MAX_CELLS else ""
    caption = (
        "Recovery over the steps that follow the first write, with its 95 % interval over prompts and the p of no "
        "recovery, corrected for the number of cells; where written: recovery at the written steps. Distances are "
        "means of the centred L2 of the logits, to the donor; reference is "
        f"{' or '.join(dict.fromkeys(table['reference']))}.{left}"
    )
    return Table("Cells", caption, columns, rows, open=len(table) <= 20)


def _cell_row(result: Outcomes, row: pd.Series) -> list[str]:
    plain = result.recovery(int(row["cell"]), against="unpatched")
    return [
        str(row["cell"]),
        str(row["label"]),
        _short(result.recovery(int(row["cell"]))),
        "1 by construction" if row["trivial_written"] else signed(row["recovery_written"]),
        number(row["p_holm"], "none"),
        span(row["placebo_low"], row["placebo_high"], signed),
        _short(plain) if row["reference"] != "unpatched" else "the same",
        number(row["logit_l2"]),
        number(row["logit_l2_reference"]),
        number(row["logit_l2_unpatched"]),
        of_steps(float(row["restored"])),
        str(row["flips"]),
        "not known" if math.isnan(row["followed"]) else f"{row['followed']:.3g}",
        str(row["n"]),
        "1 by construction" if row["trivial"] else "",
    ]


def arm_table(result: Outcomes, cell: int) -> Table:
    """Every arm of one cell: how far it stays from the donor."""
    roles = [role for role in dict.fromkeys(arm.role for arm in result.arms) if result.find(role, cell)]
    signature = bool(np.isfinite(result.arrays["signature"]).any())
    columns = [Column("arm", False), Column("seeds"), Column("distance"), Column("KL, nats"), Column("restored"),
               Column("flips"), Column("tokens followed")]  # fmt: skip
    columns += [Column("error signature")] * signature
    ends = result.ends(cell)
    columns += [Column("distance, where written"), Column("restored, where written")] * ends
    rows = []
    for role in roles:
        followed = mean_finite(result.followed(role, cell))
        row = [
            patch.NAMES.get(role, role),
            str(len(result.find(role, cell))),
            number(mean_finite(result.distance(role, cell))),
            number(mean_finite(result.distance(role, cell, "kl"))),
            of_steps(result.restored(cell, role=role)),
            str(result.flips(cell, role=role)),
            "not known" if math.isnan(followed) else f"{followed:.3g}",
        ]
        if signature:
            value = mean_finite(result.values("signature", role, cell)[:, result.counted(cell)])
            row.append(number(value, "not computed"))
        if ends:
            row.append(number(mean_finite(result.distance(role, cell, steps="written"))))
            row.append(of_steps(result.restored(cell, "written", role)))
        rows.append(row)
    caption = (
        f"Cell {cell}: {result.cells[cell].label}. Means over the steps that follow the first write; flips are those "
        "of the first seed."
    )
    if signature:
        caption += " Error signature: cosine between the arm's error and the donor's, both against wider arithmetic."
    return Table("Arms and controls", caption, tuple(columns), rows, open=len(result.cells) == 1)


def prompt_table(result: Outcomes, cell: int) -> Table:
    """One row per prompt, with the recovery of one cell."""
    found = result.recovery(cell)
    followed = {role: result.followed(role, cell)[0] for role in ("patched", "unpatched")}
    values = [
        [
            str(int(n)),
            signed(found.per_prompt[p]),
            *("not known" if math.isnan(x[p]) else f"{x[p]:.3g}" for x in followed.values()),
        ]
        for p, n in enumerate(result.n_steps)
    ]
    columns = (
        Column("steps"), Column(f"recovery, cell {cell}"), Column("followed, patched"), Column("followed, unpatched")
    )  # fmt: skip
    return parts.prompt_table(result.prompts, columns, values)


def _short(found: Recovery) -> str:
    """A recovery and its interval in a few characters."""
    ends = "" if math.isnan(found.low) else f" ({span(found.low, found.high, signed)})"
    return f"{signed(found.value)}{ends}"
