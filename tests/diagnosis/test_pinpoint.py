"""The very module in which a difference begins, and the hook that stands there."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

import kvdrift as kd

PROMPT = [5, 9, 100, 33, 7, 8, 250, 301, 12, 44, 17, 61]


def small(family="llama", **overrides):
    return kd.models.tiny(family, num_hidden_layers=2, **overrides)


def diagnose(model):
    return kd.diagnose(model, PROMPT, max_new_tokens=3, progress=False)


@contextmanager
def hooked(handle):
    try:
        yield
    finally:
        handle.remove()


def at_one_row(_module, args, output):
    return output * 1.001 if args[0].shape[1] == 1 else output


class FastMLP(LlamaMLP):
    """Another activation for one row."""

    def forward(self, x):
        if x.shape[1] == 1:
            return self.down_proj(nn.functional.gelu(self.gate_proj(x)) * self.up_proj(x))
        return super().forward(x)


class FastNorm(LlamaRMSNorm):
    """Another epsilon for one row."""

    def forward(self, hidden_states):
        if hidden_states.shape[1] == 1:
            return super().forward(hidden_states) * 1.001
        return super().forward(hidden_states)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.1.mlp", FastMLP),
        ("model.layers.1.input_layernorm", FastNorm),
        ("model.layers.0.post_attention_layernorm", FastNorm),
        ("model.norm", FastNorm),
    ],
)
def test_a_branch_for_one_row_is_a_bug_of_its_module(name, kind):
    model = small()
    model.get_submodule(name).__class__ = kind
    verdict = diagnose(model)
    assert verdict.kind == "bug", str(verdict)
    assert verdict.where.module == name
    assert verdict.signature == ("from the first decode step",)


@pytest.mark.parametrize("family", ["llama", "gpt-neox"])
@pytest.mark.parametrize("last", ["o_proj|dense", "down_proj|dense_4h_to_h", "q_proj|query_key_value"])
def test_a_hook_is_named_with_its_module(family, last):
    model = small(family)
    name = next(n for n, _ in reversed(list(model.named_modules())) if n.rpartition(".")[2] in last.split("|"))
    with hooked(model.get_submodule(name).register_forward_hook(at_one_row)):
        verdict = diagnose(model)
    assert verdict.kind == "bug", str(verdict)
    assert verdict.where.module == f"{name} (with the forward hook at_one_row)"
    assert verdict.where.layer == 1
    assert "what the hook makes of a token" in verdict.suggestion


def steered(x):
    return torch.cat([x[:, :-1], x[:, -1:] + torch.arange(x.shape[-1]).cos()], dim=1)


def steer_before(_module, args):
    return (steered(args[0]), *args[1:])


@pytest.mark.parametrize(("family", "block"), [("llama", "model.layers.0"), ("gpt2", "transformer.h.0")])
def test_a_hook_on_the_last_position_is_found_behind_the_cache_that_it_spoils(family, block):
    model = small(family)

    def hook(_module, _args, output):
        return (steered(output[0]), *output[1:]) if isinstance(output, tuple) else steered(output)

    with hooked(model.get_submodule(block).register_forward_hook(hook)):
        verdict = diagnose(model)
    assert verdict.kind == "bug", str(verdict)
    assert verdict.where.module == f"{block} (with the forward hook hook)"
    assert verdict.wrong is None
    assert any("depends there on those that follow it" in reason for reason in verdict.reasons)


def test_a_pre_hook_is_named_too():
    model = small("mistral")
    with hooked(model.model.layers[0].mlp.register_forward_pre_hook(steer_before)):
        verdict = diagnose(model)
    assert verdict.where.module == "model.layers.0.mlp (with the forward pre-hook steer_before)", str(verdict)


def test_rows_that_nothing_is_made_of_are_no_fault():
    """In the last block only the current row leads anywhere, and a hook on it is there in every pass."""
    model = small("mistral")
    with hooked(model.model.layers[1].mlp.register_forward_pre_hook(steer_before)):
        verdict = diagnose(model)
    assert verdict.equivalent, str(verdict)


def test_a_hook_that_treats_all_positions_alike_is_no_fault():
    model = small()
    with hooked(model.model.layers[1].register_forward_hook(lambda _m, _a, output: output + 0.3)):
        assert diagnose(model).equivalent
