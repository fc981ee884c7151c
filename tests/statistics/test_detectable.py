import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdrift.errors import InputError
from kvdrift.statistics.detectable import detectable_difference, enough_to_tell, fewest_discordant
from kvdrift.statistics.paired import mcnemar, sign_flip

quick = settings(max_examples=60, deadline=None)
eighths = st.lists(st.integers(-8, 8).map(lambda k: k / 8), max_size=9)


class TestEnough:
    @pytest.mark.parametrize(("alpha", "n"), [(0.05, 6), (0.01, 8), (0.001, 11), (1.0, 0)])
    def test_fewest_discordant(self, alpha, n):
        assert fewest_discordant(alpha) == n
        assert mcnemar(n, 0) <= alpha

    @quick
    @given(eighths)
    def test_is_whether_all_of_one_sign_would_be_significant(self, d):
        assert enough_to_tell(d) == (sign_flip([abs(x) for x in d]) <= 0.05)

    def test_what_rounding_left_of_zero_does_not_count(self):
        assert not enough_to_tell([0.1 + 0.2 - 0.3, 1, 1, 1, 1, 1])

    def test_an_alpha_of_zero_is_refused(self):
        with pytest.raises(InputError, match="alpha=0"):
            fewest_discordant(0)


def power_of_mcnemar(n, a, b, alpha=0.05):
    """Sum over all tables of (only a, only b, neither), each a multinomial outcome."""
    total = 0.0
    for i in range(n + 1):
        for j in range(n + 1 - i):
            if mcnemar(i, j) <= alpha:
                ways = math.comb(n, i) * math.comb(n - i, j)
                total += ways * a**i * b**j * (1 - a - b) ** (n - i - j)
    return total


class TestDetectable:
    @pytest.mark.parametrize(("n", "share"), [(30, 0.4), (30, 0.8), (12, 1.0), (45, 0.25)])
    def test_has_the_power_asked_for_in_the_multinomial(self, n, share):
        found = detectable_difference(n, share)
        assert 0 < found <= share
        assert power_of_mcnemar(n, (share + found) / 2, (share - found) / 2) == pytest.approx(0.8, abs=1e-6)

    @pytest.mark.parametrize(("n", "share"), [(20, 0.1), (5, 1.0), (0, 0.5), (100, 0.0)])
    def test_is_none_where_even_one_way_cannot_be_seen(self, n, share):
        assert power_of_mcnemar(min(n, 30), share, 0) < 0.8 or share == 0
        assert detectable_difference(n, share) is None

    def test_falls_with_items_and_grows_with_power(self):
        by_n = [detectable_difference(n, 0.2) for n in (60, 100, 200, 1319)]
        assert by_n == sorted(by_n, reverse=True)
        assert detectable_difference(100, 0.2, power=0.9) > detectable_difference(100, 0.2)

    def test_scales_with_what_an_item_differs_by(self):
        assert detectable_difference(100, 0.2, size=0.25) == detectable_difference(100, 0.2) / 4

    @pytest.mark.parametrize("bad", [{"n_items": -1}, {"discordant_share": 1.5}, {"power": 0}, {"alpha": 2}])
    def test_numbers_out_of_range_are_refused(self, bad):
        with pytest.raises(InputError):
            detectable_difference(**{"n_items": 10, "discordant_share": 0.5, **bad})
