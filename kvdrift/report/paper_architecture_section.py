"""The section of the paper's architecture experiment: the model beside its counterfactuals."""

from __future__ import annotations

from functools import partial

import pandas as pd

from kvdrift import views
from kvdrift.experiments.paper_architecture import ARMS, PaperArchitecture
from kvdrift.report import parts
from kvdrift.report.figures import View, draw, sort
from kvdrift.report.parts import Column, Section, Table, Tile
from kvdrift.statistics.resampling import MIN_PROMPTS
from kvdrift.views.parts.labels import counts
from kvdrift.words.numbers import number, percent, span

FIGURE = View(
    "architectures",
    "The same function in other architectures",
    "Each curve is cache-ON against cache-OFF in one architecture; all of them compute the same function on the same "
    "tokens. A curve on top of the original's (broad and pale) says that what was changed does not shape the drift.",
)
KINDS = {"drift": "accumulated", "local": "local"}

_number = partial(number, unknown="none")


def section(result: PaperArchitecture, id: str) -> Section:
    """Everything the page says about the experiment."""
    original, table = result.original, result.to_dataframe()
    drawn, missing = sort([draw(FIGURE, f"{id}-architectures", partial(views.architectures, result))])
    models = {name: drift.a for name, drift in result.arms.items()}
    return Section(
        id=id,
        heading=f"{parts.subject(original.a)}: the paper's architecture experiment",
        what=f"{parts.subject(original.a)} · {', '.join(result.arms)} · {counts(original)}",
        tiles=tiles(result, table),
        reading=result.reading(),
        notes=list(result.notes),
        figures=drawn,
        missing=missing,
        tables=[arm_table(table), layer_table(result), parts.prompt_table(original.prompts)],
        provenance=parts.provenance(models, original.architecture, original.provenance),
        command=original.provenance.get("command"),
    )


def tiles(result: PaperArchitecture, table: pd.DataFrame) -> list[Tile]:
    """What decides first: how much the first layer holds in each arm, and whether anything changed."""
    n = len(result.original.prompts)
    detail = f"fewer than {MIN_PROMPTS}: no intervals" if n < MIN_PROMPTS else "intervals are over prompts"
    made = [Tile("prompts", str(n), detail)]
    rows = table[table["of"] == "drift"].set_index("arm")
    for arm in result.arms:
        row = rows.loc[arm]
        same = arm != ARMS["original"] and row["same_numbers"]
        detail = "of the final drift; every number as in the original" if same else "of the final drift"
        made.append(Tile(f"first layer, {arm}", percent(row["first_share"], "none"), detail, "quiet" if same else ""))
    return made


def arm_table(table: pd.DataFrame) -> Table:
    """One row per arm and kind of drift."""
    columns = (
        Column("arm", False), Column("heads", False), Column("windows", False), Column("drift", False),
        Column("first layer"), Column("its floor"), Column("change"), Column("95 % interval", False), Column("p"),
        Column("share of the first layer"), Column("change"), Column("95 % interval", False), Column("p"),
        Column("largest share"), Column("at layer"), Column("same numbers", False),
    )  # fmt: skip
    rows = []
    for _, row in table.iterrows():
        changed = row["arm"] != ARMS["original"]
        rows.append([
            str(row["arm"]), str(row["grouping"]), str(row["windows"]), KINDS[row["of"]],
            _number(row["first"]), _number(row["first_floor"]),
            *_change(row, "first", changed), percent(row["first_share"], "none"), *_change(row, "first_share", changed),
            percent(row["largest_share"], "none"),
            "none" if pd.isna(row["largest_layer"]) else str(int(row["largest_layer"])),
            ("yes" if row["same_numbers"] else "no") if changed else "",
        ])  # fmt: skip
    caption = (
        "Means over prompts; changes are paired differences to the original. Shares are of the last layer's drift "
        f"(accumulated) or of the sum over layers (local): {percent(table['even_share'].iloc[0], 'none')} in an even "
        "course. p: sign-flip test over prompts."
    )
    return Table("Architectures", caption, columns, rows, open=True)


def layer_table(result: PaperArchitecture) -> Table:
    """One row per arm, kind and layer."""
    columns = (
        Column("arm", False), Column("drift", False), Column("layer"), Column("value"), Column("floor"),
        Column("change"), Column("p after Holm"),
    )  # fmt: skip
    rows = [
        [
            str(row["arm"]), KINDS[row["of"]], str(row["layer"]), _number(row["value"]), _number(row["floor"]),
            _number(row["change"]), _number(row["p_holm"]),
        ]
        for _, row in result.to_dataframe("layers").iterrows()
    ]  # fmt: skip
    return Table("Layer by layer", "Means over prompts; Holm's correction is over layers.", columns, rows)


def _change(row: pd.Series, name: str, changed: bool) -> list[str]:
    if not changed:
        return ["", "", ""]
    return [
        _number(row[f"{name}_change"]),
        span(row[f"{name}_change_low"], row[f"{name}_change_high"]),
        _number(row[f"{name}_p"]),
    ]
