import math

import numpy as np
import pytest

from kvdrift.ladder.statistics import mean, ratio, upper_bound


@pytest.mark.parametrize(
    ("events", "n", "bound"),
    [(0, 10, 0.2589), (1, 10, 0.3942), (2, 10, 0.5069), (5, 10, 0.7776), (1, 20, 0.2161), (10, 10, 1.0)],
)
def test_upper_bounds_are_those_of_published_tables(events, n, bound):
    assert upper_bound(events, n) == pytest.approx(bound, abs=5e-5)


def test_so_few_events_are_rare_at_the_bound():
    bound, rng = upper_bound(3, 40), np.random.default_rng(0)
    assert (rng.binomial(40, bound, 200_000) <= 3).mean() == pytest.approx(0.05, abs=0.003)


def test_no_trial_no_bound():
    assert math.isnan(upper_bound(0, 0))


def test_mean_leaves_out_what_has_no_value():
    values = np.array([1.0, 2.0, 6.0, np.nan])
    found = mean(values)
    assert (found.value, found.median, found.n) == (3.0, 2.0, 3)
    assert found.error == pytest.approx(np.std([1, 2, 6], ddof=1) / math.sqrt(3))
    assert 1 <= found.low < 3 < found.high <= 6


def test_mean_of_one_and_of_none():
    one, none = mean(np.array([4.0])), mean(np.array([np.nan]))
    assert one.value == 4
    assert math.isnan(one.error)
    assert math.isnan(one.low)
    assert math.isnan(none.value)
    assert none.n == 0


def test_ratios_are_paired():
    """Prompts that vary tenfold, but alike in both arms: the interval of the ratio is a point."""
    b = np.array([1.0, 10.0, 3.0, 0.5])
    assert ratio(3 * b, b) == pytest.approx((3, 3, 3))
    value, low, high = ratio(b, b[::-1].copy())
    assert value == pytest.approx(1)
    assert low < 0.5 < 2 < high


def test_a_chain_of_ratios_is_measured_over_predicted():
    a, b, c, d = (np.array(x, dtype=float) for x in ([8, 8], [2, 2], [4, 4], [2, 2]))
    assert ratio(a, b, c, d) == pytest.approx((2, 2, 2))


def test_zeros_in_a_ratio():
    zero, one = np.zeros(3), np.ones(3)
    assert ratio(zero, one) == (0, 0, 0)
    assert ratio(one, zero)[0] == math.inf
    assert math.isnan(ratio(zero, zero)[0])
    assert all(math.isnan(x) for x in ratio(np.array([np.nan]), np.array([1.0])))
