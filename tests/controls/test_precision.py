"""Casting copies, and float64 as a clean reference."""

import copy
from itertools import product

import accelerate
import pytest
import torch
from pairwise import params
from transformers import DynamicCache

from kvdrift.controls import cast_copy, promote_float32
from kvdrift.controls.precision import experts_note
from kvdrift.errors import InputError, ModelError
from kvdrift.models.tiny import FAMILIES, supported_attn, tiny

PROMPT = torch.tensor([[5, 9, 100, 33, 7, 8, 250, 301, 12, 44, 17, 61]])


def state(module):
    return {name: tensor.clone() for name, tensor in [*module.named_parameters(), *module.named_buffers()]}


def unchanged(before, module):
    after = state(module)
    return before.keys() == after.keys() and all(
        before[n].dtype == after[n].dtype and torch.equal(before[n], after[n]) for n in before
    )


@torch.no_grad()
def logits(model):
    return model(PROMPT).logits


@pytest.mark.parametrize(
    ("family", "dtype"), params(list(product(FAMILIES, (torch.bfloat16, torch.float16, torch.float64))), 1)
)
def test_a_copy_is_what_from_pretrained_loads(family, dtype):
    """Bitwise the model that transformers makes of the same checkpoint in that dtype; the original is untouched."""
    model = tiny(family)
    before, kept = state(model), logits(model)
    result = cast_copy(model, dtype)
    assert torch.equal(logits(result), logits(tiny(family, dtype=dtype)))
    assert unchanged(before, model)
    assert model.dtype == model.config.dtype == torch.float32
    assert torch.equal(logits(model), kept)
    assert result.config.dtype == dtype
    assert not {t.data_ptr() for t in before.values()} & {t.data_ptr() for t in result.parameters()}


@pytest.mark.parametrize(("family", "dtype"), params(list(product(FAMILIES, (torch.float32, torch.float64))), 1))
def test_upward_is_exact_and_comes_back(family, dtype):
    model = tiny(family, dtype=torch.bfloat16)
    up = cast_copy(model, dtype)
    for (name, a), (other, b) in zip(model.named_parameters(), up.named_parameters(), strict=True):
        assert name == other
        assert b.dtype == dtype
        assert torch.equal(a.to(dtype), b)
    down = cast_copy(up, torch.bfloat16)
    if dtype == torch.float64 and model.config._experts_implementation == "grouped_mm":
        assert down.config._experts_implementation == "eager", "grouped products have no float64 kernel"
        model.set_experts_implementation("eager")
    assert torch.equal(logits(down), logits(model))


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_everything_else_is_kept(attn):
    model = tiny("llama", dtype=torch.bfloat16, attn=attn, tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.model.embed_tokens.weight.requires_grad_(True)
    result = cast_copy(model, torch.float32)
    assert type(result) is type(model)
    assert result.lm_head.weight is result.model.embed_tokens.weight
    assert result.lm_head.weight.requires_grad
    assert not result.model.norm.weight.requires_grad
    assert not result.training
    assert result.config._attn_implementation == attn
    assert result.model.layers[0].self_attn.config is result.model.config
    assert result.config is not model.config
    assert model.config.dtype == torch.bfloat16
    assert result.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(result.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)


def test_buffers():
    module = torch.nn.Module()
    module.register_buffer("running", torch.ones(2, dtype=torch.bfloat16))
    module.register_buffer("counter", torch.ones(2, dtype=torch.int64))
    module.register_buffer("inv_freq", torch.ones(2), persistent=False)
    module.register_buffer("scale", torch.ones(2, dtype=torch.bfloat16), persistent=False)
    result = cast_copy(module, torch.float64)
    assert [b.dtype for b in result.buffers()] == [torch.float64, torch.int64, torch.float32, torch.float64]


def test_hooked_by_accelerate():
    """Models spread by accelerate run their copy's weights, not the original's."""
    model = tiny("llama", dtype=torch.bfloat16)
    expected = logits(cast_copy(model, torch.float32))
    spread = accelerate.dispatch_model(copy.deepcopy(model), {"": "cpu"}, force_hooks=True)
    result = cast_copy(spread, torch.float32)
    with torch.no_grad():
        for parameter in spread.parameters():
            parameter.zero_()
    assert torch.equal(logits(result), expected)


def test_offloaded_weights_are_refused():
    model = accelerate.cpu_offload(tiny("llama"), execution_device=torch.device("cpu"))
    with pytest.raises(ModelError, match=r"offloaded.*load"):
        cast_copy(model, torch.float64)


def test_other_refusals():
    with pytest.raises(InputError, match="floating-point"):
        cast_copy(tiny("llama"), torch.int8)
    model = tiny("llama")
    model.is_quantized = True
    with pytest.raises(ModelError, match="quantized"):
        cast_copy(model, torch.float32)


@torch.no_grad()
def on_off_distance(model):
    cache = DynamicCache(config=model.config)
    model(PROMPT[:, :-2], cache=cache, use_cache=True)
    model(PROMPT[:, -2:-1], cache=cache, use_cache=True)
    on = model(PROMPT[:, -1:], cache=cache, use_cache=True).logits[0, -1]
    off = model(PROMPT, use_cache=False).logits[0, -1]
    return float((on - off).norm() / off.norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_float64_is_clean_with_promotion(family):
    for attn in supported_attn(family):
        model = tiny(family, dtype=torch.float64, attn=attn)
        with promote_float32():
            assert on_off_distance(model) < 1e-12


def test_promotion_is_needed():
    """Hard-coded float32 leaves its rounding in a float64 model, and parts the two paths of some."""
    model = tiny("llama", dtype=torch.float64)
    rounded = logits(model)
    with promote_float32():
        clean = logits(model)
    assert 1e-9 < float((rounded - clean).norm() / clean.norm()) < 1e-5
    assert on_off_distance(tiny("mamba", dtype=torch.float64)) > 1e-9


def test_what_is_promoted():
    x = torch.ones(3, dtype=torch.float64)
    with promote_float32():
        results = [
            x.to(torch.float32),
            x.to(dtype=torch.float32),
            x.float(),
            x.type(torch.float32),
            x.softmax(-1, dtype=torch.float32),
            torch.nn.functional.softmax(x, dim=-1, dtype=torch.float32),
            x.sum(dtype=torch.float32),
            torch.zeros(2, dtype=torch.float32),
            torch.zeros_like(x, dtype=torch.float32),
            torch.arange(3).float(),
        ]
    assert [result.dtype for result in results] == [torch.float64] * len(results)
    assert x.float().dtype == torch.float32


def test_promotion_leaves_other_dtypes_alone():
    x = torch.ones(3, dtype=torch.bfloat16)
    with promote_float32():
        assert x.half().dtype == torch.float16
        assert (x + x).dtype == torch.bfloat16
        assert x.long().dtype == torch.int64


def test_promotion_ends_with_an_exception():
    with pytest.raises(ZeroDivisionError), promote_float32():
        _ = 1 / 0
    assert torch.ones(1).double().float().dtype == torch.float32


def test_experts_that_run_otherwise_in_float64_are_told():
    for family, told in (("llama", False), ("mixtral", True), ("gpt-oss", True)):
        model = tiny(family)
        assert (experts_note(model) is not None) == told
        assert experts_note(cast_copy(model, torch.float64)) is None
    assert "'grouped_mm'" in experts_note(tiny("mixtral"))
