"""Errors in the cases of a diagnosis: a crash of one path is a bug, of both no evidence, and kvdrift's own is said."""

from contextlib import contextmanager

import pytest
import torch
from transformers import DynamicCache

import kvdrift as kd
from kvdrift.diagnosis import cases, gather, generated
from kvdrift.diagnosis.cases import Case
from kvdrift.diagnosis.evidence import Finding
from kvdrift.diagnosis.raised import cause
from kvdrift.errors import InputError, InternalError, ModelError
from kvdrift.testing import assert_cache_equivalent

PROMPT = [5, 9, 100, 33, 7, 8, 250, 301, 12, 44, 17, 61]
OFF = kd.CacheOff()


def diagnose(model, **options):
    return kd.diagnose(model, options.pop("prompts", PROMPT), max_new_tokens=3, progress=False, **options)


def small(family="llama", **overrides):
    return kd.models.tiny(family, **{"num_hidden_layers": 1} | overrides)


class Breaking(DynamicCache):
    """Raises where ``when(held, new)`` says so."""

    def __init__(self, when, error=IndexError, n_layers=None, **options):
        super().__init__(**options)
        self.when, self.error = when, error

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        if self.when(self.get_seq_length(layer_idx), key_states.shape[2]):
            raise self.error("no more\n room.")
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def breaking(when, error=IndexError):
    return kd.CacheOn(cache=lambda: Breaking(when, error))


@contextmanager
def raising(model, when, error=ValueError):
    """The last MLP raises for passes of so many tokens."""

    def check(_module, args):
        if when(args[0].shape[1]):
            raise error("a shape of one's own")

    handle = model.model.layers[-1].mlp.register_forward_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize(
    ("when", "signature"),
    [
        (lambda held, new: held == 0, "already in the prompt"),
        (lambda held, new: held > 3 and new == 1, "from the first decode step"),
        (lambda held, new: held > 13, "from 15 tokens on"),
        (lambda held, new: held > 0 and new > 1, "at a chunk boundary"),
    ],
)
def test_a_crash_of_one_path_is_a_bug_with_its_case(when, signature):
    verdict = diagnose(small(), a=breaking(when))
    assert verdict.kind == "bug", str(verdict)
    assert verdict.wrong == "a"
    assert verdict.signature[0] == signature
    assert verdict.where.module == "model.layers.0.self_attn"
    assert any("raises IndexError (no more room), where cache-OFF runs" in reason for reason in verdict.reasons)


def test_a_crash_in_the_cache_free_path_is_a_bug_of_it():
    model = small(num_hidden_layers=2)
    with raising(model, lambda n: n == 14):
        verdict = diagnose(model)
    assert verdict.kind == "bug", str(verdict)
    assert verdict.wrong == "b"
    assert (verdict.where.layer, verdict.where.module) == (1, "model.layers.1.mlp")
    assert any("step 2 (14 tokens): cache-OFF" in reason for reason in verdict.reasons)


def test_a_stop_iteration_of_the_model_is_its_own():
    """Python hides it in a RuntimeError that the steps of the path seem to raise."""
    verdict = diagnose(small(), a=breaking(lambda held, new: held > 13, StopIteration))
    assert (verdict.kind, verdict.wrong) == ("bug", "a"), str(verdict)
    assert any("raises StopIteration (no more room), where cache-OFF runs" in reason for reason in verdict.reasons)
    model = small("gpt2", num_hidden_layers=2)
    handle = model.transformer.h[1].mlp.register_forward_hook(
        lambda _m, _args, out: next(iter(())) if out.shape[1] == 14 else out
    )
    verdict = diagnose(model)
    handle.remove()
    assert (verdict.kind, verdict.wrong) == ("bug", "b"), str(verdict)
    assert verdict.where.layer == 1


class Uncroppable(DynamicCache):
    """Says that it can be cropped, and cannot."""

    def crop(self, tokens_to_remove):
        raise self.error("not there")


@pytest.mark.parametrize("error", [RuntimeError, AttributeError, IndexError])
def test_a_crash_in_a_crop_is_a_bug_after_a_crop(error):
    cache = type("Cache", (Uncroppable,), {"error": error})
    verdict = diagnose(small(), a=kd.CacheOn(cache=cache))
    assert verdict.kind == "bug", str(verdict)
    assert verdict.signature[0] == "after a crop"


class Refusing(Uncroppable):
    """Says so by its error."""

    error = NotImplementedError


class Uncropped(DynamicCache):
    """Says so by its attribute."""

    is_croppable = False


@pytest.mark.parametrize("cache", [Refusing, Uncropped])
def test_a_cache_that_says_that_it_cannot_be_cropped_is_not_examined(cache):
    verdict = diagnose(small(), a=kd.CacheOn(cache=cache))
    assert verdict.equivalent, str(verdict)
    assert any("crop" in case and "cannot be cropped" in case for case in verdict.not_examined)
    assert "not examined: " in str(verdict)
    assert verdict.to_dict()["not_examined"] == verdict.not_examined


