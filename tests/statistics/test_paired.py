import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.contingency_tables import mcnemar as statsmodels_mcnemar

from kvdrift.errors import InputError
from kvdrift.statistics import resampling
from kvdrift.statistics.items import item_differences
from kvdrift.statistics.paired import N_PERMUTATIONS, mcnemar, paired_difference, sign_flip

NAN = float("nan")
quick = settings(max_examples=60, deadline=None)
counts = st.integers(0, 40)
eighths = st.lists(st.integers(-8, 8).map(lambda k: k / 8), max_size=9)


def column(values):
    return np.asarray(values, dtype=float)[:, None]


class TestPairedDifference:
    def test_averages_seeds_and_leaves_out_pairs_with_nan(self):
        a, b = [[1, 1], [0, 1], [NAN, NAN], [1, NAN]], [[0, 1], [0, 1], [1, 1], [0, 0]]
        assert item_differences(a, b).tolist() == [0.5, 0.0, 1.0]
        assert paired_difference(a, b).value == 0.5

    def test_ends_are_the_expanded_percentiles_of_all_resamples(self):
        d = np.array([0.0, 1.0, -2.0, 3.5, 0.25, 7.0])
        means = np.array([np.mean(r) for r in itertools.product(d, repeat=6)])
        tail = stats.norm.cdf(-math.sqrt(6 / 5) * 2.570582)  # Student's t of 5 degrees, from a table
        assert tail == pytest.approx(0.00243, abs=5e-6)
        found = paired_difference(column(d), column(d) * 0)
        noise = 4 * math.sqrt(tail / resampling.N_BOOTSTRAP)
        assert (means <= found.low).mean() == pytest.approx(tail, abs=noise)
        assert (means >= found.high).mean() == pytest.approx(tail, abs=noise)

    def test_covers_the_mean_where_plain_percentiles_do_not(self, monkeypatch):
        monkeypatch.setattr(resampling, "N_BOOTSTRAP", 999)
        rng = np.random.default_rng(0)
        covered = []
        for _ in range(600):
            found = paired_difference(rng.normal(size=(8, 1)), np.zeros((8, 1)))
            covered.append(found.low <= 0 <= found.high)
        assert np.mean(covered) == pytest.approx(0.93, abs=0.025)  # plain percentiles: 0.85

    def test_of_many_items_is_students_interval(self):
        d = np.random.default_rng(1).normal(0.1, size=400)
        found, expected = paired_difference(column(d), column(d * 0)), stats.ttest_1samp(d, 0).confidence_interval()
        assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=0.01)

    def test_is_the_same_every_time(self):
        d = np.random.default_rng(1).normal(size=(30, 2))
        assert paired_difference(d, d[::-1]) == paired_difference(d, d[::-1])

    @pytest.mark.parametrize(
        ("a", "value"), [([], NAN), ([1.0], 1.0), ([0, 0, 0, 0], 0.0), ([2.5, 2.5], 2.5), ([NAN, 1], 1.0)]
    )
    def test_without_anything_to_resample_has_no_interval(self, a, value):
        found = paired_difference(np.reshape(a, (-1, 1)), np.zeros((len(a), 1)))
        assert found.value == pytest.approx(value, nan_ok=True)
        assert np.isnan([found.low, found.high]).all()

    def test_of_two_items_spans_both(self):
        found = paired_difference(column([0.0, 3.0]), column([0.0, 0.0]))
        assert (found.value, found.low, found.high) == (1.5, 0.0, 3.0)

    def test_unlike_shapes_are_refused(self):
        with pytest.raises(InputError, match="Pairs"):
            paired_difference([[1], [0]], [[1]])


class TestMcNemar:
    @quick
    @given(counts, counts)
    def test_is_the_binomial_tail_on_both_sides(self, a, b):
        n = a + b
        tail = sum(Fraction(math.comb(n, k), 2**n) for k in range(min(a, b) + 1))
        assert mcnemar(a, b) == pytest.approx(float(min(1, 2 * tail)), rel=1e-9)
        assert mcnemar(a, b) == mcnemar(b, a)
        assert mcnemar(a, b) == pytest.approx(statsmodels_mcnemar([[0, a], [b, 0]], exact=True).pvalue, rel=1e-9)

    @quick
    @given(st.integers(1, 40), st.data())
    def test_falls_as_the_sides_part(self, n, data):
        low = data.draw(st.integers(0, (n - 1) // 2))
        assert mcnemar(low, n - low) <= mcnemar(low + 1, n - low - 1)

    def test_without_discordant_items_says_nothing(self):
        assert mcnemar(0, 0) == 1.0


class TestSignFlip:
    @quick
    @given(eighths)
    def test_is_the_share_of_sign_patterns_as_far_from_zero(self, d):
        patterns = itertools.product((1, -1), repeat=len(d))
        sums = [abs(sum(x * sign for x, sign in zip(d, p, strict=True))) for p in patterns]
        assert sign_flip(d) == pytest.approx(sum(x >= abs(sum(d)) for x in sums) / len(sums), rel=1e-9)
        assert sign_flip(d) == sign_flip([-x for x in d])

    @quick
    @given(st.integers(0, 8), st.integers(0, 8))
    def test_is_mcnemar_with_one_seed(self, a, b):
        assert sign_flip([1.0] * a + [-1.0] * b + [0.0] * 5) == pytest.approx(mcnemar(a, b), rel=1e-9)

    def test_thirds_that_sum_to_the_same_count_as_equal(self):
        thirds = np.array([1, 1, 1, -2, 1])
        sums = [abs(sum(thirds * p)) for p in itertools.product((1, -1), repeat=5)]
        assert sign_flip(thirds / 3) == np.mean(np.array(sums) >= 2)

    def test_draws_patterns_where_there_are_too_many(self):
        p = sign_flip([1.0] * 25 + [-1.0] * 10)
        exact = mcnemar(25, 10)
        assert p == pytest.approx(exact, abs=4 * math.sqrt(exact / N_PERMUTATIONS))
        assert p == sign_flip([1.0] * 25 + [-1.0] * 10)
        assert sign_flip([1.0] * 40) == 2 / (1 + N_PERMUTATIONS)

    @pytest.mark.parametrize("d", [[], [0.0, 0.0], [3.0], [0.0, -0.5]])
    def test_without_two_items_that_differ_says_nothing(self, d):
        assert sign_flip(d) == 1.0

    def test_nan_is_refused(self):
        with pytest.raises(InputError, match="finite"):
            sign_flip([1.0, NAN])
