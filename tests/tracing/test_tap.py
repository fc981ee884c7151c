"""Taps against what the model itself says it computed."""

from itertools import product

import pytest
import torch
from pairwise import params
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import kvdrift as kd
from kvdrift.errors import SiteError
from kvdrift.models.tiny import FAMILIES, tiny

IDS = torch.tensor([[5, 9, 100, 33, 7, 8, 250, 301, 12, 44]])


@pytest.mark.parametrize("family", FAMILIES)
def test_residual_sites_equal_the_models_hidden_states(family, tiny_model):
    model = tiny_model(family)
    with kd.tap(
        model, [s for s in ("embed", "resid_pre", "resid_post") if s in model.coverage.sites], positions="all"
    ) as taps:
        output = model.hf(IDS, output_hidden_states=True, use_cache=False)
    states = output.hidden_states
    assert len(states) == 5
    if family == "mamba":  # its list begins after the first block
        states = (taps.values["embed"][0], *states[:-1], states[-1])
    for layer in range(4):
        assert torch.equal(taps.values["resid_pre"][layer], states[layer]), layer
    for layer in range(3):
        assert torch.equal(taps.values["resid_post"][layer], states[layer + 1]), layer
    if "final_norm" in model.coverage.sites:
        with kd.tap(model, "final_norm", positions="all") as taps:
            model.hf(IDS, use_cache=False)
        assert torch.equal(model.hf.get_output_embeddings()(taps["final_norm"]), output.logits) or family in (
            "gemma2",
            "granite",
        )


@pytest.mark.parametrize(("family", "dtype"), params(list(product(FAMILIES, (torch.float32, torch.bfloat16))), 1))
def test_the_added_terms_add_up_bitwise(family, dtype, tiny_model):
    coverage = tiny_model(family, dtype).coverage
    with kd.tap(tiny_model(family, dtype), coverage.sites, positions="all") as taps:
        taps.model.hf(IDS)
    for layer in coverage.layers("attn_out"):
        values = {site: by_layer[layer] for site, by_layer in taps.values.items() if layer in by_layer}
        middle = values["resid_pre"] + values["attn_out"]
        if "resid_mid" in values:
            assert torch.equal(values["resid_mid"], middle)
        assert torch.equal(values["resid_post"], middle + values["mlp_out"])
        assert not torch.equal(values["attn_out"], values["mlp_out"])
    sequential = {"falcon": False, "gpt-neox": False, "mamba": False}.get(family, True)
    assert bool(coverage.layers("attn_out")) is sequential


def test_q_k_v_z_by_hand_on_a_llama(tiny_model):
    model = tiny_model("llama")
    with kd.tap(model, ["resid_pre", "attn_out", "q", "k", "v", "z"], positions="all") as taps:
        model.hf(IDS)
    rotary = model.hf.model.rotary_emb(IDS.float(), torch.arange(IDS.shape[1])[None])
    for layer, block in enumerate(model.hf.model.layers):
        x, attention = block.input_layernorm(taps.values["resid_pre"][layer]), block.self_attn
        q, k, v = (
            getattr(attention, f"{name}_proj")(x).view(1, IDS.shape[1], -1, 32).transpose(1, 2) for name in "qkv"
        )
        q, k = apply_rotary_pos_emb(q, k, *rotary)
        assert torch.equal(taps.values["q"][layer], q)
        assert torch.equal(taps.values["k"][layer], k)
        assert torch.equal(taps.values["v"][layer], v)
        z = taps.values["z"][layer].transpose(1, 2).reshape(1, IDS.shape[1], -1)
        assert torch.equal(attention.o_proj(z), taps.values["attn_out"][layer])


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt2", "gemma2"])
def test_pattern_rows_sum_to_one_and_respect_causality_and_window(family, tiny_model):
    model = tiny_model(family, attn="eager")
    with kd.tap(model, "pattern", positions="all") as taps:
        model.hf(IDS)
    n = IDS.shape[1]
    for info in model.architecture.layers:
        pattern = taps.values["pattern"][info.index][0]
        assert pattern.shape == (8, n, n)
        assert torch.allclose(pattern.sum(-1), torch.ones(8, n), atol=1e-5)
        query, key = torch.arange(n)[:, None], torch.arange(n)[None]
        hidden = (key > query) | (query - key >= (info.window or n))
        assert (pattern[:, hidden] == 0).all()
        assert (pattern[:, ~hidden] > 0).all()


def test_gpt_oss_pattern_gives_some_weight_to_the_sink(tiny_model):
    model = tiny_model("gpt-oss")
    with kd.tap(model, "pattern", positions="all") as taps:
        model.hf(IDS)
    assert (taps.values["pattern"][0].sum(-1) < 1).all()


def test_current_is_the_last_row_of_all(tiny_model):
    model = tiny_model("gemma3", attn="eager")
    sites = model.coverage.sites
    with kd.tap(model, sites) as current, kd.tap(model, sites, positions="all") as every:
        model.hf(IDS)
    for site in sites:
        for layer, value in current.values[site].items():
            whole = every.values[site][layer]
            assert torch.equal(value, whole if site == "logits" else whole[..., -1, :]), site


