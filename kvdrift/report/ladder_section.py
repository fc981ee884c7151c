"""The section of a ladder: tiles, reading, figure, tables."""

from __future__ import annotations

from functools import partial
from typing import Any

from kvdrift import views
from kvdrift.ladder.result import Ladder
from kvdrift.report import parts
from kvdrift.report.figures import View, draw, sort
from kvdrift.report.parts import Column, Section, Table, Tile
from kvdrift.statistics.resampling import MIN_PROMPTS
from kvdrift.summaries.ladder import headline
from kvdrift.words.numbers import decades, number, percent, span, times

FIGURE = View(
    "ladder",
    "The ladder",
    "Each row is the same comparison, on the same tokens, in another arithmetic. If rounding makes the difference, KL "
    "falls with precision as the measured drift, squared, says (diamonds), and is exactly zero where every row is "
    "computed at one fixed shape. The bars are what rounding of stored numbers alone would give.",
)

_number = partial(number, unknown="none")


def section(result: Ladder, id: str) -> Section:
    """Everything the page says about one ladder."""
    drawn, missing = sort([draw(FIGURE, f"{id}-ladder", partial(views.ladder, result))])
    return Section(
        id=id,
        heading=f"{parts.subject(result.model)}: the precision ladder",
        what=headline(result),
        tiles=tiles(result),
        reading=result.reading(),
        notes=list(result.notes),
        figures=drawn,
        missing=missing,
        tables=[arm_table(result), ratio_table(result), prompt_table(result)],
        provenance=parts.provenance({"base": result.model}, result.architecture, result.provenance),
        command=result.provenance.get("command"),
    )


def tiles(result: Ladder) -> list[Tile]:
    """What decides first: is it exact at one shape, how far does KL fall, what do reordered sums do."""
    n = len(result.prompts)
    detail = f"fewer than {MIN_PROMPTS}: no intervals" if n < MIN_PROMPTS else "intervals are over prompts"
    made = [Tile("prompts", str(n), detail)]
    base = result.mean(result.base)
    made.append(Tile(f"KL in {result.base}", number(base.value), f"nats; median over prompts {number(base.median)}"))
    if result.has("fixed-shape"):
        same = result.identical("fixed-shape")
        tone = "" if same == 1 else "warn"
        made.append(Tile("fixed shape", percent(same, ""), "of steps with equal logits", tone))
    if result.has("float32") and result.base != "float32" and result.mean("float32").value > 0 and base.value > 0:
        row = _ratios(result).loc["float32"]
        predicted = decades(1 / row["drift_squared"]) if row["drift_squared"] > 0 else "nothing"
        value = decades(1 / row["kl"])
        made.append(Tile(f"{result.base} to float32", value, f"less KL; the measured drift predicts {predicted}"))
    if result.has("rounding-floor") and base.value > 0:
        row = _ratios(result).loc["rounding-floor"]
        made.append(Tile("reordered sums", times(row["kl"]), "the KL of ON against OFF, without any cache-OFF"))
    return made


def arm_table(result: Ladder) -> Table:
    """One row per arm that ran, and the others with their reasons."""
    columns = (
        Column("arm", False), Column("what is done", False), Column("KL, nats"), Column("± SE"), Column("median"),
        Column("LM head in float32"), Column("logit L2"), Column("drift"), Column("flips"), Column("prompts with one"),
        Column("at most"), Column("ties"), Column("equal logits"), Column("kernel", False), Column("note", False),
    )  # fmt: skip
    rows = []
    for _, row in result.to_dataframe().iterrows():
        note = row["reason"] or (f"the same numbers as {row['same_as']}" if row["same_as"] else "")
        if row["weights_changed"]:
            note = f"{note}; the cast rounds {percent(row['weights_changed'], '')} of the weights".strip("; ")
        numbers = [""] * 11
        if row["status"] == "ran":
            numbers = [
                number(row["kl"]), _number(row["kl_se"]), number(row["kl_median"]), _number(row["kl_float32_head"]),
                number(row["logit_l2"]), _number(row["drift"]), str(row["flips"]), str(row["flip_prompts"]),
                percent(row["flip_bound"], ""), str(row["ties"]), percent(row["identical"], ""),
            ]  # fmt: skip
        status = row["what"] if row["status"] == "ran" else f"{row['what']}: {row['status']}"
        rows.append([row["arm"], status, *numbers, row["kernels"], note])
    caption = (
        "Means over prompts of means over the counted steps; SE: standard error over prompts. Drift is the root mean "
        "square of the relative L2 after the last layer. At most: 95 % upper bound of the share of prompts with a flip."
    )
    return Table("Arms", caption, columns, rows, open=True)


def ratio_table(result: Ladder) -> Table:
    """KL of every arm over that of the base arm, measured and predicted."""
    columns = (
        Column("arm", False), Column("KL ratio"), Column("95 % interval", False), Column("predicted by drift²"),
        Column("measured / predicted"), Column("95 % interval", False), Column("unit roundoff²"),
        Column("measured / roundoff²"), Column("KL ratio, LM head in float32"),
    )  # fmt: skip
    rows = [
        [
            arm, _number(row["kl"]), _interval(row, "kl"), _number(row["drift_squared"]), _number(row["over_drift"]),
            _interval(row, "over_drift"), _number(row["roundoff_squared"]), _number(row["over_roundoff"]),
            _number(row["kl_float32_head"]),
        ]
        for arm, row in _ratios(result).iterrows()
    ]  # fmt: skip
    caption = f"KL of the arm divided by KL of {result.base}. Measured / predicted is 1 where the law holds."
    return Table("Measured against predicted", caption, columns, rows, open=True)


def prompt_table(result: Ladder) -> Table:
    """One row per prompt: its KL and its first flip in the base arm."""
    kl, first = result.per_prompt(result.base), result.first_flips(result.base)
    values = [
        [str(int(n)), number(float(kl[p])), "none" if first[p] is None else str(first[p])]
        for p, n in enumerate(result.n_steps)
    ]
    return parts.prompt_table(result.prompts, (Column("steps"), Column("KL, nats"), Column("first flip")), values)


def _ratios(result: Ladder) -> Any:
    return result.ratios().set_index("arm")


def _interval(row: Any, name: str) -> str:
    return span(row[f"{name}_low"], row[f"{name}_high"])
