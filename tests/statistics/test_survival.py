import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from statsmodels.duration.survfunc import CumIncidenceRight

from kvdrift.errors import InputError
from kvdrift.statistics.rates import wilson
from kvdrift.statistics.survival import cumulative_incidence

NAN = float("nan")
quick = settings(max_examples=60, deadline=None)


def column(values):
    return np.asarray(values, dtype=float)[:, None]


class TestIncidence:
    def test_is_aalen_johansen_with_the_end_of_the_text_competing(self):
        rng = np.random.default_rng(3)
        horizon, n = 32, 80
        diverges, ends = rng.integers(0, 60, n), rng.integers(5, 60, n)
        event = (diverges < ends) & (diverges < horizon)
        status = np.where(event, 1, np.where(ends <= horizon, 2, 0))
        time = np.where(event, diverges + 1, np.minimum(ends, horizon))
        expected = CumIncidenceRight(time, status)
        found = cumulative_incidence(column(np.where(event, diverges, NAN)), horizon)
        at = np.searchsorted(expected.times, found.tokens)
        assert set(status) == {0, 1, 2}
        assert found.value == pytest.approx(expected.cinc[0][at], rel=1e-9)
        assert found.value[-1] == pytest.approx(expected.cinc[0][-1], rel=1e-9)

    def test_by_hand_with_two_seeds(self):
        found = cumulative_incidence([[0, NAN], [3, 0], [NAN, NAN], [7, 3]], 8)
        assert found.tokens == (1, 4, 8)
        assert found.value == (0.25, 0.5, 0.625)
        assert (found.low[1], found.high[1]) == wilson(2, 4)
        assert found.horizon == 8

    @pytest.mark.parametrize("steps", [np.empty((0, 1)), [[NAN], [NAN]]])
    def test_is_empty_if_nothing_diverged(self, steps):
        assert cumulative_incidence(steps, 8).tokens == ()

    @pytest.mark.parametrize("step", [-1, 8])
    def test_steps_outside_the_run_are_refused(self, step):
        with pytest.raises(InputError, match="8 tokens"):
            cumulative_incidence([[step]], 8)

    @quick
    @given(st.lists(st.one_of(st.just(NAN), st.integers(0, 15)), min_size=1, max_size=30))
    def test_rises_within_its_interval(self, steps):
        found = cumulative_incidence(column(steps), 16)
        assert list(found.value) == sorted(found.value)
        assert all(0 <= lo <= v <= hi <= 1 for lo, v, hi in zip(found.low, found.value, found.high, strict=True))
