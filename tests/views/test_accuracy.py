from dataclasses import replace

import numpy as np
import pytest

from kvdrift.errors import InputError
from kvdrift.evaluation.conditions import NullNumbers
from kvdrift.views import accuracy
from kvdrift.views.parts import takeaway_evaluation


def plain(fig):
    return fig.layout.title.text.replace("</b><br><b>", " ")


def by_name(fig):
    return {trace.name: trace for trace in fig.data if trace.name}


def beside(fig, row):
    """The verdicts to the right of a condition, from left to right."""
    notes = [note for note in fig.layout.annotations if note.xshift is not None and note.y == row]
    return [note.text for note in sorted(notes, key=lambda note: note.xshift)]


@pytest.fixture(scope="module")
def found(made_evaluation):
    return made_evaluation.evaluation()


@pytest.fixture(scope="module")
def lost(made_evaluation):
    """Path b loses answers that no re-roll loses."""
    return made_evaluation.evaluation(n_items=40, lost=0.9, flipping=0.02, null_parting=0.2)


def test_dots_and_bars_are_the_table(found):
    fig, table = accuracy(found), found.to_dataframe()
    for name, path in (("cache-ON", "a"), ("cache-OFF", "b")):
        trace = by_name(fig)[name]
        np.testing.assert_allclose(trace.x, 100 * table[f"accuracy_{path}"], rtol=1e-12)
        highs, lows = (np.array(trace.x) + trace.error_x.array, np.array(trace.x) - trace.error_x.arrayminus)
        np.testing.assert_allclose(highs, 100 * table[f"accuracy_{path}_high"], rtol=1e-12)
        np.testing.assert_allclose(lows, 100 * table[f"accuracy_{path}_low"], rtol=1e-12)
    np.testing.assert_allclose(by_name(fig)["cache-ON − cache-OFF"].x, 100 * table["difference"], rtol=1e-12)
    assert [text.removeprefix("<b>").removesuffix("</b>") for text in fig.layout.yaxis.ticktext] == list(table.strategy)


def test_re_rolls_are_counted_from_the_trials(found):
    dots = by_name(accuracy(found))["one re-roll"]
    trials = found.to_dataframe("trials")
    for row, strategy in enumerate(found.strategies):
        some = trials[trials.strategy == strategy]
        right = some.groupby("arm").correct.mean()
        expected = sorted(100 * (right["a"] - right[f"null {r}"]) for r in range(found.replicates))
        drawn = sorted(x for x, y in zip(dots.x, dots.y, strict=True) if row - 0.5 < y < row + 0.5)
        np.testing.assert_allclose(drawn, expected, atol=1e-9)
    assert len({(round(x, 6), round(y, 6)) for x, y in zip(dots.x, dots.y, strict=True)}) == len(dots.x), "none hidden"


def test_the_grey_bar_spans_the_re_rolls(found):
    bar = by_name(accuracy(found))["range of the re-rolls"]
    for start, width, condition in zip(bar.base, bar.x, found.conditions, strict=True):
        differences = condition.null.differences
        assert (start, start + width) == pytest.approx((100 * min(differences), 100 * max(differences)))


def test_too_few_flips_are_hollow_and_cannot_tell(found):
    fig = accuracy(found)
    symbols = by_name(fig)["cache-ON − cache-OFF"].marker.symbol
    assert not any(condition.enough for condition in found.conditions)
    assert set(symbols) == {"diamond-open"}
    for row, condition in enumerate(found.conditions):
        assert "cannot tell" in beside(fig, row)[1]
        flips = condition.only_a + condition.only_b
        assert (f"only {flips} answer" if flips else "no answer flipped") in beside(fig, row)[1]
    assert "(in 3 too few answers flip to tell)" in plain(fig)


