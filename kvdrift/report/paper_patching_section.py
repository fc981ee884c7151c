"""The section of the paper's patching experiment: both directions beside their controls."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pandas as pd

from kvdrift import views
from kvdrift.experiments.paper_patching import DIRECTIONS, PaperPatching
from kvdrift.report import parts
from kvdrift.report.figures import draw, sort
from kvdrift.report.parts import Column, Group, Section, Table, Tile
from kvdrift.report.patching_section import CURVE, RECOVERY
from kvdrift.statistics.resampling import MIN_PROMPTS
from kvdrift.views.parts.interventions import of_steps, size
from kvdrift.words.numbers import interval, number, signed

LASTING = "KV, persistent"

_number = partial(number, unknown="none")


def section(result: PaperPatching, id: str) -> Section:
    """Everything the page says about the experiment."""
    table = result.to_dataframe()
    figures = []
    for name, words in DIRECTIONS.items():
        if words not in result.sweeps:
            continue
        sweep = result.sweeps[words]
        lasting = next((place for place, cell in enumerate(sweep.cells) if cell.label == LASTING), 0)
        for view, build in (
            (RECOVERY, partial(views.recovery, sweep)),
            (CURVE, partial(views.recovery_curve, sweep, lasting)),
        ):
            titled = replace(view, heading=f"{words}: {view.heading[0].lower()}{view.heading[1:]}")
            figures.append(draw(titled, f"{id}-{name}-{view.name}", build))
    drawn, missing = sort(figures)
    one = next(iter(result.sweeps.values()))
    notes = list(dict.fromkeys(note for sweep in result.sweeps.values() for note in sweep.notes))
    return Section(
        id=id,
        heading=f"{parts.subject(one.recipient)}: the paper's patching experiment",
        what=f"{parts.subject(one.recipient)} · {' and '.join(result.sweeps)} · {size(one)}",
        tiles=tiles(result, table),
        reading=result.reading(),
        notes=notes,
        figures=drawn,
        missing=missing,
        tables=[condition_table(table), parts.prompt_table(one.prompts)],
        provenance=_provenance(result),
        command=one.provenance.get("command"),
    )


def tiles(result: PaperPatching, table: pd.DataFrame) -> list[Tile]:
    """What decides the paper's inference, in the paper's direction if it was run: each against no patch at all."""
    direction, sweep = next(iter(result.sweeps.items()))
    n = len(sweep.prompts)
    rows = table[table["direction"] == direction].set_index(["schedule", "condition"])
    made = [
        Tile(
            "prompts",
            str(n),
            f"fewer than {MIN_PROMPTS}: no intervals" if n < MIN_PROMPTS else "intervals are over prompts",
        )
    ]
    for schedule, condition, label in (
        ("one-shot", "residual", "residual, once"),
        ("one-shot", "KV", "K/V, once"),
        ("persistent", "KV", "K/V, persistently"),
    ):
        row = rows.loc[(schedule, condition)]
        low, high = row["against_unpatched_low"], row["against_unpatched_high"]
        ends = interval(low, high, signed, "95 % interval ")
        tone = "quiet" if not low > 0 else ""
        made.append(Tile(label, signed(row["against_unpatched"]), f"recovery against no patch; {ends}", tone))
    return made


def condition_table(table: pd.DataFrame) -> Table:
    """The experiment's own table, one row per direction, schedule and condition."""
    columns = (
        Column("direction", False), Column("schedule", False), Column("condition", False), Column("recovery"),
        Column("± SE"), Column("against no patch"), Column("distance"), Column("± SE"), Column("restored"),
        Column("flips"), Column("tokens followed"), Column("n"), Column("note", False),
    )  # fmt: skip
    rows = [
        [
            str(row["direction"]),
            str(row["schedule"]),
            str(row["condition"]),
            signed(row["recovery"]),
            _number(row["recovery_se"]),
            signed(row["against_unpatched"]),
            _number(row["logit_l2"]),
            _number(row["logit_l2_se"]),
            of_steps(float(row["restored"])),
            str(row["flips"]),
            "not known" if math.isnan(row["followed"]) else f"{row['followed']:.3g}",
            str(row["n"]),
            "1 by construction" if row["trivial"] else "",
        ]
        for _, row in table.iterrows()
    ]
    caption = (
        "Recovery is against the placebo; distance is the mean centred L2 of the logits to the donor, over the steps "
        "that follow the first write. SE: standard error over prompts."
    )
    return Table("Conditions and controls", caption, columns, rows, open=True)


def _provenance(result: PaperPatching) -> list[Group]:
    one = next(iter(result.sweeps.values()))
    return parts.provenance({"donor": one.donor, "recipient": one.recipient}, one.architecture, one.provenance)
