"""The section of an evaluation: tiles, reading, figures, and tables that keep direction and rate apart."""

from __future__ import annotations

import math
from functools import partial

from kvdrift import views
from kvdrift.evaluation.conditions import Condition, Difference, Rate
from kvdrift.evaluation.records import ItemRecord
from kvdrift.evaluation.result import Evaluation
from kvdrift.report import parts
from kvdrift.report.figures import View, draw, sort
from kvdrift.report.parts import Column, Section, Table, Tile
from kvdrift.statistics.resampling import MIN_PROMPTS
from kvdrift.summaries.evaluation import headline, in_percent
from kvdrift.views.parts import takeaway_evaluation as takeaway
from kvdrift.views.parts.takeaway_evaluation import OUT, UNKNOWN, p_words
from kvdrift.words.numbers import number, points, span

MAX_ITEMS = 200
FIGURES = (
    View(
        "accuracy",
        "Right answers",
        "Left, the share of right answers of each path. Right, their difference (diamond) above one grey dot per "
        "re-roll: what the order of summation alone does. A diamond inside the grey bar says nothing about path b; a "
        "hollow one stands on too few flipped answers to tell a direction.",
    ),
    View(
        "agreement",
        "How soon texts part",
        "The share of texts that have parted after so many tokens, one panel per strategy, with the same of every "
        "re-roll in grey. A curve among the grey lines parts no more texts than another order of summation would.",
    ),
    View(
        "answers",
        "The texts behind the answers",
        "What both paths wrote, token by token, where only one of them is right. After the first difference each path "
        "reads its own text, so the columns may have little in common.",
    ),
)


def section(result: Evaluation, id: str) -> Section:
    """Everything the page says about one evaluation."""
    drawn, missing = sort(
        [draw(view, f"{id}-{view.name}", partial(getattr(views, view.name), result)) for view in FIGURES]
    )
    paths = {"a": result.a, "b": result.b}
    return Section(
        id=id,
        heading=f"{parts.subject(result.a)}: {result.task}",
        what=headline(result),
        tiles=tiles(result),
        reading=result.reading(),
        notes=list(result.notes),
        figures=drawn,
        missing=missing,
        tables=[direction_table(result), rate_table(result), item_table(result)],
        provenance=parts.provenance(paths, result.architecture, {"settings": result.settings, **result.provenance}),
        command=result.provenance.get("command"),
    )


def tiles(result: Evaluation) -> list[Tile]:
    """What decides first: how many texts part, whether re-rolls do the same, and whether answers have a direction."""
    n = len(result.records)
    detail = f"fewer than {MIN_PROMPTS}: intervals are rough" if n < MIN_PROMPTS else "intervals are over items"
    made = [Tile("items", str(n), detail)]
    if not n:
        return made
    conditions = result.conditions
    made.append(Tile("texts that part", _spread([c.divergence.value for c in conditions]), "over strategies"))
    nulls = [c.null for c in conditions if c.null is not None and not c.null.refused]
    if nulls:
        shares = [share for null in nulls for share in null.divergence]
        made.append(Tile("re-rolls that part", _spread(shares), "what the order of summation alone does"))
        made.append(
            _stand_out("rates that stand out", [takeaway.against_null(c.null, _p(c, "divergence")) for c in conditions])
        )
    if takeaway.scored(result):
        values = [c.difference.value for c in conditions]
        low, high = points(min(values)), points(max(values))
        made.append(
            Tile("accuracy, a − b", low if low == high else f"{low} to {high}", "percentage points, over strategies")
        )
        names = takeaway.path_names(result)
        found = [takeaway.direction(c, names)[0] for c in conditions]
        unknown = found.count(UNKNOWN)
        ahead = len(found) - unknown - found.count("none shown")
        detail = f"strategies; cannot tell in {unknown}" if unknown else "strategies with a direction, after Holm"
        made.append(Tile("a direction in", f"{ahead} of {len(found)}", detail, "warn" if ahead else ""))
    if result.gold is not None:
        made.append(Tile("gold text, a − b", f"{number(result.gold.value)} nats", "log-probability, mean over items"))
    return made


def _stand_out(label: str, verdicts: list[tuple[str, str]]) -> Tile:
    out, known = ([v for v, _ in verdicts].count(OUT), sum(v != UNKNOWN for v, _ in verdicts))
    if not known:
        return Tile(label, UNKNOWN, verdicts[0][1])
    return Tile(label, f"{out} of {known}", "strategies, against the re-rolls", "warn" if out else "")


