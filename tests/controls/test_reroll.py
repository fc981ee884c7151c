"""The re-roll changes the order of sums and nothing else."""

import copy
import gc
import weakref
from itertools import product

import pytest
import torch
from pairwise import params
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import DynamicCache

from kvdrift.controls import BoundReRoll, ReRoll, derived_weights, promote_float32, reroll
from kvdrift.models.tiny import FAMILIES, supported_attn, tiny

PROMPT = torch.tensor([[5, 9, 100, 33, 7, 8, 250, 301, 12, 44, 17, 61]])
CASES = [(family, attn) for family in FAMILIES for attn in supported_attn(family)]
WITHOUT_ATTENTION = {"mamba"}


@torch.no_grad()
def prefill_and_decode(model):
    """Logits of the whole prompt, then of two decoded tokens."""
    cache = DynamicCache(config=model.config)
    inputs = [PROMPT, torch.tensor([[3]]), torch.tensor([[77]])]
    return [model(ids.to(model.device), cache=cache, use_cache=True).logits.double() for ids in inputs]


def distance(a, b):
    return max(float((x - y).norm() / y.norm()) for x, y in zip(a, b, strict=True))


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("family", "attn"), params(CASES, 1))
def test_the_function_stays_the_same(family, attn):
    model = tiny(family, dtype=torch.float64, attn=attn)
    with promote_float32():
        plain = prefill_and_decode(model)
        for seed in (0, 1):
            with ReRoll(seed).applied(model):
                rerolled = prefill_and_decode(model)
            assert 0 < distance(rerolled, plain) < 1e-12


@pytest.mark.parametrize(("family", "attn"), params(CASES, 1))
def test_every_family_is_rerolled_in_float32(family, attn):
    model = tiny(family, attn=attn)
    plain = prefill_and_decode(model)
    with ReRoll(1).applied(model) as bound:
        first = prefill_and_decode(model)
        counts = dict(bound.counts)
    with ReRoll(1).applied(model):
        again = prefill_and_decode(model)
    with ReRoll(2).applied(model):
        other = prefill_and_decode(model)
    assert equal(first, again)
    assert 1e-8 < distance(first, plain) < 1e-4
    assert not equal(first, other)
    assert equal(prefill_and_decode(model), plain)
    assert counts["matmul"] > 0
    assert counts.get("sum", 0) + counts.get("layer_norm", 0) > 0
    if family not in WITHOUT_ATTENTION:
        fused = counts.get("attention_features", 0) > 0 and counts.get("attention_keys", 0) > 0
        assert fused or counts.get("softmax", 0) > 0


@pytest.mark.parametrize(("family", "dtype"), params(list(product(FAMILIES, (torch.bfloat16, torch.float16))), 1))
def test_half_precision_moves_under_some_seed(family, dtype):
    model = tiny(family, dtype=dtype)
    plain = prefill_and_decode(model)
    moved = []
    for seed in range(4):
        with ReRoll(seed).applied(model):
            moved.append(distance(prefill_and_decode(model), plain))
    assert 0 < max(moved) < 0.5


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_are_left_alone(family):
    model = tiny(family, dtype=torch.bfloat16)
    seen = []
    model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: seen.append(output.clone()))
    with torch.no_grad():
        model(PROMPT)
        with ReRoll(0).applied(model):
            model(PROMPT)
    assert torch.equal(seen[0], seen[1])


def test_each_layer_and_head_moves_not_only_the_last():
    model = tiny("llama")
    outputs = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, inputs, output: outputs.append(output.clone()))
    with torch.no_grad():
        model(PROMPT)
        with ReRoll(0).applied(model):
            model(PROMPT)
    n = len(model.model.layers)
    assert all(not torch.equal(outputs[i], outputs[n + i]) for i in range(n))


