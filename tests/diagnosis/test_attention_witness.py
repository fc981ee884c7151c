"""The witness of attention: clean calls stay inside the bound, planted faults far outside of it."""

import math
from dataclasses import replace

import pytest
import torch
from pairwise import params
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as softcapped
from transformers.models.gpt2.modeling_gpt2 import eager_attention_forward as rounding_softmax
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as with_sinks
from transformers.models.granite_swa.modeling_granite_swa import eager_attention_forward as scaled_by_sinks
from transformers.models.llama.modeling_llama import eager_attention_forward as eager

import kvdrift as kd
from kvdrift.diagnosis.attention_witness import excess, readable
from kvdrift.models.tiny import supported_attn
from kvdrift.tracing.seam import AttentionCall, Order, seam

PROMPT = [5, 9, 100, 33, 7, 8, 250, 301, 12, 44, 77, 21, 200, 5, 6, 7, 9, 3]  # beyond the windows of 8
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FAMILIES = ("llama", "gemma2", "gemma3", "phi3", "gpt-neox", "gpt2", "gpt-oss", "deepseek-v3", "granite", "lfm2")


def recorded(model, path, n_steps=2):
    """The attention calls of a run."""

    class Recorder:
        order = Order.OBSERVE

        def __call__(self, call, proceed):
            calls.append(replace(call))
            return proceed(call)

    calls = []
    run = path.start(model, PROMPT)
    with seam(model.hf, Recorder()):
        for step in range(n_steps):
            run.step(None if step == 0 else 100 + step)
    run.close()
    return calls


def math_sdpa(*args, **kwargs):
    with sdpa_kernel(SDPBackend.MATH):
        return sdpa_attention_forward(*args, **kwargs)


def call(n_queries, n_keys, native, dtype, size=1.0, seed=0, d=32, **kwargs):
    """A call of 4 heads on 2 KV heads, with a mask, and everything that ``native`` takes."""
    generator = torch.Generator().manual_seed(seed)
    n_kv = 4 if native is rounding_softmax else 2
    module = torch.nn.Module()
    module.num_key_value_groups = 4 // n_kv
    query = size * torch.randn(1, 4, n_queries, d, generator=generator)
    key, value = torch.randn(2, 1, n_kv, n_keys, d, generator=generator)
    visible = torch.ones(1, 1, n_queries, n_keys, dtype=torch.bool).tril(n_keys - n_queries)
    is_sdpa = native in (sdpa_attention_forward, math_sdpa)
    mask = visible if is_sdpa else torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)
    kwargs.setdefault("scaling", d**-0.5)
    if native is softcapped:
        kwargs["softcap"] = 5.0
    if native in (with_sinks, scaled_by_sinks):
        kwargs["s_aux"] = module.sinks = torch.randn(4, generator=generator).to(dtype)
    return AttentionCall(module, query.to(dtype), key.to(dtype), value.to(dtype), mask, kwargs, native)


def attn_of(native):
    return "sdpa" if native in (sdpa_attention_forward, math_sdpa) else "eager"


NATIVES = [sdpa_attention_forward, math_sdpa, eager, softcapped, rounding_softmax, with_sinks, scaled_by_sinks]
natives = pytest.mark.parametrize("native", NATIVES, ids=lambda native: native.__module__.split("_")[-1])
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


PATHS = {
    "on": kd.CacheOn(),
    "off": kd.CacheOff(),
    "chunks": kd.CacheOn(prefill_chunk=5),
    "padded": kd.CacheOn(left_padding=3),
}
CLEAN = [(f, dtype, attn, name) for f in FAMILIES for dtype in DTYPES for attn in supported_attn(f) for name in PATHS]


@pytest.mark.parametrize(("family", "dtype", "attn", "name"), params(CLEAN))
def test_clean_models_stay_inside_the_bound(family, dtype, attn, name, tiny_model):
    for each in recorded(tiny_model(family, dtype, attn), PATHS[name]):
        assert readable(each) is None
        assert 0 < excess(each) < 1


@natives
@dtypes
def test_clean_calls_stay_inside_the_bound_whatever_their_size(native, dtype):
    for seed, (n_queries, n_keys, size, d) in enumerate(
        [(1, 1, 1, 8), (1, 16, 1, 64), (1, 300, 8, 64), (9, 9, 0.1, 128), (17, 40, 3, 16), (5, 64, 20, 80)]
    ):
        assert excess(call(n_queries, n_keys, native, dtype, size, seed, d), attn=attn_of(native)) < 1


