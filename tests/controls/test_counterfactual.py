"""Counterfactuals: the same function in another architecture, the original untouched, or a sentence why not."""

import pytest
import torch

import kvdrift as kd
from kvdrift.controls import counterfactual, float64_copy
from kvdrift.controls.counterfactual import expand_kv_heads, widen_window
from kvdrift.errors import InputError, ModelError
from kvdrift.models.tiny import FAMILIES, tiny

GROUPED = {
    "llama", "llama-mqa", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmo2", "mixtral", "gpt-oss",
    "granite", "lfm2",
}  # fmt: skip
REFUSED = {
    "llama-mha": "is MHA already", "gpt-neox": "is MHA already", "gpt2": "is MHA already", "bloom": "is MHA already",
    "deepseek-v3": "is MHA already", "falcon": "does not share KV heads by transformers' own rule",
    "mamba": "has no attention heads",
}  # fmt: skip
WINDOWED = ("mistral", "gemma2", "gemma3", "gpt-oss")


def logits(hf, ids):
    with torch.no_grad():
        return hf(torch.tensor([ids])).logits


def snapshot(hf):
    return hf.config.to_dict(), {name: tensor.clone() for name, tensor in hf.state_dict().items()}


def same(one, two):
    return one[0] == two[0] and all(torch.equal(one[1][name], two[1][name]) for name in one[1].keys() | two[1].keys())


def test_the_families_are_all_here():
    assert set(FAMILIES) == GROUPED | set(REFUSED)


@pytest.mark.parametrize("family", sorted(GROUPED))
def test_expanded_heads_compute_the_same_function(family):
    hf = tiny(family)
    before, tied = snapshot(hf), hf.get_input_embeddings().weight is hf.get_output_embeddings().weight
    copy = expand_kv_heads(hf)  # checked in float64 on the way, or it raises
    assert same(before, snapshot(hf))
    assert copy.hf is not hf
    assert copy.name == f"tiny-{family} with 8 KV heads"
    assert copy.architecture.grouping == "MHA"
    assert all(layer.n_kv_heads in (0, 8) for layer in copy.architecture.layers)
    assert (copy.hf.get_input_embeddings().weight is copy.hf.get_output_embeddings().weight) == tied
    cache = copy.backend.new_cache()
    copy.backend.forward(torch.tensor([[5, 6, 7]]), 0, cache)
    layer = next(x.index for x in copy.architecture.layers if x.n_kv_heads)
    assert cache.layers[layer].keys.shape[1] == 8
    ours, theirs = logits(copy.hf, [5, 6, 7, 8]), logits(hf, [5, 6, 7, 8])
    assert torch.allclose(ours, theirs, rtol=0, atol=2e-4 * float(theirs.abs().max()))


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_where_nothing_can_be_expanded_a_sentence_says_why(family):
    with pytest.raises(ModelError, match=REFUSED[family]):
        expand_kv_heads(tiny(family))


@pytest.mark.parametrize("family", ["gemma3", "olmo2", "qwen2", "phi3"])
def test_one_kv_head_and_half_precision(family):
    """With one KV head the norm of K has head_dim weights, whether it is per head (Gemma 3) or over all (OLMo 2)."""
    copy = expand_kv_heads(tiny(family, dtype=torch.bfloat16, num_key_value_heads=1))
    assert copy.architecture.grouping == "MHA"
    assert copy.dtype == torch.bfloat16


def test_a_wrong_order_of_heads_is_caught(monkeypatch):
    def tiled(rows, groups, dim):
        return rows.repeat(groups, *[1] * (rows.ndim - 1))

    monkeypatch.setattr(torch.Tensor, "repeat_interleave", tiled)
    with pytest.raises(ModelError, match="In float64 the logits of tiny-llama with 8 KV heads differ"):
        expand_kv_heads(tiny("llama"))


def test_without_memory_for_the_check_the_name_says_so(monkeypatch):
    monkeypatch.setattr(float64_copy, "free_memory", lambda device: 1000)
    assert "(not checked: a float64 copy needs 0.0 GB" in expand_kv_heads(tiny("llama")).name