def direction_table(result: Evaluation) -> Table:
    """One row per condition: which path is right more often."""
    names = takeaway.path_names(result)
    columns = (
        Column("strategy", False), Column(f"right, {names[0]}"), Column(f"right, {names[1]}"),
        Column("a − b, points"), Column("95 % interval", False), Column("only a : only b"), Column("test", False),
        Column("after Holm", False), Column("direction", False), Column("detectable, points"),
        Column("re-rolls, points", False), Column("against re-rolls", False), Column("no answer found, a : b"),
        Column("cut off, a : b"),
    )  # fmt: skip
    scored = bool(result.records) and takeaway.scored(result)
    rows = [_direction_row(c, names) for c in result.conditions] if scored else []
    caption = (
        "Paired over items. Detectable: the smallest true difference that this many items would show with 80 % power. "
        "Re-rolls: the range of path a's accuracy minus its re-rolls'."
        if scored
        else "No answers were scored, so nothing can be said about which path is right more often."
    )
    return Table("Which path is right more often", caption, columns, rows, open=True)


def _direction_row(c: Condition, names: tuple[str, str]) -> list[str]:
    null = c.null
    spread = "none"
    if null is not None and not null.refused:
        spread = span(min(null.differences), max(null.differences), points)
    return [
        c.strategy, _rate(c.accuracy_a), _rate(c.accuracy_b), points(c.difference.value), _interval(c.difference),
        f"{c.only_a} : {c.only_b}", f"{c.test}, {p_words(c.p)}", p_words(c.p_holm),
        ": ".join(takeaway.direction(c, names)),
        "none" if c.detectable is None else points(c.detectable, sign=False),
        spread, ": ".join(takeaway.against_null(null, _p(c, "difference"))),
        f"{c.invalid_a} : {c.invalid_b}", f"{c.truncated_a} : {c.truncated_b}",
    ]  # fmt: skip


def rate_table(result: Evaluation) -> Table:
    """One row per condition: how many texts part, and how many the re-rolls make part."""
    columns = (
        Column("strategy", False), Column("texts"), Column("that part"), Column("share"),
        Column("95 % interval", False), Column("half by token"), Column("re-rolls", False),
        Column("against re-rolls", False),
    )  # fmt: skip
    rows = []
    for c in result.conditions if result.records else ():
        null, half = c.null, c.incidence.median
        shares = () if null is None or null.refused else null.divergence
        rows.append([
            c.strategy, str(c.divergence.n), str(c.divergence.events), in_percent(c.divergence.value),
            span(c.divergence.low, c.divergence.high, in_percent), "never" if half is None else str(half),
            _spread(list(shares)) if shares else "none", ": ".join(takeaway.against_null(null, _p(c, "divergence"))),
        ])  # fmt: skip
    caption = "Re-rolls: the range of the share of texts that leave path a's when only the order of its sums changes."
    return Table("How often texts part", caption, columns, rows, open=True)


def item_table(result: Evaluation) -> Table:
    """One row per item: where its texts part, whose answer flips, its gold text, its prompt."""
    columns = (
        Column("item", False), Column("hash of its tokens", False), Column("tokens"), Column("right answer", False),
        Column("texts that part"), Column("first at token"), Column("the answer flips under", False),
        Column("gold text, a − b, nats"), Column("text", False),
    )  # fmt: skip
    rows = [_item_row(record) for record in result.records[:MAX_ITEMS]]
    caption = "Equal hashes mean equal token ids."
    if len(result.records) > MAX_ITEMS:
        caption += f" The first {MAX_ITEMS} of {len(result.records)} items; to_dataframe('trials') has them all."
    return Table("Items", caption, columns, rows)


def _item_row(record: ItemRecord) -> list[str]:
    steps = [trial.b.divergence for trial in record.trials if trial.b.divergence is not None]
    flips = [t.strategy for t in record.trials if None not in (t.a.correct, t.b.correct) and t.a.correct != t.b.correct]
    text = " ".join((record.prompt or "").split())
    return [
        record.item, record.prompt_hash, str(record.n_prompt), record.reference or "none",
        f"{len(steps)} of {len(record.trials)}", str(min(steps) + 1) if steps else "none",
        ", ".join(dict.fromkeys(flips)) or "none",
        "none" if record.gold is None else number(record.gold.a - record.gold.b),
        text if len(text) <= 140 else f"…{text[-139:]}",
    ]  # fmt: skip


def _p(condition: Condition, what: str) -> float:
    return math.nan if condition.null is None else float(getattr(condition.null, f"p_{what}"))


def _rate(rate: Rate) -> str:
    return f"{rate.events} of {rate.n} ({in_percent(rate.value)})"


def _interval(difference: Difference) -> str:
    return span(difference.low, difference.high, points)


def _spread(shares: list[float]) -> str:
    low, high = in_percent(min(shares)), in_percent(max(shares))
    return low if low == high else f"{low} to {high}"
