import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.proportion import proportion_confint

from kvdrift.errors import InputError
from kvdrift.statistics.rates import item_rate, rule_of_three, upper_bound, wilson

NAN = float("nan")
quick = settings(max_examples=60, deadline=None)
counts = st.integers(0, 40)


def column(values):
    return np.asarray(values, dtype=float)[:, None]


class TestWilson:
    @pytest.mark.parametrize(
        ("events", "n", "low", "high"),
        [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
    )
    def test_agrees_with_newcombe_1998(self, events, n, low, high):
        assert wilson(events, n) == pytest.approx((low, high), abs=5e-5)

    @quick
    @given(counts, st.integers(1, 40))
    def test_ends_lie_where_the_score_statistic_is_at_its_limit(self, events, more):
        n = events + more
        for p in wilson(events, n):
            assert 0 <= p <= 1
            assert (events / n - p) ** 2 == pytest.approx(stats.norm.ppf(0.975) ** 2 * p * (1 - p) / n, abs=1e-12)

    @quick
    @given(counts, st.integers(1, 40))
    def test_is_that_of_scipy_and_of_statsmodels(self, events, more):
        n = events + more
        whole = stats.binomtest(events, n).proportion_ci(method="wilson")
        assert wilson(events, n) == pytest.approx((whole.low, whole.high), abs=1e-12)
        assert wilson(events / 3, n) == pytest.approx(proportion_confint(events / 3, n, method="wilson"), abs=1e-12)

    def test_of_nothing_is_no_interval(self):
        assert np.isnan(wilson(0, 0)).all()

    def test_more_events_than_trials_are_refused(self):
        with pytest.raises(InputError, match="5 events of 4"):
            wilson(5, 4)


class TestItemRate:
    def test_of_one_seed_is_wilson(self):
        rate = item_rate(column([True, True, False, True]))
        assert (rate.value, rate.events, rate.n) == (0.75, 3, 4)
        assert (rate.low, rate.high) == wilson(3, 4)

    def test_leaves_out_what_was_not_scored(self):
        assert item_rate(column([1, NAN, 0, NAN])) == item_rate(column([1, 0]))
        assert item_rate([[1, NAN], [0, 1], [NAN, NAN]]).n == 3

    @pytest.mark.parametrize("shape", [(0, 1), (0, 3), (2, 1), (2, 3)])
    def test_of_nothing_is_nan(self, shape):
        rate = item_rate(np.full(shape, NAN))
        assert np.isnan([rate.value, rate.low, rate.high]).all()
        assert (rate.events, rate.n) == (0, 0)

    def test_seeds_that_agree_do_not_count_as_more_items(self):
        one = np.random.default_rng(0).random((60, 1)) < 0.3
        many = item_rate(np.repeat(one, 5, axis=1))
        low, high = wilson(int(one.sum()), 60)
        assert many.high - many.low > 0.9 * (high - low)
        naive_low, naive_high = wilson(many.events, many.n)
        assert many.high - many.low > 2 * (naive_high - naive_low)

    def test_items_that_are_all_alike_get_wilsons_interval_over_items(self):
        rate = item_rate(np.ones((12, 4)))
        assert (rate.value, rate.events, rate.n) == (1.0, 48, 48)
        assert (rate.low, rate.high) == wilson(12, 12)

    def test_other_numbers_are_refused(self):
        with pytest.raises(InputError, match="true and false"):
            item_rate([[0.5]])

    def test_a_flat_array_is_refused(self):
        with pytest.raises(InputError, match=r"\[item, seed\]"):
            item_rate([True, False])


@pytest.mark.parametrize(
    ("events", "n", "bound"),
    [(0, 10, 0.2589), (1, 10, 0.3942), (2, 10, 0.5069), (5, 10, 0.7776), (1, 20, 0.2161), (10, 10, 1.0)],
)
def test_upper_bounds_are_those_of_published_tables(events, n, bound):
    assert upper_bound(events, n) == pytest.approx(bound, abs=5e-5)


@quick
@given(counts, st.integers(1, 40))
def test_upper_bound_is_clopper_and_pearsons(events, more):
    exact = stats.binomtest(events, events + more, alternative="less").proportion_ci(0.95, method="exact")
    assert upper_bound(events, events + more) == pytest.approx(exact.high, rel=1e-8)


def test_so_few_events_are_rare_at_the_bound():
    bound, rng = upper_bound(3, 40), np.random.default_rng(0)
    assert (rng.binomial(40, bound, 200_000) <= 3).mean() == pytest.approx(0.05, abs=0.003)


def test_no_trial_no_bound():
    assert math.isnan(upper_bound(0, 0))


@pytest.mark.parametrize("n", [1, 5, 20, 1000])
def test_rule_of_three_is_the_exact_bound(n: int) -> None:
    bound = rule_of_three(n)
    assert (1 - bound) ** n == pytest.approx(0.05, rel=1e-12)  # a rate this high gives no event in n once in 20
    assert bound < 3 / n
    assert n < 1000 or bound > 0.997 * 3 / n


def test_rule_of_three_needs_a_trial() -> None:
    with pytest.raises(InputError, match="n=0"):
        rule_of_three(0)
