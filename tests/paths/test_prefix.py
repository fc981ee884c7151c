"""A saved prefix: the bits of a prompt in two passes, in every verb; what does not fit is refused in a sentence."""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import pytest
import torch
from transformers import DynamicCache, StaticCache

import kvdrift as kd
from kvdrift.backends.cache_state import length
from kvdrift.errors import FileError, InputError, StaleCacheError
from kvdrift.fingerprint import one_job
from kvdrift.models.tiny import tiny

SYSTEM, QUESTION = list(range(10, 28)), list(range(60, 67))
PROMPT = SYSTEM + QUESTION
QUIET = {"progress": False, "max_new_tokens": 3}
TWO_PASSES = kd.CacheOn(prefill_chunk=[len(SYSTEM)])


@pytest.fixture(scope="module", params=["llama", "mistral", "gemma3", "gpt2", "lfm2", "mamba", "deepseek-v3"])
def model(request, tiny_model):
    return tiny_model(request.param, torch.bfloat16)


@pytest.fixture(scope="module")
def llama(tiny_model):
    return tiny_model("llama", torch.bfloat16)


@pytest.fixture(scope="module")
def saved(llama):
    return kd.Prefix.make(llama, SYSTEM)


def steps(model, path, prompt=PROMPT):
    run = path.start(model, prompt)
    try:
        return torch.stack([run.step(token).logits for token in (None, 5, 9)])
    finally:
        run.close()


def same(one, other):
    assert one.keys() == other.keys()
    return all(np.array_equal(one[name], other[name], equal_nan=True) for name in one)


def test_it_gives_the_bits_of_a_prompt_in_two_passes(model, tmp_path, same_bits):
    prefix, expected = kd.Prefix.make(model, SYSTEM), steps(model, TWO_PASSES)
    before = prefix.settings()
    file = prefix.save(tmp_path / "system.safetensors")
    loaded = kd.Prefix.load(file).verify(model)
    assert (loaded.tokens, loaded.weights, loaded.dtype) == (tuple(SYSTEM), model.fingerprint, "bfloat16")
    for path in (
        kd.CacheOn(prefix=prefix),
        kd.CacheOn(prefix=loaded),
        kd.CacheOn(prefix=(torch.tensor([SYSTEM]), prefix.cache)),
        kd.CacheOn(prefix=kd.Prefix(SYSTEM, None)),
    ):
        assert same_bits(steps(model, path), expected)
        assert same_bits(steps(model, path), expected), "the first run left something in the prefix"
    again = kd.Prefix(prefix.tokens, prefix.cache).settings()
    assert again == before, "the cache of the prefix was touched"


def test_a_fork_of_it_goes_on_alone(model, same_bits):
    run = kd.CacheOn(prefix=kd.Prefix.make(model, SYSTEM)).start(model, PROMPT)
    run.step()
    fork = run.fork()
    fork.step(99)
    assert same_bits(run.step(5).logits, steps(model, TWO_PASSES)[1])


@pytest.mark.parametrize("make", [DynamicCache, partial(StaticCache, max_cache_len=40)], ids=["dynamic", "static"])
def test_a_factory_whose_cache_holds_tokens_is_a_prefix_of_every_prompt(make, llama, same_bits):
    filled = make(config=llama.hf.config)
    with llama.evaluating(), torch.no_grad():
        llama.backend.forward(torch.tensor([SYSTEM]), 0, filled)
    path = kd.CacheOn(cache=lambda: copy.deepcopy(filled))
    expected = steps(llama, kd.CacheOn(cache=partial(make, config=llama.hf.config), prefill_chunk=[len(SYSTEM)]))
    assert same_bits(steps(llama, path), expected)
    assert same_bits(steps(llama, path), expected)
    wide = (kd.WideSums(),)
    anew = path.start(llama, PROMPT, wide)
    assert same_bits(anew.step().logits, TWO_PASSES.start(llama, PROMPT, wide).step().logits)


@pytest.mark.parametrize("share", [lambda cache: cache, copy.copy], ids=["the same", "one that shares its layers"])
def test_one_cache_again_and_again_is_stale(share, llama):
    cache = kd.Prefix.make(llama, SYSTEM).cache
    path = kd.CacheOn(cache=lambda: share(cache))
    steps(llama, path)
    with pytest.raises(StaleCacheError, match="holds 27 tokens of an earlier run: cache= must make a new one"):
        path.start(llama, [*PROMPT, *QUESTION])


