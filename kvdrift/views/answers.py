"""The texts behind a flipped answer: what both paths wrote, where they part, and how close the choice was."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

import plotly.graph_objects as go

from kvdrift.errors import InputError
from kvdrift.evaluation.records import Answer, ItemRecord, Trial
from kvdrift.evaluation.result import Evaluation
from kvdrift.views.parts import takeaway_evaluation as takeaway
from kvdrift.views.parts.choices import menu
from kvdrift.views.parts.labels import escape, token_label
from kvdrift.views.parts.text_width import wrap
from kvdrift.views.parts.theme import NARROW, lay_out, title_text
from kvdrift.words.numbers import number, plural

MAX_TEXTS = 40  # pairs of texts held in one figure
WIDTH = 100  # characters of a line; half of it for each path after the texts have parted
GAP = 2
PREFIX_LINES, TEXT_LINES = 10, 16
LINE = 25  # pixels from one line to the next
FONT = {"family": "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace", "size": 11}
INK = "#1f2430"
COLOURS = {
    "both": ("#c5cad2", INK), "first": ("#e5484d", "#ffffff"), "a only": ("#8fbdf0", INK), "a again": ("#d5e4f6", INK),
    "b only": ("#f2b878", INK), "b again": ("#f8e3c9", INK),
}  # fmt: skip
"""Box and letters of a token; they keep their colours in the dark template."""


@dataclass(frozen=True)
class _Pair:
    """One item under one strategy and seed."""

    record: ItemRecord
    trial: Trial
    label: str

    @property
    def flipped(self) -> bool:
        a, b = self.trial.a.correct, self.trial.b.correct
        return a is not None and b is not None and a != b


@dataclass
class _Page:
    """What is drawn of one pair: boxes with tokens, and lines of text."""

    boxes: list[dict[str, Any]] = field(default_factory=list)
    texts: list[tuple[float, float, str]] = field(default_factory=list)
    end: float = 0.0


def answers(
    evaluation: Evaluation, *, item: str | None = None, strategy: str | None = None, dark: bool = False
) -> go.Figure:
    """Both paths' texts, token by token, of every item whose answer flipped.

    Grey boxes are what both wrote. From the first difference (red) on, each path has a column of its own; full colour
    marks tokens that only this path wrote, a pale one those that the other wrote too, later or earlier. If no answer
    flipped, the items whose texts parted are shown. The dropdown goes through items, strategies and seeds.

    Parameters
    ----------
    evaluation
        What `kvdrift.evaluate` found.
    item
        Only this item's texts, whether or not an answer flipped.
    strategy
        Only texts of this strategy.
    dark
        Use the dark template.

    Raises
    ------
    InputError
        If it is another kind of result, no item has run, or there is no such item or strategy.

    Examples
    --------
    >>> import kvdrift as kd
    >>> found = kd.evaluate(kd.models.tiny("llama"), [[1, 2, 3], [4, 5]], max_new_tokens=4, progress=False)
    >>> fig = kd.views.answers(found)
    """
    takeaway.check(evaluation, "answers")
    pairs = _pairs(evaluation, item, strategy)
    flipped = [pair for pair in pairs if pair.flipped]
    parted = [pair for pair in pairs if pair.trial.b.divergence is not None]
    head = takeaway.answers(evaluation, [pair.trial for pair in flipped], len(parted), len(pairs))
    if item is not None:
        shown, head = pairs, f"Item {item}: {head[0].lower()}{head[1:]}"
    else:
        shown = flipped or parted
    if not shown:
        return _empty(evaluation, head, dark)
    left = len(shown) - MAX_TEXTS
    note = f"Only the first {MAX_TEXTS} of them are in this figure: ask for one with item=…" if left > 0 else ""
    shown = shown[:MAX_TEXTS]

    fig = go.Figure()
    titles, pages = [], [_page(evaluation, pair) for pair in shown]
    end = max(page.end for page in pages)
    for number_, (pair, page) in enumerate(zip(shown, pages, strict=True)):
        for trace in _traces(page):
            fig.add_trace(trace.update(visible=number_ == 0))
        titles.append(title_text(head, f"{takeaway.setting(evaluation)}. {note}".strip(), *_details(evaluation, pair)))
    args = [
        [{"visible": [place // 2 == k for place in range(len(fig.data))]}, {"title.text": title}]
        for k, title in enumerate(titles)
    ]
    labels = [escape(pair.label) for pair in shown]
    menus = [menu("text", labels, labels[0], args)] if len(shown) > 1 else []
    fig.update_xaxes(range=[-0.5, WIDTH + 0.5], visible=False, fixedrange=True)
    fig.update_yaxes(range=[end + 0.4, -0.6], visible=False, fixedrange=True)
    fig.update_layout(barmode="overlay", showlegend=False)
    return lay_out(
        fig, titles[0], dark=dark, plot=round(LINE * (end + 1)), above=8, below=30, left=20, right=20, menus=menus
    )


def _pairs(evaluation: Evaluation, item: str | None, strategy: str | None) -> list[_Pair]:
    if strategy is not None and strategy not in evaluation.strategies:
        have = ", ".join(evaluation.strategies)
        raise InputError(f"There is no strategy {strategy!r} in this evaluation; it has {have}.")
    if item is not None and item not in {record.item for record in evaluation.records}:
        raise InputError(f"There is no item {item!r} in this evaluation of {len(evaluation.records)} items.")
    return [
        _Pair(record, trial, _label(evaluation, record, trial))
        for record in evaluation.records
        for trial in record.trials
        if item in (None, record.item) and strategy in (None, trial.strategy)
    ]


def _label(evaluation: Evaluation, record: ItemRecord, trial: Trial) -> str:
    parts = [record.item, trial.strategy]
    if len(evaluation.seeds) > 1:
        parts.append(f"seed {trial.seed}")
    names, a, b = takeaway.path_names(evaluation), trial.a.correct, trial.b.correct
    if a is not None and b is not None and a != b:
        parts.append(f"only {names[not a]} is right")
    elif trial.b.divergence is None:
        parts.append("same text")
    return " · ".join(parts)


# --- words


def _details(evaluation: Evaluation, pair: _Pair) -> list[str]:
    """Where the texts part, how close it was, and what re-rolls did at this item."""
    names, b = takeaway.path_names(evaluation), pair.trial.b
    if b.divergence is None:
        bits = "are equal in every bit" if b.unequal is None else f"differ from token {b.unequal + 1} on"
        where = f"{pair.record.item}, {pair.trial.strategy}"
        return [f"{where}: both paths write the same {len(b.tokens)} tokens; their logits {bits}."]
    step = b.divergence
    said = [f"'{_word(evaluation, path.tokens[step])}'" for path in (pair.trial.a, b)]
    lines = [
        f"{pair.record.item}, {pair.trial.strategy}: the texts part at token {step + 1}, where {names[0]} writes "
        f"{said[0]} and {names[1]} {said[1]}."
    ]
    if b.margins is not None:
        sides = [
            f"{name}'s best two were {'exactly equal' if margin == 0 else f'{number(margin)} apart'}"
            for name, margin in zip(names, b.margins, strict=True)
        ]
        first = f"; logits first differed at token {b.unequal + 1}" if b.unequal is not None else ""
        lines.append(f"How close it was: {' and '.join(sides)}{first}.")
    lines.append("Red: the first difference. Full colour: only in this text. Pale: in the other text too.")
    if pair.trial.null:
        lines.append(_null_words(pair.trial, names))
    return lines


def _null_words(trial: Trial, names: tuple[str, str]) -> str:
    steps = [one.divergence for one in trial.null if one.divergence is not None]
    text = f"Re-rolls of {names[0]} at this item: {len(steps)} of {len(trial.null)} write another text too"
    if steps:
        text += f" (the first parts at token {min(steps) + 1})"
    if trial.a.correct is not None:
        turned = sum(one.correct is not None and one.correct != trial.a.correct for one in trial.null)
        text += f", the answer flips in {turned}"
    return f"{text}."


def _word(evaluation: Evaluation, token: int) -> str:
    """A token's text for a title, which escapes it; white space is visible."""
    text = evaluation.token_texts.get(token, str(token))
    return text.replace("\n", "⏎").replace(" ", "␣")


