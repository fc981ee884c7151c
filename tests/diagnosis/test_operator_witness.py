"""The witness of operators: clean ones stay inside their bounds, planted faults do not, and no bit changes."""

import math

import pytest
import torch
from pairwise import params
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import kvdrift as kd
from kvdrift.diagnosis.operator_witness import Excess, OperatorWitness, _rms_norm
from kvdrift.models.tiny import FAMILIES, supported_attn

PROMPT = [5, 9, 100, 33, 7, 8, 250, 301, 12, 44, 77, 21, 200, 5, 6, 7, 9, 3]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
aten = torch.ops.aten
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


class Fault(TorchDispatchMode):
    """Changes the result of some operators: ``{operator: (args, result) -> result}``."""

    def __init__(self, faults):
        super().__init__()
        self.faults = faults

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return self.faults[func](args, result) if func in self.faults else result


def logits(path, model, n_steps=2):
    run = path.start(model, PROMPT)
    try:
        return torch.stack([run.step(None if step == 0 else 100 + step).logits for step in range(n_steps)])
    finally:
        run.close()


PATHS = {"on": kd.CacheOn(), "off": kd.CacheOff()}
CLEAN = [(f, dtype, attn, name) for f in FAMILIES for dtype in DTYPES for attn in supported_attn(f) for name in PATHS]


@pytest.mark.parametrize(("family", "dtype", "attn", "name"), params(CLEAN))
def test_clean_models_stay_inside_the_bounds_and_keep_every_bit(family, dtype, attn, name, tiny_model, same_bits):
    model, path = tiny_model(family, dtype, attn), PATHS[name]
    plain, witness = logits(path, model), OperatorWitness(model.hf)
    with witness:
        assert same_bits(logits(path, model), plain)
    assert witness.excesses == []
    assert witness.unchecked == set()
    assert {"mm", "addmm"} & set(witness.worst)
    assert 0 < max(witness.worst.values()) <= 1


@dtypes
def test_a_product_that_is_wrong_with_one_row_is_convicted_in_its_module(dtype, tiny_model):
    model = tiny_model("llama", dtype)
    fault = Fault({aten.mm.default: lambda args, result: result * 1.02 if args[0].shape[0] == 1 else result})
    with fault, OperatorWitness(model.hf) as witness:
        logits(kd.CacheOn(), model)
    assert witness.excesses
    assert {(one.op, one.shapes.startswith("[1, ")) for one in witness.excesses} == {("mm", True)}
    assert "model.layers.0.self_attn.q_proj" in {one.module for one in witness.excesses}
    assert witness.excesses[0].ratio == witness.worst["mm"] == max(one.ratio for one in witness.excesses)
    assert witness.worst["mm"] > (100 if dtype == torch.float32 else 2)


def test_an_exponential_that_is_off_is_convicted(tiny_model):
    model = tiny_model("mamba")
    with Fault({aten.exp.default: lambda _, result: result * 1.001}), OperatorWitness() as witness:
        logits(kd.CacheOn(), model, 1)
    assert {one.op for one in witness.excesses} == {"exp"}
    assert {one.module for one in witness.excesses} == {""}
    assert witness.worst["exp"] > 1000