@natives
@dtypes
def test_planted_faults_are_far_outside(native, dtype):
    def wrong_scale(module, query, key, value, mask, scaling, **kwargs):
        return native(module, query, key, value, mask, scaling=1.02 * scaling, **kwargs)

    def dropped_key(module, query, key, value, mask, **kwargs):
        key, value, mask = key[:, :, 1:], value[:, :, 1:], mask[..., 1:]
        return native(module, query, key, value, mask, **kwargs)

    def ignored_mask(module, query, key, value, mask, **kwargs):
        return native(module, query, key, value, mask | True if mask.dtype == torch.bool else mask * 0, **kwargs)

    def swapped_heads(module, query, key, value, mask, **kwargs):
        return native(module, query, key, value.flip(1), mask, **kwargs)

    clean = call(4, 24, native, dtype)
    for fault in (wrong_scale, dropped_key, ignored_mask, swapped_heads):
        assert excess(replace(clean, native=fault), attn=attn_of(native)) > 100, fault.__name__


def test_a_kernel_that_is_wrong_in_half_precision_alone_is_found():
    def half_wrong(module, query, key, value, mask, scaling, **kwargs):
        scaling = scaling if query.dtype == torch.float32 else 1.02 * scaling
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **kwargs)

    for dtype in (torch.bfloat16, torch.float16):
        assert excess(call(4, 24, half_wrong, dtype, 4), attn="sdpa") > 1.5


def test_a_kernel_for_half_precision_alone_is_judged_by_it():
    def half_only(module, query, key, value, mask, **kwargs):
        if query.dtype == torch.float32:
            raise RuntimeError("only support fp16 and bf16 data type")
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    assert 0 < excess(call(4, 24, half_only, torch.bfloat16), attn="sdpa") < 1


@dtypes
def test_soft_caps_and_sinks_that_are_left_out_are_found(dtype):
    def uncapped(*args, softcap, **kwargs):
        return softcapped(*args, **kwargs)

    def sinkless(*args, s_aux, **kwargs):
        return eager(*args, **kwargs)

    assert excess(replace(call(2, 9, softcapped, dtype), native=uncapped)) > 100
    assert excess(replace(call(2, 9, with_sinks, dtype), native=sinkless)) > 100


def test_the_result_does_not_depend_on_the_number_of_queries_at_a_time(monkeypatch):
    whole = call(24, 24, sdpa_attention_forward, torch.float32)
    expected = excess(whole)
    monkeypatch.setattr("kvdrift.diagnosis.attention_witness.BLOCK", 500)
    assert excess(whole) == pytest.approx(expected, rel=1e-6)


def test_without_a_mask_a_call_is_causal_or_as_it_is_told():
    unmasked = replace(call(3, 3, sdpa_attention_forward, torch.float32), mask=None)
    assert excess(unmasked) < 1
    assert excess(replace(unmasked, kwargs={**unmasked.kwargs, "is_causal": False})) < 1
    static = replace(call(3, 9, sdpa_attention_forward, torch.float32), mask=None)  # 6 slots not filled yet
    assert excess(static, torch.ones(3, 9, dtype=torch.bool).tril()) < 1
    assert excess(static) > 100


@natives
def test_queries_that_see_nothing_are_left_out(native):
    padded = call(4, 6, native, torch.float32)
    hidden = False if padded.mask.dtype == torch.bool else torch.finfo(torch.float32).min
    padded.mask[:, :, 0] = hidden

    def junk_there(*args, **kwargs):
        output, weights = native(*args, **kwargs)
        output[:, 0] = 1e3
        return output, weights

    def junk_elsewhere(*args, **kwargs):
        output, weights = native(*args, **kwargs)
        output[:, 1] += 1e-2
        return output, weights

    assert excess(replace(padded, native=junk_there), attn=attn_of(native)) < 1
    assert excess(replace(padded, native=junk_elsewhere), attn=attn_of(native)) > 100


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_output_that_is_not_finite_exceeds_everything(value):
    def broken(*args, **kwargs):
        output, weights = eager(*args, **kwargs)
        output[0, -1, 0, 0] = value
        return output, weights

    assert excess(call(2, 4, broken, torch.float32)) == math.inf


def test_the_call_is_left_as_it_is(same_bits):
    one = call(3, 9, eager, torch.bfloat16)
    before = [tensor.clone() for tensor in (one.query, one.key, one.value, one.mask)]
    excess(one)
    assert all(map(same_bits, before, (one.query, one.key, one.value, one.mask)))


def test_what_cannot_be_judged_says_why():
    one = call(2, 4, eager, torch.float32)
    assert readable(one) is None
    assert "position_bias" in readable(replace(one, kwargs={"position_bias": torch.zeros(1)}))
    assert "object" in readable(replace(one, mask=object()))
    assert "dropout" in readable(replace(one, kwargs={"dropout": 0.5}))
    assert "float64" in readable(replace(one, value=one.value.double()))
    assert "not finite" in readable(replace(one, key=one.key * math.inf))
    assert "one to one" in readable(replace(one, value=one.value[:, :, 1:]))