def test_decode_keys_alone_are_reordered_at_a_fused_kernel():
    """Each kind of reordering inside fused attention moves the result by itself, masked and unmasked."""
    torch.manual_seed(0)
    key, value = torch.randn(2, 1, 2, 40, 32)
    query = torch.randn(1, 2, 1, 32)
    mask = torch.zeros(1, 1, 1, 40).masked_fill_(torch.arange(40) < 7, -torch.inf)
    module = torch.nn.Identity()
    for attn_mask in (None, mask, mask == 0):
        plain = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask)
        with ReRoll(0).applied(module) as bound:
            rerolled = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask)
        assert bound.counts == {"attention_features": 1, "attention_keys": 1}
        assert not torch.equal(plain, rerolled)
        torch.testing.assert_close(rerolled, plain)


def test_causal_kernels_keep_their_key_order():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 9, 32, dtype=torch.float64)
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    with ReRoll(0).applied(torch.nn.Identity()) as bound:
        rerolled = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert bound.counts == {"attention_features": 1}
    torch.testing.assert_close(rerolled, plain, rtol=1e-13, atol=1e-13)


OPERATIONS = {
    "mm": lambda x, y: x @ y.T,
    "mv": lambda x, y: x @ y[0],
    "dot": lambda x, y: x[0] @ y[0],
    "addmm": lambda x, y: torch.addmm(y[:1, :6], x, y.T),
    "addmv": lambda x, y: torch.addmv(y[0, :5], x, y[0]),
    "baddbmm": lambda x, y: torch.baddbmm(y[None, :1, :6], x[None], y.T[None]),
    "bmm of a transposed view": lambda x, y: x.expand(3, -1, -1) @ y.expand(3, -1, -1).mT,
    "linear": lambda x, y: torch.nn.functional.linear(x, y, y[0, :6]),
    "einsum": lambda x, y: torch.einsum("ik,jk->ij", x, y),
    "sum": lambda x, y: x.sum(),
    "sum over an axis": lambda x, y: x.sum(-1, keepdim=True),
    "sum over two axes": lambda x, y: x.sum((0, 1)),
    "mean": lambda x, y: x.mean(-1),
    "var": lambda x, y: x.var(-1, correction=0),
    "std": lambda x, y: x.std(-1),
    "var_mean": lambda x, y: torch.var_mean(x, -1)[0],
    "vector norm": lambda x, y: torch.linalg.vector_norm(x, dim=-1),
    "norm": lambda x, y: x.norm(2, dim=-1, keepdim=True),
    "logsumexp": lambda x, y: x.logsumexp(-1),
    "softmax": lambda x, y: x.softmax(-1),
    "log_softmax": lambda x, y: x.log_softmax(-1),
    "softmax over the first axis": lambda x, y: x.T.softmax(0),
    "layer norm": lambda x, y: torch.nn.functional.layer_norm(x, (x.shape[-1],), y[0], y[1]),
    "layer norm without weights": lambda x, y: torch.nn.functional.layer_norm(x, (x.shape[-1],)),
    "rms norm": lambda x, y: torch.nn.functional.rms_norm(x, (x.shape[-1],), y[0]),
}


GRADIENTS = {"off": torch.no_grad, "inference": torch.inference_mode, "on": torch.enable_grad}


@pytest.mark.parametrize(("name", "gradients"), params(list(product(OPERATIONS, GRADIENTS)), 1))
def test_operations(name, gradients):
    """Every operation is reordered, and stays the same function, whatever the gradient mode."""
    torch.manual_seed(0)
    x, y = torch.randn(5, 33, dtype=torch.float64), torch.randn(6, 33, dtype=torch.float64)
    with GRADIENTS[gradients]():
        plain = OPERATIONS[name](x, y)
        with ReRoll(0).applied(torch.nn.Identity()) as bound:
            rerolled = OPERATIONS[name](x, y)
    assert sum(bound.counts.values()) > 0
    assert rerolled.stride() == plain.stride()
    torch.testing.assert_close(rerolled, plain, rtol=1e-12, atol=1e-13)


def test_grouped_products():
    torch.manual_seed(0)
    x, weight = torch.randn(12, 32, dtype=torch.bfloat16), torch.randn(3, 32, 16, dtype=torch.bfloat16)
    offsets = torch.tensor([4, 4, 12], dtype=torch.int32)
    plain = torch.nn.functional.grouped_mm(x, weight, offs=offsets)
    with ReRoll(0).applied(torch.nn.Identity()) as bound:
        rerolled = torch.nn.functional.grouped_mm(x, weight, offs=offsets)
    assert bound.counts == {"matmul": 1}
    torch.testing.assert_close(rerolled, plain)


