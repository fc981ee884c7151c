import math

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import kvdrift as kd
from kvdrift.controls import cast_copy
from kvdrift.demo_prompts import DEMO_PROMPTS
from kvdrift.errors import InputError, NonFiniteError
from kvdrift.ladder.arms import ARMS
from kvdrift.ladder.falsify import weights_changed
from kvdrift.models.tiny import tiny

PROMPTS = [[5, 9, 100, 33, 7, 8, 250, 301, 12, 44, 17, 61], [200, 17, 30, 4, 5, 6, 7, 8, 10], [40, 41, 42, 43, 99, 98]]
STEPS = 6


@pytest.fixture(scope="module")
def hf():
    """A model whose cache-ON and cache-OFF differ in bfloat16 at every step or so."""
    return tiny("llama", dtype=torch.bfloat16, intermediate_size=1024)


@pytest.fixture(scope="module")
def found(hf):
    return kd.falsify(hf, PROMPTS, max_new_tokens=STEPS, progress=False)


@torch.no_grad()
def logits(model, ids, fed):
    """Cache-ON's and cache-OFF's logits at every step, by loops of transformers alone, in float64."""
    cache, on, off = DynamicCache(config=model.config), [], []
    for step in range(len(fed)):
        new = ids if step == 0 else [fed[step - 1]]
        start = 0 if step == 0 else len(ids) + step - 1
        positions = torch.arange(start, start + len(new))[None]
        given = {"input_ids": torch.tensor([new]), "position_ids": positions, "logits_to_keep": 1}
        on.append(model(cache=cache, use_cache=True, **given).logits[0, -1].double())
        whole = [*ids, *fed[:step]]
        positions = torch.arange(len(whole))[None]
        given = {"input_ids": torch.tensor([whole]), "position_ids": positions, "logits_to_keep": 1}
        off.append(model(use_cache=False, **given).logits[0, -1].double())
    return torch.stack(on), torch.stack(off)


def kl(on, off):
    """KL(off‖on) in nats, as the mean of log(q/p) under q; good to about 1e-16."""
    q, p = off.log_softmax(-1), on.log_softmax(-1)
    return (q.exp() * (q - p)).sum(-1)


def test_all_arms_are_there_and_the_base_is_the_model_as_given(found, hf):
    assert found.names == tuple(ARMS)
    assert found.base == "bfloat16"
    assert found.model.dtype == "bfloat16"
    assert hf.dtype == torch.bfloat16
    assert hf.config._attn_implementation == "sdpa"
    assert {rung.status for rung in found.rungs if not rung.name.startswith("sdpa-")} == {"ran"}


@pytest.mark.parametrize(("arm", "dtype"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)])
def test_dtype_arms_against_loops_of_ones_own(found, hf, arm, dtype):
    copy = cast_copy(hf, dtype)
    for prompt, ids in enumerate(PROMPTS):
        fed = found.arrays["fed"][prompt].tolist()
        on, off = logits(copy, ids, fed)
        np.testing.assert_allclose(found.values(arm)[prompt], kl(on, off), atol=1e-14)
        delta = on - off
        centred = (delta - delta.mean(-1, keepdim=True)).norm(dim=-1)
        np.testing.assert_allclose(found.values(arm, "logit_l2")[prompt], centred, rtol=1e-9)
        flips = (on.argmax(-1) != off.argmax(-1)).double()
        np.testing.assert_array_equal(found.values(arm, "flip")[prompt], flips)
        if arm == "bfloat16":
            assert fed == on.argmax(-1).tolist(), "the base arm's cache-ON chooses the tokens"


def test_float32_arm_against_loops_of_ones_own(found, hf):
    copy = cast_copy(hf, torch.float32)
    on, off = logits(copy, PROMPTS[0], found.arrays["fed"][0].tolist())
    delta = on - off
    centred = (delta - delta.mean(-1, keepdim=True)).norm(dim=-1)
    np.testing.assert_allclose(found.values("float32", "logit_l2")[0], centred, rtol=1e-9)


