"""generate() runs with the path's own cache, chunks, padding and arguments, and what it alone gets wrong is found."""

import copy
from contextlib import contextmanager

import pytest
import torch
from transformers import DynamicCache, GenerationMixin, StaticCache
from transformers.cache_utils import DynamicLayer, StaticLayer

import kvdrift as kd
from kvdrift.controls.fixed_shape import not_covered
from kvdrift.diagnosis.cases import Case
from kvdrift.diagnosis.evidence import Evidence
from kvdrift.diagnosis.generated import check_generate, examine
from kvdrift.errors import InputError

PROMPT = [5, 9, 100, 33, 7, 8] * 2
LOOKUP = {"prompt_lookup_num_tokens": 4}


def small(family="llama", **overrides):
    return kd.models.tiny(family, **{"num_hidden_layers": 1} | overrides)


def examined(model, generate=True, a=None, lossy=None):
    """What is found about generate(), and nothing else."""
    model, a = kd.load(model, quiet=True), kd.CacheOn() if a is None else a
    evidence = Evidence(not_covered=not_covered(model))
    examine(evidence, model, a, Case("prompt", tuple(PROMPT), None, 3, a), check_generate(generate, a), lossy)
    return evidence


def is_right(evidence):
    followed = any("was followed over 8 tokens, with and without a cache" in note for note in evidence.notes)
    return followed and not (evidence.findings or evidence.unsettled or evidence.not_examined)


@contextmanager
def replaced(owner, name, make):
    own = vars(owner).get(name)
    setattr(owner, name, make(getattr(owner, name)))
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


@contextmanager
def prepared(model, change):
    """While it is open, ``change`` is shown the inputs that generate() prepares for each pass."""

    def make(prepare):
        def changed(self, *args, **kwargs):
            inputs = prepare(self, *args, **kwargs)
            change(inputs)
            return inputs

        return changed

    with replaced(type(model), "prepare_inputs_for_generation", make):
        yield


def moved(when):
    def change(inputs):
        if when(inputs["input_ids"].shape[1], inputs):
            inputs["position_ids"] = inputs["position_ids"].clone()
            inputs["position_ids"][..., -1] += 1

    return change


@contextmanager
def watched():
    """The keyword arguments of each call of generate(), and the length of each of its passes."""
    calls, passes = [], []

    def make(generate):
        def noted(self, *args, **kwargs):
            if not args:  # an assistant
                return generate(self, **kwargs)
            calls.append(kwargs | {"n": args[0].shape[1]})
            hook = lambda _m, _a, kw: passes.append(kw["input_ids"].shape[1])  # noqa: E731
            handle = self.register_forward_pre_hook(hook, with_kwargs=True)
            try:
                return generate(self, *args, **kwargs)
            finally:
                handle.remove()

        return noted

    with replaced(GenerationMixin, "generate", make):
        yield calls, passes


@pytest.mark.parametrize(
    ("family", "arguments"),
    [
        ("llama", {}),
        ("gemma3", LOOKUP),
        ("bloom", LOOKUP),  # promised nothing in shape-invariant arithmetic: float64 decides
        ("mistral", {"cache_implementation": "static"}),
        ("qwen2", {"num_beams": 3}),
        ("gpt2", {"repetition_penalty": 1.3}),
    ],
)
def test_a_right_model_is_right_in_generate(family, arguments):
    evidence = examined(small(family), arguments)
    assert is_right(evidence), evidence


def test_an_assistant_drafts_whole_passes():
    model = small("llama", dtype=torch.bfloat16)
    with watched() as (_, passes):
        evidence = examined(model, {"assistant_model": small("qwen2", seed=1, dtype=torch.bfloat16)})
    assert is_right(evidence), evidence
    assert any(1 < n < len(PROMPT) for n in passes)


@pytest.mark.parametrize(("chunk", "padding"), [(4, 3), (5, 0), (None, 2)])
def test_chunks_padding_and_cache_of_the_path_are_passed_on(chunk, padding):
    made = []

    def cache():
        made.append(DynamicCache())
        return made[-1]

    path = kd.CacheOn(prefill_chunk=chunk, left_padding=padding, cache=cache)
    with watched() as (calls, passes):
        evidence = examined(small("gpt2"), a=path)
    assert is_right(evidence), evidence
    cached = [call for call in calls if call["use_cache"]]
    assert cached
    assert all(any(call["cache"] is one for one in made) for call in cached)
    assert all(call.get("prefill_chunk_size") == chunk for call in cached)
    assert all(call["n"] == len(PROMPT) + padding for call in calls)
    assert all(int((call["attention_mask"] == 0).sum()) == padding for call in calls)
    assert passes[0] == (chunk or len(PROMPT) + padding)


def test_a_static_cache_of_the_path_is_passed_on():
    model = small("qwen3")
    path = kd.CacheOn(cache=lambda: StaticCache(config=model.config, max_cache_len=64))
    assert is_right(examined(model, a=path))


def test_generate_goes_on_from_a_saved_prefix():
    model = small("qwen2")
    saved = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.tensor([PROMPT[:5]]), cache=saved, use_cache=True)
    with watched() as (_, passes):
        evidence = examined(model, a=kd.CacheOn(prefix=(PROMPT[:5], saved)))
    assert is_right(evidence), evidence
    assert passes[0] == len(PROMPT) - 5


