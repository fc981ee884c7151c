"""Tiny models: reproducible, loaded like a checkpoint, finite, and drifting."""

import random

import numpy as np
import pytest
import torch
import transformers

from kvdrift.errors import InputError
from kvdrift.models.tiny import FAMILIES, supported_attn, tiny

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
IDS = torch.arange(5, 45)[None]


def tensors(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def assert_same_tensors(a, b):
    a, b = tensors(a), tensors(b)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_builds_ready_to_use_and_finite_in_every_dtype(family):
    for dtype in DTYPES:
        model = tiny(family, dtype=dtype)
        assert model.dtype == model.config.dtype == dtype
        assert not model.training
        assert not any(parameter.requires_grad for parameter in model.parameters())
        logits = model(IDS).logits
        assert logits.shape == (1, IDS.shape[1], 384)
        assert logits.isfinite().all()
        assert logits.std() > 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_same_seed_gives_the_same_bits_whatever_the_global_state(family):
    torch.manual_seed(1)
    first = tiny(family, dtype=torch.bfloat16)
    torch.manual_seed(2)
    second = tiny(family, dtype=torch.bfloat16)
    assert_same_tensors(first, second)
    assert torch.equal(first(IDS).logits, second(IDS).logits)


def test_another_seed_gives_other_weights():
    a, b = tiny("llama", seed=0), tiny("llama", seed=1)
    assert all(not torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_random_states_are_untouched(family):
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    tiny(family, seed=3)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()
    assert random.getstate() == states[2]


@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_is_the_rounded_float32_model(family):
    full = tensors(tiny(family))
    for dtype in (torch.bfloat16, torch.float16):
        for name, value in tensors(tiny(family, dtype=dtype)).items():
            assert value.dtype in (dtype, torch.float32), name
            assert torch.equal(value, full[name].to(value.dtype)), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt-oss", "deepseek-v3", "lfm2"])
def test_equals_a_saved_and_reloaded_checkpoint(family, dtype, tmp_path):
    tiny(family).save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=dtype, attn_implementation=supported_attn(family)[0]
    )
    model = tiny(family, dtype=dtype)
    assert_same_tensors(model, loaded)
    assert torch.equal(model(IDS).logits, loaded(IDS).logits)


def test_rotary_frequencies_stay_in_float32():
    model = tiny("llama", dtype=torch.bfloat16)
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16


def test_norm_weights_and_biases_are_not_trivial():
    for family in FAMILIES:
        for name, parameter in tiny(family).named_parameters():
            assert parameter.std() > 0, f"{family} {name}"


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_implementations(family):
    choices = supported_attn(family)
    assert tiny(family).config._attn_implementation == choices[0]
    models = [tiny(family, attn=attn) for attn in choices]
    for attn, model in zip(choices, models, strict=True):
        assert model.config._attn_implementation == attn
        assert_same_tensors(model, models[0])
        torch.testing.assert_close(model(IDS).logits, models[0](IDS).logits, rtol=1e-3, atol=1e-3)


def test_families_that_refuse_sdpa():
    eager_only = {family for family in FAMILIES if supported_attn(family) == ("eager",)}
    assert eager_only == {"gemma2", "gpt-oss", "bloom", "mamba"}


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss", "deepseek-v3"])
def test_experts_run_as_transformers_runs_them_by_default(family):
    assert tiny(family).config._experts_implementation == "grouped_mm"
    wide = tiny(family, dtype=torch.float64)
    assert wide.config._experts_implementation == "eager", "grouped products have no float64 kernel"
    assert_same_tensors(tiny(family), wide.float())


def test_overrides_reach_the_configuration():
    model = tiny("mistral", num_hidden_layers=2, sliding_window=5)
    assert len(model.model.layers) == 2
    assert model.config.sliding_window == 5


@pytest.mark.parametrize("family", FAMILIES)
def test_depth_can_be_overridden_in_every_family(family):
    assert tiny(family, num_hidden_layers=2)(IDS).logits.isfinite().all()


def test_generation_does_not_stop_by_itself():
    out = tiny("llama").generate(IDS, max_new_tokens=20, do_sample=False)
    assert out.shape[1] == IDS.shape[1] + 20


def test_loading_is_silent_and_leaves_the_progress_bar_setting(capfd):
    from transformers.utils import logging

    assert logging.is_progress_bar_enabled()
    tiny("llama")
    assert logging.is_progress_bar_enabled()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: tiny("lama"), r"'lama'.*llama, .*mamba"),
        (lambda: supported_attn("lama"), r"'lama'.*llama, .*mamba"),
        (lambda: tiny("llama", sliding_windw=3), "sliding_windw"),
        (lambda: tiny("llama", hidden_size="wide"), "hidden_size"),
        (lambda: tiny("llama", num_attention_heads=7), "7"),
        (lambda: tiny("gemma2", attn="sdpa"), "'sdpa'.*supports eager"),
        (lambda: tiny("llama", attn="nope"), "'nope'.*supports sdpa, eager"),
        (lambda: tiny("llama", dtype=torch.int8), "int8"),
    ],
)
def test_bad_input_is_one_clear_sentence(call, words):
    with pytest.raises(InputError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


def cache_on_and_off_logits(model, prompt_length=24, steps=12):
    """Logits of both ways to decode the same tokens, [step, vocab] each."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 384, (1, prompt_length + steps), generator=generator)
    cache = model(ids[:, :prompt_length], use_cache=True).cache
    on, off = [], []
    for end in range(prompt_length + 1, prompt_length + steps + 1):
        token = model(ids[:, end - 1 : end], use_cache=True, cache=cache, logits_to_keep=1)
        whole = model(ids[:, :end], use_cache=False, logits_to_keep=1)
        on.append(token.logits[0, -1].double())
        off.append(whole.logits[0, -1].double())
    return torch.stack(on), torch.stack(off)


@pytest.mark.parametrize("family", FAMILIES)
def test_cache_on_and_off_agree_up_to_rounding_and_differ_in_float32(family):
    on, off = cache_on_and_off_logits(tiny(family))
    assert not torch.equal(on, off)
    assert (on - off).norm() / off.norm() < 1e-5


def test_cache_on_and_off_differ_in_bfloat16_in_most_sdpa_families():
    families = ["llama", "mistral", "qwen3", "gemma3", "phi3", "gpt-neox", "gpt2", "mixtral", "granite"]
    pairs = [cache_on_and_off_logits(tiny(family, dtype=torch.bfloat16)) for family in families]
    assert sum(not torch.equal(on, off) for on, off in pairs) > len(families) / 2
