"""Models that make a cache of a class of their own."""

import pickle

import pytest
import torch
import transformers
from transformers.models.minimax.modeling_minimax import MiniMaxCache

import kvdrift as kd
from kvdrift.backends.own_cache import own_cache, takes_dynamic_cache
from kvdrift.errors import ModelError
from kvdrift.models.tiny import tiny

PROMPT = [5, 9, 100, 33, 7, 8, 250, 301, 12, 44]
SMALL = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "layer_types": ["full_attention", "linear_attention", "full_attention"],
    "initializer_range": 0.08,
    "bos_token_id": None,
    "eos_token_id": None,
}


@pytest.fixture(scope="module")
def minimax():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        hf = transformers.AutoModelForCausalLM.from_config(transformers.MiniMaxConfig(**SMALL))
    return kd.load(hf.eval().requires_grad_(False), quiet=True)


def test_the_model_is_asked_for_its_cache(minimax):
    one, two = minimax.backend.new_cache(), minimax.backend.new_cache()
    assert type(one) is type(two) is MiniMaxCache
    assert one is not two
    assert not one.layers
    assert not one.linear_cache
    pickle.dumps(minimax.backend.new_cache)


def test_models_with_a_cache_of_transformers_are_not(tiny_model):
    assert takes_dynamic_cache(tiny_model("llama").hf)
    assert type(tiny_model("llama").backend.new_cache()) is transformers.DynamicCache


@torch.no_grad()
def test_steps_are_those_of_generate(minimax, same_bits):
    out = minimax.hf.generate(
        torch.tensor([PROMPT]), max_new_tokens=4, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    run, tokens = kd.CacheOn().start(minimax, PROMPT), out.sequences[0, len(PROMPT) :].tolist()
    for step, logits in enumerate(out.logits):
        assert same_bits(run.step(tokens[step - 1] if step else None).logits, logits[0])
    run.close()


def test_masks_cover_what_the_cache_holds(minimax):
    """Its layers are made while it runs, so that an empty one says nothing about them."""
    assert minimax.backend.masks_past
    runs = [kd.CacheOn(left_padding=padding).start(minimax, PROMPT) for padding in (0, 3)]
    for token in (None, 4, 5):
        plain, padded = (run.step(token).logits for run in runs)
        torch.testing.assert_close(padded, plain, rtol=1e-4, atol=1e-4)


def test_it_is_rounding_although_its_constants_are_float32(minimax):
    verdict = kd.diagnose(minimax, PROMPT, max_new_tokens=4, generate=False, progress=False)
    assert verdict.kind == "rounding", verdict
    assert "rounding of constants that the model holds in float32" in str(verdict)


def test_states_without_the_interface_of_a_cache_are_refused():
    hf = tiny("llama")

    class State:
        pass

    with pytest.raises(ModelError, match="keeps its state in State, which has not the interface"):
        own_cache(hf, lambda **_: {"logits": torch.zeros(1), "state": State()})
    with pytest.raises(ModelError, match="fails at that with one token"):
        own_cache(hf, lambda **_: 1 / 0)


def test_a_cache_that_cannot_be_made_without_the_model_names_the_way_on():
    class Sized(transformers.DynamicCache):
        def __init__(self, config, n_slots):
            super().__init__()

    hf = tiny("llama")
    with pytest.raises(ModelError, match=r"Sized\) that asks for config, n_slots; pass CacheOn\(cache"):
        own_cache(hf, lambda **_: {"cache": Sized(None, 1)})