CASES = {
    "mm": lambda x: x @ x.mT,
    "bmm": lambda x: torch.bmm(x.view(3, 4, 20), x.view(3, 20, 4)),
    "mv": lambda x: x @ x[0],
    "addmm": lambda x: torch.addmm(x[:, :12], x, x.mT, beta=0.5, alpha=2),
    "baddbmm": lambda x: torch.baddbmm(x.view(3, 4, 20)[:, :, :4], x.view(3, 4, 20), x.view(3, 20, 4)),
    "addmv": lambda x: torch.addmv(x[:, 0], x, x[0]),
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean((0, 1), keepdim=True),
    "cumsum": lambda x: x.cumsum(1),
    "prod": lambda x: x.prod(1),
    "cumprod": lambda x: x.cumprod(1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "var": lambda x: (x + 3).var(-1),
    "var_mean": lambda x: torch.var_mean(x, dim=1, correction=0)[0],
    "std": lambda x: x.std(-1, keepdim=True),
    "linalg_vector_norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "_softmax": lambda x: (4 * x).softmax(-1),
    "_log_softmax": lambda x: x.log_softmax(-1),
    "native_layer_norm": lambda x: functional.layer_norm(x, (20,), x[0], x[1]),
    "exp": torch.exp,
    "exp_": lambda x: x.clone().exp_(),
    "log1p": lambda x: x.abs().log1p(),
    "rsqrt": lambda x: x.abs().rsqrt(),
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "softplus": functional.softplus,
    "tanh": torch.tanh,
    "cos": lambda x: (100 * x).cos(),
    "pow": lambda x: x.abs().pow(-0.7),
    "add": lambda x: x.add(x.flip(0), alpha=0.3),
    "sub": lambda x: x.sub(x.flip(0), alpha=0.3),
    "addcmul": lambda x: x.addcmul(x, x, value=0.3),
    "lerp": lambda x: x.lerp(x.flip(0), 0.3),
}


@dtypes
@pytest.mark.parametrize("name", CASES)
def test_every_operator_has_a_bound_that_holds_and_convicts(name, dtype):
    x = torch.randn(12, 20, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[3] = 0
    with torch.no_grad(), OperatorWitness() as witness:
        CASES[name](x)
    assert witness.worst[name] <= 1
    assert witness.excesses == []

    off = 1.001 if dtype == torch.float32 else 1.2
    wrong = {
        op: lambda _, result: (result[0] * off, *result[1:]) if isinstance(result, tuple) else result * off
        for packet in (getattr(aten, name),)
        for op in (getattr(packet, overload) for overload in packet.overloads())
    }
    with torch.no_grad(), Fault(wrong), OperatorWitness() as witness:
        CASES[name](x)
    assert witness.worst[name] > 1
    assert [one.op for one in witness.excesses] == [name]


@dtypes
def test_the_bound_of_a_fused_rms_norm(dtype):
    """On CPUs it is composed of others, so its rule is tried by itself."""
    x, weight = torch.randn(2, 12, 20, generator=torch.Generator().manual_seed(0)).to(dtype)
    y = (functional.rms_norm(x.float(), (20,), weight[0].float(), 1e-6)).to(dtype)
    for factor, holds in ((1, True), (1.02, False)):
        given = (x, [20], weight[0], 1e-6)
        ((result, exact, bound),) = _rms_norm(aten._fused_rms_norm.default, given, {}, (y * factor, None))
        assert bool(((result.double() - exact).abs() <= bound).all()) == holds


def test_experts_grouped_in_one_product_are_checked_by_group():
    generator = torch.Generator().manual_seed(0)
    rows, weights = torch.randn(7, 16, generator=generator), torch.randn(3, 16, 8, generator=generator)
    ends = torch.tensor([2, 2, 7], dtype=torch.int32)
    given = (rows.bfloat16(), weights.bfloat16(), ends)
    with OperatorWitness() as witness:
        aten._grouped_mm.default(*given)
    assert 0 < witness.worst["_grouped_mm"] <= 1
    with Fault({aten._grouped_mm.default: lambda _, result: result.roll(1, 0)}), OperatorWitness() as witness:
        aten._grouped_mm.default(*given)
    assert witness.worst["_grouped_mm"] > 10


def test_wide_products_are_checked_in_parts(monkeypatch):
    monkeypatch.setattr("kvdrift.diagnosis.operator_witness.COLUMNS", 64)
    a, b = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))

    def last_column(_, result):
        result[:, -1] *= 1.01
        return result

    for fault, wrong in ((lambda _, result: result, False), (last_column, True)):
        with Fault({aten.addmm.default: fault}), OperatorWitness() as witness:
            torch.addmm(b[:1, :3].expand(3, 3), a, b.mT)
        assert (witness.worst["addmm"] > 1) == wrong


def test_what_is_not_finite_where_it_should_be_is_infinitely_wrong():
    with Fault({aten.tanh.default: lambda _, result: result / 0}), OperatorWitness() as witness:
        torch.ones(3).tanh()
    assert witness.worst["tanh"] == math.inf