def test_the_order_of_precisions(found):
    means = [found.mean(arm).value for arm in ("bfloat16", "float16", "float32", "float64")]
    assert means == sorted(means, reverse=True)
    assert means[0] > 10 * means[1] > 1e4 * means[2]
    assert 0 < means[3] < 1e-26
    for arm in ("float32", "layercast", "float64"):
        assert np.isnan(found.values(arm, "kl_float32_head")).all(), "a float32 head takes nothing away there"


def test_kl_is_quadratic_in_the_measured_drift(found):
    rows = found.ratios("float16").set_index("arm")
    for arm in ("float32", "float64"):
        assert 0.3 < rows.loc[arm, "over_drift"] < 3, "the law of the measured drift"
    assert rows.loc["float32", "over_roundoff"] > 10, "rounding of stored numbers alone predicts far too little"


def test_fixed_shape_is_exact(found):
    for metric in ("kl", "logit_l2", "logit_max", "drift", "flip"):
        assert not found.values("fixed-shape", metric).any()
    assert found.identical("fixed-shape") == 1
    assert found.identical("bfloat16") < 1


def test_wide_sums_leave_nothing(found):
    """What drifts is the accumulated error of sums: with it gone, storage rounds both paths' numbers alike."""
    assert found.identical("wide-sums") == 1


def test_twins(found):
    assert found.twins["layercast"] == "float32"
    assert found.twins["sdpa-flash"] == "bfloat16"


def test_kernels_are_those_that_ran(found):
    kernels = {rung.name: rung.kernels for rung in found.rungs}
    assert kernels["bfloat16"] == kernels["sdpa-flash"] == ("flash",)
    assert kernels["sdpa-math"] == ("math",)
    assert kernels["eager"] == kernels["fixed-shape"] == ()


@pytest.mark.parametrize("arm", ["sdpa-efficient", "sdpa-cudnn"])
def test_kernels_that_this_machine_lacks_are_said_to_be_missing(found, arm):
    if torch.cuda.is_available():
        pytest.skip("this machine may have them")
    rung = found.rung(arm)
    assert rung.status == "not run"
    assert "No viable backend" in rung.reason
    assert np.isnan(found.values(arm)).all()


def test_the_head_alone_leaves_the_states_alone(found):
    np.testing.assert_array_equal(found.values("head-float32", "drift"), found.values("bfloat16", "drift"))
    wide, head = found.values("bfloat16", "kl_float32_head"), found.values("head-float32")
    np.testing.assert_allclose(head, wide, rtol=1e-4, atol=1e-12)


def test_the_floor_has_no_cache_off_in_it(hf, found):
    on, re_rolled = kd.CacheOn(), kd.CacheOn(controls=(kd.ReRoll(0),))
    fed = [row.tolist() for row in found.arrays["fed"]]
    drift = kd.compare(
        hf, PROMPTS, a=re_rolled, b=on, tokens=fed, max_new_tokens=STEPS, floor=0, local=False, progress=False
    )
    np.testing.assert_array_equal(found.values("rounding-floor"), drift.values("logits", "kl"))
    assert found.rung("rounding-floor").b == "cache-ON"


def test_an_arm_that_overflows_is_reported_and_the_others_run():
    hf = tiny("llama", dtype=torch.bfloat16)
    with torch.no_grad():
        hf.model.layers[2].mlp.up_proj.weight.mul_(1e4)
    found = kd.falsify(hf, PROMPTS[0], arms=["float16", "float32"], max_new_tokens=4, progress=False)
    rung = found.rung("float16")
    assert rung.status == "not finite"
    assert "layer 2" in rung.reason
    assert "float16 ends at" in rung.reason
    assert rung.weights_changed > 0
    assert found.rung("float32").ran
    assert found.mean("float32").value >= 0
    assert math.isnan(found.mean("float16").value)
    assert any(sentence.startswith("float16 is not finite") for sentence in found.reading())


def test_a_base_that_overflows_can_choose_no_tokens():
    hf = tiny("llama", dtype=torch.float16)
    with torch.no_grad():
        hf.model.layers[2].mlp.up_proj.weight.mul_(1e4)
    with pytest.raises(NonFiniteError, match="layer 2"):
        kd.falsify(hf, PROMPTS[0], arms=["float32"], max_new_tokens=4, progress=False)


