"""What a drift may say, and where it must rather say nothing."""

from dataclasses import dataclass, replace

import pytest
import torch

import kvdrift as kd
from kvdrift.errors import NonFiniteError, SiteError
from kvdrift.models.tiny import tiny
from kvdrift.paths.cache_off import CacheOff, CacheOffRun
from kvdrift.paths.cache_on import CacheOn, CacheOnRun

PROMPT = [5, 9, 100, 33, 7, 8, 250, 301, 12, 44, 17, 61]


def compare(*args, **options):
    return kd.compare(*args, **{"progress": False, "floor": 0, "local": False, "max_new_tokens": 6, **options})


class NudgedRun(CacheOffRun):
    """From step `at` on, the second-best token gets the best logit."""

    def step(self, token=None):
        step = super().step(token)
        if len(self._tokens) - len(PROMPT) < self.path.at:
            return step
        logits = step.logits.clone()
        logits[logits.topk(2).indices[1]] = logits.max() + 1
        return replace(step, logits=logits)


@dataclass(frozen=True)
class Nudged(CacheOff):
    at: int = 3

    def start(self, model, ids, controls=None):
        return NudgedRun(self, model, list(ids), self.controls if controls is None else controls)


def test_free_divergence_is_the_planted_flip():
    assert compare(tiny("llama"), PROMPT, b=Nudged(at=3)).free_divergence == (3,)


def test_with_steps_left_out_free_divergence_is_not_known():
    drift = compare(tiny("llama"), PROMPT, b=Nudged(at=1), every=2)
    assert drift.first_flip == (2,)
    assert drift.free_divergence == (None,)
    assert drift.free_steps == (1,)
    assert any("one step in 2" in note for note in drift.notes)


def test_a_flip_after_the_tokens_left_path_a_is_censored():
    hf = tiny("llama")
    fed = compare(hf, PROMPT).arrays["fed"][0].tolist()
    fed[1] = (fed[1] + 1) % 384
    drift = compare(hf, PROMPT, b=Nudged(at=3), tokens=fed)
    assert drift.first_flip == (3,)
    assert drift.free_steps == (2,)
    assert drift.free_divergence == (None,)


def test_one_layer_of_a_site_is_refused():
    with pytest.raises(SiteError, match="whole sites"):
        compare(tiny("llama"), PROMPT, sites=["blocks.1.hook_resid_post"])


def test_the_float32_head_is_found_under_a_control_too():
    drift = compare(tiny("llama"), PROMPT, a=kd.CacheOn(controls=(kd.ReRoll(0),)))
    assert drift.has("logits", "kl_float32_head")


def test_nan_that_only_a_path_has_is_not_blamed_on_the_model():
    class Broken(CacheOnRun):
        def step(self, token=None):
            step = super().step(token)
            if token is None:
                self.cache.layers[2].keys = self.cache.layers[2].keys * torch.nan
            return step

    @dataclass(frozen=True)
    class BrokenPath(CacheOn):
        def start(self, model, ids, controls=None):
            return Broken(self, model, list(ids), model.backend.new_cache(), controls or ())

    with pytest.raises(NonFiniteError, match="path's own cache"):
        compare(tiny("llama"), PROMPT, a=BrokenPath())