def test_a_cache_that_grows_from_start_to_start_is_stale(llama):
    caches = [kd.Prefix.make(llama, SYSTEM[:n]).cache for n in (4, 6)]
    path = kd.CacheOn(cache=lambda: caches.pop(0))
    with one_job():
        steps(llama, path)
        with pytest.raises(StaleCacheError, match="holds 6 tokens of an earlier run"):
            steps(llama, path)
    caches += [kd.Prefix.make(llama, SYSTEM[:8]).cache]
    steps(llama, path)  # another job: the saved one may be another by now


def test_every_verb_takes_it(llama, saved):
    on = kd.CacheOn(prefix=saved)
    for options in ({"control": "float32"}, {"floor": 2, "local": True}):
        found, expected = (kd.compare(llama, PROMPT, a=path, **options, **QUIET) for path in (on, TWO_PASSES))
        assert same(found.arrays, expected.arrays)
        assert found.control is None or same(found.control.arrays, expected.control.arrays)
    traces = [kd.record(llama, PROMPT, path=path, sites=["k", "resid_post"], **QUIET) for path in (on, TWO_PASSES)]
    assert all(torch.equal(traces[0][site], traces[1][site]) for site in ("k", "resid_post"))
    sweeps = [
        kd.sweep(llama, PROMPT, sites="v", layers=[1], recipient=path, checks="all", **QUIET)
        for path in (on, TWO_PASSES)
    ]
    assert same(sweeps[0].arrays, sweeps[1].arrays)
    donors = [
        kd.patch(llama, PROMPT, kd.Patch("kv", 1), recipient=kd.CacheOff(), donor=path, **QUIET)
        for path in (on, TWO_PASSES)
    ]
    assert same(donors[0].arrays, donors[1].arrays)
    crossed = [kd.factorial(llama, PROMPT, a=path, **QUIET) for path in (on, TWO_PASSES)]
    assert same(crossed[0].arrays, crossed[1].arrays)
    texts = [kd.evaluate(llama, [PROMPT, [*SYSTEM, 70]], a=path, null=1, **QUIET).records for path in (on, TWO_PASSES)]
    assert texts[0] == texts[1]


def test_a_recording_says_that_its_residual_rows_were_not_computed(llama, saved):
    trace = kd.record(llama, PROMPT, path=kd.CacheOn(prefix=saved), sites=["k", "resid_post"], positions="all", **QUIET)
    assert trace.valid("k")[0, 0, 0].tolist()[: len(PROMPT)] == [True] * len(PROMPT)
    computed = trace.valid("resid_post")[0, 0].tolist()[: len(PROMPT)]
    assert computed == [False] * len(SYSTEM) + [True] * len(QUESTION)


def test_what_does_not_fit_is_refused_in_a_sentence(llama, saved, tiny_model):
    on = kd.CacheOn(prefix=saved)
    for prompt, words in [
        (SYSTEM, "holds 18 tokens and the prompt has 18: at least one must be left"),
        (SYSTEM[:5], "holds 18 tokens and the prompt has 5"),
        ([*SYSTEM[:7], 99, *SYSTEM[8:], 3], "does not begin with the prefix: token 7 is 99, not 17"),
    ]:
        with pytest.raises(InputError, match=words):
            kd.compare(llama, prompt, a=on, **QUIET)
    with pytest.raises(InputError, match=r"made by another model .*make it anew"):
        kd.compare(tiny_model("llama", torch.bfloat16, seed=1), PROMPT, a=on, **QUIET)
    with pytest.raises(InputError, match="made by another model"):
        kd.compare(tiny_model("llama"), PROMPT, a=on, **QUIET)
    with pytest.raises(InputError, match="The prefix is in bfloat16, tiny-llama in float32"):
        kd.compare(tiny_model("llama"), PROMPT, a=kd.CacheOn(prefix=saved.cache), **QUIET)
    with pytest.raises(InputError, match="17 tokens and a cache that holds 18"):
        kd.Prefix(SYSTEM[1:], saved.cache)
    with pytest.raises(InputError, match="left_padding= and prefix= exclude each other"):
        kd.CacheOn(prefix=saved, left_padding=2)
    for nonsense, words in [
        ("system.txt", "prefix=str: give"), (kd.CacheOn(), "prefix=CacheOn: give"), (DynamicCache(), "holds no token"),
    ]:  # fmt: skip
        with pytest.raises(InputError, match=words):
            kd.CacheOn(prefix=nonsense)
    with pytest.raises(InputError, match="give prefix= with an empty one"):
        kd.CacheOn(prefix=saved, cache=lambda: copy.deepcopy(saved.cache)).start(llama, PROMPT)


