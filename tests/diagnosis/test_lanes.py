"""Every manner of calling the model is run, and what sets one apart is found and named; see faults/manners.py."""

import pytest
import torch
from faults.judge import judge
from transformers import AutoConfig, AutoModelForCausalLM

import kvdrift as kd
from kvdrift.diagnosis.lanes import lane_cases, manners

PROMPT = [5, 9, 100, 33, 7, 8, 250, 301, 12, 44, 17, 61]
SMALL = {"vocab_size": 384, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
SMALL |= {"intermediate_size": 64, "initializer_range": 0.2}


def built(kind, **values):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL, **values)).eval()


def diagnose(model, **options):
    return kd.diagnose(model, PROMPT, max_new_tokens=3, progress=False, **options)


@pytest.mark.parametrize("kind", ["roberta", "camembert", "data2vec-text"])
def test_a_model_with_other_default_positions_is_no_rounding(kind):
    verdict = diagnose(built(kind, is_decoder=True))
    assert verdict.kind == "bug", str(verdict)
    assert verdict.signature == ("between the model's default positions and explicit ones",)
    assert (verdict.a, verdict.b) == ("model(ids)", "model(ids, position_ids=…)")
    assert any("default positions differ from those that generate() and kvdrift pass" in r for r in verdict.reasons)
    assert "position_ids 0, 1, …" in verdict.suggestion


@pytest.mark.parametrize("family", ["llama", "gemma3", "bloom", "mamba"])
def test_a_clean_model_is_run_in_every_manner_that_it_knows(family):
    model = kd.load(kd.models.tiny(family, num_hidden_layers=1), quiet=True)
    verdict = diagnose(model)
    told = next(reason for reason in verdict.reasons if reason.startswith("The model was also called as"))
    assert all(str(manner) in told for call, manner in manners(model).items() if call != "explicit")
    assert verdict.equivalent or family == "mamba", str(verdict)


@pytest.mark.parametrize(
    ("fault", "family", "dtype"),
    [
        ("default-positions-ignore-the-cache", "llama", "float32"),
        pytest.param("default-positions-begin-at-two", "gpt2", "float32", marks=pytest.mark.slow),
        ("positions-of-a-mask-begin-at-one", "gpt2", "bfloat16"),
        ("a-mask-resets-positions-at-decode", "qwen3", "bfloat16"),
        pytest.param("head-off-for-one-row", "gpt-neox", "bfloat16", marks=pytest.mark.slow),
        ("head-off-for-one-row", "mistral", "float32"),
    ],
)
def test_a_fault_of_one_manner_is_found_and_the_manner_named(fault, family, dtype):
    case = judge(fault, family, dtype, brief=True)
    assert case.right, case.reasons
    assert case.signature_right, case.signature


def test_a_head_that_is_wrong_for_one_row_is_placed_in_the_head():
    model = kd.models.tiny("qwen2", num_hidden_layers=1)
    handle = model.lm_head.register_forward_hook(lambda _m, _a, out: out * 1.001 if out.shape[1] == 1 else out)
    verdict = diagnose(model)
    handle.remove()
    assert verdict.kind == "bug", str(verdict)
    assert verdict.where.module.startswith("lm_head")
    assert verdict.signature[0] == "where all logits are asked for"


def test_positions_that_are_all_moved_alike_are_the_same_function_of_a_rotary_model():
    model = kd.models.tiny("llama", num_hidden_layers=1)

    def move(_module, args, kwargs):
        if kwargs.get("position_ids") is None:
            ids, cache = kwargs["input_ids"], kwargs.get("cache")
            start = 2 + (int(cache.get_seq_length()) if cache is not None else 0)
            kwargs["position_ids"] = torch.arange(start, start + ids.shape[1])[None]
        return args, kwargs

    model.register_forward_pre_hook(move, with_kwargs=True)
    verdict = diagnose(model)
    assert verdict.equivalent, str(verdict)
    assert any("the same function in float64" in reason for reason in verdict.reasons)


def test_two_manners_given_as_the_two_paths_are_held_against_each_other_alone():
    model = built("roberta", is_decoder=True)
    a, b = kd.CacheOn(call="default"), kd.CacheOff()
    assert not lane_cases(kd.load(model, quiet=True), a, b)
    assert diagnose(model, a=a, b=b).kind == "bug"


def test_a_manner_that_is_under_test_itself_is_not_run_twice():
    model = kd.load(kd.models.tiny("llama"), quiet=True)
    names = [case.name for case in lane_cases(model, kd.CacheOn(call="default"), kd.CacheOff(call="default"))]
    assert "model(ids)" not in names
    assert "model(ids, position_ids=…, logits_to_keep=1)" in names


def test_a_path_that_cannot_be_called_otherwise_is_told():
    class Own:
        label, model, attn, controls = "mine", None, None, ()

        def start(self, model, ids, controls=None):
            return kd.CacheOn().start(model, ids, controls)

    verdict = diagnose(kd.models.tiny("llama", num_hidden_layers=1), a=Own())
    assert "other manners of calling: mine takes no call=." in verdict.not_examined
