import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from statsmodels.duration.survfunc import CumIncidenceRight
from statsmodels.stats.contingency_tables import mcnemar as statsmodels_mcnemar

from kvdrift.errors import InputError
from kvdrift.evaluation import statistics as s

NAN = float("nan")
quick = settings(max_examples=60, deadline=None)
counts = st.integers(0, 40)
eighths = st.lists(st.integers(-8, 8).map(lambda k: k / 8), max_size=9)


def column(values):
    return np.asarray(values, dtype=float)[:, None]


class TestWilson:
    @pytest.mark.parametrize(
        ("events", "n", "low", "high"),
        [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
    )
    def test_agrees_with_newcombe_1998(self, events, n, low, high):
        assert s.wilson(events, n) == pytest.approx((low, high), abs=5e-5)

    @quick
    @given(counts, st.integers(1, 40))
    def test_ends_lie_where_the_score_statistic_is_at_its_limit(self, events, more):
        n = events + more
        for p in s.wilson(events, n):
            assert 0 <= p <= 1
            assert (events / n - p) ** 2 == pytest.approx(stats.norm.ppf(0.975) ** 2 * p * (1 - p) / n, abs=1e-12)

    def test_of_nothing_is_no_interval(self):
        assert np.isnan(s.wilson(0, 0)).all()

    def test_more_events_than_trials_are_refused(self):
        with pytest.raises(InputError, match="5 events of 4"):
            s.wilson(5, 4)


class TestItemRate:
    def test_of_one_seed_is_wilson(self):
        rate = s.item_rate(column([True, True, False, True]))
        assert (rate.value, rate.events, rate.n) == (0.75, 3, 4)
        assert (rate.low, rate.high) == s.wilson(3, 4)

    def test_leaves_out_what_was_not_scored(self):
        assert s.item_rate(column([1, NAN, 0, NAN])) == s.item_rate(column([1, 0]))
        assert s.item_rate([[1, NAN], [0, 1], [NAN, NAN]]).n == 3

    @pytest.mark.parametrize("shape", [(0, 1), (0, 3), (2, 1), (2, 3)])
    def test_of_nothing_is_nan(self, shape):
        rate = s.item_rate(np.full(shape, NAN))
        assert np.isnan([rate.value, rate.low, rate.high]).all()
        assert (rate.events, rate.n) == (0, 0)

    def test_seeds_that_agree_do_not_count_as_more_items(self):
        one = np.random.default_rng(0).random((60, 1)) < 0.3
        many = s.item_rate(np.repeat(one, 5, axis=1))
        low, high = s.wilson(int(one.sum()), 60)
        assert many.high - many.low > 0.9 * (high - low)
        naive_low, naive_high = s.wilson(many.events, many.n)
        assert many.high - many.low > 2 * (naive_high - naive_low)

    def test_items_that_are_all_alike_get_wilsons_interval_over_items(self):
        rate = s.item_rate(np.ones((12, 4)))
        assert (rate.value, rate.events, rate.n) == (1.0, 48, 48)
        assert (rate.low, rate.high) == s.wilson(12, 12)

    def test_other_numbers_are_refused(self):
        with pytest.raises(InputError, match="true and false"):
            s.item_rate([[0.5]])

    def test_a_flat_array_is_refused(self):
        with pytest.raises(InputError, match=r"\[item, seed\]"):
            s.item_rate([True, False])


class TestPairedDifference:
    def test_averages_seeds_and_leaves_out_pairs_with_nan(self):
        a, b = [[1, 1], [0, 1], [NAN, NAN], [1, NAN]], [[0, 1], [0, 1], [1, 1], [0, 0]]
        assert s.item_differences(a, b).tolist() == [0.5, 0.0, 1.0]
        assert s.paired_difference(a, b).value == 0.5

    def test_ends_are_the_expanded_percentiles_of_all_resamples(self):
        d = np.array([0.0, 1.0, -2.0, 3.5, 0.25, 7.0])
        means = np.array([np.mean(r) for r in itertools.product(d, repeat=6)])
        tail = stats.norm.cdf(-math.sqrt(6 / 5) * 2.570582)  # Student's t of 5 degrees, from a table
        assert tail == pytest.approx(0.00243, abs=5e-6)
        found = s.paired_difference(column(d), column(d) * 0)
        noise = 4 * math.sqrt(tail / s.N_BOOTSTRAP)
        assert (means <= found.low).mean() == pytest.approx(tail, abs=noise)
        assert (means >= found.high).mean() == pytest.approx(tail, abs=noise)

    def test_covers_the_mean_where_plain_percentiles_do_not(self, monkeypatch):
        monkeypatch.setattr(s, "N_BOOTSTRAP", 999)
        rng = np.random.default_rng(0)
        covered = []
        for _ in range(600):
            found = s.paired_difference(rng.normal(size=(8, 1)), np.zeros((8, 1)))
            covered.append(found.low <= 0 <= found.high)
        assert np.mean(covered) == pytest.approx(0.93, abs=0.025)  # plain percentiles: 0.85

    def test_of_many_items_is_students_interval(self):
        d = np.random.default_rng(1).normal(0.1, size=400)
        found, expected = s.paired_difference(column(d), column(d * 0)), stats.ttest_1samp(d, 0).confidence_interval()
        assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=0.01)

    def test_is_the_same_every_time(self):
        d = np.random.default_rng(1).normal(size=(30, 2))
        assert s.paired_difference(d, d[::-1]) == s.paired_difference(d, d[::-1])

    @pytest.mark.parametrize(
        ("a", "value"), [([], NAN), ([1.0], 1.0), ([0, 0, 0, 0], 0.0), ([2.5, 2.5], 2.5), ([NAN, 1], 1.0)]
    )
    def test_without_anything_to_resample_has_no_interval(self, a, value):
        found = s.paired_difference(np.reshape(a, (-1, 1)), np.zeros((len(a), 1)))
        assert found.value == pytest.approx(value, nan_ok=True)
        assert np.isnan([found.low, found.high]).all()

    def test_of_two_items_spans_both(self):
        found = s.paired_difference(column([0.0, 3.0]), column([0.0, 0.0]))
        assert (found.value, found.low, found.high) == (1.5, 0.0, 3.0)

    def test_unlike_shapes_are_refused(self):
        with pytest.raises(InputError, match="Pairs"):
            s.paired_difference([[1], [0]], [[1]])


