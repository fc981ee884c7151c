"""The names of a drift's arrays, and the views by which others ask for them."""

import numpy as np
import pytest

import kvdrift as kd
from kvdrift.drift.layout import array_name, layers_name, prompt_axis
from kvdrift.errors import SiteError

from .made import make

PROMPTS = [[5, 9, 100, 33, 7], [8, 250]]


@pytest.fixture(scope="module")
def drift(tiny_model):
    return kd.compare(
        tiny_model("mistral"), PROMPTS, max_new_tokens=4, floor=2, self_drift=True, kv_every=2, progress=False
    )


def test_every_array_is_behind_a_view(drift):
    """No array is left that only its name gives, and each view is the array of that name, laid out as it says."""
    kinds = ("drift", "floor", "local", "local_floor", "self_a", "self_b", "positions")
    seen = {array_name(of, *pair): drift.values(*pair, of) for of in kinds for pair in drift.pairs(of)}
    seen |= {layers_name(site): drift.layers(site) for site in drift.sites if drift.layers(site).size}
    seen |= {
        "steps": drift.steps, "measured": drift.measured, "fed": drift.fed, "n_steps": drift.n_steps,
        "top1_a": drift.top1("a"), "top1_b": drift.top1("b"), "layers/local": drift.layers("resid_post", "local"),
        "positions/steps": drift.position_steps, "positions/visible_a": drift.visible("a"),
        "positions/visible_b": drift.visible("b"),
    }  # fmt: skip
    assert seen.keys() == drift.arrays.keys()
    assert all(seen[name] is array for name, array in drift.arrays.items())
    for name, array in drift.arrays.items():
        if (axis := prompt_axis(name)) is not None:
            assert array.shape[axis] == len(PROMPTS), name


def test_values_and_their_layers(drift):
    assert drift.values("resid_post").shape == (2, 4, 4)
    assert drift.values("resid_post", of="floor").shape == drift.floor("resid_post").shape == (2, 2, 4, 4)
    assert drift.values("embed").shape == (2, 4)
    assert drift.layers("resid_post").tolist() == [0, 1, 2, 3]
    assert drift.layers("embed").size == 0
    assert drift.has("logits", "kl")
    assert not drift.has("resid_post", "kl")
    with pytest.raises(SiteError, match="drift/k/nonsense"):
        drift.values("k", "nonsense")
    with pytest.raises(SiteError, match="has nothing"):
        drift.values("k", of="nonsense")


def test_what_was_not_measured():
    made = make(flips=[(0, 2)])
    assert made.floor("resid_post") is made.floor("resid_post", "local") is None
    assert made.position_steps.size == 0
    np.testing.assert_array_equal(made.layers("resid_post", "local"), made.layers("resid_post"))
    assert np.argwhere(made.flips).tolist() == [[0, 2]]
    made.measured[0, 2] = False
    assert not made.flips.any()
