"""Forks are right for any cache: whatever it keeps, and wherever."""

import copy

import numpy as np
import pytest
import torch
from transformers import DynamicCache, StaticCache

import kvdrift as kd
from kvdrift.errors import InputError
from kvdrift.paths.forking import copied, shares_tensors

PROMPT = [5, 9, 100, 33, 7, 8, 250, 301, 12, 44]


class Counts(DynamicCache):
    """Scales keys by a count that a shared copy would spoil; the factor is 1 in a run of its own."""

    def __init__(self):
        super().__init__()
        self.n = [0] * 4

    def update(self, k, v, layer_idx, *args, **kwargs):
        keys, values = super().update(k, v, layer_idx)
        self.n[layer_idx] += k.shape[2]
        return keys * (self.n[layer_idx] / keys.shape[2]), values


class Elsewhere(DynamicCache):
    """Keeps its entries in a dictionary of its own, and writes into preallocated tensors."""

    def __init__(self):
        super().__init__()
        self.kv, self.used = {}, {}

    def update(self, k, v, layer_idx, *args, **kwargs):
        if layer_idx not in self.kv:
            self.kv[layer_idx] = tuple(x.new_zeros(1, x.shape[1], 64, x.shape[3]) for x in (k, v))
        start = self.used.get(layer_idx, 0)
        self.used[layer_idx] = end = start + k.shape[2]
        for store, new in zip(self.kv[layer_idx], (k, v), strict=True):
            store[:, :, start:end] = new
        return tuple(store[:, :, :end] for store in self.kv[layer_idx])

    def get_seq_length(self, layer_idx=0):
        return self.used.get(layer_idx, 0)

    def get_mask_sizes(self, query_length, layer_idx):
        return self.get_seq_length(layer_idx) + query_length, 0


class NoCopy(Elsewhere):
    """Refuses to be copied, as tensors of some quantisers do."""

    def __deepcopy__(self, memo):
        raise NotImplementedError("packed tensors cannot be copied")


class SameCopy(Elsewhere):
    """Says that it is its own copy."""

    def __deepcopy__(self, memo):
        return self


class Patched:
    """Makes caches whose update is a closure over the original, which a copy goes on sharing."""

    def __call__(self):
        cache, seen = DynamicCache(), []
        inner = cache.update

        def update(k, v, layer_idx, *args, **kwargs):
            seen.append(layer_idx)
            return inner(k, v, layer_idx)

        cache.update = update
        return cache


class Dice(Elsewhere):
    """Is neither copied nor made again."""

    def __deepcopy__(self, memo):
        raise TypeError("no")

    def update(self, k, v, layer_idx, *args, **kwargs):
        keys, values = super().update(k, v, layer_idx)
        return keys, values + torch.rand(())


MAKERS = [Counts, Elsewhere, NoCopy, SameCopy, Patched()]


@pytest.mark.parametrize("make", MAKERS, ids=["counts", "elsewhere", "no copy", "its own copy", "closure"])
@pytest.mark.parametrize("steps", [(), (3, 1)])
def test_a_fork_goes_on_as_its_original_and_leaves_it_alone(make, steps, tiny_model, same_bits):
    model = tiny_model()
    run, alone = (kd.CacheOn(cache=make).start(model, PROMPT) for _ in range(2))
    for token in (None, *steps):
        run.step(token), alone.step(token)
    forks = [run.fork(), run.fork().fork()]
    expected = [alone.step(token).logits for token in (7, 8)]
    for fork in (*forks, run):
        assert [same_bits(fork.step(token).logits, x) for token, x in zip((7, 8), expected, strict=True)] == [True] * 2


@pytest.mark.parametrize("make", [Counts, NoCopy])
def test_a_correct_cache_has_the_numbers_of_the_plain_one(make, tiny_model):
    options = {"max_new_tokens": 4, "progress": False, "floor": 1}
    own = kd.compare(tiny_model(), PROMPT, a=kd.CacheOn(cache=make), **options)
    plain = kd.compare(tiny_model(), PROMPT, **options)
    for name, array in plain.arrays.items():
        np.testing.assert_array_equal(own.arrays[name], array, err_msg=name)


def test_forks_under_other_controls_are_made_again_as_they_were(tiny_model, same_bits):
    model, rolled = tiny_model(), (kd.ReRoll(0),)
    runs = []
    for make in (None, NoCopy):
        fork = kd.CacheOn(cache=make).start(model, PROMPT)
        fork.step()
        fork = fork.fork(rolled)
        fork.step(3)
        runs.append(fork.fork(()))
    assert same_bits(runs[0].step(4).logits, runs[1].step(4).logits)


def test_an_update_of_one_object_stays_its_own(tiny_model):
    run = kd.CacheOn(cache=Patched(), lossy="nothing much").start(tiny_model(), PROMPT)  # which is watched
    own = vars(run.cache)["update"]
    run.step()
    assert vars(run.cache)["update"] is own


def test_a_cache_that_cannot_be_forked_is_one_sentence(tiny_model):
    with pytest.raises(InputError, match="Dice cannot be forked: a copy of it fails") as raised:
        kd.compare(tiny_model(), PROMPT, a=kd.CacheOn(cache=Dice), max_new_tokens=3, floor=0, progress=False)
    assert "\n" not in str(raised.value)


def test_tensors_are_shared_only_where_nothing_can_write_into_them(tiny_model, monkeypatch):
    model = tiny_model()
    run = kd.CacheOn().start(model, PROMPT)
    run.step()
    assert shares_tensors(run.cache)
    assert copied(run.cache, model).layers[0].keys is run.cache.layers[0].keys
    layer = type(run.cache.layers[0])
    monkeypatch.setattr(layer, "update", lambda self, *args, **kwargs: None)
    assert not shares_tensors(run.cache)
    assert not shares_tensors(StaticCache(config=model.hf.config, max_cache_len=8))


def test_a_model_that_a_cache_holds_on_to_is_not_copied(tiny_model):
    model, cache = tiny_model(), Counts()
    cache.model, cache.weights = model.hf, [model.hf.lm_head.weight]
    other = copied(cache, model)
    assert other.model is model.hf
    assert other.weights[0] is model.hf.lm_head.weight
    assert other.n is not cache.n
    assert copy.deepcopy(cache).model is not model.hf


def test_values_that_were_written_are_not_lost_on_the_way(tiny_model):
    run = kd.CacheOn(cache=lambda: StaticCache(config=tiny_model().hf.config, max_cache_len=32))
    run = run.start(tiny_model(), PROMPT)
    run.step()
    run.overwrite(0, "v", slice(None), [0], torch.zeros(1, 2, 1, 32))
    assert not run.fork().cache.layers[0].values[:, :, 0].any()
    run = kd.CacheOn(cache=NoCopy).start(tiny_model(), PROMPT)
    run.step()
    run.overwritten = True
    with pytest.raises(InputError, match="was overwritten"):
        run.fork()