@pytest.mark.parametrize(
    ("family", "overrides"), [("mistral", {"sliding_window": 16}), ("gemma3", {"sliding_window": 20})]
)
def test_a_crash_beyond_the_window_alone(family, overrides):
    model = small(family, **overrides)
    window = overrides["sliding_window"]

    class Narrow(Breaking):
        def __init__(self):
            super().__init__(lambda held, new: held + new > window + 1, IndexError, config=model.config)

    with pytest.raises(AssertionError, match=r"BUG: (.|\n)*window of \d+, step \d .*: cache-ON, .*: raises IndexError"):
        assert_cache_equivalent(model, PROMPT[:4], a=kd.CacheOn(cache=Narrow), max_new_tokens=2)


def test_what_both_paths_fail_in_is_left_out_and_told():
    model = small()
    with raising(model, lambda n: n > 40):
        verdict = kd.diagnose(model, progress=False)
    assert verdict.equivalent, str(verdict)
    assert "long prompt: both paths fail in it (ValueError (a shape of one's own))." in verdict.not_examined
    with raising(model, lambda n: True), pytest.raises(ModelError, match="both paths fail in it"):
        diagnose(model)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_lack_of_memory_is_no_fault(error):
    model = small()
    with raising(model, lambda n: n == 14, error):
        verdict = diagnose(model, prompts=[PROMPT[:6], PROMPT[:11]])
    assert verdict.equivalent, str(verdict)
    assert any("prompt 1" in case and case.endswith(": memory does not suffice.") for case in verdict.not_examined)


def test_an_interruption_goes_through(hooks):
    model = small()
    with raising(model, lambda n: n == 14, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        diagnose(model)
    assert not hooks(model)


def test_an_error_of_kvdrifts_own_is_called_one(monkeypatch):
    def broken(*_):
        raise IndexError("list index\n out of range")

    monkeypatch.setattr(gather, "first_difference", broken)
    with pytest.raises(
        InternalError, match=r"kvdrift itself failed .*\(IndexError: list index out of range.*report"
    ) as e:
        diagnose(small())
    assert isinstance(e.value.__cause__, IndexError)
    monkeypatch.setattr(gather, "by_uncached_pass", broken)
    with pytest.raises(InternalError, match="while it diagnosed tiny-llama"):
        diagnose(small())


def test_what_a_control_breaks_is_kvdrifts_own():
    """A hook that only runs fail under shape-invariant arithmetic says nothing about the model."""
    model = kd.load(small(), quiet=True)
    case = Case("prompt", tuple(PROMPT), None, 2, kd.CacheOn())
    with pytest.raises(InternalError, match="while it observed prompt, which both paths run by themselves"):
        cause(model, case, OFF, RuntimeError("under a control"))
    assert cause(model, case, OFF, InputError("Fixed shape cannot read it.")) == "Fixed shape cannot read it"


def test_a_crash_on_a_twin_counts_unless_the_cache_was_made_for_the_model(monkeypatch):
    monkeypatch.setitem(cases.COST_LIMIT, "cpu", 1)
    model = small("mistral", sliding_window=64)
    update = DynamicCache.update

    def narrow(self, key, *args, **kwargs):
        if self.get_seq_length() > 14:
            raise IndexError("out of range")
        return update(self, key, *args, **kwargs)

    monkeypatch.setattr(DynamicCache, "update", narrow)
    own = diagnose(model, prompts=PROMPT[:4])
    assert own.kind == "bug", str(own)
    given = diagnose(model, prompts=PROMPT[:4], a=kd.CacheOn(cache=lambda: DynamicCache(config=model.config)))
    assert given.equivalent, str(given)
    assert any("on a tiny twin, for which its own cache need not be made" in case for case in given.not_examined)


def test_a_generate_that_raises_is_a_bug_of_it(monkeypatch):
    model = small()

    def broken(*args, **kwargs):
        raise ZeroDivisionError("no inputs")

    model.prepare_inputs_for_generation = broken
    verdict = diagnose(model, generate=True)
    assert verdict.kind == "bug", str(verdict)
    assert any(r.startswith("Generate(): raises ") and "where cache-ON runs" in r for r in verdict.reasons), str(
        verdict
    )
    del model.prepare_inputs_for_generation
    monkeypatch.setattr(generated, "same_bits", broken)
    with pytest.raises(InternalError, match=r"while it followed generate\(\)"):
        diagnose(model, generate=True)


def test_a_crash_is_a_finding_with_its_step():
    model = kd.load(small(), quiet=True)
    case = Case("prompt", tuple(PROMPT), None, 4, breaking(lambda held, new: held > 13))
    found = cause(model, case, OFF, RuntimeError())
    assert isinstance(found, Finding)
    assert (found.check, found.path, found.moment.step, found.moment.position) == ("crash", "cache-ON", 3, 14)
