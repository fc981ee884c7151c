import numpy as np
import pytest

from kvdrift.errors import InputError
from kvdrift.ladder.arms import ARMS
from kvdrift.views import ladder
from kvdrift.views.ladder import GROUPS, LABELS


def plain(fig):
    return fig.layout.title.text.replace("</b><br><b>", " ")


def by_name(fig):
    return {trace.name: trace for trace in fig.data if trace.name != "one prompt"}


def rows(fig):
    """Where each arm stands, by its label."""
    axis = fig.layout.yaxis
    names = [text.replace("<b>", "").replace("</b>", "") for text in axis.ticktext]
    return dict(zip(names, axis.tickvals, strict=True))


def beside(fig, y):
    """The texts to the right of an arm, from left to right."""
    found = [note for note in fig.layout.annotations if note.y == y and note.xref == "paper" and note.x > 0.5]
    return [note.text for note in sorted(found, key=lambda note: note.x)]


def at(fig, arm):
    return rows(fig)[LABELS.get(arm, arm)]


def shown(trace):
    return dict(zip(trace.y, trace.x, strict=True))


def test_dots_and_bars_are_the_table(made_ladder):
    result = made_ladder.ladder()
    fig = ladder(result)
    table = result.to_dataframe().set_index("arm")
    trace = by_name(fig)["measured"]
    positive = table[table.kl > 0]
    assert shown(trace) == {at(fig, arm): kl for arm, kl in positive.kl.items()}
    lows = np.array(trace.x) - np.array(trace.error_x.arrayminus)
    highs = np.array(trace.x) + np.array(trace.error_x.array)
    order = [arm for y in trace.y for arm in positive.index if at(fig, arm) == y]
    np.testing.assert_allclose(lows, positive.kl_low[order], rtol=1e-12)
    np.testing.assert_allclose(highs, positive.kl_high[order], rtol=1e-12)


def test_every_arm_has_its_place():
    assert sorted(arm for arms in GROUPS.values() for arm in arms) == sorted(ARMS)


def test_faint_dots_are_the_prompts(made_ladder):
    result = made_ladder.ladder()
    fig = ladder(result)
    traces = {trace.y[0]: trace for trace in fig.data if trace.name == "one prompt"}
    for rung in result.rungs:
        if rung.ran:
            values = result.per_prompt(rung.name)
            np.testing.assert_array_equal(traces[at(fig, rung.name)].x, np.where(values > 0, values, np.nan))


@pytest.mark.parametrize("reference", [None, "float16"])
def test_predictions_are_the_reference_times_the_ratios(made_ladder, reference):
    result = made_ladder.ladder()
    fig = ladder(result, reference=reference)
    name = reference or "bfloat16"
    start, ratios = result.mean(name).value, result.ratios(reference).set_index("arm")
    for column, words in (("drift_squared", "measured drift²"), ("roundoff_squared", "unit roundoff²")):
        (trace,) = [trace for trace in fig.data if words in trace.name]
        expected = {
            at(fig, arm): start * value for arm, value in ratios[column].items() if arm != name and start * value > 0
        }
        assert shown(trace) == expected
    assert f"from {name}" in plain(fig)
    assert any(shape.x0 == start for shape in fig.layout.shapes)


def test_exact_zeros_stand_in_their_own_column(made_ladder):
    fig = ladder(made_ladder.ladder())
    trace = by_name(fig)["exactly 0: bit-identical"]
    assert set(trace.y) == {at(fig, "sdpa-math"), at(fig, "wide-sums"), at(fig, "fixed-shape")}
    assert set(trace.x) == {fig.layout.xaxis.tickvals[0]}
    assert "identical" in fig.layout.xaxis.ticktext[0]
    assert trace.x[0] < min(by_name(fig)["measured"].x)


def test_flips_ties_and_their_bounds_stand_beside(made_ladder):
    result = made_ladder.ladder()
    fig = ladder(result)
    flips, _, bound = result.count("bfloat16")
    ties, _, tie_bound = result.count("bfloat16", "tie")
    _, *texts = beside(fig, at(fig, "bfloat16"))
    assert texts == [f"{flips} [{100 * bound:.0f} %]", f"{ties} [{100 * tie_bound:.0f} %]"]
    assert flips > 0


def test_arms_without_numbers_say_so(made_ladder):
    fig = ladder(made_ladder.ladder(broken={"float16": "not finite"}))
    assert beside(fig, at(fig, "float16")) == ["<b>not finite</b>"]
    assert beside(fig, at(fig, "sdpa-cudnn")) == ["<b>not run</b>"]
    (note,) = [note for note in fig.layout.annotations if note.text == "<b>not finite</b>"]
    assert note.hovertext == "&lt;b&gt;no&lt;/b&gt; kernel in layer 3"
    assert at(fig, "float16") not in by_name(fig)["measured"].y


def test_the_headline(made_ladder):
    result = made_ladder.ladder()
    row = result.ratios("float16").set_index("arm").loc["float32"]
    head = plain(ladder(result))
    assert f"float16 → float32: KL falls by {-np.log10(row['kl']):.1f} orders of magnitude" in head
    assert f"predicts {-np.log10(row['drift_squared']):.1f}, unit roundoff alone 7.8" in head
    assert "bfloat16 → float32" in plain(ladder(made_ladder.ladder(broken={"float16": "not finite"})))


def test_other_things_are_refused(drift, made_ladder):
    with pytest.raises(InputError, match=r"ladder was given a Drift; it shows what kvdrift\.falsify returns"):
        ladder(drift)
    with pytest.raises(InputError, match="did not run"):
        ladder(made_ladder.ladder(), reference="sdpa-cudnn")


def test_one_prompt_and_only_zeros(made_ladder):
    fig = ladder(made_ladder.ladder(n_prompts=1))
    assert not np.isnan(np.array(by_name(fig)["measured"].error_x.array, dtype=float)).any()
    zeros = dict.fromkeys(made_ladder.LEVELS, 0.0)
    fig = ladder(made_ladder.ladder(levels=zeros))
    assert "bit-identical" in plain(fig)
    assert len(by_name(fig)["exactly 0: bit-identical"].x) == len(zeros)


def test_no_step_after_the_first(made_ladder):
    assert ladder(made_ladder.ladder(n_prompts=1, n_steps=1)).layout.title.text


def test_template(made_ladder):
    assert ladder(made_ladder.ladder(), dark=True).layout.template.layout.paper_bgcolor == "#15181e"
