"""Feeding a pass another path's inputs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvdrift as kd
from kvdrift.tracing.borrow import Borrow, shared_positions
from kvdrift.tracing.tap import Tap

IDS = [5, 9, 100, 33, 7, 8, 250, 301, 12, 44, 17, 61]

ranges = st.builds(lambda start, n: range(start, start + n), st.integers(0, 12), st.integers(0, 12))
listed = st.lists(st.integers(0, 20), unique=True, max_size=12)
before = st.integers(0, 24)


def pick(positions, index):
    return list(positions[index]) if isinstance(index, slice) else [positions[slot] for slot in index]


def check(a, b, limit):
    in_a, in_b = shared_positions(a, b, limit)
    assert pick(a, in_a) == pick(b, in_b)
    assert pick(a, in_a) == [p for p in a if p in set(b) and p < limit]
    return in_a, in_b


@given(ranges, ranges, before)
def test_two_ranges_share_a_slice(a, b, limit):
    in_a, in_b = check(a, b, limit)
    assert isinstance(in_a, slice)
    assert isinstance(in_b, slice)


@given(st.one_of(ranges, listed), st.one_of(ranges, listed), before)
def test_any_order_of_positions(a, b, limit):
    check(a, b, limit)


@given(st.one_of(ranges, listed), st.one_of(ranges, listed), before)
def test_swapping_the_paths_swaps_the_answer(a, b, limit):
    in_a, in_b = shared_positions(a, b, limit)
    swapped_b, swapped_a = shared_positions(b, a, limit)
    assert sorted(pick(a, in_a)) == sorted(pick(a, swapped_a))
    assert sorted(pick(b, in_b)) == sorted(pick(b, swapped_b))


def advance(model, path, tokens, sites):
    """A run one step before the end of ``tokens``, and the values of the last step."""
    run = path.start(model, tokens[:-1])
    run.step()
    fork = run.fork()
    with Tap(model, dict.fromkeys(sites), kv_where="all") as tap:
        step = run.step(tokens[-1])
    return fork, run, step, tap.take()[0][-1]


SITES = ("resid_pre", "attn_out", "mlp_out", "resid_post", "k", "v")


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt2", "mixtral"])
@pytest.mark.parametrize("path", [kd.CacheOn(), kd.CacheOff()], ids=["on", "off"])
def test_borrowing_from_itself_changes_no_bit(family, path, tiny_model):
    model = tiny_model(family)
    fork, run, step, values = advance(model, path, IDS, SITES)
    with (
        Borrow(model, values, run.key_positions, fork.key_positions, step.position),
        Tap(model, dict.fromkeys(SITES), kv_where="all") as tap,
    ):
        borrowed = fork.step(IDS[-1])
    assert torch.equal(borrowed.logits, step.logits)
    for site in SITES:
        for layer, value in values[site].items():
            assert torch.equal(tap.values[site][layer], value), (site, layer)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_what_is_upstream_in_the_recipient_does_not_matter(family, tiny_model):
    """Garbage in the recipient's cache (every layer, keys and values) is replaced before it is read."""
    model = tiny_model(family)
    _, donor, step, values = advance(model, kd.CacheOff(), IDS, SITES)

    def work(spoil):
        fork, *_ = advance(model, kd.CacheOn(), IDS, SITES)
        if spoil:
            for layer in fork.cache.layers:
                layer.keys, layer.values = torch.randn_like(layer.keys), torch.randn_like(layer.values)
        with (
            Borrow(model, values, donor.key_positions, fork.key_positions, step.position),
            Tap(model, dict.fromkeys(SITES), kv_where="all") as tap,
        ):
            fork.step(IDS[-1])
        return tap.take()[0][-1]

    clean, spoilt = work(False), work(True)
    for site in SITES:
        for layer, value in clean[site].items():
            assert torch.equal(spoilt[site][layer], value), (site, layer)


def test_one_layer_by_hand(tiny_model):
    """Local work of a layer: a decoder layer called alone with the other path's inputs."""
    model = tiny_model("llama")
    fork, *_ = advance(model, kd.CacheOn(), IDS, SITES)
    _, donor, step, values = advance(model, kd.CacheOff(), IDS, SITES)
    with (
        Borrow(model, values, donor.key_positions, fork.key_positions, step.position),
        Tap(model, dict.fromkeys(SITES)) as tap,
    ):
        fork.step(IDS[-1])
    from transformers import DynamicCache

    past = len(IDS) - 1
    rotary = model.hf.model.rotary_emb(torch.zeros(1), torch.tensor([[past]]))
    for layer, block in enumerate(model.hf.model.layers):
        cache = DynamicCache(config=model.hf.config)
        cache.update(values["k"][layer][:, :, :past], values["v"][layer][:, :, :past], layer)
        out = block(
            values["resid_pre"][layer][:, None],
            attention_mask=None,
            position_ids=torch.tensor([[past]]),
            cache=cache,
            use_cache=True,
            position_embeddings=rotary,
        )
        out = out[0] if isinstance(out, tuple) else out
        assert torch.equal(tap.values["resid_post"][layer], out[:, -1]), layer


def test_everything_is_taken_away_again(tiny_model, hooks):
    model = tiny_model("llama")
    fork, run, step, values = advance(model, kd.CacheOn(), IDS, SITES)
    borrow = Borrow(model, values, run.key_positions, fork.key_positions, step.position)
    with pytest.raises(RuntimeError, match="stop"), borrow:
        raise RuntimeError("stop")
    assert not hooks(model.hf)
