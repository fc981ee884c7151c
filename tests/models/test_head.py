"""The float32 LM head."""

from itertools import product

import pytest
import torch
from pairwise import params

import kvdrift as kd
from kvdrift.models.head import Float32Head
from kvdrift.models.tiny import FAMILIES, tiny
from kvdrift.tracing.tap import Tap

IDS = torch.tensor([[5, 9, 100, 33, 7]])


def state_and_logits(model):
    with Tap(model, {"final_norm": None, "logits": None}) as tap:
        model.backend.forward(IDS, 0)
    return tap.values["final_norm"][0], tap.values["logits"][0][0]


@pytest.mark.parametrize(
    ("family", "dtype"), params(list(product(FAMILIES, (torch.float32, torch.bfloat16, torch.float16))), 1)
)
def test_every_family_has_one_that_is_the_head_in_float64(family, dtype, tiny_model):
    model = tiny_model(family, dtype)
    if "final_norm" not in model.coverage.sites:
        pytest.skip(model.coverage.reasons["final_norm"])
    state, logits = state_and_logits(model)
    head = Float32Head.find(model, state, logits)
    assert head is not None
    found = head(state)
    assert found.dtype == torch.float32
    exact = state.double() @ model.hf.get_output_embeddings().weight.double().T
    config = model.hf.config
    exact = exact / getattr(config, "logits_scaling", 1.0)
    if cap := getattr(config, "final_logit_softcapping", None):
        exact = torch.tanh(exact / cap) * cap
    exact = exact[0]
    assert (found - exact).norm() < 1e-5 * exact.norm()
    assert (logits - exact).norm() < (1e-5 if dtype == torch.float32 else 1e-2) * exact.norm()


@pytest.mark.parametrize("overrides", [{}, {"tie_word_embeddings": True}])
def test_tied_embeddings(overrides):
    model = kd.load(tiny("llama", dtype=torch.bfloat16, **overrides), quiet=True)
    assert Float32Head.find(model, *state_and_logits(model)) is not None


def test_a_head_that_does_something_else_is_not_pretended_to_be_understood():
    hf = tiny("llama", dtype=torch.bfloat16)
    hf.lm_head.register_forward_hook(lambda _m, _a, out: out.sin())
    model = kd.load(hf, quiet=True)
    state, logits = state_and_logits(model)
    native = Float32Head.find(model, state, logits)
    assert native is None or torch.equal(native.after(hf.lm_head(state[None])[0])[0], logits)
    assert Float32Head.find(model, state, logits + 1) is None
    assert Float32Head.find(model, state * 2, logits) is None


def test_the_weights_are_not_touched():
    hf = tiny("llama", dtype=torch.bfloat16)
    before = hf.lm_head.weight.clone()
    model = kd.load(hf, quiet=True)
    Float32Head.find(model, *state_and_logits(model))(torch.zeros(1, 256))
    assert hf.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(hf.lm_head.weight, before)


def test_a_comparison_without_an_understood_head_leaves_the_number_out(monkeypatch, tiny_model):
    monkeypatch.setattr(Float32Head, "find", classmethod(lambda cls, *_: None))
    drift = kd.compare(tiny_model("llama"), [1, 2], max_new_tokens=2, floor=0, local=False, progress=False)
    assert not drift.has("logits", "kl_float32_head")
    assert drift.has("logits", "kl")