def test_what_stands_out_says_so(lost):
    fig = accuracy(lost)
    assert plain(fig).startswith("<b>In 3 of 3 strategies the accuracy difference cache-ON − cache-OFF stands out")
    assert set(by_name(fig)["cache-ON − cache-OFF"].marker.symbol) == {"diamond"}
    for row, condition in enumerate(lost.conditions):
        assert "stands out" in beside(fig, row)[0]
        assert condition.p_holm <= 0.05
        assert "cache-ON ahead" in beside(fig, row)[1]
    assert "a systematic direction shows in 3 of 3" in plain(fig)


def test_without_re_rolls(made_evaluation):
    fig = accuracy(made_evaluation.evaluation(replicates=0))
    assert "one re-roll" not in by_name(fig)
    assert "nothing is known of what re-rolls alone would do" in plain(fig)
    assert "no re-rolls ran" in beside(fig, 0)[0]


def test_a_refused_null_is_not_drawn(made_evaluation):
    fig = accuracy(made_evaluation.evaluation(null_parting=0.0))
    assert "one re-roll" not in by_name(fig)
    assert "re-rolls refused" in beside(fig, 0)[0]
    assert "The re-rolls say nothing" in plain(fig)


def test_without_answers_the_rate_takes_its_place(made_evaluation):
    found = made_evaluation.evaluation(answers=False, gold=False)
    fig = accuracy(found)
    assert plain(fig).startswith("<b>No answers were scored")
    assert "cache-ON" not in by_name(fig)
    trace = by_name(fig)["cache-OFF leaves cache-ON"]
    np.testing.assert_allclose(trace.x, [100 * condition.divergence.value for condition in found.conditions])
    assert len(beside(fig, 0)) == 1, "no direction"


def test_several_seeds_and_one_item(made_evaluation):
    found = made_evaluation.evaluation(n_items=1, seeds=(0, 1), strategies=("greedy",), replicates=2)
    fig = accuracy(found)
    assert "as re-rolls do" in beside(fig, 0)[0]
    assert "2 seeds" in plain(fig).replace('</span><br><span style="font-size:13px">', " ")
    assert "not a number" not in str(fig.to_dict())


def test_beyond_a_few_re_rolls_is_no_verdict(made_evaluation):
    (condition,) = made_evaluation.evaluation(strategies=("greedy",), replicates=2).conditions
    assert takeaway_evaluation.against_null(condition.null, 1 / 3) == ("cannot tell", "beyond all of only 2 re-rolls")
    assert takeaway_evaluation.against_null(condition.null, 2 / 3)[0] == "as re-rolls do"


def test_the_gold_text_is_told(found):
    assert f"{found.gold.value:.3g} nats" in plain(accuracy(found))


def test_markup_is_escaped(found):
    text = accuracy(found).to_json()
    assert "<u>questions" not in text


@pytest.mark.parametrize(
    ("null", "p", "verdict"),
    [
        (None, 0.01, "cannot tell"),
        (NullNumbers((0.0,) * 18, (), (), None, 0.0, 0.0, 0.0), 0.05, "cannot tell"),
        (NullNumbers((0.0,) * 19, (), (), "why", 0.0, 0.0, 0.0), 0.05, "cannot tell"),
        (NullNumbers((0.0,) * 19, (), (), None, 0.0, 0.0, 0.0), float("nan"), "cannot tell"),
        (NullNumbers((0.0,) * 19, (), (), None, 0.0, 0.0, 0.0), 0.05, "stands out"),
        (NullNumbers((0.0,) * 19, (), (), None, 0.0, 0.0, 0.0), 0.1, "as re-rolls do"),
    ],
)
def test_verdicts(null, p, verdict):
    assert takeaway_evaluation.against_null(null, p)[0] == verdict


def test_paths_of_one_label_are_told_apart(found):
    fig = accuracy(replace(found, b=found.a))
    assert "path a − path b" in plain(fig)


def test_other_things_are_refused(drift, found):
    with pytest.raises(InputError, match=r"accuracy was given a Drift; it shows what kvdrift\.evaluate returns"):
        accuracy(drift)
    with pytest.raises(InputError, match="No item of this evaluation has run"):
        accuracy(replace(found, records=()))


def test_template(found):
    assert accuracy(found, dark=True).layout.template.layout.paper_bgcolor == "#15181e"
