"""Settings: what decides numbers shows in them, what does not is not in them, and what cannot be told says so."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from functools import cache, partial

import pytest
import torch
from transformers import DynamicCache, StaticCache

import kvdrift as kd
from kvdrift.models.tiny import tiny
from kvdrift.runs.settings import differences
from kvdrift.settings import settings_of, untold

FACTOR = 1.0
SAVED = DynamicCache()


class Scaled(DynamicCache):
    """A cache whose values come out scaled."""

    share = 0.5

    def __init__(self, factor=1.0):
        super().__init__()
        self.factor = factor


@dataclass(frozen=True)
class Recipe:
    """Makes caches."""

    factor: float
    parts: tuple[int, ...] = ()
    made: list[int] = field(default_factory=list)

    def __call__(self):
        return Scaled(self.factor)


class Maker:
    """Makes caches, by an attribute that no argument shows."""

    def __init__(self, make):
        self.make = make


class Named:
    """Says itself what decides."""

    def __init__(self, bits):
        self.hidden, self.bits = (lambda: bits), bits

    def settings(self):
        return {"bits": self.bits}

    def __call__(self):
        return Scaled(self.bits)


class Slotted:
    """Without a dictionary."""

    __slots__ = ("size",)

    def __init__(self, size):
        self.size = size


def by_global():
    return Scaled(FACTOR)


def by_other():
    return by_global()


def by_default(factor=2.0):
    return Scaled(factor)


def saved():
    return copy.deepcopy(SAVED)


@cache
def remembered():
    return Scaled(FACTOR)


def closed(factor):
    def make():
        return Scaled(factor)

    return make


def local_class(factor=None):
    class Local(DynamicCache):
        def rank(self):
            return 2 if factor is None else factor

    class Free(DynamicCache):
        def rank(self):
            return 2

    return Local if factor is not None else Free


def told(thing):
    """Settings that survive JSON and hold nothing that cannot be told."""
    found = settings_of(thing)
    assert untold(found) is None
    assert json.loads(json.dumps(found)) == found, "settings must be as JSON gives them back"
    return found


@pytest.mark.parametrize(
    ("one", "other", "where"),
    [
        (partial(Scaled, 1.0), partial(Scaled, 1.5), "args.0: 1.0 there, 1.5 here"),
        (partial(Scaled, factor=1.0), partial(Scaled, factor=1.5), "kwargs.factor"),
        (partial(partial(Scaled), 1.0), partial(partial(Scaled), 2.0), "args"),
        (Recipe(1.0), Recipe(1.5), "factor"),
        (Recipe(1.0, (1, 2)), Recipe(1.0, (1, 3)), "parts.1"),
        (Recipe(1.0).__call__, Recipe(2.0).__call__, "of.factor"),
        (Maker(1), Maker(2), "make: 1 there, 2 here"),
        (Maker(torch.zeros(2)), Maker(torch.zeros(2, dtype=torch.bfloat16)), "make.dtype"),
        (Maker(torch.tensor([1.0])), Maker(torch.tensor([1.0000001])), "make.bits"),
        (Maker({"a": {1, 2}}), Maker({"a": {1, 3}}), "make.a"),
        (Maker(Scaled), Maker(DynamicCache), "make"),
        (Named(4), Named(8), "bits: 4 there, 8 here"),
        (Slotted(1), Slotted(2), "size: 1 there, 2 here"),
        (by_default, by_global, "function: "),
        (partial(StaticCache, max_cache_len=16), partial(StaticCache, max_cache_len=32), "kwargs.max_cache_len"),
        (kd.CacheOn(prefill_chunk=4), kd.CacheOn(prefill_chunk=8), "prefill_chunk: 4 there, 8 here"),
        (kd.CacheOn(left_padding=1), kd.CacheOn(left_padding=2), "left_padding"),
        (kd.CacheOn(lossy="8 bits"), kd.CacheOn(lossy="4 bits"), "lossy"),
        (
            kd.CacheOff(controls=(kd.FixedShape(64),)),
            kd.CacheOff(controls=(kd.FixedShape(64, tile=8),)),
            "controls.0.tile: 16 there, 8 here",
        ),
        (kd.CacheOff(controls=(kd.ReRoll(1),)), kd.CacheOff(controls=(kd.ReRoll(2),)), "controls.0.seed"),
        (kd.TopP(0.9), kd.TopP(0.8), "p: 0.9 there"),
        (kd.TopK(4), kd.TopK(4, 0.5), "temperature"),
    ],
)
def test_what_decides_numbers_differs_by_name(one, other, where):
    assert where in differences(told(one), told(other))
    assert told(one) != told(other)
    assert told(one) == told(copy.copy(one)), "the same thing has the same settings"


@pytest.mark.parametrize("thing", [by_global, by_other, remembered, partial(by_global), Recipe(1.0)])
def test_a_global_value_that_code_reads_is_among_them(thing, monkeypatch):
    before = told(thing)
    monkeypatch.setattr(f"{__name__}.FACTOR", 1.5)
    assert (told(thing) == before) == isinstance(thing, Recipe), "an object holds its own value, a function reads it"


def test_a_class_attribute_and_an_exchanged_method_are_among_them(monkeypatch):
    before = told(partial(Scaled))
    monkeypatch.setattr(Scaled, "share", 0.25)
    assert "share: 0.5 there, 0.25 here" in differences(before, told(partial(Scaled)))
    monkeypatch.undo()
    monkeypatch.setattr(Scaled, "__init__", lambda self: None)
    assert told(partial(Scaled)) != before


def test_a_saved_cache_is_told_by_its_bits(monkeypatch):
    filled = DynamicCache()
    filled.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 0)
    before = told(saved)
    monkeypatch.setattr(f"{__name__}.SAVED", filled)
    after = told(saved)
    assert after != before
    other = copy.deepcopy(filled)
    other.layers[0].keys[0, 0, 0, 0] = 1.0000001
    monkeypatch.setattr(f"{__name__}.SAVED", other)
    assert told(saved) != after


def test_a_model_inside_is_told_by_its_weights():
    one, other = tiny("llama"), tiny("llama", seed=1)
    assert told(partial(Scaled, one)) == told(partial(Scaled, tiny("llama")))
    assert told(partial(Scaled, one)) != told(partial(Scaled, other))
    assert told(partial(StaticCache, one.config)) != told(partial(StaticCache, tiny("mistral").config))
    path = kd.CacheOn(model=one)
    assert told(path)["model"]["weights"] != told(kd.CacheOn(model=other))["model"]["weights"]


@pytest.mark.parametrize(
    ("thing", "words"),
    [
        (lambda: Scaled(1.0), "it is a lambda"),
        (partial(lambda factor: Scaled(factor), 1.0), "partial is a lambda"),
        (closed(1.0), "it is make, a function made inside another one"),
        (Maker(closed(1.0)), "make is make, a function"),
        (Maker([lambda: 1]), "make.0 is a lambda"),
        (local_class(3), "it is Local, a class made inside a function whose variables it reads"),
        (Maker(iter([1])), "make is an object"),
        (Maker([].append), "make is list.append of an object"),
        (kd.CacheOn(cache=lambda: Scaled(1.0)), "cache is a lambda"),
    ],
)
def test_what_cannot_be_told_says_so(thing, words):
    assert untold(settings_of(thing)).startswith(words)


def test_a_local_class_that_reads_nothing_around_it_is_told():
    assert told(local_class()) == told(local_class())


def test_an_object_that_holds_itself_ends():
    thing = Maker(1)
    thing.make = thing
    assert told(thing)["make"] == "itself again"


def test_hooks_and_end_tokens_of_a_model_are_among_its_settings():
    hf = tiny("llama")
    model = kd.load(hf, quiet=True)
    before = told(model)
    handle = hf.model.layers[2].mlp.register_forward_hook(lambda module, args, output: output)
    assert list(told(model)["hooks"]) == ["model.layers.2.mlp"]
    handle.remove()
    assert told(model) == before
    hf.generation_config.eos_token_id = 7
    assert told(kd.load(hf, quiet=True))["ends"] == [7]
