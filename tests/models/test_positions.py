"""Default positions that differ from explicit ones are noticed, and told by every verb that passes explicit ones."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import kvdrift as kd
from kvdrift.models.tiny import FAMILIES, tiny

SMALL = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"intermediate_size": 64, "initializer_range": 0.2, "is_decoder": True}
PROMPT = [5, 6, 7, 8]


def built(kind):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL)).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_no_tiny_family_has_positions_of_its_own(family):
    assert kd.load(tiny(family, num_hidden_layers=2), quiet=True).default_positions is None


@pytest.mark.parametrize("kind", ["roberta", "xlm-roberta", "data2vec-text"])
def test_positions_behind_a_padding_index_are_told(kind):
    assert "own default positions" in kd.load(built(kind), quiet=True).default_positions


def test_positions_that_ignore_the_cache_are_told():
    model = tiny("gpt2", num_hidden_layers=1)

    def reset(_module, args, kwargs):
        if kwargs.get("position_ids") is None:
            kwargs["position_ids"] = torch.arange(kwargs["input_ids"].shape[1])[None]
        return args, kwargs

    model.register_forward_pre_hook(reset, with_kwargs=True)
    assert "own default positions" in kd.load(model, quiet=True).default_positions


def test_a_model_that_needs_its_positions_says_so():
    model = tiny("llama", num_hidden_layers=1)

    def insist(_module, args, kwargs):
        kwargs.get("position_ids") + 0

    model.register_forward_pre_hook(insist, with_kwargs=True)
    assert "without them this model does not run (TypeError" in kd.load(model, quiet=True).default_positions


def test_noise_is_not_taken_for_positions():
    model = tiny("llama", num_hidden_layers=1)
    model.lm_head.register_forward_hook(lambda _m, _a, out: out + torch.randn_like(out))
    assert kd.load(model, quiet=True).default_positions is None


def test_every_verb_says_that_it_passes_explicit_positions(capsys):
    model = kd.load(built("roberta"), quiet=True)
    results = [
        kd.compare(model, PROMPT, max_new_tokens=2, floor=0, local=False, progress=False),
        kd.patch(model, PROMPT, kd.Patch("resid_post"), max_new_tokens=2, placebos=0, progress=False),
        kd.factorial(model, PROMPT, max_new_tokens=2, progress=False),
        kd.evaluate(model, [PROMPT], max_new_tokens=2, progress=False),
    ]
    assert all(model.default_positions in result.notes for result in results)
    assert capsys.readouterr().err == ""
    trace = kd.record(model, PROMPT, sites=["logits"], max_new_tokens=2, progress=False)
    assert trace.provenance["notes"] == [model.default_positions]
    assert capsys.readouterr().err == f"kvdrift: {model.default_positions}.\n"


def test_a_path_in_the_models_own_manner_needs_no_note_and_gives_its_logits(capsys):
    hf = built("camembert")
    trace = kd.record(hf, PROMPT, path=kd.CacheOff(call="default"), sites=["logits"], max_new_tokens=1, progress=False)
    assert capsys.readouterr().err == ""
    with torch.no_grad():
        assert torch.equal(trace["logits"][0], hf(torch.tensor([PROMPT])).logits[0, -1])