def test_without_a_cache_generate_is_held_against_that_path():
    with watched() as (calls, _):
        assert is_right(examined(small(), a=kd.CacheOff()))
    assert not any(call["use_cache"] for call in calls)


def likewise(model):
    """An assistant whose drafts are all right."""
    return {"assistant_model": copy.deepcopy(model)}


@pytest.mark.parametrize(
    ("arguments", "when"),
    [
        (lambda model: {}, lambda n, inputs: n == 1),
        (likewise, lambda n, inputs: 1 < n < len(PROMPT)),
        (lambda model: {}, lambda n, inputs: not inputs["use_cache"] and n > len(PROMPT) + 1),
    ],
)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_positions_that_generate_alone_gets_wrong_are_a_finding(family, arguments, when):
    model = small(family)
    given = arguments(model)
    with prepared(model, moved(when)):
        found = examined(model, given).findings
    assert [finding.check for finding in found]
    assert {finding.check for finding in found} == {"generate"}
    assert all("in float64" in finding.what for finding in found)


def test_the_verdict_is_a_bug_in_generate_alone():
    model = small(num_hidden_layers=1)
    with prepared(model, moved(lambda n, inputs: n == 1)):
        verdict = kd.diagnose(model, PROMPT, max_new_tokens=2, progress=False, generate=LOOKUP)
    assert verdict.kind == "bug", str(verdict)
    assert verdict.signature == ("in generate() alone",)
    assert any(reason.startswith("Generate(), step") for reason in verdict.reasons)


def test_a_fault_of_the_static_cache_is_found_through_its_argument():
    def make(update):
        def wrong(self, key_states, value_states, *args, **kwargs):
            keys, values = update(self, key_states, value_states, *args, **kwargs)
            return keys, values.index_fill(2, torch.tensor([2]), 0.0) if key_states.shape[2] == 1 else values

        return wrong

    with replaced(StaticLayer, "update", make):
        assert examined(small(), {"cache_implementation": "static"}).findings
        assert is_right(examined(small()))


def test_beams_that_keep_the_cache_of_another_are_found():
    model = small(initializer_range=0.02)
    with replaced(DynamicLayer, "reorder_cache", lambda reorder: lambda self, beams: None):
        found = examined(model, {"num_beams": 3}).findings
    assert any("with its cache than with use_cache=False" in finding.what for finding in found)


def test_an_error_of_generate_alone_is_a_finding():
    def fail(inputs):
        if inputs["input_ids"].shape[1] == 1:
            raise IndexError("no such position")

    model = small()
    with prepared(model, fail):
        found = examined(model).findings
    assert [finding.what for finding in found] == ["raises IndexError (no such position), where cache-ON runs"]


def test_what_transformers_refuses_is_not_examined():
    said = examined(kd.models.tiny("mamba", num_hidden_layers=1), LOOKUP).not_examined["generate()"]
    assert said.startswith("transformers refuses it: assisted generation is not supported")


def test_a_context_that_is_full_is_not_examined():
    said = examined(small("gpt2", max_position_embeddings=len(PROMPT))).not_examined["generate()"]
    assert said == "the model's context holds no further token"


class Coarse(DynamicCache):
    """Keeps keys in 8 bits of mantissa."""

    def update(self, key_states, value_states, *args, **kwargs):
        return super().update(key_states.bfloat16().to(key_states.dtype), value_states, *args, **kwargs)


def test_a_loss_is_excused_where_it_is_declared():
    path = kd.CacheOn(cache=Coarse)
    assert [finding.excuse for finding in examined(small(), a=path).findings] == [None]
    declared = examined(small(), a=path, lossy="keys in bfloat16").findings
    assert [finding.excuse.kind for finding in declared] == ["lossy"]


@pytest.mark.parametrize(
    ("generate", "error"),
    [
        ({"do_sample": True}, "draws its tokens at random"),
        ({"penalty_alpha": 0.6}, "contrastive search"),
        ({"return_dict_in_generate": False}, "kvdrift sets return_dict_in_generate itself"),
        ({"num_return_sequences": 2}, "kvdrift sets num_return_sequences itself"),
        ({"cache": DynamicCache()}, r"give it as CacheOn\(cache=…\)"),
        ({"prefill_chunk_size": 4}, r"give it as CacheOn\(prefill_chunk=…\)"),
        ({"attention_mask": None}, r"give it as CacheOn\(left_padding=…\)"),
        ({"frobnicate": 1}, "has no such argument"),
        ("yes", "give True, or a dict"),
    ],
)
def test_what_cannot_be_passed_on_is_refused(generate, error):
    with pytest.raises(InputError, match=error):
        kd.diagnose(small(), PROMPT, generate=generate, progress=False)


def test_one_cache_at_a_time():
    static = {"cache_implementation": "static"}
    with pytest.raises(InputError, match="give one or the other"):
        check_generate(static, kd.CacheOn(cache=DynamicCache))
    with pytest.raises(InputError, match="it needs a cache, and cache-OFF has none"):
        check_generate(static, kd.CacheOff())


def test_chunks_of_several_lengths_are_refused():
    with pytest.raises(InputError, match="in chunks of one length"):
        check_generate(True, kd.CacheOn(prefill_chunk=[3, 4]))


def test_a_path_of_ones_own_is_refused():
    class Own:
        label, model, attn, controls = "own", None, None, ()

        def start(self, model, ids, controls=None):
            return kd.CacheOn().start(model, ids, controls)

    with pytest.raises(InputError, match="a=own is none"):
        check_generate(True, Own())
