"""The float64 witness: how far apart the paths are, where, and which of them is wrong."""

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import kvdrift as kd
from kvdrift.controls import float64_copy as float64
from kvdrift.controls.float64_copy import float64_copy
from kvdrift.diagnosis.cases import CROP_AND_CONTINUE, Case
from kvdrift.diagnosis.float64 import float64_witness
from kvdrift.errors import ModelError

PROMPT = (5, 9, 100, 33, 7, 8, 250, 301, 12, 44)


def case(a=None, **changes):
    return Case("short prompt", PROMPT, (1, 2, 3, 4), 4, a or kd.CacheOn(), **changes)


class Twisted(DynamicCache):
    """From the second pass on, the cache of layer 1 hands its keys back negated."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return (-keys if layer_idx == 1 and keys.shape[2] > key_states.shape[2] else keys), values


class Rounded(DynamicCache):
    """Keys are rounded on their way in."""

    def update(self, key_states, value_states, *args, **kwargs):
        return super().update(key_states.bfloat16().to(key_states.dtype), value_states, *args, **kwargs)


@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral", "lfm2", "falcon"])
def test_clean_models_agree_far_below_the_line(family, tiny_model):
    witness = float64_witness(float64_copy(tiny_model(family, torch.bfloat16)), case(), kd.CacheOff())
    assert witness.agrees
    assert witness.error < 1e-12
    assert witness.wrong is None


def test_a_fault_is_measured_placed_and_charged(tiny_model):
    copy = float64_copy(tiny_model("llama"))
    witness = float64_witness(copy, case(kd.CacheOn(cache=Twisted)), kd.CacheOff())
    assert witness.moment.step == 1
    assert (witness.where.layer, witness.where.site) == (1, "k")
    assert witness.wrong == "a"

    def logits(path):
        run = path.start(copy, PROMPT, (kd.TrueFloat64(),))
        found = [run.step().logits, *(run.step(token).logits for token in (1, 2, 3, 4))]
        return torch.stack(found).numpy()

    a, b = logits(kd.CacheOn(cache=Twisted)), logits(kd.CacheOff())
    expected = max(np.abs(x - y).max() / np.abs(y).max() for x, y in zip(a, b, strict=True))
    assert witness.error == pytest.approx(expected, rel=1e-9)


def test_a_cache_that_changes_what_it_is_given_is_wrong_by_that_alone(tiny_model):
    witness = float64_witness(float64_copy(tiny_model("llama")), case(kd.CacheOn(cache=Rounded)), kd.CacheOff())
    assert witness.moment.step == 0
    assert witness.wrong == "a"


def test_a_wrong_reference_is_told(tiny_model):
    copy = float64_copy(tiny_model("llama"))

    def shift(module, args, kwargs):
        if kwargs.get("use_cache") is False:
            ids = kwargs["position_ids"]
            kwargs["position_ids"] = torch.where(ids > 4, ids + 1, ids)
        return args, kwargs

    handle = copy.hf.register_forward_pre_hook(shift, with_kwargs=True)
    try:
        witness = float64_witness(copy, case(), kd.CacheOff())
    finally:
        handle.remove()
    assert witness.wrong == "b"


def test_a_copy_that_does_not_fit_is_refused(tiny_model, monkeypatch):
    monkeypatch.setattr(float64, "free_memory", lambda device: 1000)
    with pytest.raises(ModelError, match="float64 copy needs"):
        float64_copy(tiny_model("llama"))


def test_tokens_taken_back_are_followed(tiny_model):
    cropped = Case("crop and continue", PROMPT, (1, 2, 3, 4, 5, 6), 6, kd.CacheOn(), CROP_AND_CONTINUE[:6])
    witness = float64_witness(float64_copy(tiny_model("gemma3")), cropped, kd.CacheOff())
    assert witness.agrees
    assert witness.error < 1e-12
