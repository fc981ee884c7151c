"""Cache-ON: prefill, then one token at a time."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

import kvdrift as kd
from kvdrift.errors import InputError
from kvdrift.models.tiny import FAMILIES

PROMPT = [5, 9, 100, 33, 7, 8, 250, 301, 12, 44, 17, 61]  # longer than the windows of 8
WINDOWED = ("mistral", "gemma2", "gemma3", "gpt-oss")


def own_loop(model, tokens, n_prompt, cache, chunk=None):
    """A decode loop written without kvdrift: logits after the prompt and after each later token."""
    logits, place = [], 0
    sizes = [chunk or n_prompt] * 99
    while place < len(tokens):
        size = min(sizes.pop(0), n_prompt - place) if place < n_prompt else 1
        out = model.hf(
            torch.tensor([tokens[place : place + size]]),
            position_ids=torch.arange(place, place + size)[None],
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        place += size
        if place >= n_prompt:
            logits.append(out.logits[0, -1])
    return logits


@pytest.mark.parametrize("chunk", [None, 1, 3, 5, 12, 50])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt-oss"])
@torch.no_grad()
def test_logits_equal_ones_own_loop(family, chunk, tiny_model):
    model = tiny_model(family)
    run, tokens = kd.CacheOn(prefill_chunk=chunk).start(model, PROMPT), list(PROMPT)
    logits = []
    for number in range(5):
        step = run.step(tokens[-1] if number else None)
        assert step.position == len(tokens) - 1
        logits.append(step.logits)
        tokens.append(int(step.logits.argmax()))
    expected = own_loop(model, tokens[:-1], len(PROMPT), DynamicCache(config=model.hf.config), chunk)
    assert all(torch.equal(x, y) for x, y in zip(logits, expected, strict=True))


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gemma3", "gpt-oss", "qwen3"])
def test_recorded_keys_are_the_caches_at_their_absolute_positions(family, chunk, tiny_model):
    """Before each step the cache holds the past; the kernel reads it and the new entry."""
    model = tiny_model(family)
    trace = kd.record(
        model,
        PROMPT,
        path=kd.CacheOn(prefill_chunk=chunk),
        sites=["k", "v"],
        positions="all",
        max_new_tokens=4,
        tokens=[3, 1, 4, 1],
        progress=False,
    )
    run = kd.CacheOn(prefill_chunk=chunk).start(model, PROMPT)
    for step, token in enumerate([None, 3, 1, 4]):
        run.step(token)
        n = len(PROMPT) + step
        for info in model.architecture.layers:
            layer, window = run.cache.layers[info.index], info.window
            queries = 1 if step else (chunk or len(PROMPT))
            first = 0 if window is None else max(0, n - queries - (window - 1))
            for site, stored in (("k", layer.keys), ("v", layer.values)):
                kept = stored.shape[2]
                assert kept == (n if window is None else min(n, window - 1))
                recorded = trace[site][step, info.index]
                assert torch.equal(recorded[:, n - kept : n], stored[0]), (site, step, info.index)
                valid = trace.valid(site)[step, info.index]
                assert valid[:, first:n].all(), (step, info.index, first)
                assert not valid[:, :first].any()
                assert not valid[:, n:].any()


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("family", WINDOWED)
def test_positions_of_a_window_are_the_same_keys_as_cache_off(family, chunk, tiny_model):
    """An off-by-one in a position would be as large as the keys themselves."""
    model = tiny_model(family)
    both = [
        kd.record(model, PROMPT, path=path, sites="k", positions="all", tokens=[3, 1, 4, 1, 5], progress=False)
        for path in (kd.CacheOn(prefill_chunk=chunk), kd.CacheOff())
    ]
    shared = both[0].valid("k") & both[1].valid("k")
    assert shared.any(-1).all()
    assert (both[1].valid("k") | ~both[0].valid("k")).all()
    x, y = (trace["k"][shared] for trace in both)
    assert ((x - y).norm(dim=-1) < 1e-4 * y.norm(dim=-1)).all()
    other = torch.roll(both[1]["k"], 1, dims=3)[shared]
    assert ((x - other).norm(dim=-1) > 1e-2 * y.norm(dim=-1)).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fork_is_independent_and_exact(family, tiny_model):
    model = tiny_model(family)
    run = kd.CacheOn().start(model, PROMPT)
    run.step()
    run.step(3)
    fork, late = run.fork(), run.fork()
    for token in (7, 8, 9):
        fork.step(token)
    mine = run.step(1).logits
    assert torch.equal(late.step(1).logits, mine)
    straight = kd.CacheOn().start(model, PROMPT)
    straight.step()
    straight.step(3)
    assert torch.equal(straight.step(1).logits, mine)


def test_a_fork_before_the_first_step(tiny_model):
    run = kd.CacheOn(prefill_chunk=5).start(tiny_model("mistral"), PROMPT)
    fork = run.fork()
    assert torch.equal(fork.step().logits, run.step().logits)
    assert torch.equal(fork.step(2).logits, run.step(2).logits)


def test_a_cache_of_ones_own(tiny_model):
    model = tiny_model("mistral")
    plain = kd.CacheOn(cache=DynamicCache).start(model, PROMPT)
    plain.step()
    assert plain.cache.layers[0].keys.shape[2] == len(PROMPT), "a plain DynamicCache keeps everything"
    assert plain.key_positions(0, len(PROMPT)) == range(len(PROMPT))
    static = kd.CacheOn(cache=lambda: StaticCache(config=model.hf.config, max_cache_len=32)).start(model, PROMPT)
    reference = kd.CacheOn().start(model, PROMPT)
    assert torch.allclose(static.step().logits, reference.step().logits, atol=1e-4)
    fork = static.fork()
    fork.step(9)
    assert torch.allclose(static.step(3).logits, reference.step(3).logits, atol=1e-4)


def test_skip_is_a_step(tiny_model):
    model = tiny_model("llama")
    one, two = kd.CacheOn().start(model, PROMPT), kd.CacheOn().start(model, PROMPT)
    one.step()
    two.step()
    one.step(3)
    two.skip(3)
    assert torch.equal(one.step(4).logits, two.step(4).logits)


@pytest.mark.parametrize("size", [0, -1])
def test_a_chunk_holds_a_token(size):
    with pytest.raises(InputError, match="at least one token"):
        kd.CacheOn(prefill_chunk=size)


def test_a_model_of_its_own(tiny_model):
    mine, other = tiny_model("llama"), tiny_model("llama", torch.bfloat16)
    trace = kd.record(mine, PROMPT, path=kd.CacheOn(model=other), max_new_tokens=2, sites="logits", progress=False)
    assert trace.path.dtype == "bfloat16"
    assert trace["logits"].dtype == torch.bfloat16
