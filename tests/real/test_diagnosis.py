"""The verdict on real weights: clean, and with one stale key in one layer."""

import pytest
from transformers.cache_utils import DynamicCache

import kvdrift as kd
from kvdrift.diagnosis.observe import by_uncached_pass

PROMPT = "A baker packs 6 rolls into every bag."

pytestmark = pytest.mark.real


class Stale(DynamicCache):
    """Layer 17 stores the key of the token before."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        if layer_idx == 17 and key_states.shape[2] == 1:
            key_states = self.layers[17].keys[:, :, -1:]
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


@pytest.fixture(scope="module")
def model():
    return kd.load("smollm2-135m", quiet=True)


def test_smollm2_is_rounding(model):
    verdict = kd.diagnose(model, PROMPT, max_new_tokens=2, progress=False)
    assert verdict.kind == "rounding", str(verdict)
    assert by_uncached_pass(model).coverage.attention_layers == tuple(range(30))


def test_one_stale_key_in_one_of_thirty_layers_is_found(model):
    verdict = kd.diagnose(model, PROMPT, kd.CacheOn(cache=lambda: Stale(config=model.hf.config)), max_new_tokens=2,
                          progress=False)  # fmt: skip
    assert verdict.kind == "bug", str(verdict)
    assert verdict.where.layer == 17
    assert verdict.wrong == "a"
