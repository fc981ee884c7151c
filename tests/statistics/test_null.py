import math

import pytest

from kvdrift.errors import InputError
from kvdrift.statistics.null import null_share

NAN = float("nan")


class TestNullShare:
    def test_counts_ties_and_itself(self):
        assert null_share(0.4, [0.1, 0.4, 0.5, 0.3]) == 3 / 5
        assert null_share(-0.4, [0.1, 0.4, 0.5, -0.5], tail="two-sided") == 4 / 5
        assert null_share(0.4, []) == 1.0

    def test_needs_19_replicates_for_5_percent(self):
        assert null_share(1.0, [0.0] * 19) == 0.05
        assert null_share(1.0, [0.0] * 18) > 0.05

    def test_ties_survive_rounding(self):
        assert null_share(0.3, [0.1 + 0.2, 0.1 * 3]) == 1.0
        assert null_share(0.1 + 0.2, [0.3]) == 1.0

    def test_of_nan_is_nan(self):
        assert math.isnan(null_share(NAN, [0.0]))
        assert math.isnan(null_share(0.0, [NAN]))

    def test_another_tail_is_refused(self):
        with pytest.raises(InputError, match="tail='low'"):
            null_share(0.0, [0.0], tail="low")
