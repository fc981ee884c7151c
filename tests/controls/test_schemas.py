"""Every handler against the schema of every operator in its table: each argument given and left out, on any device.

Operators that only other devices have run on the meta device, which knows shapes and no numbers; what their handlers do
to numbers is tried with a function of the same schema in plain tensor operations.
"""

import math
from collections import Counter

import pytest
import torch

from kvdrift.controls import reroll, row_tiles, wide_sums
from kvdrift.controls.derived_weights import DerivedWeights
from kvdrift.controls.groups import GROUPED_OPERATORS, Groups
from kvdrift.controls.operators import arguments_of
from kvdrift.controls.reroll import ReRoll
from kvdrift.controls.row_tiles import RowTiles
from kvdrift.controls.upcast import WideOperators
from kvdrift.diagnosis import operator_witness
from kvdrift.diagnosis.operator_witness import OperatorWitness

aten = torch.ops.aten
ATTENTION = [op for op in reroll._HANDLERS if "attention" in op._schema.name]
OTHERS = [op for op in reroll._HANDLERS if op not in ATTENTION]


def name_of(op):
    return op._schema.name.partition("::")[2] + "." + op._overloadname


def mode_of():
    return reroll._ReorderSums(0, reroll._shared_weights(0, torch.nn.Identity()), Counter())


