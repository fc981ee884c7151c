"""The section of a factorial: tiles, reading, figure, tables."""

from __future__ import annotations

from functools import partial

from kvdrift import views
from kvdrift.patching.factorial_result import EDGES, PAIRS, PLACEBOS, WHOLE, Factorial
from kvdrift.report import parts
from kvdrift.report.figures import View, draw, sort
from kvdrift.report.parts import Column, Section, Table, Tile
from kvdrift.statistics.measured import mean_finite
from kvdrift.summaries.factorial import sentences
from kvdrift.views.parts.interventions import of_steps, size
from kvdrift.words.numbers import number

FIGURE = View(
    "factorial",
    "One factor at a time",
    "Each line changes one thing and asks how far the logits move. The dashed line moves one entry by one ulp: where "
    "it lies as high as the others, heights say nothing about shares; what counts is which factor changes no bit.",
)
TILES = {
    WHOLE: ("both", "cache-ON against cache-OFF"),
    "y10-y00": ("kernel alone", "on cache-OFF's K/V"),
    "y01-y00": ("K/V alone", "under recompute"),
    "ulp-y00": ("one ulp", "one entry, under recompute"),
}


def section(result: Factorial, id: str) -> Section:
    """Everything the page says about one factorial."""
    drawn, missing = sort([draw(FIGURE, f"{id}-factorial", partial(views.factorial, result))])
    return Section(
        id=id,
        heading=f"{parts.subject(result.on)}: K/V state × kernel",
        what=f"{parts.subject(result.on)} · {result.on.label} and {result.off.label} · {size(result)}",
        tiles=tiles(result),
        reading=sentences(result),
        notes=list(result.notes),
        figures=drawn,
        missing=missing,
        tables=[pair_table(result), prompt_table(result)],
        provenance=parts.provenance({"on": result.on, "off": result.off}, result.architecture, result.provenance),
        command=result.provenance.get("command"),
    )


def tiles(result: Factorial) -> list[Tile]:
    """How often each factor changes no bit at all, and how far it moves the logits."""
    n = len(result.prompts)
    made = [Tile("prompts", str(n), f"{int(result.counted.sum()):,} counted steps")]
    for pair, (label, detail) in TILES.items():
        same = of_steps(mean_finite(result.per_prompt(pair, "identical")))
        distance = number(mean_finite(result.per_prompt(pair)))
        made.append(Tile(label, distance, f"logit L2, {detail}; bit-identical at {same} of steps"))
    return made


def pair_table(result: Factorial) -> Table:
    """One row per pair: means over prompts of means over the counted steps."""
    what = {WHOLE: f"{result.on.label} against {result.off.label}"} | EDGES | PLACEBOS
    columns = (
        Column("pair", False), Column("what is changed", False), Column("logit L2"), Column("KL, nats"),
        Column("bit-identical steps"),
    )  # fmt: skip
    rows = [
        [
            pair,
            what[pair],
            number(mean_finite(result.per_prompt(pair))),
            number(mean_finite(result.per_prompt(pair, "kl"))),
            of_steps(mean_finite(result.per_prompt(pair, "identical"))),
        ]
        for pair in PAIRS
    ]
    caption = (
        "y00: cache-OFF; y11: cache-ON; y10: the one-token kernel on cache-OFF's K/V; y01: recompute on cache-ON's."
    )
    return Table("Distances", caption, columns, rows, open=True)


def prompt_table(result: Factorial) -> Table:
    """One row per prompt, with the distance of the whole path."""
    whole = result.per_prompt(WHOLE)
    values = [[str(int(n)), number(float(whole[p]))] for p, n in enumerate(result.n_steps)]
    return parts.prompt_table(result.prompts, (Column("steps"), Column("logit L2, both")), values)