def test_grouped_experts_are_rerolled_like_looped_ones():
    model = tiny("mixtral")
    plain = prefill_and_decode(model)
    with ReRoll(0).applied(model) as bound:
        rerolled = prefill_and_decode(model)
    assert 0 < distance(rerolled, plain) < 1e-4
    looped = tiny("mixtral", experts_implementation="eager")
    with ReRoll(0).applied(looped) as bound_looped:
        prefill_and_decode(looped)
    assert bound.counts["matmul"] > bound_looped.counts["matmul"] / 2


def test_integers_and_single_terms_are_left_alone():
    with ReRoll(0).applied(torch.nn.Identity()) as bound:
        assert torch.arange(5).sum() == 10
        assert (torch.ones(3, 1) @ torch.ones(1, 2)).sum(1).shape == (3,)
    assert bound.counts == {"sum": 1}


@pytest.mark.parametrize("shape", [(6, 33), (1, 33), (33, 1)])
def test_copies_keep_the_memory_layout(shape):
    linear = torch.nn.Linear(shape[1], shape[0], bias=False).double()
    bound = BoundReRoll(0, linear)
    with torch.no_grad(), bound:
        linear(torch.ones(2, shape[1], dtype=torch.float64))
        copies = list(bound.weights._kept.values())
    for kept in copies:
        assert kept.value.stride() == kept.source.stride()
        assert not torch.equal(kept.value, kept.source)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize(
    "laid",
    [
        lambda x: x, lambda x: x.mT, lambda x: x.permute(2, 0, 1), lambda x: x[:, ::2], lambda x: x[:, :1, ::3],
        lambda x: x[:1].expand(4, -1, -1), lambda x: x[..., :1].expand(-1, -1, 5).permute(1, 2, 0),
    ],
)  # fmt: skip
def test_terms_are_taken_in_order_and_laid_out_as_before(laid, dtype):
    tensor = laid(torch.randn(4, 6, 7, generator=torch.Generator().manual_seed(0)).to(dtype))
    for dim in range(-3, 3):
        order = torch.randperm(tensor.shape[dim], generator=torch.Generator().manual_seed(1))
        taken = reroll._take(tensor, dim, order)
        assert torch.equal(taken, tensor.index_select(dim, order))
        assert taken.stride() == tensor.stride()
        assert taken.data_ptr() != tensor.data_ptr() or tensor.stride(dim) == 0


@pytest.mark.parametrize(
    "edit",
    [
        lambda linear: linear.weight.mul_(2),
        lambda linear: linear.weight[0].zero_(),
        lambda linear: linear.load_state_dict({"weight": torch.ones(6, 33)}),
        lambda linear: setattr(linear, "weight", torch.nn.Parameter(torch.ones(6, 33))),
        lambda linear: setattr(linear.weight, "data", torch.ones(6, 33)),
        lambda linear: torch.nn.init.normal_(linear.weight),
        lambda linear: linear.double().float().weight.add_(1),
    ],
)
@torch.no_grad()
def test_copies_are_never_stale(edit):
    linear = torch.nn.Linear(33, 6, bias=False)
    x = torch.randn(4, 33, generator=torch.Generator().manual_seed(0))
    bound = BoundReRoll(0, linear)
    with bound:
        before = linear(x)
    edit(linear)
    with bound:
        after = linear(x)
    with ReRoll(0).applied(copy.deepcopy(linear)) as fresh:
        assert torch.equal(after, fresh.module(x))
    assert not torch.equal(before, after)
    assert bound.weights.n_bytes == 6 * 33 * 4


