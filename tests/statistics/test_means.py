import math

import numpy as np
import pytest

from kvdrift.statistics.means import mean, ratio


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
