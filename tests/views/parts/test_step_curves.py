import numpy as np
import pytest

from kvdrift.views.parts.curves import LogAxis
from kvdrift.views.parts.step_curves import step_band, step_curve, step_traces, zero_words
from kvdrift.views.parts.theme import IDENTICAL, NOT_FINITE

VALUES = np.array([[0.0, 2.0, 8.0, np.nan], [0.0, 4.0, np.nan, np.nan], [0.0, 9.0, 2.0, np.nan]])
RAN = np.array([[True, True, True, False], [True, True, False, False], [True, True, True, False]])


def test_median_over_the_prompts_that_have_the_step():
    found = step_curve(VALUES, VALUES == 0, RAN)
    assert found.steps.tolist() == [0, 1, 2]
    assert found.median.tolist() == [0.0, 4.0, 5.0]
    assert found.n.tolist() == [3, 3, 2]
    assert found.same.tolist() == [3, 0, 0]
    assert found.low[1] == 2.0
    assert found.high[1] == 9.0


def test_one_prompt_has_no_interval():
    found = step_curve(VALUES[:1], VALUES[:1] == 0, RAN[:1])
    assert np.isnan(found.low).all()
    assert found.median.tolist() == [0.0, 2.0, 8.0]


def test_a_value_that_is_not_a_number_is_not_averaged_away():
    values = VALUES.copy()
    values[0, 1] = np.nan
    assert np.isnan(step_curve(values, values == 0, RAN).median[1])


def test_zeros_stand_at_the_bottom_in_grey_and_the_line_stops():
    found = step_curve(VALUES, VALUES == 0, RAN)
    axis = LogAxis.of([found.median])
    line, zeros = step_traces(found, axis, name="patched", colour="#2f7fd1")
    assert np.isnan(line.y[0])
    assert list(line.y[1:]) == [4.0, 5.0]
    assert list(zeros.x) == [0]
    assert list(zeros.y) == [axis.zero]
    assert 0 < axis.zero < 4.0
    assert zeros.marker.color == IDENTICAL
    assert "exactly 0" in zeros.customdata[0]
    assert "bit for bit in 3 of 3" in zeros.customdata[0]


def test_not_finite_is_marked_at_the_top():
    values = np.array([[1.0, np.inf, 3.0]])
    found = step_curve(values, values == 0, np.ones((1, 3), bool))
    axis = LogAxis.of([found.median])
    traces = step_traces(found, axis, name="x", colour="#2f7fd1")
    assert traces[1].marker.color == NOT_FINITE
    assert traces[1].y[0] == pytest.approx(10**axis.high)


def test_a_band_is_broken_where_both_edges_are_zero():
    low, high = np.array([1.0, 1.0, 0.0, 0.0, 2.0]), np.array([2.0, 3.0, 0.0, 1.0, 4.0])
    axis = LogAxis.of([low, high])
    drawn = step_band(np.arange(5), low, high, axis)
    breaks = np.flatnonzero(np.isnan(np.array(drawn.x, dtype=float)))
    assert len(breaks) == 2
    assert list(drawn.x[: breaks[0]]) == [0, 1, 1, 0]
    assert list(drawn.x[breaks[0] + 1 : breaks[1]]) == [3, 4, 4, 3]
    assert drawn.y[breaks[1] - 1] == axis.zero  # zero in some prompts: down to the row of zeros


def test_a_band_at_a_single_step_has_a_width():
    drawn = step_band(np.arange(3), np.zeros(3), np.array([0.0, 2.0, 0.0]), LogAxis.of([np.array([0.0, 2.0])]))
    x, y = np.array(drawn.x[:4]), np.array(drawn.y[:4])
    assert x.min() < 1 < x.max()
    assert y.max() == 2.0


def test_zero_is_called_bit_identical_only_if_it_always_is():
    assert zero_words(np.array([0.0, 1.0]), np.array([1.0, 0.0])) == "bit-identical"
    assert zero_words(np.array([0.0, 0.0]), np.array([1.0, 0.0])) == "exactly 0"
