"""Other values in a running cache: where they go, that they stay, and that nobody else sees them."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

import kvdrift as kd
from kvdrift.errors import SiteError

PROMPT = [5, 9, 100, 33, 7, 8, 250, 301, 12, 44, 17, 61]  # longer than the windows of 8
FAMILIES = ("llama", "llama-mqa", "mistral", "gemma3", "gpt-oss", "gpt2", "lfm2")


def started(model, path=None, steps=(3, 1)):
    run = (path or kd.CacheOn()).start(model, PROMPT)
    run.step()
    for token in steps:
        run.step(token)
    return run


@pytest.mark.parametrize("family", FAMILIES)
def test_held_positions_are_those_that_the_cache_stores(family, tiny_model):
    model = tiny_model(family)
    run = started(model, steps=())
    for consumed in range(len(PROMPT), len(PROMPT) + 4):
        for layer in model.coverage.attention_layers:
            window = model.architecture.layers[layer].window
            held = run.held(layer)
            assert held.stop == consumed
            assert len(held) == run.cache.layers[layer].keys.shape[2]
            assert held.start == (0 if window is None else consumed - (window - 1))
        run.step(3)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_overwritten_is_what_the_next_kernels_read(family, tiny_model, same_bits):
    model = tiny_model(family)
    run = started(model)
    layer = model.coverage.attention_layers[-1]
    held, n_heads = run.held(layer), run.cache.layers[layer].keys.shape[1]
    head, place = n_heads - 1, [held.start + 4, held.stop - 1, held.start + 2]
    features = run.cache.layers[layer].keys.shape[3]
    value = torch.randn(1, 1, 3, features, generator=torch.Generator().manual_seed(0))
    read = {}
    for name, which in (("plain", run.fork()), ("changed", run)):
        if which is run:
            run.overwrite(layer, "k", [head], place, value)
            run.overwrite(layer, "v", [head], place, 2 * value)
        for step in range(2):
            with kd.tap(model, ["k", "v"], positions="all", layers=layer) as tap:
                which.step(9)
            keys = which.key_positions(layer, tap.values["k"][layer].shape[2])
            read[name, step] = {
                site: {p: tap.values[site][layer][0, :, slot] for slot, p in enumerate(keys)} for site in ("k", "v")
            }
    for step in range(2):
        for site, scale in (("k", 1), ("v", 2)):
            changed, plain = read["changed", step][site], read["plain", step][site]
            assert changed.keys() == plain.keys()
            for p in changed:
                if p in place:
                    assert same_bits(changed[p][head], scale * value[0, 0, place.index(p)])
                    assert same_bits(changed[p][:head], plain[p][:head]), "the other heads are left alone"
                elif p < run.held(layer).stop - 2:
                    assert same_bits(changed[p], plain[p]), "the other positions are left alone"
    assert any(p in read["changed", 1]["k"] for p in place), "it stays as long as the window holds it"


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_nobody_else_sees_it(family, static, tiny_model, same_bits):
    """Forks before and after share memory with a run where they can; none must see the other's writing."""
    model = tiny_model(family)
    path = kd.CacheOn(cache=lambda: StaticCache(config=model.hf.config, max_cache_len=32)) if static else kd.CacheOn()
    run = started(model, path)
    twin, parent = started(model, path), run.fork()
    expected = [twin.step(token).logits for token in (7, 8)]
    child = parent.fork()
    features = run.cache.layers[1].keys.shape[3]
    child.overwrite(1, "k", slice(None), range(0, 5), torch.zeros(1, run.cache.layers[1].keys.shape[1], 5, features))
    late = child.fork()
    for clean in (run, parent):
        assert same_bits(clean.step(7).logits, expected[0])
        assert same_bits(clean.step(8).logits, expected[1])
    changed = child.step(7).logits
    assert not same_bits(changed, expected[0])
    assert same_bits(late.step(7).logits, changed), "a later fork inherits it"


def test_one_entry_by_hand(tiny_model, same_bits):
    """The same as a cache of one's own whose tensor is edited in place."""
    model = tiny_model("mistral")
    run = started(model)
    run.overwrite(2, "v", [1], [9], torch.full((1, 1, 1, 32), 0.5))
    cache = DynamicCache(config=model.hf.config)
    with torch.no_grad():
        tokens, at = [PROMPT, [3], [1]], 0
        for some in tokens:
            places = torch.arange(at, at + len(some))[None]
            model.hf(torch.tensor([some]), position_ids=places, cache=cache, use_cache=True)
            at += len(some)
        # 14 tokens consumed, a window of 8 keeps positions 7 to 13: position 9 sits in slot 2
        cache.layers[2].values[0, 1, 2] = 0.5
        out = model.hf(torch.tensor([[9]]), position_ids=torch.tensor([[14]]), cache=cache, use_cache=True).logits[
            0, -1
        ]
    assert same_bits(run.step(9).logits, out)


def test_writing_back_what_was_there_changes_nothing(tiny_model, same_bits):
    model = tiny_model("gemma3", torch.bfloat16)
    run, twin = started(model), started(model)
    for layer in range(4):
        held = run.held(layer)
        for name, tensor in (("k", run.cache.layers[layer].keys), ("v", run.cache.layers[layer].values)):
            run.overwrite(layer, name, slice(None), held, tensor.clone())
    for token in (7, 8, 9):
        assert same_bits(run.step(token).logits, twin.step(token).logits)


@pytest.mark.parametrize(
    ("family", "path", "words"),
    [
        ("lfm2", None, r"layer 0 .*cannot be overwritten; use write='read'"),
        ("mamba", None, r"layer 0 .*cannot be overwritten"),
        ("deepseek-v3", None, "another shape than the kernel reads; use write='read'"),
        ("mistral", "static", r"StaticSlidingWindowLayer.*cannot be overwritten"),
    ],
)
def test_caches_that_cannot_be_overwritten_say_so(family, path, words, tiny_model):
    model = tiny_model(family)
    if path == "static":
        path = kd.CacheOn(cache=lambda: StaticCache(config=model.hf.config, max_cache_len=32))
    run, twin = started(model, path), started(model, path)
    with pytest.raises(SiteError, match=words):
        run.overwrite(0, "k", slice(None), [3], torch.zeros(1, 8, 1, 48))
    assert torch.equal(run.step(7).logits, twin.step(7).logits), "a refusal harms nothing"


def test_a_layer_that_is_not_there(tiny_model):
    with pytest.raises(SiteError, match=r"layer 4 .no cache of its own. cannot be overwritten"):
        started(tiny_model("llama")).held(4)