@torch.no_grad()
def test_recycled_addresses_do_not_alias():
    """New weights again and again, as offloading does: memory stays bounded and values right."""
    linear = torch.nn.Linear(64, 64, bias=False)
    bound = BoundReRoll(0, linear)
    for step in range(20):
        linear.weight = torch.nn.Parameter(torch.full((64, 64), float(step)))
        with bound:
            assert (linear(torch.ones(1, 64)) == 64 * step).all()
        assert bound.weights.n_bytes == 64 * 64 * 4


@torch.no_grad()
def test_copies_are_kept_between_passes_shared_and_freed():
    model = tiny("llama")
    first, second = BoundReRoll(5, model), BoundReRoll(5, model)
    other = BoundReRoll(6, model)
    for bound in (first, second, other):
        with bound:
            model(PROMPT)
    assert first.weights.n_bytes > 0
    assert first.weights is second.weights
    assert first.weights is not other.weights
    copies = weakref.ref(first.weights)
    first.close()
    assert first.weights is None
    assert copies() is not None
    second.close()
    assert copies() is None
    with first:  # entering again makes them anew
        model(PROMPT)
    assert first.weights.n_bytes > 0


@torch.no_grad()
def test_a_dropped_control_frees_its_copies():
    model = tiny("llama")
    bound = BoundReRoll(5, model)
    with bound:
        model(PROMPT)
    copies = weakref.ref(bound.weights)
    del bound
    gc.collect()
    assert copies() is None


def test_memory_budget_changes_no_bit(monkeypatch):
    model = tiny("llama")
    with ReRoll(0).applied(model) as bound:
        kept = prefill_and_decode(model)
        whole = bound.weights.n_bytes
    for free in (0, whole * 8):
        monkeypatch.setattr(derived_weights, "free_memory", lambda device, free=free: free)
        with ReRoll(0).applied(model) as bound:
            assert equal(prefill_and_decode(model), kept)
            assert bound.weights.n_bytes <= reroll.SHARE_OF_FREE_MEMORY * free
            assert (bound.weights.n_bytes > 0) == (free > 0)


def test_nothing_is_left_after_an_exception():
    model = tiny("llama", dtype=torch.bfloat16)
    plain = prefill_and_decode(model)

    def fail(*_):
        raise RuntimeError("on purpose")

    handle = model.model.layers[1].register_forward_hook(fail)
    bound = BoundReRoll(0, model)
    with pytest.raises(RuntimeError, match="on purpose"), bound:
        model(PROMPT)
    with pytest.raises(RuntimeError, match="on purpose"), ReRoll(1).applied(model):
        model(PROMPT)
    handle.remove()
    assert _get_current_dispatch_mode_stack() == []
    assert equal(prefill_and_decode(model), plain)
    with bound:
        after = prefill_and_decode(model)
    with ReRoll(0).applied(model):
        assert equal(prefill_and_decode(model), after)


def test_nested_entry_rerolls_once():
    model = tiny("llama")
    bound = BoundReRoll(0, model)
    with bound:
        once = prefill_and_decode(model)
        with bound:
            assert equal(prefill_and_decode(model), once)
        assert equal(prefill_and_decode(model), once)
    assert _get_current_dispatch_mode_stack() == []


def test_inference_mode_gives_the_same_bits():
    model = tiny("llama", dtype=torch.bfloat16)
    with ReRoll(0).applied(model):
        expected = prefill_and_decode(model)
        with torch.inference_mode():
            assert equal(prefill_and_decode(model), expected)


def test_label_and_equality():
    assert ReRoll(3).label == "re-roll 3"
    assert ReRoll(3) == ReRoll(3) != ReRoll(4)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", FAMILIES)
def test_cuda(family):
    for attn in supported_attn(family):
        for dtype, bound in ((torch.float32, 1e-2), (torch.float16, 0.5), (torch.bfloat16, 0.5)):
            model = tiny(family, dtype=dtype, attn=attn).cuda()
            plain = prefill_and_decode(model)
            with ReRoll(0).applied(model):
                rerolled = prefill_and_decode(model)
            with ReRoll(0).applied(model):
                assert equal(prefill_and_decode(model), rerolled)
            assert distance(rerolled, plain) < bound
            assert dtype != torch.float32 or distance(rerolled, plain) > 0
