"""Attention that sees later tokens: by design where the configuration or the mask says so, a bug where neither does."""

import pytest
import torch
import transformers.models.llama.modeling_llama as llama
from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

import kvdrift as kd

PROMPT = [5, 9, 100, 33, 7, 8, 250, 301, 12, 44, 17, 61]


def small(family="llama", **overrides):
    return kd.models.tiny(family, num_hidden_layers=2, **overrides)


def paligemma():
    text = {
        "model_type": "gemma", "vocab_size": 384, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 128,
        "pad_token_id": 0,
    }  # fmt: skip
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14, "projection_dim": 64, "vision_use_head": False,
    }  # fmt: skip
    torch.manual_seed(0)
    config = PaliGemmaConfig(text_config=text, vision_config=vision, image_token_id=383, projection_dim=64)
    return PaliGemmaForConditionalGeneration(config).eval()


def diagnose(model):
    return kd.diagnose(model, PROMPT, max_new_tokens=2, generate=False, progress=False)


@pytest.fixture
def masked(monkeypatch):
    """``masked(sees)``: what later tokens a pass that begins the sequence sees, ``sees(n, query, key)``."""
    original = llama.create_causal_mask

    def begin(sees):
        def mask(**given):
            cache, n = given.get("cache"), given["inputs_embeds"].shape[1]
            if cache is not None and cache.get_seq_length():
                return original(**given)
            return original(**given, or_mask_function=lambda b, h, query, key: sees(n, query, key))

        monkeypatch.setattr(llama, "create_causal_mask", mask)

    return begin


@pytest.mark.parametrize("make", [lambda: small("gemma3", use_bidirectional_attention=True), paligemma])
def test_declared_by_the_configuration(make):
    verdict = diagnose(make())
    assert verdict.kind == "by_design", str(verdict)
    assert (verdict.where.layer, verdict.where.site) == (0, "z")
    assert "Expect the difference" in verdict.suggestion
    assert not any("see the positions that they should" in reason for reason in verdict.reasons)


@pytest.mark.parametrize("sees", [lambda n, query, key: (query < n) & (key < n), lambda n, q, k: (q < 4) & (k < 4)])
def test_declared_by_the_mask_in_blocks(masked, sees):
    masked(sees)
    verdict = diagnose(small())
    assert verdict.kind == "by_design", str(verdict)  # a prefix of four: where padding stands in it
    assert any("in blocks that are read both ways" in reason for reason in verdict.reasons)


def test_a_mask_shifted_by_one_is_a_bug(masked):
    masked(lambda n, query, key: key == query + 1)
    verdict = diagnose(small())
    assert verdict.kind == "bug", str(verdict)
    assert verdict.where.layer == 0