def test_a_projection_that_is_no_plain_linear_is_refused():
    hf = tiny("llama")
    hf.model.layers[2].self_attn.k_proj = torch.nn.Sequential(hf.model.layers[2].self_attn.k_proj)
    with pytest.raises(ModelError, match="no plain k_proj and v_proj"):
        expand_kv_heads(hf)


@pytest.mark.parametrize("family", WINDOWED)
def test_widened_windows_compute_the_same_function_within_the_window(family):
    hf = tiny(family)
    before = snapshot(hf)
    windows = [module.sliding_window for module in hf.modules() if hasattr(module, "sliding_window")]
    copy = widen_window(hf)
    assert same(before, snapshot(hf))
    assert [module.sliding_window for module in hf.modules() if hasattr(module, "sliding_window")] == windows
    assert copy.name == f"tiny-{family} with windows of 256"
    assert {layer.window for layer in copy.architecture.layers} <= {None, 256}
    assert copy.architecture.max_positions == 8
    assert torch.equal(logits(copy.hf, [5, 6, 7, 8, 9]), logits(hf, [5, 6, 7, 8, 9]))


@pytest.mark.parametrize("family", WINDOWED)
def test_the_window_is_gone_and_nothing_else_is(family):
    """Beyond the old window the copy is the model that was built with wide windows, each layer's RoPE included."""
    ids = list(range(20, 44))
    wide = tiny(family, sliding_window=256)
    copy = widen_window(tiny(family))
    assert torch.equal(logits(copy.hf, ids), logits(wide, ids))
    assert not torch.equal(logits(copy.hf, ids), logits(tiny(family), ids))


def test_a_text_beyond_the_window_is_refused():
    copy = widen_window(tiny("gemma3"))
    with pytest.raises(InputError, match="exceed the context of tiny-gemma3 with windows of 256"):
        kd.compare(copy, [1, 2, 3, 4, 5], max_new_tokens=4, progress=False)
    again = kd.load(copy.hf, quiet=True)  # the limit goes with the module
    with pytest.raises(InputError, match="exceed the context"):
        again.check_length(5, 4)


def test_a_wrong_widening_is_caught(monkeypatch):
    """A copy whose sliding layers lose their own RoPE is another function."""
    cast = counterfactual.cast_copy

    def broken(hf, dtype):
        copy = cast(hf, dtype)
        copy.config.layer_types = ["full_attention"] * len(copy.config.layer_types)
        return copy

    monkeypatch.setattr(counterfactual, "cast_copy", broken)
    with pytest.raises(ModelError, match="it is another function and was not made"):
        widen_window(tiny("gemma3"))


def test_where_there_is_no_window_a_sentence_says_so():
    with pytest.raises(ModelError, match="No layer of tiny-llama has a window"):
        widen_window(tiny("llama"))


def test_both_at_once():
    copy = expand_kv_heads(widen_window(tiny("gemma3")))
    assert copy.name == "tiny-gemma3 with windows of 256 and 8 KV heads"
    assert copy.architecture.grouping == "MHA"
    assert copy.architecture.max_positions == 8


def test_paths_with_a_copy_can_be_compared_with_the_original(tiny_model):
    model = tiny_model("llama", torch.float32)
    path = kd.CacheOn(model=expand_kv_heads(model))
    drift = kd.compare(model, [5, 6, 7], a=path, b=kd.CacheOn(), max_new_tokens=3, floor=0, progress=False)
    assert drift.a.model == "tiny-llama with 8 KV heads"
    assert drift.b.model == "tiny-llama"
    assert any("the two models have other heads" in note for note in drift.notes)


def test_attention_that_is_not_found_is_not_left_grouped():
    hf = tiny("llama")
    hf.model.layers[1].extra = torch.nn.Module()
    hf.model.layers[1].extra.num_key_value_groups = 2
    with pytest.raises(ModelError, match="attention that kvdrift does not find"):
        expand_kv_heads(hf)


def test_the_shortest_windows_can_be_widened():
    assert widen_window(tiny("mistral", sliding_window=2)).architecture.max_positions == 2


def test_the_public_name_is_the_module():
    assert kd.counterfactual is counterfactual
    assert kd.counterfactual.expand_kv_heads is expand_kv_heads
