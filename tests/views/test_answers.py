import re
from dataclasses import replace

import pytest

from kvdrift.errors import InputError
from kvdrift.views import answers
from kvdrift.views.answers import MAX_TEXTS, PREFIX_LINES, TEXT_LINES, WIDTH
from kvdrift.views.parts.labels import token_label


def boxes(fig, entry=0):
    """``(token label, kind)`` of every box of an entry of the dropdown."""
    trace = fig.data[2 * entry]
    return list(zip(trace.text, trace.meta, strict=True))


def flips(found):
    return [
        (record, trial)
        for record in found.records
        for trial in record.trials
        if trial.a.correct is not None and trial.a.correct != trial.b.correct
    ]


def labels(found, tokens):
    return [token_label(found.token_texts[token], 60) for token in tokens]


@pytest.fixture(scope="module")
def found(made_evaluation):
    return made_evaluation.evaluation(max_new_tokens=32)


def test_the_dropdown_holds_the_flips(found):
    fig = answers(found)
    buttons = fig.layout.updatemenus[0].buttons
    assert len(buttons) == len(flips(found)) == len(fig.data) // 2
    for button, (record, trial) in zip(buttons, flips(found), strict=True):
        right = "cache-ON" if trial.a.correct else "cache-OFF"
        assert button.label == f"{record.item} · {trial.strategy} · only {right} is right"
    only_a = sum(trial.a.correct for _, trial in flips(found))
    n = len(found.records) * len(found.strategies)
    assert f"flips in {len(buttons)} of {n} texts: only cache-ON is right in {only_a}" in fig.layout.title.text.replace(
        "</b><br><b>", " "
    )
    assert [trace.visible for trace in fig.data] == [True, True] + [False] * (len(fig.data) - 2)
    assert list(buttons[1].args[0]["visible"][:4]) == [False, False, True, True]


def test_boxes_are_the_tokens(found):
    fig = answers(found)
    for entry, (_, trial) in enumerate(flips(found)):
        step, drawn = trial.b.divergence, boxes(fig, entry)
        both = [text for text, kind in drawn if kind == "both"]
        assert both == labels(found, trial.a.tokens[:step])
        rest = drawn[step:]
        cut = len(trial.a.tokens) - step
        for path, part in ((trial.a, rest[:cut]), (trial.b, rest[cut:])):
            assert [text for text, _ in part] == labels(found, path.tokens[step:])
            assert [kind for _, kind in part].count("first") == 1
            assert part[0][1] == "first"


def test_pale_tokens_stand_in_both_texts_in_the_same_order(found):
    fig = answers(found)
    for entry in range(len(flips(found))):
        again = [[text for text, kind in boxes(fig, entry) if kind == f"{path} again"] for path in "ab"]
        assert again[0] == again[1]


def test_margins_and_re_rolls_in_words(found):
    _, trial = flips(found)[0]
    title = answers(found).layout.title.text.replace('</span><br><span style="font-size:13px">', " ")
    margin = trial.b.margins[0]
    assert f"part at token {trial.b.divergence + 1}" in title
    assert f"cache-ON's best two were {margin:.3g} apart" in title
    parted = sum(one.divergence is not None for one in trial.null)
    assert f"{parted} of {len(trial.null)} write another text too" in title
    turned = sum(one.correct != trial.a.correct for one in trial.null)
    assert f"the answer flips in {turned}" in title


def test_an_exact_tie_is_named(found):
    record, trial = flips(found)[0]
    tied = replace(trial, b=replace(trial.b, margins=(0.0, 0.5)))
    fig = answers(replace(found, records=(replace(record, trials=(tied,)),), strategies=(trial.strategy,)))
    assert "cache-ON's best two were exactly equal" in fig.layout.title.text


def test_hover_names_token_and_place(found):
    _, trial = flips(found)[0]
    first = answers(found).data[0].customdata[0]
    assert first.startswith("<b>'")
    assert f"id {trial.a.tokens[0]}" in first
    assert "token 1" in first


def test_nothing_leaves_the_page(found):
    for trace in answers(found).data[::2]:
        assert all(x + length <= WIDTH for x, length in zip(trace.base, trace.x, strict=True))
        rows = {}
        for x, length, y in sorted(zip(trace.base, trace.x, trace.y, strict=True)):
            assert x >= rows.get(y, 0) - 1e-9, "boxes of one line do not overlap"
            rows[y] = x + length


def test_texts_that_part_are_shown_where_no_answer_flips(made_evaluation):
    found = made_evaluation.evaluation(flipping=0.0, n_items=4, replicates=1)
    fig = answers(found)
    parted = [t for record in found.records for t in record.trials if t.b.divergence is not None]
    assert len(fig.data) == 2 * len(parted) > 0
    assert "no answer flips" in fig.layout.title.text
    silent = made_evaluation.evaluation(answers=False, n_items=4, replicates=0)
    assert "no answers were scored" in answers(silent).layout.title.text


def test_empty_state(made_evaluation):
    fig = answers(made_evaluation.evaluation(parting=0.0, n_items=4, replicates=0))
    assert len(fig.data) == 0
    assert "No text differed in 4 items" in fig.layout.annotations[0].text
    assert "12 of 12 texts the logits are equal" in fig.layout.annotations[0].text


def test_one_item_on_request(found):
    fig = answers(found, item="item-0", strategy="greedy")
    assert len(fig.data) == 2
    assert fig.layout.title.text.startswith("<b>Item item-0: ")


def test_long_texts_are_cut(made_evaluation):
    found = made_evaluation.evaluation(n_items=9, strategies=("greedy",), max_new_tokens=900, parting=1.0, replicates=0)
    record = sorted(found.records, key=lambda record: record.trials[0].b.divergence)[4]
    fig, trial = answers(found, item=record.item), record.trials[0]
    drawn = boxes(fig)
    both = [text for text, kind in drawn if kind == "both"]
    rows = {y for y, kind in zip(fig.data[0].y, fig.data[0].meta, strict=True) if kind == "both"}
    assert len(rows) <= PREFIX_LINES
    assert both == labels(found, trial.a.tokens[: trial.b.divergence])[-len(both) :]
    words = " ".join(fig.data[1].text)
    assert len(both) < trial.b.divergence
    assert f"the first {trial.b.divergence - len(both)} are left out" in words
    left = re.findall(r"and (\d+) more tokens", words)
    shown_a = sum(kind.startswith("a ") for _, kind in drawn) + 1
    assert len(trial.a.tokens) - trial.b.divergence - shown_a == int(left[0])
    assert len(set(fig.data[0].y) - rows) <= TEXT_LINES


def test_many_texts_are_cut(made_evaluation):
    found = made_evaluation.evaluation(n_items=30, answers=False, replicates=0, parting=1.0, max_new_tokens=8)
    fig = answers(found)
    assert len(fig.data) == 2 * MAX_TEXTS
    assert f"Only the first {MAX_TEXTS}" in fig.layout.title.text


def test_markup_is_escaped(found):
    text = answers(found, item="item-1").to_json()
    assert "<b>bold" not in text
    assert "</script" not in text
    assert "<i>1</i>" not in text


def test_other_things_are_refused(drift, found):
    with pytest.raises(InputError, match="answers was given a Drift"):
        answers(drift)
    with pytest.raises(InputError, match="There is no item 'x' in this evaluation of 20 items"):
        answers(found, item="x")
    with pytest.raises(InputError, match="There is no strategy 'beam'"):
        answers(found, strategy="beam")


def test_template(found):
    assert answers(found, dark=True).layout.template.layout.paper_bgcolor == "#15181e"