class TestMcNemar:
    @quick
    @given(counts, counts)
    def test_is_the_binomial_tail_on_both_sides(self, a, b):
        n = a + b
        tail = sum(Fraction(math.comb(n, k), 2**n) for k in range(min(a, b) + 1))
        assert s.mcnemar(a, b) == pytest.approx(float(min(1, 2 * tail)), rel=1e-9)
        assert s.mcnemar(a, b) == s.mcnemar(b, a)
        assert s.mcnemar(a, b) == pytest.approx(statsmodels_mcnemar([[0, a], [b, 0]], exact=True).pvalue, rel=1e-9)

    @quick
    @given(st.integers(1, 40), st.data())
    def test_falls_as_the_sides_part(self, n, data):
        low = data.draw(st.integers(0, (n - 1) // 2))
        assert s.mcnemar(low, n - low) <= s.mcnemar(low + 1, n - low - 1)

    def test_without_discordant_items_says_nothing(self):
        assert s.mcnemar(0, 0) == 1.0


class TestSignFlip:
    @quick
    @given(eighths)
    def test_is_the_share_of_sign_patterns_as_far_from_zero(self, d):
        patterns = itertools.product((1, -1), repeat=len(d))
        sums = [abs(sum(x * sign for x, sign in zip(d, p, strict=True))) for p in patterns]
        assert s.sign_flip(d) == pytest.approx(sum(x >= abs(sum(d)) for x in sums) / len(sums), rel=1e-9)
        assert s.sign_flip(d) == s.sign_flip([-x for x in d])

    @quick
    @given(st.integers(0, 8), st.integers(0, 8))
    def test_is_mcnemar_with_one_seed(self, a, b):
        assert s.sign_flip([1.0] * a + [-1.0] * b + [0.0] * 5) == pytest.approx(s.mcnemar(a, b), rel=1e-9)

    def test_thirds_that_sum_to_the_same_count_as_equal(self):
        thirds = np.array([1, 1, 1, -2, 1])
        sums = [abs(sum(thirds * p)) for p in itertools.product((1, -1), repeat=5)]
        assert s.sign_flip(thirds / 3) == np.mean(np.array(sums) >= 2)

    def test_draws_patterns_where_there_are_too_many(self):
        p = s.sign_flip([1.0] * 25 + [-1.0] * 10)
        exact = s.mcnemar(25, 10)
        assert p == pytest.approx(exact, abs=4 * math.sqrt(exact / s.N_PERMUTATIONS))
        assert p == s.sign_flip([1.0] * 25 + [-1.0] * 10)
        assert s.sign_flip([1.0] * 40) == 2 / (1 + s.N_PERMUTATIONS)

    @pytest.mark.parametrize("d", [[], [0.0, 0.0], [3.0], [0.0, -0.5]])
    def test_without_two_items_that_differ_says_nothing(self, d):
        assert s.sign_flip(d) == 1.0

    def test_nan_is_refused(self):
        with pytest.raises(InputError, match="finite"):
            s.sign_flip([1.0, NAN])


class TestEnough:
    @pytest.mark.parametrize(("alpha", "n"), [(0.05, 6), (0.01, 8), (0.001, 11), (1.0, 0)])
    def test_fewest_discordant(self, alpha, n):
        assert s.fewest_discordant(alpha) == n
        assert s.mcnemar(n, 0) <= alpha

    @quick
    @given(eighths)
    def test_is_whether_all_of_one_sign_would_be_significant(self, d):
        assert s.enough_to_tell(d) == (s.sign_flip([abs(x) for x in d]) <= 0.05)

    def test_what_rounding_left_of_zero_does_not_count(self):
        assert not s.enough_to_tell([0.1 + 0.2 - 0.3, 1, 1, 1, 1, 1])

    def test_an_alpha_of_zero_is_refused(self):
        with pytest.raises(InputError, match="alpha=0"):
            s.fewest_discordant(0)


def power_of_mcnemar(n, a, b, alpha=0.05):
    """Sum over all tables of (only a, only b, neither), each a multinomial outcome."""
    total = 0.0
    for i in range(n + 1):
        for j in range(n + 1 - i):
            if s.mcnemar(i, j) <= alpha:
                ways = math.comb(n, i) * math.comb(n - i, j)
                total += ways * a**i * b**j * (1 - a - b) ** (n - i - j)
    return total


class TestDetectable:
    @pytest.mark.parametrize(("n", "share"), [(30, 0.4), (30, 0.8), (12, 1.0), (45, 0.25)])
    def test_has_the_power_asked_for_in_the_multinomial(self, n, share):
        found = s.detectable_difference(n, share)
        assert 0 < found <= share
        assert power_of_mcnemar(n, (share + found) / 2, (share - found) / 2) == pytest.approx(0.8, abs=1e-6)

    @pytest.mark.parametrize(("n", "share"), [(20, 0.1), (5, 1.0), (0, 0.5), (100, 0.0)])
    def test_is_none_where_even_one_way_cannot_be_seen(self, n, share):
        assert power_of_mcnemar(min(n, 30), share, 0) < 0.8 or share == 0
        assert s.detectable_difference(n, share) is None

    def test_falls_with_items_and_grows_with_power(self):
        by_n = [s.detectable_difference(n, 0.2) for n in (60, 100, 200, 1319)]
        assert by_n == sorted(by_n, reverse=True)
        assert s.detectable_difference(100, 0.2, power=0.9) > s.detectable_difference(100, 0.2)

    def test_scales_with_what_an_item_differs_by(self):
        assert s.detectable_difference(100, 0.2, size=0.25) == s.detectable_difference(100, 0.2) / 4

    @pytest.mark.parametrize("bad", [{"n_items": -1}, {"discordant_share": 1.5}, {"power": 0}, {"alpha": 2}])
    def test_numbers_out_of_range_are_refused(self, bad):
        with pytest.raises(InputError):
            s.detectable_difference(**{"n_items": 10, "discordant_share": 0.5, **bad})


class TestIncidence:
    def test_is_aalen_johansen_with_the_end_of_the_text_competing(self):
        rng = np.random.default_rng(3)
        horizon, n = 32, 80
        diverges, ends = rng.integers(0, 60, n), rng.integers(5, 60, n)
        event = (diverges < ends) & (diverges < horizon)
        status = np.where(event, 1, np.where(ends <= horizon, 2, 0))
        time = np.where(event, diverges + 1, np.minimum(ends, horizon))
        expected = CumIncidenceRight(time, status)
        found = s.cumulative_incidence(column(np.where(event, diverges, NAN)), horizon)
        at = np.searchsorted(expected.times, found.tokens)
        assert set(status) == {0, 1, 2}
        assert found.value == pytest.approx(expected.cinc[0][at], rel=1e-9)
        assert found.value[-1] == pytest.approx(expected.cinc[0][-1], rel=1e-9)

    def test_by_hand_with_two_seeds(self):
        found = s.cumulative_incidence([[0, NAN], [3, 0], [NAN, NAN], [7, 3]], 8)
        assert found.tokens == (1, 4, 8)
        assert found.value == (0.25, 0.5, 0.625)
        assert (found.low[1], found.high[1]) == s.wilson(2, 4)
        assert found.horizon == 8

    @pytest.mark.parametrize("steps", [np.empty((0, 1)), [[NAN], [NAN]]])
    def test_is_empty_if_nothing_diverged(self, steps):
        assert s.cumulative_incidence(steps, 8).tokens == ()

    @pytest.mark.parametrize("step", [-1, 8])
    def test_steps_outside_the_run_are_refused(self, step):
        with pytest.raises(InputError, match="8 tokens"):
            s.cumulative_incidence([[step]], 8)

    @quick
    @given(st.lists(st.one_of(st.just(NAN), st.integers(0, 15)), min_size=1, max_size=30))
    def test_rises_within_its_interval(self, steps):
        found = s.cumulative_incidence(column(steps), 16)
        assert list(found.value) == sorted(found.value)
        assert all(0 <= lo <= v <= hi <= 1 for lo, v, hi in zip(found.low, found.value, found.high, strict=True))


class TestNullShare:
    def test_counts_ties_and_itself(self):
        assert s.null_share(0.4, [0.1, 0.4, 0.5, 0.3]) == 3 / 5
        assert s.null_share(-0.4, [0.1, 0.4, 0.5, -0.5], tail="two-sided") == 4 / 5
        assert s.null_share(0.4, []) == 1.0

    def test_needs_19_replicates_for_5_percent(self):
        assert s.null_share(1.0, [0.0] * 19) == 0.05
        assert s.null_share(1.0, [0.0] * 18) > 0.05

    def test_ties_survive_rounding(self):
        assert s.null_share(0.3, [0.1 + 0.2, 0.1 * 3]) == 1.0
        assert s.null_share(0.1 + 0.2, [0.3]) == 1.0

    def test_of_nan_is_nan(self):
        assert math.isnan(s.null_share(NAN, [0.0]))
        assert math.isnan(s.null_share(0.0, [NAN]))

    def test_another_tail_is_refused(self):
        with pytest.raises(InputError, match="tail='low'"):
            s.null_share(0.0, [0.0], tail="low")