def test_a_batch_is_kept_apart(tiny_model):
    model = tiny_model("llama")
    with kd.tap(model, ["resid_post", "q", "k", "z"]) as taps:
        model.hf(torch.cat([IDS, IDS.flip(1)]))
    assert taps["resid_post"].shape == (4, 2, 256)
    assert (taps["q"].shape, taps["k"].shape, taps["z"].shape) == ((4, 2, 8, 32), (4, 2, 2, 32), (4, 2, 8, 32))
    assert not torch.equal(taps["resid_post"][:, 0], taps["resid_post"][:, 1])


def test_heads_choose_query_heads_and_their_kv_heads(tiny_model):
    model = tiny_model("llama")
    with kd.tap(model, ["q", "k", "v", "z"]) as whole, kd.tap(model, ["q", "k", "v", "z"], heads=[5, 1]) as some:
        model.hf(IDS)
    assert torch.equal(some["q"], whole["q"][:, :, [5, 1]])
    assert torch.equal(some["z"], whole["z"][:, :, [5, 1]])
    assert torch.equal(some["k"], whole["k"][:, :, [0, 1]])
    with kd.tap(model, ["k"], heads=[6, 7, 4]) as some:
        model.hf(IDS)
    assert torch.equal(some["k"], whole["k"][:, :, [1]])


def test_each_top_level_pass_is_one_step_also_in_generate(tiny_model):
    model = tiny_model("llama")
    with kd.tap(model, ["resid_post", "logits"], layers=[1, -1]) as taps:
        model.hf.generate(IDS, max_new_tokens=3, do_sample=False)
    assert len(taps.steps) == 3
    assert all(set(step["resid_post"]) == {1, 3} for step in taps.steps)
    assert not torch.equal(taps.steps[0]["logits"][0], taps.steps[1]["logits"][0])


def test_what_was_tapped_does_not_change_later(tiny_model):
    model = tiny_model("mistral")
    cache = DynamicCache(config=model.hf.config)
    with kd.tap(model, model.coverage.sites, positions="all") as taps:
        model.hf(IDS, cache=cache, use_cache=True)
        before = {site: {x: t.clone() for x, t in layers.items()} for site, layers in taps.values.items()}
        first = taps.steps[0]
        for token in (3, 4):
            model.hf(torch.tensor([[token]]), cache=cache, use_cache=True)
    assert all(torch.equal(first[site][x], t) for site, layers in before.items() for x, t in layers.items())


def test_logits_of_a_tuple_output(tiny_model):
    model = tiny_model("llama")
    with kd.tap(model, "logits") as taps:
        output = model.hf(IDS, return_dict=False)
    assert torch.equal(taps["logits"], output[0][:, -1])


def test_nothing_is_left_after_success_failure_and_nesting(hooks):
    hf = tiny("llama")
    model = kd.load(hf, quiet=True)
    own = hf.register_forward_hook(lambda *_: None)
    assert len(hooks(hf)) == 1
    with kd.tap(model, "resid_post") as outer:
        with kd.tap(model, "k") as inner:
            hf(IDS)
        hf(IDS)
        assert (len(outer.steps), len(inner.steps)) == (2, 1)
    assert len(hooks(hf)) == 1
    with pytest.raises(IndexError), kd.tap(model, model.coverage.sites):
        hf(torch.tensor([[10**6]]))
    assert len(hooks(hf)) == 1

    def fail(*_):
        raise RuntimeError("in a block")

    handle = hf.model.layers[2].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="in a block"), kd.tap(model, model.coverage.sites) as taps:
        hf(IDS)
    assert not taps.steps
    handle.remove()
    own.remove()
    assert not hooks(hf)


def test_two_models_at_once():
    one, two = kd.load(tiny("llama"), quiet=True), kd.load(tiny("llama", seed=1), quiet=True)
    with kd.tap(one, ["resid_post", "k"]) as first, kd.tap(two, ["resid_post", "k"]) as second:
        one.hf(IDS)
        assert (len(first.steps), len(second.steps)) == (1, 0)
        two.hf(IDS)
        assert (len(first.steps), len(second.steps)) == (1, 1)
    assert not torch.equal(first["k"], second["k"])


def test_refusals_name_the_reason(tiny_model):
    model = tiny_model("llama")
    for arguments, words in [
        ({"sites": "pattern"}, "attn='eager'"),
        ({"sites": "nonsense"}, "There is no site 'nonsense'"),
        ({"sites": "k", "layers": [4]}, "layers 0 to 3"),
        ({"sites": "blocks.7.attn.hook_k"}, "layers 0 to 3"),
        ({"sites": "k", "heads": [8]}, "among heads 0 to 7"),
        ({"sites": "k", "heads": []}, "among heads 0 to 7"),
        ({"sites": "k", "layers": []}, "no layer that was asked for has it"),
    ]:
        with pytest.raises(SiteError, match=words):
            kd.tap(model, **arguments)
    for family, site, words in [
        ("mamba", "k", "attention table"),
        ("gpt-neox", "attn_out", "no two modules"),
        ("bloom", "q", "attention table"),
    ]:
        with pytest.raises(SiteError, match=words):
            kd.tap(tiny_model(family), site)
    with kd.tap(model, "k") as taps, pytest.raises(SiteError, match="no 'k' yet"):
        taps["k"]
