"""The verdict on whole models: clean ones, and one of each kind that is not rounding. Faults: test_confusion.py."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, DynamicCache

import kvdrift as kd
from kvdrift.controls import cast_copy
from kvdrift.controls.self_test import Failure
from kvdrift.diagnosis import cases, gather
from kvdrift.errors import InputError
from kvdrift.testing import assert_cache_equivalent

PROMPT = [5, 9, 100, 33, 7, 8, 250, 301, 12, 44, 17, 61]


def diagnose(model, prompts=PROMPT, **options):
    return kd.diagnose(model, prompts, max_new_tokens=3, progress=False, **options)


def small(family="llama", dtype=torch.float32, **overrides):
    return kd.models.tiny(family, dtype=dtype, **{"num_hidden_layers": 1} | overrides)


@contextmanager
def hooked(handle):
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize(("family", "dtype"), [("llama", torch.bfloat16), ("gemma2", torch.float32)])
def test_clean_models_are_rounding_or_exact(family, dtype, hooks):
    model = small(family, dtype, num_hidden_layers=2)
    verdict = kd.diagnose(model, progress=False)
    assert verdict.equivalent, str(verdict)
    assert verdict.exit_code == 0
    assert verdict.where is None
    assert verdict.wrong is None
    assert any("agree in every bit" in reason for reason in verdict.reasons)
    assert any("rounding bounds" in reason for reason in verdict.reasons)
    assert not hooks(model)


def test_layers_that_call_attention_twice_are_read_pass_by_pass():
    config = DiffLlamaConfig(
        vocab_size=384, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    verdict = diagnose(DiffLlamaForCausalLM(config).eval())
    assert verdict.equivalent, str(verdict)


def test_a_path_against_itself_is_exact():
    assert diagnose(small(), a=kd.CacheOff(), b=kd.CacheOff()).kind == "exact"


@pytest.mark.parametrize(("family", "n_layers"), [("falcon", 1), ("lfm2", 2)])
def test_without_a_bitwise_promise_float64_decides_and_the_verdict_says_so(family, n_layers):
    verdict = diagnose(small(family, num_hidden_layers=n_layers))
    assert verdict.equivalent, str(verdict)
    assert any("No bitwise promise in layers 0" in reason for reason in verdict.reasons)
    assert any("In float64 the paths differ by at most" in reason for reason in verdict.reasons)


def test_dynamic_ntk_is_by_design_beyond_its_switch():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    verdict = diagnose(small(rope_parameters=rope, max_position_embeddings=40))
    assert verdict.kind == "by_design", str(verdict)
    assert verdict.signature == ("at a length switch",)


def test_longrope_is_by_design_beyond_its_switch():
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 16, "long_factor": [4.0] * 16,
        "factor": 4.0, "original_max_position_embeddings": 40,
    }  # fmt: skip
    model = small(rope_parameters=rope, max_position_embeddings=160, initializer_range=0.08)
    verdict = diagnose(model)
    assert verdict.kind == "by_design", str(verdict)
    assert "at a length switch" in verdict.signature
    assert any("This is expected: beyond 40 tokens" in reason for reason in verdict.reasons)


def test_what_differs_before_the_switch_has_no_excuse():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = small(rope_parameters=rope, max_position_embeddings=40)
    verdict = diagnose(model, a=kd.CacheOn(cache=Coarse))
    assert verdict.kind == "bug"


class Coarse(DynamicCache):
    """Keeps keys in 8 bits of mantissa."""

    def update(self, key_states, value_states, *args, **kwargs):
        return super().update(key_states.bfloat16().to(key_states.dtype), value_states, *args, **kwargs)


def test_a_loss_is_a_bug_unless_it_is_declared():
    model = small()
    undeclared = diagnose(model, a=kd.CacheOn(cache=Coarse))
    assert undeclared.kind == "bug"
    assert undeclared.wrong == "a"
    declared = diagnose(model, a=kd.CacheOn(cache=Coarse, lossy="keys in bfloat16"))
    assert declared.kind == "lossy"
    assert "This is expected: keys in bfloat16." in declared.reasons
    assert diagnose(model, a=kd.CacheOn(lossy="nothing, as it turns out")).equivalent


def test_dropout_is_nondeterministic():
    model = small()
    noisy = nn.Dropout(0.1)
    noisy.train()
    handle = model.model.layers[0].register_forward_hook(
        lambda _m, _a, out: nn.functional.dropout(out, 0.1, training=True)
    )
    with hooked(handle):
        verdict = diagnose(model)
    assert verdict.kind == "nondeterministic", str(verdict)
    assert verdict.exit_code == 1


def test_training_mode_is_put_aside_and_told():
    model = small()
    model.train()
    verdict = diagnose(model)
    assert verdict.equivalent
    assert any("training mode" in reason for reason in verdict.reasons)
    assert model.training


def test_nan_weights_are_nonfinite_with_their_name():
    model = small(num_hidden_layers=2)
    model.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    verdict = diagnose(model)
    assert verdict.kind == "nonfinite"
    assert "model.layers.1.mlp.down_proj.weight" in verdict.reasons[0]
    assert verdict.where.layer == 1


def test_overflow_is_nonfinite_with_its_layer():
    model = small(dtype=torch.float16, num_hidden_layers=2)
    model.model.layers[1].mlp.down_proj.weight.mul_(3e4)
    verdict = diagnose(model)
    assert verdict.kind == "nonfinite"
    assert "layer 1" in verdict.reasons[0]


def test_a_shared_cache_is_stale():
    cache = DynamicCache()
    verdict = diagnose(small(), a=kd.CacheOn(cache=lambda: cache))
    assert verdict.kind == "bug"
    assert "between prompts" in verdict.signature
    assert verdict.suggestion == "Make a new cache for every prompt."
    reference = DynamicCache()
    verdict = diagnose(small(), b=kd.CacheOn(cache=lambda: reference, label="reference"))
    assert (verdict.kind, verdict.wrong) == ("bug", "b")


def test_a_failed_self_test_overrules_nothing_that_does_not_rest_on_it(monkeypatch):
    failure = Failure("operator", "mm of [16, 16]", "rows differ")
    monkeypatch.setattr(gather, "self_test", lambda model, control: [failure])
    verdict = diagnose(small(), a=kd.CacheOn(cache=Coarse))
    assert verdict.kind == "bug"
    assert any("failed its self-test: mm" in reason for reason in verdict.reasons)
    assert "The verdict does not rest on the control." in verdict.reasons


def test_a_failed_self_test_convicts_nobody(monkeypatch):
    """The arm differs, by a row that is computed otherwise beside others, and float64 sees nothing."""
    model = small()

    def rounds(_module, _args, output):
        return output if output.dtype == torch.float64 or output.shape[1] > 1 else output * (1 + 2**-22)

    with hooked(model.model.layers[0].mlp.register_forward_hook(rounds)):
        verdict = diagnose(model)
    assert verdict.kind == "inconclusive", str(verdict)
    assert verdict.exit_code == 2
    assert verdict.suggestion == "Diagnose again with attn='eager'."


def test_generate_is_held_against_forward():
    model = small()
    assert diagnose(model, generate=True).equivalent
    prepare = type(model).prepare_inputs_for_generation

    def shifted(self, *args, **kwargs):
        inputs = prepare(self, *args, **kwargs)
        if inputs.get("position_ids") is not None and inputs["position_ids"].shape[-1] == 1:
            inputs["position_ids"] = inputs["position_ids"] + 1
        return inputs

    try:
        type(model).prepare_inputs_for_generation = shifted
        verdict = diagnose(model, generate=True)
    finally:
        type(model).prepare_inputs_for_generation = prepare
    assert verdict.kind == "bug"
    assert verdict.signature == ("in generate() alone",)


def test_costly_lengths_run_on_a_tiny_twin(monkeypatch):
    model = small("mistral", sliding_window=64)
    n_parameters = sum(p.numel() for p in model.parameters())
    monkeypatch.setitem(cases.COST_LIMIT, "cpu", n_parameters * 40)
    verdict = diagnose(model)
    assert verdict.equivalent, str(verdict)
    assert any("on a tiny twin" in reason and "the window of 64" in reason for reason in verdict.reasons)


def test_paths_of_different_arithmetic_rest_on_float64():
    model = small(dtype=torch.bfloat16)
    wide = kd.CacheOn(model=cast_copy(model, torch.float32))
    for a in (wide, kd.CacheOn(controls=(kd.ReRoll(0),))):
        verdict = diagnose(model, a=a)
        assert verdict.kind == "rounding", str(verdict)
        assert any("the verdict rests on float64" in reason for reason in verdict.reasons)
    wide.model.hf.model.layers[0].self_attn.register_forward_hook(lambda _m, _a, out: (out[0] * 1.01, *out[1:]))
    assert diagnose(model, a=wide).kind == "bug"
    with pytest.raises(InputError, match=r"different weights \(model.embed_tokens.weight\)"):
        diagnose(model, a=kd.CacheOn(model=small(seed=1)))


def test_a_prompt_of_ones_own_runs_on_the_model_whatever_it_costs(monkeypatch):
    monkeypatch.setitem(cases.COST_LIMIT, "cpu", 1)
    verdict = diagnose(small())
    assert verdict.equivalent, str(verdict)
    told = next(reason for reason in verdict.reasons if "tiny twin" in reason)
    assert "chunked prefill" in told
    assert "prompt," not in told.replace("prefill,", "")


def test_what_has_no_room_is_left_out_and_told():
    verdict = diagnose(small(max_position_embeddings=24), prompts=[1, 2, 3])
    assert verdict.equivalent
    narrow = kd.diagnose(small(max_position_embeddings=48), progress=False)
    assert "long prompt: the model's context is too short." in narrow.not_examined


@pytest.mark.parametrize(
    ("arguments", "error"),
    [({"prompts": []}, "empty"), ({"prompts": [[400]]}, "outside the vocabulary"), ({"a": "ON"}, "a='ON' is no path")],
)
def test_bad_input_is_refused(arguments, error):
    with pytest.raises(InputError, match=error):
        diagnose(small(), **arguments)


@pytest.mark.parametrize("prompts", [[7], [7, 8, 9, 10, 11]])
def test_short_prompts(prompts):
    assert diagnose(small(), prompts).equivalent


def test_assert_cache_equivalent():
    model = small()
    assert assert_cache_equivalent(model, PROMPT, max_new_tokens=2).kind == "rounding"
    with pytest.raises(AssertionError, match="BUG: the two paths compute different functions"):
        assert_cache_equivalent(model, PROMPT, a=kd.CacheOn(cache=Coarse))
    lossy = kd.CacheOn(cache=Coarse, lossy="keys in bfloat16")
    assert assert_cache_equivalent(model, PROMPT, a=lossy, allow=("lossy",)).kind == "lossy"