def test_overflow_and_inputs_that_are_not_finite_are_no_fault():
    big = torch.full((2, 4), 6e4, dtype=torch.float16)
    with OperatorWitness() as witness:
        big @ big.mT
        torch.tensor([torch.nan, torch.inf, -torch.inf, 1000.0]).exp()
        torch.tensor([[-torch.inf, -torch.inf], [0.0, -torch.inf]]).softmax(-1)
        torch.zeros(0, 4) @ torch.zeros(4, 4)
    assert witness.excesses == []
    assert set(witness.worst) == {"mm", "exp", "_softmax"}


def test_a_shape_is_checked_once_and_float64_not_at_all():
    calls = []

    def count(args, result):
        calls.append(args)
        return result

    fault = Fault({aten.exp.default: count})
    with fault, OperatorWitness() as witness:
        for _ in range(3):
            torch.ones(5).exp()
        torch.ones(5, dtype=torch.float64).exp()
        assert len(calls) == 4  # the witness computes behind the back of other modes
        first = witness.worst["exp"]
    with Fault({aten.exp.default: lambda _, result: result * 2}), witness:
        torch.ones(5).exp()
        assert witness.worst["exp"] == first
        torch.ones(6).exp()
    assert witness.worst["exp"] > 1


def test_an_operator_without_a_bound_is_named():
    with OperatorWitness() as witness:
        torch.ones(3).lgamma()
    assert witness.unchecked == {"lgamma"}
    assert witness.worst == {}


def test_nothing_is_left_behind_after_an_error(tiny_model, hooks):
    model = tiny_model("llama")
    before = len(hooks(model.hf))
    witness = OperatorWitness(model.hf)
    with pytest.raises(IndexError), witness:
        model.hf(torch.tensor([[10**6]]))
    assert len(hooks(model.hf)) == before
    assert _get_current_dispatch_mode_stack() == []
    with witness:  # names begin anew
        logits(kd.CacheOn(), model, 1)
    assert witness.excesses == []


def test_inference_mode_is_looked_into_too(tiny_model):
    model = tiny_model("llama")
    fault = Fault({aten.mm.default: lambda _, result: result * 1.02})
    with torch.inference_mode(), OperatorWitness(model.hf) as witness:
        model.hf(torch.tensor([PROMPT]))
    assert {"mm", "pow", "mean", "rsqrt", "silu"} <= set(witness.worst)
    assert witness.excesses == []
    with torch.inference_mode(), fault, OperatorWitness(model.hf) as witness:
        model.hf(torch.tensor([PROMPT]))
    assert "mm" in {one.op for one in witness.excesses}


def test_a_sentence_about_it():
    one = Excess("mm", "lm_head", "[1, 4] and [4, 8] in float32", 2.345)
    assert str(one) == "mm of [1, 4] and [4, 8] in float32 in lm_head is off by 2.35 times what rounding explains."
    assert one.where == "lm_head, [1, 4] and [4, 8] in float32"
    assert Excess("mm", "", "[1, 4]", 2.0).where == "[1, 4]"


@pytest.mark.parametrize(
    "count",
    [
        lambda x: x.cumsum(0, dtype=torch.int32),  # the offsets of grouped experts
        lambda x: (x > 0).sum(-1),
        lambda x: x.sum(-1, dtype=torch.int64),
        lambda x: x.cumprod(0, dtype=torch.int32),
        lambda x: (x > 0).to(torch.int64).cumsum(-1),
        lambda x: torch.histc(x, bins=4, min=0, max=3).cumsum(0, dtype=torch.int64),
        lambda x: torch.pow(x.to(torch.int64), 2),
        lambda x: (x > 0).float().mean(-1),
    ],
)
def test_integers_and_truth_values_are_left_alone(count):
    x = torch.tensor([[0.0, 3.0, 1.0], [2.0, 2.0, 0.0]])
    plain = count(x)
    with OperatorWitness() as witness:
        assert torch.equal(count(x), plain)
    assert not witness.excesses
    assert not witness.unchecked


def test_floats_beside_integers_are_still_looked_at():
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    with Fault({aten.mean.dim: lambda _, result: result * 1.01}), OperatorWitness() as witness:
        x.cumsum(0, dtype=torch.int32)
        x.mean(-1)
    assert [excess.op for excess in witness.excesses] == ["mean"]
