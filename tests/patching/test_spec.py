"""What is written and where: patches and cells, before any model is asked."""

import json

import numpy as np
import pytest
import torch

import kvdrift as kd
from kvdrift.errors import InputError, SiteError
from kvdrift.patching.schedule import Schedule
from kvdrift.patching.spec import PATCH_SITES, Patch, as_cell


@pytest.mark.parametrize("site", PATCH_SITES)
def test_every_site_can_be_named(site):
    patch = Patch(site)
    assert (patch.layers, patch.heads, patch.positions, patch.write) == (None, None, None, None)
    assert patch.schedule == Schedule.persistent()
    assert patch.sites == (("k", "v") if site == "kv" else (site,))
    assert patch.is_kv == (site in ("k", "v", "kv"))


@pytest.mark.parametrize(
    ("name", "site", "layers"),
    [
        ("blocks.5.hook_resid_post", "resid_post", (5,)),
        ("blocks.0.attn.hook_k", "k", (0,)),
        ("hook_embed", "embed", None),
        ("ln_final.hook_normalized", "final_norm", None),
    ],
)
def test_full_names(name, site, layers):
    patch = Patch(name)
    assert (patch.site, patch.layers) == (site, layers)


@pytest.mark.parametrize(
    "patch",
    [
        Patch("kv", layers=[1, 3], heads=0, positions=[4, 2], schedule="one_shot(3)", write="read"),
        Patch("resid_post", -1, positions="all", schedule="window(2, 5)"),
        Patch("q", range(3), [0, 7], "current"),
        Patch("embed"),
        Patch("v", np.int64(2), torch.tensor([0, 1]).tolist(), np.array([3, 4]), write="cache"),
    ],
    ids=lambda patch: patch.label,
)
def test_plain_data_and_back(patch):
    assert Patch.from_dict(json.loads(json.dumps(patch.to_dict()))) == patch
    assert hash(Patch.from_dict(patch.to_dict())) == hash(patch)


def test_labels_name_everything_that_is_not_a_default():
    patch = Patch("kv", layers=[1, 3], heads=0, positions=[4, 2], schedule="one_shot(3)", write="read")
    assert patch.label == "kv, layers 1 3, heads 0, positions 4 2, write read, one_shot(3)"
    assert repr(Patch("k")) == "Patch(k, persistent)"


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"site": "logits"}, SiteError, "'logits' cannot be patched"),
        ({"site": "pattern"}, SiteError, "'pattern' cannot be patched"),
        ({"site": "resid"}, SiteError, "'resid' cannot be patched"),
        ({"site": "blocks.5.hook_resid_post", "layers": 5}, SiteError, "names its layer already"),
        ({"site": "resid_post", "heads": 0}, SiteError, "has no heads"),
        ({"site": "embed", "layers": 0}, SiteError, "exists once in a model"),
        ({"site": "k", "layers": []}, InputError, "layers=.*leave it out for all"),
        ({"site": "k", "layers": [1, 1]}, InputError, "each once"),
        ({"site": "k", "heads": [0.5]}, InputError, "whole numbers"),
        ({"site": "k", "heads": True}, InputError, "whole numbers"),
        ({"site": "k", "positions": []}, InputError, "positions="),
        ({"site": "k", "positions": [-1]}, InputError, "count from 0"),
        ({"site": "k", "positions": "current"}, InputError, "choose 'past', 'all'"),
        ({"site": "resid_post", "positions": "past"}, InputError, "choose 'current', 'all'"),
        ({"site": "resid_post", "write": "read"}, InputError, "one way only"),
        ({"site": "k", "write": "both"}, InputError, "choose 'cache' or 'read'"),
        ({"site": "k", "write": "cache", "positions": "all"}, InputError, "needs write='read'"),
        ({"site": "k", "schedule": "sometimes"}, InputError, "schedule='sometimes'"),
        ({"site": "k", "schedule": "one_shot(0)"}, InputError, "steps start from 1"),
    ],
)
def test_a_patch_that_makes_no_sense_is_one_sentence(arguments, error, words):
    with pytest.raises(error, match=words) as raised:
        Patch(**arguments)
    assert str(raised.value).endswith(".")
    assert "\n" not in str(raised.value)


def test_cells():
    one, two = Patch("k", schedule="one_shot(4)"), Patch("v", schedule="window(2, 3)")
    cell = as_cell([one, two])
    assert cell.patches == (one, two)
    assert cell.label == "k, one_shot(4) + v, window(2, 3)"
    assert cell.first == 2
    assert [step for step in range(8) if cell.covers(step)] == [2, 3, 4]
    assert as_cell("kv") == as_cell(["kv"]) == as_cell(Patch("kv"))
    assert as_cell(patch for patch in (one, two)) == cell
    assert as_cell("kv", "mine").label == "mine"


@pytest.mark.parametrize(("given", "words"), [([], "There is no patch"), ([3], "3 is no patch"), (5, "5 is no patch")])
def test_what_is_no_patch_is_refused(given, words):
    with pytest.raises(InputError, match=words):
        as_cell(given)


@pytest.mark.parametrize(
    ("patch", "trivial"),
    [
        (Patch("resid_post"), True),
        (Patch("resid_post", schedule="window(2, 9)"), True),
        (Patch("resid_post", schedule="window(2, 5)"), False),
        (Patch("resid_post", layers=[0, 3]), True),
        (Patch("resid_post", layers=-1), True),
        (Patch("final_norm"), True),
        (Patch("resid_post", positions="all"), True),
        (Patch("resid_post", schedule="persistent(3)"), True),
        (Patch("resid_post", layers=2), False),
        (Patch("resid_post", layers=3, positions=[0]), False),
        (Patch("resid_post", schedule="one_shot(1)"), False),
        (Patch("resid_pre"), False),
        (Patch("kv"), False),
    ],
    ids=lambda value: getattr(value, "label", None),
)
def test_recovery_is_one_by_construction_only_where_the_last_residual_is_always_written(patch, trivial):
    steps = range(3, 7)
    assert as_cell(patch).trivial(4, steps) == trivial
    assert as_cell(["kv", patch]).trivial(4, steps) == trivial


def test_public_names():
    assert kd.Patch is Patch
    assert kd.Schedule is Schedule
