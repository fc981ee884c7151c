"""Writing into a forward pass: a tap sees what was written, and so does everything downstream."""

from contextlib import ExitStack

import pytest
import torch
from pairwise import params

import kvdrift as kd
from kvdrift.models.sites import BLOCK_SITES, GLOBAL_SITES, HEAD_SITES
from kvdrift.models.tiny import FAMILIES, tiny
from kvdrift.tracing.tap import Tap
from kvdrift.tracing.writer import Block, Writer, as_index, shifted, slots, write_at

MINE = [5, 9, 100, 33, 7, 8, 250, 301, 12, 44, 17, 61]  # longer than the windows of 8
OTHER = [6, 19, 200, 3, 77, 88, 25, 30, 120, 4, 170, 1]
SITES = (*GLOBAL_SITES, *BLOCK_SITES, *HEAD_SITES)


def given_sites(model):
    return {site: None for site in SITES if site in model.coverage.sites}


class Pass:
    """One pass over MINE or OTHER: whole, or the last token after a prefill; run inside taps and writers."""

    def __init__(self, model, ids, cached):
        self.model, self.ids, self.cached = model, torch.tensor([ids]), cached
        self.first = len(ids) - 1 if cached else 0
        self.cache = None
        if cached:
            self.cache = model.backend.new_cache()
            model.backend.forward(self.ids[:, :-1], 0, self.cache)

    def keys(self, layer, n_keys):
        """Positions of the keys: all end at the current one here."""
        return range(len(MINE) - n_keys, len(MINE))

    def run(self):
        return self.model.backend.forward(self.ids[:, self.first :], self.first, self.cache)


def tapped(model, ids, cached, scaled=False, within=()):
    """Logits and every site of one pass."""
    one = Pass(model, ids, cached)
    with ExitStack() as stack:
        for context in within:
            stack.enter_context(context)
        tap = stack.enter_context(Tap(model, given_sites(model), where="all", kv_where="all", scaled=scaled))
        logits = one.run()
    return logits, tap.take()[0][-1]


def writer_of(model, blocks, one):
    sites = {}
    for block in blocks:
        sites.setdefault(block.site, set()).add(block.layer)
    writer = Writer(model, sites)
    writer.load(blocks)
    writer.position, writer.keys = len(MINE) - 1, one.keys
    return writer


def whole(site, layer, value):
    """A block of a site's whole value."""
    return Block(site, layer, slice(None), range(len(MINE) - value.shape[-2], len(MINE)), value)


CASES = params([(family, dtype) for family in FAMILIES for dtype in (torch.float32, torch.bfloat16)], 1)


@pytest.fixture(scope="module", params=[pytest.param(case.values, marks=case.marks, id=case.id) for case in CASES])
def model(request, tiny_model):
    return tiny_model(*request.param)


@pytest.fixture(scope="module")
def cached(model):
    """A decode step in float32, a recompute in bfloat16."""
    return model.dtype == torch.float32


@pytest.fixture(scope="module")
def plain(model, cached):
    return tapped(model, MINE, cached)


@pytest.fixture(scope="module")
def donor(model, cached):
    return tapped(model, OTHER, cached)


@pytest.mark.parametrize("tap_first", [False, True], ids=["writer first", "tap first"])
def test_a_tap_sees_what_is_written_at_every_site_whichever_came_first(
    model, cached, plain, donor, tap_first, same_bits
):
    (_, own), (_, given) = plain, donor
    written = {site: model.coverage.layers(site)[-1] for site in given_sites(model)}
    blocks = [
        Block(site, layer, slice(None), [len(MINE) - 1], given[site][layer][..., -1:, :])
        for site, layer in written.items()
    ]
    one = Pass(model, MINE, cached)
    tap, writer = (
        Tap(model, given_sites(model), where="all", kv_where="all", scaled=False),
        writer_of(model, blocks, one),
    )
    with ExitStack() as stack:
        for context in (tap, writer) if tap_first else (writer, tap):
            stack.enter_context(context)
        one.run()
    for site, layer in written.items():
        seen = tap.values[site][layer]
        assert not same_bits(own[site][layer][..., -1, :], given[site][layer][..., -1, :])
        assert same_bits(seen[..., -1, :], given[site][layer][..., -1, :]), site
        if site != "k" and site != "v":  # with embed written, the decode step's own rows differ from layer to layer
            assert same_bits(seen[..., :-1, :], own[site][layer][..., :-1, :]), "other rows are left alone"


