"""What a cache says of itself, and what is refused for it, in every verb."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

import kvdrift as kd
from kvdrift.backends.cache_state import first_positions, length, room, taken_in
from kvdrift.errors import InputError

PROMPT = list(range(20))
SHORT = {"max_new_tokens": 8, "progress": False}


def static(model, n):
    return kd.CacheOn(cache=lambda: StaticCache(config=model.hf.config, max_cache_len=n))


VERBS = {
    "record": lambda m, a: kd.record(m, PROMPT, path=a, **SHORT),
    "compare": lambda m, a: kd.compare(m, PROMPT, a=a, **SHORT),
    "patch": lambda m, a: kd.patch(m, PROMPT, kd.Patch("v"), recipient=a, **SHORT),
    "sweep": lambda m, a: kd.sweep(m, PROMPT, sites="v", recipient=a, **SHORT),
    "factorial": lambda m, a: kd.factorial(m, PROMPT, a=a, **SHORT),
    "evaluate": lambda m, a: kd.evaluate(m, [PROMPT], a=a, **SHORT),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_cache_without_room_is_refused_before_anything_runs(verb, tiny_model):
    model = tiny_model()
    with pytest.raises(InputError, match="holds 24 entries, and the run needs 27") as raised:
        VERBS[verb](model, static(model, 24))
    assert "\n" not in str(raised.value)


def test_a_run_of_ones_own_is_stopped_at_the_step_that_does_not_fit(tiny_model):
    model = tiny_model()
    run = static(model, 21).start(model, PROMPT)
    run.step()
    run.step(3)
    with pytest.raises(InputError, match="holds 21 entries, and the run needs 22"):
        run.step(4)


def test_room_is_that_of_layers_without_a_window(tiny_model):
    model = tiny_model("gemma3")
    assert room(StaticCache(config=model.hf.config, max_cache_len=24)) == 24
    trace = kd.record(model, PROMPT, path=static(model, 27), **SHORT)
    assert trace["k"].shape[0] == 8
    windows = StaticCache(config=tiny_model("mistral").hf.config, max_cache_len=24)
    assert room(windows) is None


def test_padding_takes_room_and_what_does_not_fit_is_not_examined(tiny_model):
    model = tiny_model()
    with pytest.raises(InputError, match="needs 30"):
        kd.record(model, PROMPT, path=kd.CacheOn(cache=static(model, 27).cache, left_padding=3), **SHORT)
    verdict = kd.diagnose(model, a=static(model, 48), progress=False)
    assert verdict.kind == "rounding"
    assert any("long prompt" in said and "holds 48 entries" in said for said in verdict.not_examined)


@pytest.mark.parametrize("verb", [*VERBS, "diagnose"])
def test_a_cache_that_offloads_to_where_the_model_is_already(verb, tiny_model):
    path = kd.CacheOn(cache=lambda: DynamicCache(offloading=True))
    with pytest.raises(InputError, match="offloads its entries to the CPU, where the model is") as raised:
        {**VERBS, "diagnose": lambda m, a: kd.diagnose(m, PROMPT, a=a, **SHORT)}[verb](tiny_model(), path)
    assert "\n" not in str(raised.value)


def test_a_factory_that_raises_is_one_sentence(tiny_model):
    with pytest.raises(InputError, match=r"cache= makes no cache \(TypeError: .*missing"):
        kd.record(tiny_model(), PROMPT, path=kd.CacheOn(cache=StaticCache), **SHORT)


def test_what_is_taken_in_and_where_keys_begin(tiny_model):
    model = tiny_model("mistral")
    cache = model.backend.new_cache()
    assert (length(cache), first_positions(cache, 4, 1)) == (0, {})
    model.hf(torch.tensor([PROMPT]), cache=cache)
    assert [taken_in(cache, layer) for layer in range(5)] == [20] * 4 + [0]
    assert first_positions(cache, 4, 1) == dict.fromkeys(range(4), 20 + 1 - 8)
    recurrent = tiny_model("mamba").backend.new_cache()
    assert (length(recurrent), first_positions(recurrent, 4, 1)) == (0, {})
