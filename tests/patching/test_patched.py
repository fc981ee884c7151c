"""`kd.patched`: writing in a loop of one's own."""

import pytest
import torch
from transformers import DynamicCache

import kvdrift as kd
from kvdrift.errors import InputError, SiteError
from kvdrift.models.tiny import FAMILIES, tiny
from kvdrift.tracing import seam

IDS = torch.tensor([[5, 9, 100, 33, 7, 8, 250, 301, 12, 44]])  # longer than the windows of 8
OTHER = torch.tensor([[6, 19, 200, 3, 77, 88, 25, 30, 120, 4]])


def tapped(model, ids, *sites):
    with kd.tap(model, sites, positions="all") as taps:
        logits = model.hf(ids, use_cache=False).logits
    return logits, taps.values


@pytest.mark.parametrize("family", FAMILIES)
def test_own_values_change_nothing_and_others_are_seen_at_every_site(family, tiny_model, same_bits, hooks):
    model = tiny_model(family)
    # attn_out and mlp_out of a model with a residual multiplier are written before it and read after it
    sites = [s for s in model.coverage.sites if s not in ("logits", "pattern")]
    plain, own = tapped(model, IDS, *sites)
    with kd.patched(model, {site: lambda value: value for site in sites}):
        assert same_bits(model.hf(IDS, use_cache=False).logits, plain)
    for site in sites:
        layer = model.coverage.layers(site)[-1]
        name = {"embed": "hook_embed", "final_norm": "ln_final.hook_normalized"}.get(
            site, f"blocks.{layer}.{'attn.' if site in 'qkvz' else ''}hook_{site}"
        )
        edit, tap = kd.patched(model, {name: lambda value: 1.5 * value}), kd.tap(model, site, positions="all")
        outer, inner = (edit, tap) if site in ("embed", "attn_out", "q", "z") else (tap, edit)
        with outer, inner:
            logits = model.hf(IDS, use_cache=False).logits
        assert same_bits(tap.values[site][layer], 1.5 * own[site][layer]), site
        assert not same_bits(logits, plain), f"{site} has no effect"
    assert not hooks(model.hf)


def test_a_residual_written_is_what_the_stream_carries_on(tiny_model, same_bits):
    model = tiny_model("llama")
    _, other = tapped(model, OTHER, "resid_mid")
    with kd.patched(model, {"blocks.1.hook_resid_mid": other["resid_mid"][1]}):
        _, seen = tapped(model, IDS, "resid_mid", "mlp_out", "resid_post")
    assert same_bits(seen["resid_mid"][1], other["resid_mid"][1])
    assert same_bits(seen["resid_post"][1], seen["resid_mid"][1] + seen["mlp_out"][1])


@pytest.mark.parametrize("site", ["resid_post", "q", "k", "v", "z"])
def test_a_tensor_for_the_whole_value_or_its_last_position(site, tiny_model, same_bits):
    model = tiny_model("llama")
    _, own = tapped(model, IDS, site)
    _, other = tapped(model, OTHER, site)
    given, mine = other[site][2], own[site][2]
    name = f"blocks.2.{'attn.' if len(site) == 1 else ''}hook_{site}"
    with kd.patched(model, {name: given}):
        assert same_bits(tapped(model, IDS, site)[1][site][2], given)
    with kd.patched(model, {name: given[..., -1, :].double()}):
        seen = tapped(model, IDS, site)[1][site][2]
    assert same_bits(seen[..., -1, :], given[..., -1, :]), "in the model's own dtype"
    assert same_bits(seen[..., :-1, :], mine[..., :-1, :])
    assert not same_bits(given, mine)