def test_what_is_written_into_the_residual_is_what_the_stream_carries_on(model, cached, plain, donor, same_bits):
    """Every equation of the stream still holds in every bit, now with the written term in it."""
    (plain_logits, own), (donor_logits, given) = plain, donor
    for site in given_sites(model):
        if site in HEAD_SITES:
            continue
        layer = min(1, model.coverage.layers(site)[-1])
        block = whole(site, layer, given[site][layer])
        logits, seen = tapped(model, MINE, cached, True, [writer_of(model, [block], Pass(model, MINE, cached))])
        assert not same_bits(logits, plain_logits), f"{site} has no effect"
        assert site == "final_norm" or not same_bits(seen["resid_post"][3], own["resid_post"][3])
        if site == "final_norm":
            assert same_bits(logits, donor_logits)
        for at in model.coverage.layers("resid_pre"):
            if at + 1 in seen["resid_pre"]:
                expected = given[site][1] if (site, layer) == ("resid_pre", at + 1) else seen["resid_post"][at]
                assert same_bits(seen["resid_pre"][at + 1], expected), (site, at)
            if at not in seen.get("attn_out", {}) or at not in seen.get("mlp_out", {}):
                continue
            middle = seen["resid_pre"][at] + seen["attn_out"][at]
            if at in seen.get("resid_mid", {}):
                expected = given[site][1] if (site, layer) == ("resid_mid", at) else middle
                assert same_bits(seen["resid_mid"][at], expected), (site, at)
                middle = seen["resid_mid"][at]
            expected = middle + seen["mlp_out"][at]
            if (site, layer) == ("resid_post", at):
                expected = given[site][1]
            assert same_bits(seen["resid_post"][at], expected), (site, at)


def test_q_k_and_v_reach_the_kernel_and_z_reaches_the_output(model, cached, plain, donor, same_bits):
    """The kernel given all of the donor's q, k and v returns its z; a block given its z adds its attn_out."""
    if not model.coverage.attention_layers:
        assert "k" not in model.coverage.sites
        return
    (_, own), (_, given) = plain, donor
    layer = model.coverage.attention_layers[-1]

    def seen_with(*sites):
        blocks = [whole(site, layer, given[site][layer]) for site in sites]
        return tapped(model, MINE, cached, within=[writer_of(model, blocks, Pass(model, MINE, cached))])[1]

    assert same_bits(seen_with("q", "k", "v")["z"][layer], given["z"][layer])
    assert not same_bits(own["z"][layer], given["z"][layer])
    for site in ("q", "k", "v"):
        assert not same_bits(seen_with(site)["z"][layer], own["z"][layer]), f"{site} alone has no effect"
    after = seen_with("z")
    if "attn_out" in after:
        assert same_bits(after["attn_out"][layer], given["attn_out"][layer])
        assert not same_bits(after["attn_out"][layer], own["attn_out"][layer])
    else:  # a parallel block: attention and MLP are added at once
        assert not same_bits(after["resid_post"][layer], own["resid_post"][layer])


@pytest.mark.parametrize("heads", [slice(None), [1], [0, 1], [1, 0]], ids=str)
@pytest.mark.parametrize("positions", [range(3, 6), [2], [9, 4, 11]], ids=str)
@pytest.mark.parametrize("site", ["q", "k", "v", "z"])
def test_only_the_heads_and_positions_of_a_block_change(site, heads, positions, tiny_model, same_bits):
    model = tiny_model("llama")
    _, plain = tapped(model, MINE, False)
    own = plain[site][2]
    rows = len(range(own.shape[1])[heads]) if isinstance(heads, slice) else len(heads)
    value = torch.randn(1, rows, len(positions), 32, generator=torch.Generator().manual_seed(0))
    one = Pass(model, MINE, False)
    _, seen = tapped(model, MINE, False, within=[writer_of(model, [Block(site, 2, heads, positions, value)], one)])
    expected = own.clone()
    for i, head in enumerate(range(own.shape[1])[heads] if isinstance(heads, slice) else heads):
        for j, position in enumerate(positions):
            expected[0, head, position] = value[0, i, j]
    assert same_bits(seen[site][2], expected)


def test_positions_are_absolute_beyond_a_window(tiny_model, same_bits):
    """A decode step of a window of 8 reads keys 4 to 11; position 9 sits in slot 5."""
    model = tiny_model("mistral")
    value = torch.zeros(1, 1, 1, 32)
    one = Pass(model, MINE, True)
    _, seen = tapped(model, MINE, True, within=[writer_of(model, [Block("k", 1, [1], [9], value)], one)])
    key = seen["k"][1]
    assert key.shape[2] == 8
    assert (key[0, 1] == 0).all(dim=-1).nonzero().flatten().tolist() == [5]
    assert not (key[0, 0] == 0).all(dim=-1).any()


def test_what_the_kernel_reads_is_changed_and_the_cache_is_not(tiny_model, same_bits):
    model = tiny_model("llama")
    one = Pass(model, MINE, True)
    before = [layer.keys.clone() for layer in one.cache.layers]
    with writer_of(model, [Block("k", 1, slice(None), [3], torch.zeros(1, 2, 1, 32))], one):
        one.run()
    for layer, keys in zip(one.cache.layers, before, strict=True):
        assert same_bits(layer.keys[:, :, : keys.shape[2]], keys)


