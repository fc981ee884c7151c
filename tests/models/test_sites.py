"""Site names and the choice of layers."""

import pytest

from kvdrift.errors import KvdriftError, SiteError
from kvdrift.models.sites import ALL_SITES, choose_layers, parse_sites


@pytest.mark.parametrize("site", ALL_SITES)
def test_every_short_name_means_all_layers(site):
    assert parse_sites(site) == parse_sites([site]) == {site: None}


@pytest.mark.parametrize(
    ("name", "site", "layers"),
    [
        ("hook_embed", "embed", None),
        ("ln_final.hook_normalized", "final_norm", None),
        ("blocks.0.hook_resid_pre", "resid_pre", {0}),
        ("blocks.12.hook_attn_out", "attn_out", {12}),
        ("blocks.3.attn.hook_k", "k", {3}),
        ("blocks.3.attn.hook_pattern", "pattern", {3}),
    ],
)
def test_full_names(name, site, layers):
    assert parse_sites(name) == {site: None if layers is None else frozenset(layers)}


def test_layers_of_full_names_add_up_and_the_short_name_wins():
    assert parse_sites(["blocks.1.attn.hook_v", "blocks.4.attn.hook_v"]) == {"v": frozenset({1, 4})}
    assert parse_sites(["blocks.1.attn.hook_v", "v"]) == {"v": None}
    assert parse_sites(["v", "blocks.1.attn.hook_v"]) == {"v": None}


@pytest.mark.parametrize(
    "name",
    [
        "",
        "K",
        "resid",
        "hook_k",
        "blocks.hook_k",
        "blocks.-1.hook_resid_post",
        "blocks.1.hook_embed",
        "blocks.1.hook_k ",
    ],
)
def test_other_names_are_refused_with_a_sentence(name):
    with pytest.raises(SiteError) as caught:
        parse_sites([name])
    assert repr(name) in str(caught.value)
    assert "resid_post" in str(caught.value)
    assert isinstance(caught.value, KvdriftError)


def test_no_site_is_refused():
    with pytest.raises(SiteError, match="No site"):
        parse_sites([])


def test_layers_restrict_and_count_from_the_end():
    wanted = {"k": None, "v": frozenset({0, 3})}
    assert choose_layers(wanted, None, 4) == wanted
    assert choose_layers(wanted, [-1, 1], 4) == {"k": frozenset({1, 3}), "v": frozenset({3})}


@pytest.mark.parametrize("layer", [4, -5, 100])
def test_a_layer_out_of_range_is_refused(layer):
    for wanted, layers in (({"k": None}, [layer]), ({"k": frozenset({layer})}, None)):
        with pytest.raises(SiteError, match="layers 0 to 3"):
            choose_layers(wanted, layers, 4)