def test_the_cache_keeps_its_own(tiny_model, same_bits):
    model = tiny_model("mistral")
    caches = []
    for edits in ({}, {"blocks.3.attn.hook_k": torch.zeros_like, "blocks.3.attn.hook_v": torch.zeros_like}):
        cache = DynamicCache(config=model.hf.config)
        with kd.patched(model, edits or {"blocks.3.attn.hook_q": lambda q: q}):
            logits = model.hf(IDS, cache=cache, use_cache=True).logits
        caches.append((cache, logits))
    for one, two in zip(caches[0][0].layers, caches[1][0].layers, strict=True):
        assert same_bits(one.keys, two.keys)
        assert same_bits(one.values, two.values)
    assert not same_bits(caches[0][1], caches[1][1])


def test_in_generate(tiny_model):
    """The last residual of every step replaced by a constant: always the same token."""
    model = tiny_model("llama")
    constant = torch.randn(1, 256, generator=torch.Generator().manual_seed(0))
    token = int((model.hf.lm_head(model.hf.model.norm(constant)))[0].argmax())
    with kd.patched(model, {"blocks.3.hook_resid_post": constant}):
        out = model.hf.generate(IDS, max_new_tokens=4, do_sample=False)
    assert out[0, IDS.shape[1] :].tolist() == [token] * 4


def test_a_short_name_writes_every_layer_and_a_full_one_after_it_wins(tiny_model, same_bits):
    model = tiny_model("lfm2")
    assert model.coverage.attention_layers == (1, 3)
    with kd.patched(model, {"v": lambda v: 0 * v, "blocks.3.attn.hook_v": lambda v: v + 1}):
        _, seen = tapped(model, IDS, "v")
    assert (seen["v"][1] == 0).all()
    assert not (seen["v"][3] == 0).any()


@pytest.mark.parametrize(
    ("edits", "error", "words"),
    [
        ({}, InputError, "nothing to write"),
        ({"resid_post": 3}, InputError, "not int"),
        ({"logits": torch.zeros(1)}, SiteError, "cannot be patched"),
        ({"blocks.9.hook_resid_post": torch.zeros(1)}, SiteError, "layers 0 to 3"),
        ({"somewhere": torch.zeros(1)}, SiteError, "no site 'somewhere'"),
    ],
)
def test_bad_edits_are_one_sentence(edits, error, words, tiny_model, hooks):
    model = tiny_model("llama")
    with pytest.raises(error, match=words), kd.patched(model, edits):
        pass
    assert not hooks(model.hf)


@pytest.mark.parametrize("site", ["resid_post", "q", "z"])
@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (torch.zeros(1, 7), r"has shape \[1, 7\]; the value has"),
        (lambda value: value[..., :3], "made .* of a value of shape"),
        (lambda value: None, "made NoneType of a value"),
    ],
)
def test_an_edit_of_another_shape_is_refused_and_leaves_nothing(site, edit, words, tiny_model, hooks):
    model = tiny_model("llama")
    before = [dict(table) for table in seam.attention_tables(model.hf)]
    with pytest.raises(InputError, match=words), kd.patched(model, {site: edit}):
        model.hf(IDS)
    assert not hooks(model.hf)
    assert [dict(table) for table in seam.attention_tables(model.hf)] == before


def test_a_site_that_a_model_lacks(tiny_model):
    with (
        pytest.raises(SiteError, match="does not give 'resid_mid'"),
        kd.patched(tiny_model("gpt-neox"), {"resid_mid": abs}),
    ):
        pass


def test_a_function_may_change_its_argument_in_place(tiny_model, same_bits):
    model = tiny_model("llama")
    with kd.patched(model, {"blocks.2.hook_mlp_out": lambda value: value.zero_()}):
        in_place = model.hf(IDS).logits
    with kd.patched(model, {"blocks.2.hook_mlp_out": lambda value: 0 * value}):
        assert same_bits(model.hf(IDS).logits, in_place)


def test_with_gradients():
    """A user's own model has weights that require gradients; a forward pass is patched all the same."""
    hf = tiny("llama").requires_grad_(True)
    with kd.patched(hf, {"resid_post": lambda value: 2 * value, "z": lambda value: 2 * value, "embed": abs}):
        logits = hf(IDS).logits
    assert logits.isfinite().all()
