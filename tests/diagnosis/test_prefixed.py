"""A saved prefix under diagnosis: right ones are rounding however they were made, wrong ones a bug with its layer."""

from __future__ import annotations

import copy

import pytest
import torch
from faults.prefixes import TOKENS, kept
from transformers import DynamicCache

import kvdrift as kd
from kvdrift.backends.hf import HFBackend
from kvdrift.diagnosis.cases import Case
from kvdrift.diagnosis.prefixed import begun_with, stale_prefix
from kvdrift.errors import InputError
from kvdrift.models.tiny import tiny

QUESTION = list(range(60, 67))
PROMPT = [*TOKENS, *QUESTION]


def diagnose(model, prompt=PROMPT, **options):
    return kd.diagnose(model, prompt, **{"progress": False, "max_new_tokens": 4} | options)


def one_by_one(hf):
    cache = DynamicCache(config=hf.config)
    for place, token in enumerate(TOKENS):
        HFBackend(hf).forward(torch.tensor([[token]]), place, cache)
    return cache


def in_float32(hf):
    cache = kept(copy.deepcopy(hf).float(), TOKENS)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.to(hf.dtype), layer.values.to(hf.dtype)
    return cache


def last_layer_of_another_prompt(hf):
    cache = kept(hf, TOKENS)
    cache.layers[-1] = kept(hf, TOKENS[::-1]).layers[-1]
    return cache


def one_other_token(hf):
    return kept(hf, [*TOKENS[:-3], 99, *TOKENS[-2:]])


RIGHT = [lambda hf: kept(hf, TOKENS), one_by_one, in_float32]
WRONG = {
    "of another prompt": (lambda hf: kept(hf, [token + 100 for token in TOKENS]), 0),
    "shifted by one": (lambda hf: kept(hf, TOKENS, start=1), 0),
    "one token": (one_other_token, 0),
    "the last layer": (last_layer_of_another_prompt, -1),
    "of another model": (lambda hf: kept(tiny("llama", seed=1, dtype=hf.dtype, num_hidden_layers=3), TOKENS), 0),
}


@pytest.fixture(scope="module", params=["llama", "mistral", "mixtral"])
def hf(request):
    return tiny(request.param, dtype=torch.bfloat16, num_hidden_layers=3)


@torch.no_grad()
def found(hf, cache):
    path = kd.CacheOn(prefix=(TOKENS, cache))
    return stale_prefix(kd.load(hf, quiet=True), Case("prompt", tuple(PROMPT), None, 1, path), path)


@pytest.mark.parametrize("make", RIGHT)
def test_however_a_right_prefix_was_made_it_is_told_as_right(make, hf):
    with torch.no_grad():
        assert found(hf, make(hf)) is None


@pytest.mark.parametrize(("make", "layer"), WRONG.values(), ids=WRONG)
def test_a_wrong_prefix_is_found_in_its_layer(make, layer, hf):
    with torch.no_grad():
        finding = found(hf, make(hf))
    assert finding.check == "prefix"
    assert finding.where.site == "past k"
    assert finding.where.layer == range(hf.config.num_hidden_layers)[layer]


def test_a_saved_prefix_by_a_factory_is_rounding():
    hf = tiny("llama", dtype=torch.bfloat16, num_hidden_layers=2)
    with torch.no_grad():
        cache = one_by_one(hf)
    verdict = diagnose(hf, a=kd.CacheOn(cache=lambda: copy.deepcopy(cache)))
    assert verdict.kind == "rounding"
    assert any("saved prefix is what the model gives" in reason for reason in verdict.reasons)
    assert verdict.not_examined == ("left padding: a saved prefix begins at position 0.",)


def test_a_stale_one_by_a_factory_is_a_bug_with_advice():
    hf = tiny("llama", dtype=torch.bfloat16, num_hidden_layers=1)
    with torch.no_grad():
        cache = kept(hf, TOKENS, start=1)
    verdict = diagnose(hf, a=kd.CacheOn(cache=lambda: copy.deepcopy(cache)))
    assert (verdict.kind, verdict.signature, verdict.wrong) == ("bug", ("in a saved prefix",), "a")
    assert verdict.suggestion.startswith("Make the prefix anew from these very tokens, at positions 0, 1, …")
    lossy = diagnose(hf, a=kd.CacheOn(cache=lambda: copy.deepcopy(cache), lossy="keys rotated once"))
    assert lossy.kind == "lossy"


def test_without_prompts_its_own_tokens_begin_every_case():
    hf = tiny("gemma3", num_hidden_layers=1)
    verdict = kd.diagnose(hf, a=kd.CacheOn(prefix=kd.Prefix.make(hf, list(TOKENS))), progress=False)
    assert verdict.kind == "rounding"
    with torch.no_grad():
        cache = kept(hf, TOKENS)
    with pytest.raises(InputError, match="holds 18 tokens already, and which they are is not known: give prompts"):
        kd.diagnose(hf, a=kd.CacheOn(cache=lambda: copy.deepcopy(cache)), progress=False)


def test_cases_keep_their_lengths():
    cases = [Case(str(n), tuple(range(n)), (1,), 1, kd.CacheOn()) for n in (2, 3, 5)]
    given = Case("prompt", (7, 8, 9, 1), None, 1, kd.CacheOn())
    assert [case.prompt for case in begun_with([*cases, given], (7, 8, 9))] == [
        (7, 8, 9, 0, 1), (7, 8, 9, 0, 1, 2), (7, 8, 9, 3, 4), (7, 8, 9, 1),
    ]  # fmt: skip
    assert begun_with(cases, ()) == cases
