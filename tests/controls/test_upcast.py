import torch

from kvdrift.controls.derived_weights import DerivedWeights
from kvdrift.controls.operators import by_operator
from kvdrift.controls.upcast import WideOperators, narrower, upcast


def test_nested_values():
    given = {
        "a": (torch.ones(1, dtype=torch.float16), [torch.ones(1)]),
        "b": "text",
        "c": torch.ones(1, dtype=torch.int8),
    }
    found = upcast(given, torch.float64)
    assert found["a"][0].dtype == found["a"][1][0].dtype == torch.float64
    assert found["b"] == "text"
    assert found["c"].dtype == torch.int8
    assert upcast(given)["a"][1][0] is given["a"][1][0]


def test_narrower():
    assert narrower(torch.ones(1, dtype=torch.float16), torch.float32)
    assert not narrower(torch.ones(1, dtype=torch.float64), torch.float32)
    assert not narrower(1.0, torch.float32)


def test_the_dtype_that_an_operator_is_asked_for():
    """A softmax of bfloat16 that is asked for float32 gives float32, and is computed from the bfloat16 numbers."""
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    names = ("mean.dim", "_softmax", "sum.dim_IntList")
    mode = WideOperators(
        by_operator(dict.fromkeys(names)),
        torch.float64,
        DerivedWeights(torch.nn.Linear(1, 1), torch.Tensor.double),
    )
    with mode:
        softmax = x.softmax(-1, dtype=torch.float32)
        mean, total = x.mean(-1), x.sum(-1, dtype=torch.float32)
    assert softmax.dtype == total.dtype == torch.float32
    assert mean.dtype == torch.bfloat16
    assert torch.equal(softmax, x.double().softmax(-1).float())
    assert torch.equal(mean, x.double().mean(-1).bfloat16())
    assert torch.equal(total, x.double().sum(-1).float())
    assert mode.counts.total() == 3
