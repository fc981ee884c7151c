"""Every fault does what it says and nothing else, and is gone afterwards."""

import copy

import pytest
import torch
from faults.effect import LONG, changes_float64, effect, run
from faults.judge import model_of
from faults.registry import FAULTS
from transformers import Cache, DynamicCache, masking_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvdrift.models.tiny import FAMILIES, tiny
from kvdrift.tracing.seam import attention_tables, eager_function

FAST = ("llama", "mistral", "gemma2", "gpt2", "gpt-oss", "lfm2", "mamba", "bloom")


MODELS = {family: model_of(family) for family in FAST}
CASES = [(name, next(family for family in FAST if fault.applies(MODELS[family]))) for name, fault in FAULTS.items()]


def outputs(hf):
    """Bits of a run with a cache over a window's length and of a run without one."""
    cache, parts = DynamicCache(config=hf.config), [LONG[:6], *([token] for token in LONG[6:12])]
    found, start = [run(hf, LONG[:12], 0, None)], 0
    with torch.no_grad():
        for part in parts:
            found.append(run(hf, part, start, cache))
            start += len(part)
    return torch.cat(found)


def state(hf, hooks):
    """Whatever a fault may touch."""
    classes = (Cache, DynamicLayer, DynamicSlidingWindowLayer)
    tables = attention_tables(hf)
    eager = [eager_function(m) for m in hf.modules() if hasattr(m, "is_causal") and tables]
    return (
        [dict(vars(kind)) for kind in classes],
        vars(masking_utils)["sliding_window_causal_mask_function"],
        [dict(table._local_mapping) for table in tables],
        eager,
        hooks(hf),
        copy.deepcopy(hf.config.to_dict()),
    )


def test_every_fault_is_described():
    for fault in FAULTS.values():
        assert fault.doc.endswith(".")


@pytest.mark.parametrize(("name", "family"), CASES)
def test_a_fault_changes_the_float64_output(name, family):
    assert changes_float64(FAULTS[name], model_of(family))


@pytest.mark.parametrize(("name", "family"), CASES)
def test_a_fault_acts_alike_at_every_run_and_leaves_nothing_behind(name, family, hooks, same_bits):
    hf = model_of(family)
    before, right = state(hf, hooks), outputs(hf)
    with FAULTS[name].apply(hf):
        assert same_bits(outputs(hf), outputs(hf))
    assert state(hf, hooks) == before
    assert same_bits(outputs(hf), right)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_leaves_nothing_behind_after_an_error(name, hooks):
    hf = model_of(dict(CASES)[name])
    before, fault = state(hf, hooks), FAULTS[name].apply(hf)
    with pytest.raises(ZeroDivisionError), fault:
        raise ZeroDivisionError
    assert state(hf, hooks) == before


def test_a_fault_shows_where_its_name_says():
    names = ("left-padding-seen-at-decode", "crop-leaves-a-token", "chunk-mask-one-off")
    names = (*names, "crop-of-drafts-leaves-a-token", "mask-of-drafts-one-off", "positions-of-drafts-repeat")
    names = (*names, "cache-off-ignores-the-window", "stale-prefix-of-an-earlier-prompt")
    found = {name: shown(name, "gemma3") for name in names}
    assert found["left-padding-seen-at-decode"] == {"left padding"}
    assert found["crop-leaves-a-token"] == {"after a crop", "after a crop of drafts"}
    assert found["crop-of-drafts-leaves-a-token"] == {"after a crop of drafts"}
    assert found["mask-of-drafts-one-off"] == {"several tokens"}
    assert found["positions-of-drafts-repeat"] == {"several tokens"}
    assert found["chunk-mask-one-off"] == {"chunked prefill", "several tokens"}
    assert found["cache-off-ignores-the-window"] == {"cache-OFF", "cache-OFF at 16"}
    assert found["stale-prefix-of-an-earlier-prompt"] == {"a later prompt", "left padding"}


def shown(name, family):
    return {circumstance for circumstance, change in effect(FAULTS[name], model_of(family)).items() if change}


def test_a_window_fault_needs_a_window():
    assert not FAULTS["window-ignored-by-the-cache"].applies(tiny("llama"))
    assert not FAULTS["native-ignores-the-mask"].applies(tiny("falcon"))
    assert not FAULTS["rope-applied-twice"].applies(tiny("gpt2"))
    assert not FAULTS["heads-swapped"].applies(tiny("llama-mqa"))
    assert [name for name, fault in FAULTS.items() if fault.applies(tiny("mamba"))] == [
        "convolution-one-token-late",
        "recurrent-state-lost-at-decode",
        "recurrent-state-narrow",
        "head-off-for-one-row",
        "norm-off-at-one-row",
        "down-projection-off-at-one-row",
        "final-norm-off-at-one-row",
        "embedding-off-at-one-row",
        "hook-steers-the-last-position",
        "hook-steers-the-first-position",
    ]


def test_every_family_has_faults():
    for family in FAMILIES:
        assert any(fault.applies(tiny(family)) for fault in FAULTS.values())