def _heading(name: str, answer: Answer, columns: int) -> list[str]:
    """What a path answered and how its text ended, in lines as wide as its column in the narrowest figure."""
    verdict = {True: ", right", False: ", wrong", None: ""}[answer.correct]
    said = "" if answer.answer is None else f"answer {answer.answer}{verdict}; "
    why = {"length": "was cut off", "eos": "ended", "stop string": "ended at a stop string", "diverged": "was stopped"}
    text = f"{name}: {said}{why[answer.stop]} after {len(answer.tokens)} tokens"
    first, *rest = wrap(text, (NARROW - 60) * columns / WIDTH, 12)
    bold = first.startswith(f"{name}:")
    head = f"<b>{escape(name)}</b>{escape(first[len(name) :])}" if bold else escape(first)
    return [head, *map(escape, rest)]


# --- the page


def _page(evaluation: Evaluation, pair: _Pair) -> _Page:
    """Question, what both wrote, and the two columns."""
    page, names = _Page(), takeaway.path_names(evaluation)
    a, b = pair.trial.a, pair.trial.b
    part = b.divergence if b.divergence is not None else len(b.tokens)
    line = 0.0
    for text in _question(pair.record):
        page.texts.append((0, line, f"<i>{text}</i>"))
        line += 1
    line += 0.3
    if part:
        page.texts.append((0, line, f"<b>both</b> wrote {part} {plural(part, 'token')}"))
        places, dropped = _wrapped(evaluation, b.tokens[:part], WIDTH, PREFIX_LINES, keep_end=True)
        if dropped:
            page.texts[-1] = (0, line, f"{page.texts[-1][2]}; the first {dropped} are left out here")
        hover = [f"token {t + 1}, both paths" for t in range(part)]
        line = _place(page, evaluation, b.tokens[:part], places, line + 1, 0, ["both"] * part, hover)
    if b.divergence is None:
        line += 0.3
        page.end = _lines(page, _heading("both", a, WIDTH), 0, line) - 1
        return page
    line += 0.4
    column, ends = (WIDTH - GAP) // 2, []
    kinds = _kinds(a.tokens[part:], b.tokens[part:])
    headings = [_heading(name, answer, column) for name, answer in zip(names, (a, b), strict=True)]
    below = line + max(map(len, headings))
    for side, (path, answer, left) in enumerate((("a", a, 0), ("b", b, column + GAP))):
        rest = answer.tokens[part:]
        _lines(page, headings[side], left, line)
        places, dropped = _wrapped(evaluation, rest, column, TEXT_LINES, keep_end=False)
        words = {
            "first": "the first difference",
            "only": f"only {names[side]} writes it here",
            "again": "in both texts",
        }
        hover = [f"token {part + t + 1} of {names[side]}, {words[kind]}" for t, kind in enumerate(kinds[side])]
        colours = [kind if kind == "first" else f"{path} {kind}" for kind in kinds[side]]
        end = _place(page, evaluation, rest, places, below, left, colours, hover)
        if dropped:
            page.texts.append((left, end, f"… and {dropped} {plural(dropped, 'more token')}"))
        ends.append(end + bool(dropped))
    page.end = max(ends)
    return page


