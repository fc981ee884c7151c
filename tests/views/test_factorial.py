import numpy as np
import pytest

from kvdrift.errors import InputError
from kvdrift.views import factorial

PAIRS = {
    ("both: the whole path", "x"): "y11-y00",
    ("placebo: one entry by one ulp", "x"): "ulp-y00",
    ("the kernel alone", "x"): "y10-y00",
    ("K/V alone", "x"): "y01-y00",
    ("both: the whole path", "x2"): "y11-y00",
    ("placebo: one entry by one ulp", "x2"): "ulp-y11",
    ("the kernel alone", "x2"): "y01-y11",
    ("K/V alone", "x2"): "y10-y11",
}


def plain(fig):
    return fig.layout.title.text.replace("</b><br><b>", " ")


@pytest.mark.parametrize("metric", ["logit_l2", "kl"])
def test_lines_are_medians_of_the_table(made, metric):
    result = made.factorial()
    fig = factorial(result, metric=metric)
    lines = {(t.name, t.xaxis): t for t in fig.data if t.mode == "lines+markers"}
    assert set(lines) == set(PAIRS)
    table = result.to_dataframe()
    for key, pair in PAIRS.items():
        expected = table[table.pair == pair].groupby("step")[metric].median()
        assert list(lines[key].x) == list(expected.index)
        np.testing.assert_array_equal(lines[key].y, np.where(expected > 0, expected, np.nan))
        zeros = next(t for t in fig.data if t.name == f"{key[0]}: exactly zero" and t.xaxis == key[1])
        assert list(zeros.x) == list(expected.index[expected == 0]) == [0, 4]
        assert f"({pair})" in lines[key].hovertemplate


def test_shares_of_equal_steps_are_those_of_the_result(made):
    result = made.factorial(levels={"y10-y00": 0})
    fig = factorial(result)
    heading = fig.layout.annotations[0].text
    share = f"{100 * result.per_prompt('y01-y00', 'identical').mean():.0f}"
    assert f"kernel 100 %, K/V {share} %" in heading
    assert "Starting from cache-OFF" in heading
    assert "Starting from cache-ON" in fig.layout.annotations[1].text


def test_a_placebo_as_large_as_the_whole_forbids_shares(made):
    text = plain(factorial(made.factorial()))
    assert text.startswith("<b>One ulp in one entry does as much")
    assert "lengths do not divide the drift" in text
    small = plain(factorial(made.factorial(levels={"ulp-y00": 0.1, "ulp-y11": 0.2})))
    assert "does as much" not in small
    assert "one ulp in one entry 0." in small
    assert not any(word in text for word in ("%  of the drift", "Shapley"))


def test_a_factor_that_changes_no_bit_is_named(made):
    text = plain(factorial(made.factorial(levels={"y10-y00": 0, "y01-y11": 0})))
    assert "Changing the kernel alone changes no bit" in text
    other = plain(factorial(made.factorial(levels={"y01-y00": 0, "y10-y11": 0})))
    assert "Changing the K/V alone changes no bit" in other


def test_no_drift_at_all(made):
    levels = dict.fromkeys(("y10-y00", "y01-y00", "y10-y11", "y01-y11", "y11-y00", "ulp-y00", "ulp-y11"), 0)
    fig = factorial(made.factorial(levels=levels))
    assert "agree bit for bit at every step" in plain(fig)
    assert "bit-identical" in fig.layout.yaxis.ticktext


def test_one_step_only(made):
    assert "No step follows the prompt" in plain(factorial(made.factorial(n_steps=1)))


def test_other_things_are_refused(drift, made):
    with pytest.raises(InputError, match=r"factorial was given a Drift; it shows what kvdrift\.factorial returns"):
        factorial(drift)
    with pytest.raises(InputError, match="logit_l2 or kl"):
        factorial(made.factorial(), metric="identical")


def test_template(made):
    assert factorial(made.factorial(), dark=True).layout.template.layout.paper_bgcolor == "#15181e"
