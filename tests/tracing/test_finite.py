"""What counts as logits that leave the finite numbers."""

import pytest
import torch

from kvdrift.tracing.finite import is_nonfinite

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.5, -1.0, 3.0], False),
        ([0.5, -INF, 3.0], False),  # a token that is ruled out
        ([-INF, -INF, -INF], False),
        ([0.5, INF, 3.0], True),
        ([NAN, -1.0, 3.0], True),
        ([0.5, -1.0, NAN], True),
        ([INF, NAN, -INF], True),
    ],
)
def test_nan_and_plus_infinity_are_found_and_minus_infinity_is_legal(values, expected, dtype):
    logits = torch.tensor(values, dtype=dtype)
    assert is_nonfinite(logits) is expected
    assert is_nonfinite(torch.cat([torch.zeros(1000, dtype=dtype), logits, torch.zeros(1000, dtype=dtype)])) is expected


def test_largest_finite_values_are_finite():
    assert not is_nonfinite(torch.tensor([65504.0, -65504.0], dtype=torch.float16))