def _lines(page: _Page, texts: list[str], left: float, line: float) -> float:
    """Put lines of text below each other; returns the line after the last one."""
    page.texts += [(left, line + row, text) for row, text in enumerate(texts)]
    return line + len(texts)


def _question(record: ItemRecord, lines: int = 3) -> list[str]:
    """The end of the prompt (of a few-shot prompt, the question itself), and the right answer."""
    text = " ".join((record.prompt or f"a prompt of {record.n_prompt} token ids").split())
    wrapped = wrap(text, NARROW - 60, 12)
    shown = wrapped[-lines:]
    if len(wrapped) > lines:
        shown[0] = f"…{shown[0][1:]}"
    if record.reference is not None:
        shown += wrap(f"Right answer: {record.reference}", NARROW - 60, 12)[:2]
    return [escape(one) for one in shown]


def _kinds(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[list[str], list[str]]:
    """Per token after the texts have parted: the first difference, in this text only, or again in both."""
    kinds = ["only"] * len(a), ["only"] * len(b)
    for match in SequenceMatcher(None, a[1:], b[1:], autojunk=False).get_matching_blocks():
        for k in range(1, match.size + 1):
            kinds[0][match.a + k] = kinds[1][match.b + k] = "again"
    for side in kinds:
        side[:1] = ["first"] * bool(side)
    return kinds


def _wrapped(
    evaluation: Evaluation, tokens: tuple[int, ...], width: int, limit: int, *, keep_end: bool
) -> tuple[list[tuple[int, int, int] | None], int]:
    """Line, place and length of each token in characters, None for those beyond ``limit`` lines; how many those are."""
    line = place = 0
    places: list[tuple[int, int, int]] = []
    for token in tokens:
        length = min(width, _columns(_shown(evaluation, token, width)) + 1)
        if place and place + length > width:
            line, place = line + 1, 0
        places.append((line, place, length))
        place += length
    extra = max(0, line + 1 - limit)
    if not extra:
        return list(places), 0
    shift, last = (extra, line) if keep_end else (0, limit - 1)
    kept = [(row - shift, x, n) if shift <= row <= last else None for row, x, n in places]
    return kept, kept.count(None)


def _shown(evaluation: Evaluation, token: int, width: int) -> str:
    """A token's label without escapes, to measure it."""
    text = evaluation.token_texts.get(token, str(token))
    return text[:width] or "∅"


def _columns(text: str) -> int:
    """How many columns a text takes in a font of fixed width."""
    return sum(
        4 if unicodedata.category(c)[0] == "C" and c not in "\n\r\t" else 1 + (unicodedata.east_asian_width(c) in "WF")
        for c in text
    )


def _place(
    page: _Page, evaluation: Evaluation, tokens: tuple[int, ...], places: list[tuple[int, int, int] | None],
    line: float, left: int, colours: list[str], hover: list[str],
) -> float:  # fmt: skip
    """Put boxes on the page; returns the line after the last one."""
    last = -1
    for token, place, colour, words in zip(tokens, places, colours, hover, strict=True):
        if place is None:
            continue
        row, x, length = place
        last = max(last, row)
        text = evaluation.token_texts.get(token, str(token))
        page.boxes.append({
            "x": left + x, "length": length - 0.15, "y": line + row, "colour": colour,
            "text": token_label(text, length), "hover": f"<b>'{token_label(text, 60)}'</b><br>{words}<br>id {token}",
        })  # fmt: skip
    return line + last + 1


def _traces(page: _Page) -> list[Any]:
    """The boxes and the lines of text of one pair."""
    colours = [COLOURS[box["colour"]] for box in page.boxes]
    columns = {name: [box[name] for box in page.boxes] for name in ("x", "length", "y", "text", "hover", "colour")}
    boxes = go.Bar(
        base=columns["x"], x=columns["length"], y=columns["y"], width=0.86, orientation="h", text=columns["text"],
        textposition="inside", insidetextanchor="start", textangle=0, constraintext="none", name="tokens",
        cliponaxis=False, marker={"color": [box for box, _ in colours], "line": {"width": 0}},
        insidetextfont={**FONT, "color": [ink for _, ink in colours]}, customdata=columns["hover"],
        meta=columns["colour"], hovertemplate="%{customdata}<extra></extra>",
    )  # fmt: skip
    x, y, text = zip(*page.texts, strict=True)
    lines = go.Scatter(
        x=x, y=y, text=text, mode="text", textposition="middle right", hoverinfo="skip", name="words",
        textfont={"size": 12}, cliponaxis=False,
    )  # fmt: skip
    return [boxes, lines]


def _empty(evaluation: Evaluation, head: str, dark: bool) -> go.Figure:
    fig = go.Figure()
    fig.update_xaxes(visible=False)
    fig.update_yaxes(visible=False)
    equal = [trial.b.unequal is None for record in evaluation.records for trial in record.trials]
    bits = f"In {sum(equal)} of {len(equal)} texts the logits are equal in every bit."
    fig.add_annotation(
        x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False, font={"size": 15},
        text=f"<b>{escape(head)}</b><br>{bits}",
    )  # fmt: skip
    return lay_out(fig, title_text(head, f"{takeaway.setting(evaluation)}."), dark=dark, plot=140)