def test_a_recurrent_state_without_its_length_is_refused(tiny_model):
    mamba = tiny_model("mamba")
    filled = kd.Prefix.make(mamba, SYSTEM).cache
    with pytest.raises(InputError, match="holds the state of tokens, and it does not tell of how many"):
        kd.CacheOn(cache=lambda: copy.deepcopy(filled)).start(mamba, PROMPT)


def test_verify_finds_one_bit(llama, tmp_path):
    prefix = kd.Prefix.make(llama, SYSTEM)
    assert prefix.verify(llama) is prefix
    prefix.cache.layers[2].values[0, 1, 3, 5] += 0.0078125
    with pytest.raises(InputError, match="layer 2 differs in its values"):
        prefix.verify(llama)


def test_a_file_that_is_none_or_was_changed_is_refused(llama, saved, tmp_path):
    file = saved.save(tmp_path / "p.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["p.safetensors"]
    content = file.read_bytes()
    file.write_bytes(content[:-2] + bytes([content[-2] ^ 1, content[-1]]))
    with pytest.raises(FileError, match="was changed after it was saved"):
        kd.Prefix.load(file)
    static = StaticCache(config=llama.hf.config, max_cache_len=32)
    llama.backend.forward(torch.tensor([SYSTEM]), 0, static)
    with pytest.raises(InputError, match="a StaticCache cannot be saved"):
        kd.Prefix(SYSTEM, static).save(tmp_path / "static")


@pytest.mark.parametrize(
    ("given", "passes"),
    [(4, [4, 4, 2]), ([3, 2], [3, 2, 5]), ([10], [10]), ([4, 6], [4, 6]), ((2, 30), [2, 8]), ([7, 7, 7], [7, 3])],
)
def test_prefill_chunk_takes_a_list_of_lengths(given, passes, llama, monkeypatch):
    run = kd.CacheOn(prefill_chunk=given).start(llama, list(range(10)))
    assert [len(chunk) for chunk in run._chunks()] == passes
    assert kd.CacheOn(prefill_chunk=given).start(llama, list(range(10))).step().position == 9


@pytest.mark.parametrize("given", [0, [], [0], [3, -1], [2.5], "4", [True], 2.0])
def test_a_list_of_no_lengths_is_refused(given):
    with pytest.raises(InputError, match="give a length, or a list of the lengths of the first passes"):
        kd.CacheOn(prefill_chunk=given)


def test_a_store_knows_the_prefix(llama, saved, tmp_path):
    options = {"a": kd.CacheOn(prefix=saved), "floor": 0, "local": False, **QUIET}
    kd.compare(llama, PROMPT, store=tmp_path, **options)
    kd.compare(llama, PROMPT, store=tmp_path, **options | {"a": kd.CacheOn(prefix=kd.Prefix.make(llama, SYSTEM))})
    shorter = kd.CacheOn(prefix=kd.Prefix.make(llama, SYSTEM[:4]))
    with pytest.raises(FileError, match=r"a\.path\.prefix\.tokens: 18 entries there, 4 here"):
        kd.compare(llama, PROMPT, store=tmp_path, **options | {"a": shorter})


def test_the_length_of_a_cache():
    assert length(DynamicCache()) == 0
    assert length(kd.Prefix.make(tiny("mistral"), SYSTEM).cache) == 18, "beyond the window, too"


def test_a_recording_names_what_its_path_was_made_with(llama, saved):
    path = kd.CacheOn(prefix=saved, prefill_chunk=4)
    trace = kd.record(llama, PROMPT, path=path, sites=["k"], **QUIET)
    settings = trace.provenance["settings"]["path"]["path"]
    assert (settings["prefill_chunk"], settings["prefix"]["tokens"]) == (4, SYSTEM)