def test_a_float32_model_stays_the_base_and_16_bits_are_a_copy():
    hf = tiny("llama")
    found = kd.falsify(hf, PROMPTS[0], arms=["layercast", "head-float32", "eager"], max_new_tokens=4, progress=False)
    assert found.names == ("float32", "layercast", "head-float32", "eager")
    assert found.base == "float32"
    assert (found.rung("layercast").dtype, found.rung("layercast").stored) == ("bfloat16", "float32")
    assert found.rung("head-float32").dtype == "bfloat16"
    assert found.rung("eager").dtype == "float32"
    assert found.rung("layercast").weights_changed > 0.9
    assert hf.dtype == torch.float32


def test_tokens_can_be_given(hf):
    fed = [7, 8, 9]
    found = kd.falsify(hf, PROMPTS[0], tokens=fed, arms=["fixed-shape"], max_new_tokens=1, progress=False)
    assert found.arrays["fed"].tolist() == [fed]
    assert found.arrays["n_steps"].tolist() == [3]
    assert found.identical("fixed-shape") == 1


def test_prompts_that_end_early():
    hf = tiny("llama", dtype=torch.bfloat16)
    plain = kd.falsify(hf, PROMPTS[:2], arms=["float32"], max_new_tokens=4, progress=False)
    end = int(plain.arrays["fed"][0, 1])
    hf.generation_config.eos_token_id = end
    found = kd.falsify(hf, PROMPTS[:2], arms=["float32"], max_new_tokens=4, progress=False)
    assert found.arrays["n_steps"][0] == 2
    np.testing.assert_array_equal(found.values("float32")[0, :2], plain.values("float32")[0, :2])
    assert np.isnan(found.values("float32")[0, 2:]).all()


def test_finished_prompts_are_kept(hf, tmp_path, monkeypatch):
    first = kd.falsify(hf, PROMPTS[:2], arms=["float32"], max_new_tokens=3, progress=False, store=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bfloat16", "float32"]
    monkeypatch.setattr("kvdrift.drift.lockstep.Lockstep.walk", None)  # nothing may run again
    again = kd.falsify(hf, PROMPTS[:2], arms=["float32"], max_new_tokens=3, progress=False, store=tmp_path)
    np.testing.assert_array_equal(again.arrays["kl"], first.arrays["kl"])


def test_eager_models_report_sdpa_as_not_run():
    found = kd.falsify(tiny("gemma2"), PROMPTS[2], arms=["sdpa-math", "eager"], max_new_tokens=3, progress=False)
    assert found.rung("sdpa-math").status == "not run"
    assert "cannot run attn='sdpa'" in found.rung("sdpa-math").reason
    assert found.twins.get("eager") == "float32"


def test_unknown_arms_are_refused(hf):
    with pytest.raises(InputError, match=r"arms=\['float8'\]: choose from float64, float32"):
        kd.falsify(hf, PROMPTS[0], arms=["float8"], progress=False)
    with pytest.raises(InputError, match="choose from"):
        kd.falsify(hf, PROMPTS[0], arms=[], progress=False)


def test_weights_changed_counts_rounded_entries():
    hf = tiny("llama")
    with torch.no_grad():
        for weight in hf.parameters():
            weight.fill_(0.5)
        hf.lm_head.weight[:2] = 1 + 2**-20
    base = kd.load(hf, quiet=True)
    narrow = kd.load(cast_copy(hf, torch.bfloat16), quiet=True)
    total = sum(weight.numel() for weight in hf.parameters())
    assert weights_changed(base, narrow) == pytest.approx(2 * 256 / total)
    assert weights_changed(base, base) == 0


@pytest.mark.real
def test_the_ladder_of_a_real_model():
    model = kd.load("smollm2-135m", quiet=True)
    prompts = list(DEMO_PROMPTS[:2])  # over texts as short as a sentence bfloat16 may not drift at all
    found = kd.falsify(model, prompts, arms=["float32", "fixed-shape"], max_new_tokens=10, progress=False)
    assert found.identical("fixed-shape") == 1
    assert found.mean("bfloat16").value > 1e5 * found.mean("float32").value > 0
    assert 0.1 < found.ratios().set_index("arm").loc["float32", "over_drift"] < 10