def rand(*shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


def examples(op, dtype=torch.float64):
    """Arguments for an operator that is no attention: those it needs, then each optional one beside them."""
    packet = op._schema.name.partition("::")[2]
    x = rand(3, 5, 24, dtype=dtype)
    two = {
        "mm": (x[0], rand(24, 8, dtype=dtype)),
        "bmm": (x, rand(3, 24, 8, dtype=dtype)),
        "mv": (x[0], rand(24, dtype=dtype)),
        "dot": (rand(24, dtype=dtype), rand(24, dtype=dtype)),
        "vdot": (rand(24, dtype=dtype), rand(24, dtype=dtype)),
        "addmm": (rand(8, dtype=dtype), x[0], rand(24, 8, dtype=dtype)),
        "_addmm_activation": (rand(8, dtype=dtype), x[0], rand(24, 8, dtype=dtype)),
        "addmv": (rand(5, dtype=dtype), x[0], rand(24, dtype=dtype)),
        "baddbmm": (rand(3, 5, 8, dtype=dtype), x, rand(3, 24, 8, dtype=dtype)),
        "addbmm": (rand(5, 8, dtype=dtype), x, rand(3, 24, 8, dtype=dtype)),
    }
    if packet in two:
        yield two[packet], {}
    elif op in GROUPED_OPERATORS:
        ends = torch.tensor([2, 2, 5], dtype=torch.int32)
        yield (x[0], rand(3, 24, 8, dtype=dtype), ends), {}
    elif packet == "native_layer_norm":
        for weight in (None, rand(24, dtype=dtype)):
            for bias in (None, rand(24, dtype=dtype)):
                yield (x, [24], weight, bias, 1e-5), {}
    elif packet == "_fused_rms_norm":
        for weight in (None, rand(24, dtype=dtype)):
            for eps in (None, 1e-5):
                yield (x, [24], weight, eps), {}
    elif packet in ("_softmax", "_log_softmax"):
        yield (x, -1, False), {}
    elif packet in ("add", "add_", "sub", "sub_"):
        for named in ({}, {"alpha": 0.5}):
            yield (x.clone(), x * 2), named
    else:
        given = {"self": x, "dim": [-1], "p": 2, "ord": 2, "keepdim": True, "dtype": dtype, "correction": 0}
        if any(str(argument.type) == "int" and argument.name == "dim" for argument in op._schema.arguments):
            given["dim"] = -1
        needed = [a for a in op._schema.arguments if not a.has_default_value() and not a.kwarg_only]
        positional = [a for a in op._schema.arguments if not a.kwarg_only]
        for last in range(len(needed), len(positional) + 1):  # as dispatch cuts trailing defaults off
            args = tuple(given[a.name] for a in positional[:last])
            must = {a.name: given[a.name] for a in op._schema.arguments if a.kwarg_only and not a.has_default_value()}
            yield args, must
            for extra in op._schema.arguments:
                if extra.kwarg_only and extra.has_default_value():
                    yield args, must | {extra.name: given[extra.name]}


def results(value):
    return [part for part in (value if isinstance(value, tuple) else (value,)) if isinstance(part, torch.Tensor)]


def close(found, expected, tolerance):
    for x, y in zip(results(found), results(expected), strict=True):
        assert x.shape == y.shape
        assert x.dtype == y.dtype
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def runs_in(op, dtype):
    """Whether this machine has a kernel."""
    try:
        op(*next(iter(examples(op, dtype)))[0])
    except (NotImplementedError, RuntimeError):
        return False
    return True


@pytest.mark.parametrize("op", OTHERS, ids=name_of)
def test_the_re_roll_leaves_the_function_alone(op):
    dtype = torch.float64 if runs_in(op, torch.float64) else torch.float32
    mode = mode_of()
    for args, kwargs in examples(op, dtype):
        found = reroll._HANDLERS[op](mode, op, args, kwargs)
        close(found, op(*args, **kwargs), 1e-10 if dtype == torch.float64 else 1e-4)


@pytest.mark.parametrize("op", row_tiles._HANDLERS, ids=name_of)
def test_tiles_leave_the_function_alone(op):
    dtype = torch.float64 if runs_in(op, torch.float64) else torch.float32
    for args, kwargs in examples(op, dtype):
        given = tuple(arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args)  # some write in place
        expected = op(*args, **kwargs)
        close(
            row_tiles._HANDLERS[op](RowTiles(16), op, given, kwargs),
            expected,
            1e-10 if dtype == torch.float64 else 1e-4,
        )


@pytest.mark.parametrize("op", operator_witness._RULES, ids=name_of)
def test_the_witness_knows_every_form(op):
    for dtype in (torch.float32, torch.bfloat16):
        if not runs_in(op, dtype):
            continue
        for args, kwargs in examples(op, dtype):
            with OperatorWitness() as witness:
                op(*args, **kwargs)
            assert not witness.excesses, witness.excesses
            assert not witness.unchecked


@pytest.mark.parametrize("op", wide_sums._OPERATORS, ids=name_of)
def test_wide_operators_return_what_narrow_ones_do(op):
    weights = DerivedWeights(torch.nn.Identity(), torch.Tensor.double)
    for args, kwargs in examples(op, torch.float32):
        expected = op(*args, **kwargs)
        with WideOperators(wide_sums._OPERATORS, torch.float64, weights) as wide:
            found = op(*args, **kwargs)
        assert wide.counts
        close(found, expected, 1e-4)


def reference(query, key, value, mask, is_causal, scale):
    scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    return (scores if mask is None else scores + mask).softmax(-1) @ value


class Plain:
    """An attention operator of another device: its schema, and its function in plain operations."""

    def __init__(self, op):
        self._schema = op._schema
        self.masks = [a.name for a in op._schema.arguments if a.name in ("attn_mask", "attn_bias")]

    def __call__(self, **call):
        unknown = set(call) - {a.name for a in self._schema.arguments}
        assert not unknown
        mask = call[self.masks[0]] if self.masks and call.get(self.masks[0]) is not None else None
        output = reference(
            call["query"], call["key"], call["value"], mask, call.get("is_causal", False), call.get("scale")
        )
        return output, None


def attention_calls(op):
    masks = [a.name for a in op._schema.arguments if a.name in ("attn_mask", "attn_bias")]
    needed = {a.name: False for a in op._schema.arguments if not a.has_default_value()} | dict.fromkeys(masks)
    for n_queries, is_causal in ((1, False), (9, False), (9, True)):
        call = {**needed, "query": rand(1, 4, n_queries, 16), "key": rand(1, 4, 9, 16), "value": rand(1, 4, 9, 16)}
        call |= {"is_causal": is_causal}
        yield call
        yield call | {"scale": 0.3}
        if masks and not is_causal:
            yield call | {masks[0]: rand(1, 1, n_queries, 9)}
            yield call | {masks[0]: rand(1, 1, n_queries, 1).expand(1, 4, n_queries, 9)}


@pytest.mark.parametrize("op", ATTENTION, ids=name_of)
def test_attention_without_or_with_a_mask_causal_or_not(op):
    mode, plain = mode_of(), Plain(op)
    names = [a.name for a in op._schema.arguments]
    for call in attention_calls(op):
        before = mode.counts.copy()
        expected = plain(**call)[0]
        positional = tuple(call[name] for name in names[:3])
        named = {name: value for name, value in call.items() if name not in names[:3]}
        found = reroll._HANDLERS[op](mode, plain, positional, named)[0]
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
        moved = mode.counts - before
        assert moved["attention_features"] == 1
        assert moved["attention_keys"] == (0 if call["is_causal"] else 1)


@pytest.mark.parametrize("op", [op for op in ATTENTION if "mps" not in op._schema.name], ids=name_of)
def test_the_operators_of_other_devices_take_what_they_are_given(op):
    mode = mode_of()
    for call in attention_calls(op):
        given = {k: v.to("meta", torch.bfloat16) if isinstance(v, torch.Tensor) else v for k, v in call.items()}
        try:
            expected = op(**given)
        except (NotImplementedError, RuntimeError):
            pytest.skip("no meta kernel here")
        found = reroll._HANDLERS[op](mode, op, (), given)
        assert found[0].shape == expected[0].shape


def test_groups_within_the_sum_are_not_re_rolled():
    """The gradient of a factor adds up within groups: another order would mix them."""
    ends = torch.tensor([4, 12], dtype=torch.int32)
    args = (rand(8, 12, dtype=torch.float32), rand(12, 8, dtype=torch.float32), ends)
    assert Groups.of(aten._grouped_mm.default, args, {}) is None
    handled = reroll._HANDLERS[aten._grouped_mm.default](mode_of(), aten._grouped_mm.default, args, {})
    assert torch.equal(handled, aten._grouped_mm.default(*args))


def test_rows_that_belong_to_no_group_are_zeros():
    groups = Groups(rand(5, 24), rand(3, 24, 8), torch.tensor([2, 2, 4], dtype=torch.int32), torch.float64)
    result = groups.product(torch.mm)
    assert result.shape == (5, 8)
    assert not result[4].any()
    assert [(start, end) for start, end, _ in groups] == [(0, 2), (2, 4)]


def test_experts_by_the_fallback_of_transformers(monkeypatch):
    """What devices without a kernel for groups run: an operator of transformers' own, opaque to a dispatch mode."""
    import kvdrift as kd

    monkeypatch.setattr("transformers.integrations.moe._can_use_grouped_mm", lambda *_: False)
    model, prompt = kd.load(kd.models.tiny("mixtral"), quiet=True), [5, 9, 100, 33, 7, 8, 250, 301, 12, 44]
    plain = kd.CacheOn().start(model, prompt).step().logits
    rerolled = kd.CacheOn(controls=(ReRoll(0),)).start(model, prompt)
    assert not torch.equal(rerolled.step().logits, plain)
    rerolled.close()
    fixed = (kd.FixedShape(32),)
    on, off = (path(controls=fixed) for path in (kd.CacheOn, kd.CacheOff))
    drift = kd.compare(model, prompt, a=on, b=off, max_new_tokens=3, floor=0, local=False, progress=False)
    assert drift.values("logits", "logit_max").max() == 0
    with torch.no_grad(), OperatorWitness(model.hf) as witness:
        model.hf(torch.tensor([prompt]))
    assert 0 < witness.worst["grouped_mm_fallback"] <= 1


def test_arguments_by_name():
    found = arguments_of(aten.addmm.default, (1, 2, 3), {"beta": 0.5})
    assert found == {"self": 1, "mat1": 2, "mat2": 3, "beta": 0.5}
