import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdrift.errors import InputError
from kvdrift.statistics.multiplicity import holm

NAN = float("nan")


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]).tolist() == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]).tolist() == [1.0, 1.0]
    assert holm([0.03]).tolist() == [0.03]
    assert holm([]).tolist() == []


def test_holm_leaves_untested_layers_out() -> None:
    got = holm([NAN, 0.01, NAN, 0.02])
    assert got[[1, 3]].tolist() == [0.02, 0.02]
    assert np.isnan(got[[0, 2]]).all()
    assert np.isnan(holm([NAN])).tolist() == [True]


def test_holm_input_errors() -> None:
    for bad in ([1.5], [-0.1], [[0.1]]):
        with pytest.raises(InputError, match="from 0 to 1"):
            holm(bad)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.floats(0.001, 0.5))
def test_holm_is_monotone_and_rejects_as_the_step_down_rule_does(p: list[float], alpha: float) -> None:
    adjusted, raw = holm(p), np.array(p)
    assert ((adjusted >= raw) & (adjusted <= 1)).all()
    assert (np.diff(adjusted[np.argsort(raw, kind="stable")]) >= 0).all()
    rejected = 0
    for step, smallest in enumerate(sorted(p)):
        if smallest * (len(p) - step) > alpha:
            break
        rejected += 1
    assert int((adjusted <= alpha).sum()) == rejected