def test_blocks_are_written_in_order_and_loaded_anew(tiny_model, same_bits):
    model = tiny_model("llama")
    first, second = torch.ones(1, 2, 256), torch.zeros(1, 1, 256)
    one = Pass(model, MINE, False)
    blocks = [Block("resid_post", 3, slice(None), [4, 5], first), Block("resid_post", 3, slice(None), [5], second)]
    writer = writer_of(model, blocks, one)
    plain_logits, plain = tapped(model, MINE, False)
    with writer:
        _, seen = tapped(model, MINE, False)
        assert (seen["resid_post"][3][0, 4] == 1).all()
        assert (seen["resid_post"][3][0, 5] == 0).all()
        writer.load(())
        logits, seen = tapped(model, MINE, False)
        assert same_bits(logits, plain_logits)
        for site, by_layer in plain.items():
            for layer, value in by_layer.items():
                assert same_bits(seen[site][layer], value)
        writer.load(blocks[1:])
        _, seen = tapped(model, MINE, False)
        assert same_bits(seen["resid_post"][3][0, 4], plain["resid_post"][3][0, 4])
        assert (seen["resid_post"][3][0, 5] == 0).all()


def test_a_block_of_another_dtype_is_written_in_the_models_own(tiny_model):
    model = tiny_model("llama", torch.bfloat16)
    one = Pass(model, MINE, False)
    blocks = [
        Block("resid_post", 1, slice(None), [3], torch.full((1, 1, 256), 1 / 3)),
        Block("v", 1, [0], [3], torch.full((1, 1, 1, 32), 1 / 3)),
    ]
    _, seen = tapped(model, MINE, False, within=[writer_of(model, blocks, one)])
    third = torch.tensor(1 / 3).bfloat16()
    assert (seen["resid_post"][1][0, 3] == third).all()
    assert (seen["v"][1][0, 0, 3] == third).all()
    assert seen["v"][1].dtype == torch.bfloat16


def test_another_model_is_not_written_to(tiny_model, same_bits):
    model, twin = tiny_model("llama"), kd.load(tiny("llama"), quiet=True)
    assert twin.coverage.sites
    plain, _ = tapped(twin, MINE, False)
    one = Pass(model, MINE, False)
    blocks = [Block(site, 1, slice(None), [3], torch.zeros(1, 2, 1, 32)) for site in ("k", "v")]
    blocks.append(Block("resid_post", 1, slice(None), [11], torch.zeros(1, 1, 256)))
    with writer_of(model, blocks, one):
        assert same_bits(twin.backend.forward(torch.tensor([MINE]), 0), plain)
        assert not same_bits(one.run(), plain)


def test_nothing_is_left_after_an_exception(tiny_model, hooks):
    model = tiny_model("llama")
    everything = {site: model.coverage.layers(site) for site in given_sites(model)}

    def interrupted():
        assert hooks(model.hf)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Writer(model, everything):
        interrupted()
    assert not hooks(model.hf)
    with pytest.raises(KeyError), Writer(model, {"q": (0,), "resid_post": (0, 99)}):
        pass
    assert not hooks(model.hf), "not even when entering fails halfway"


@pytest.mark.parametrize(
    ("numbers", "index"),
    [
        ([], slice(0, 0)),
        ([4], slice(4, 5)),
        (range(2, 5), slice(2, 5)),
        ([2, 3, 4], slice(2, 5)),
        (range(2, 8, 2), [2, 4, 6]),
        ([3, 5], [3, 5]),
        ([5, 4], [5, 4]),
        ([1, 3, 2, 4], [1, 3, 2, 4]),
    ],
)
def test_as_index_picks_the_same_entries(numbers, index):
    assert as_index(numbers) == index
    line = torch.arange(20)
    assert line[as_index(numbers)].tolist() == list(numbers)


def test_shifted_and_slots():
    assert shifted(range(3, 7), -2) == range(1, 5)
    assert shifted([3, 9], -2) == [1, 7]
    assert slots(range(5, 8), range(4, 10)) == slice(1, 4)
    assert slots([9, 4], range(4, 10)) == [5, 0]
    assert slots([9, 4], [4, 7, 9]) == [2, 0]


@pytest.mark.parametrize("rows", [slice(1, 4), [0, 2, 5], [4, 1, 3]], ids=str)
@pytest.mark.parametrize("heads", [slice(0, 3), [0, 3, 1], [2, 0, 3]], ids=str)
def test_write_at_is_an_assignment_of_a_rectangle(heads, rows):
    target, value = torch.zeros(1, 4, 6, 5), torch.randn(1, 3, 3, 5)
    expected = target.clone()
    for i, head in enumerate(range(4)[heads] if isinstance(heads, slice) else heads):
        for j, row in enumerate(range(6)[rows] if isinstance(rows, slice) else rows):
            expected[0, head, row] = value[0, i, j]
    write_at(target, heads, rows, value)
    assert torch.equal(target, expected)
