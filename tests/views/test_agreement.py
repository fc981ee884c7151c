from dataclasses import replace

import numpy as np
import pytest

from kvdrift.errors import InputError
from kvdrift.views import agreement
from kvdrift.views.agreement import null_incidence


def of(fig, meta):
    return [trace for trace in fig.data if trace.meta == meta]


def at(trace, token):
    """Height of a step curve after so many tokens, per cent."""
    x, y = np.array(trace.x), np.array(trace.y)
    return y[np.flatnonzero(x <= token)[-1]]


@pytest.fixture(scope="module")
def found(made_evaluation):
    return made_evaluation.evaluation()


def test_curves_count_the_trials(found):
    curves = of(agreement(found), "share")
    trials = found.to_dataframe("trials")
    assert len(curves) == len(found.strategies)
    for curve, strategy in zip(curves, found.strategies, strict=True):
        steps = trials[(trials.strategy == strategy) & (trials.arm == "b")].divergence
        for token in range(found.max_new_tokens + 1):
            assert at(curve, token) == pytest.approx(100 * (steps + 1 <= token).mean())


def test_lines_of_the_null_count_the_trials(found):
    lines = of(agreement(found), "null")
    trials = found.to_dataframe("trials")
    for line, strategy in zip(lines, found.strategies, strict=True):
        ends = np.flatnonzero(np.isnan(np.array(line.x, dtype=float)))
        assert len(ends) == found.replicates
        for replicate, (start, end) in enumerate(zip([0, *(ends[:-1] + 1)], ends, strict=True)):
            steps = trials[(trials.strategy == strategy) & (trials.arm == f"null {replicate}")].divergence
            x, y = np.array(line.x[start:end]), np.array(line.y[start:end])
            assert (x[0], y[0], x[-1]) == (0, 0, found.max_new_tokens)
            for token in (1, 10, 30, found.max_new_tokens):
                assert y[np.flatnonzero(x <= token)[-1]] == pytest.approx(100 * (steps + 1 <= token).mean())


def test_the_null_ends_where_the_rates_are(found):
    for condition in found.conditions:
        ends = [shares[-1] if shares else 0.0 for _, shares in null_incidence(found, condition.strategy)]
        assert ends == pytest.approx(condition.null.divergence)


def test_intervals_are_those_of_the_condition(found):
    fig = agreement(found)
    bands = [trace for trace in fig.data if trace.name == "95 % interval"]
    for trace, condition in zip(bands, found.conditions, strict=True):
        assert max(trace.y) == pytest.approx(100 * max(condition.incidence.high))
        half = len(trace.y) // 2
        assert set(np.round(trace.y[:half], 9)) == {0.0, *np.round(100 * np.array(condition.incidence.high), 9)}


def test_the_median_is_marked_where_it_is_reached(made_evaluation):
    often, rare = made_evaluation.evaluation(parting=0.9), made_evaluation.evaluation(parting=0.2)
    marks = of(agreement(often), "half")
    for mark, condition in zip(marks, often.conditions, strict=True):
        shape = condition.incidence
        (token,) = mark.x
        assert shape.value[shape.tokens.index(token)] >= 0.5
        assert all(share < 0.5 for t, share in zip(shape.tokens, shape.value, strict=True) if t < token)
    assert of(agreement(rare), "half") == []
    assert "half never" in agreement(rare).layout.annotations[0].text


def test_headings_hold_the_numbers(found):
    notes = agreement(found).layout.annotations
    for note, condition in zip(notes, found.conditions, strict=True):
        null = condition.null.divergence
        assert f"{100 * condition.divergence.value:.0f} % of 20 part" in note.text
        assert f"re-rolls: {100 * min(null):.0f} % to {100 * max(null):.0f} %" in note.text


def test_nothing_parts_and_no_null(made_evaluation):
    found = made_evaluation.evaluation(parting=0.0, replicates=0)
    fig = agreement(found)
    assert of(fig, "null") == []
    assert all(set(trace.y) == {0.0} for trace in of(fig, "share"))
    assert "No re-rolls ran" in fig.layout.title.text


def test_many_strategies_wrap(made_evaluation):
    found = made_evaluation.evaluation(n_items=3, strategies=tuple("abcde"), replicates=1)
    fig = agreement(found)
    assert len({trace.yaxis for trace in of(fig, "share")}) == 5
    assert fig.layout.height > agreement(replace(found, strategies=("a", "b"))).layout.height


def test_other_things_are_refused(drift):
    with pytest.raises(InputError, match="agreement was given a Drift"):
        agreement(drift)


def test_template(found):
    assert agreement(found, dark=True).layout.template.layout.paper_bgcolor == "#15181e"
