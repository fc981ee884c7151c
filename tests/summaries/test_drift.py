"""Words and numbers about a hand-made drift, where every answer is known."""

import json
from dataclasses import replace

import numpy as np
import pytest
from drift.made import KINDS, info, make, said

from kvdrift.drift import findings
from kvdrift.summaries import drift as summary

# --- numbers


def test_statistics_leave_out_step_zero():
    values = summary.as_dict(make())
    assert values["kl_mean"] == values["kl_max"] == 0.5
    assert values["kl_float32_head_mean"] == 0.25
    assert [row["rel_l2_median"] for row in values["layers"]] == [1e-3, 1e-2, 1e-2, 1e-2]
    assert [row["kind"] for row in values["layers"]] == list(KINDS)
    assert values["steps"] == 8
    assert values["prompts"] == 2


def test_layer_medians_are_over_prompts_of_medians_over_steps():
    drift = make(prompts=3, steps=5)
    rng = np.random.default_rng(0)
    cells = rng.random((3, 5, 4))
    drift.arrays["drift/resid_post/rel_l2"] = cells
    expected = np.median(np.median(cells[:, 1:], axis=1), axis=0)
    got = [row["rel_l2_median"] for row in summary.as_dict(drift)["layers"]]
    np.testing.assert_array_equal(got, expected)


def test_floor_median_is_over_seeds_steps_and_prompts():
    drift = make(over_floor=(0.5, 0.5))
    assert [row["floor_median"] for row in summary.as_dict(drift)["layers"]] == [2e-3, 2e-2, 2e-2, 2e-2]
    assert summary.as_dict(make())["layers"][0]["floor_median"] is None


def test_steps_that_were_not_measured_do_not_count():
    drift = make()
    drift.arrays["measured"][1, 2:] = False
    drift.arrays["drift/logits/kl"][1, 2:] = np.nan
    drift.arrays["top1_b"][1, 3] = 5  # beyond the end of this prompt: no flip
    values = summary.as_dict(drift)
    assert values["kl_mean"] == 0.5
    assert values["steps"] == 6
    assert values["flips"] == 0


def test_flips_margins_ties_and_free_divergence():
    values = summary.as_dict(make(flips=[(0, 2), (0, 3)]))
    assert values["flips"] == values["exact_ties"] == 2
    assert values["flip_margin_max"] == 0.125
    assert values["free_divergence"] == [2, None]
    found = findings.flips(make(flips=[(1, 3)]))
    assert found == (findings.Flip(prompt=1, step=3, token_a=1, token_b=2, margin=0.125, tie=True),)


def test_a_flip_at_step_zero_counts():
    values = summary.as_dict(make(flips=[(1, 0)]))
    assert values["flips"] == 1
    assert values["free_divergence"] == [None, 0]


def test_control_has_the_same_keys():
    drift = replace(make(), control=make(dtype="float32"))
    values = summary.as_dict(drift)
    assert values["control"]["dtype"] == "float32"
    assert set(values["control"]) == set(values)
    assert values["control"]["control"] is None
    assert summary.as_dict(make())["control"] is None


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_json_has_no_literal_that_json_lacks(bad):
    drift = make()
    drift.arrays["drift/logits/kl"][0, 1] = bad
    drift.arrays["drift/resid_post/rel_l2"][:, :, 3] = np.inf
    values = summary.as_dict(drift)
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert values["kl_mean"] == str(bad)
    assert values["layers"][3]["rel_l2_median"] == "inf"


def test_without_resid_post_there_are_nulls_not_errors():
    drift = make()
    del drift.arrays["drift/resid_post/rel_l2"], drift.arrays["layers/resid_post"]
    values = summary.as_dict(drift)
    assert (values["layers"], values["growth"], values["onset_layer"]) == (None, None, None)
    assert "resid_post was not among the sites" in said(drift, "How drift grows")
    assert "not measured" in said(drift, "Where drift starts")


def test_only_step_zero_measured():
    drift = make(steps=1)
    values = summary.as_dict(drift)
    assert values["kl_mean"] is None
    assert values["layers"][0]["rel_l2_median"] is None
    assert said(drift, "No step after step 0, the prefill, was measured")
    assert "99 nats at most. No flip in 2 steps" in said(drift, "At step 0")
    json.dumps(values, allow_nan=False)


# --- words


def test_start_names_layer_and_module():
    drift = make(local=(0.0, 0.0, 1e-3, 0.0))
    drift.arrays["local/attn_out/rel_l2"] = np.zeros((2, 4, 4))
    drift.arrays["local/mlp_out/rel_l2"] = drift.arrays["local/resid_post/rel_l2"]
    assert said(drift, "Drift starts in layer 2, in its MLP")
    assert summary.as_dict(drift)["onset_layer"] == 2


def test_a_source_that_rounds_away_is_told_beside_the_layer_where_it_shows():
    drift = make(level=(0.0, 0.0, 1e-2, 1e-2), local=(0.0, 0.0, 1e-3, 0.0))
    drift.arrays["local/attn_out/rel_l2"] = np.broadcast_to([1e-3, 0.0, 0.0, 0.0], (2, 4, 4)).copy()
    sentence = said(drift, "Drift starts in layer 0, in its attention")
    assert "In the residual stream it shows from layer 2 on" in sentence
    drift.arrays["drift/resid_post/rel_l2"][1, 2, 0] = 1e-3  # one cell is enough to show
    assert "shows from" not in said(drift, "Drift starts in layer 0, in its attention")
    del drift.arrays["drift/resid_post/rel_l2"], drift.arrays["layers/resid_post"]
    assert findings.shows_from(drift) is None


def test_start_without_local_drift_says_so():
    sentence = said(make(level=(0.0, 1e-2, 1e-2, 1e-2)), "Where drift starts was not measured")
    assert sentence.endswith("layer 1.")  # layer 0 differs at step 0 only


def test_no_local_drift_anywhere_points_elsewhere_only_if_something_differs():
    drift = make(local=(0.0,) * 4)
    assert "by another way" in said(drift, "No layer makes drift by itself")
    drift.arrays["drift/logits/logit_max"][:] = 0.0
    assert "by another way" not in said(drift, "No layer makes drift by itself")


def test_no_floor_is_said_and_no_verdict_is_given():
    reading = " ".join(summary.reading(make()))
    assert "there is no rounding floor" in reading
    assert said(make(level=(0.0,) * 4), "there is no rounding floor")
    for claim in ("It stands above", "It stays below", "not distinguishable"):
        assert claim not in reading


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ((2.0, 3.0), "It stands above the rounding floor"),
        ((0.3, 0.5), "It stays below the rounding floor"),
        ((0.7, 1.5), "It is not distinguishable from the rounding floor"),
    ],
)
def test_floor_verdict_follows_the_interval(ratios, verdict):
    drift = make(prompts=8, over_floor=ratios)
    assert "over 8 prompts" in said(drift, verdict)


def test_one_prompt_gives_no_interval():
    sentence = said(make(prompts=1, over_floor=(5.0, 5.0)), "the rounding floor")
    assert "5×" in sentence
    assert "one prompt gives no interval" in sentence
    assert "stands above" not in sentence


def test_few_prompts_get_no_verdict():
    sentence = said(make(prompts=4, over_floor=(2.0, 3.0)), "the rounding floor")
    assert "5 prompts are needed to call it above or below" in sentence
    assert "stands above" not in sentence


@pytest.mark.parametrize(("prompts", "bound"), [(1, "95 %"), (20, "14 %")])
def test_no_flip_gives_the_exact_bound(prompts, bound):
    sentence = said(make(prompts=prompts), "No flip")
    assert f"up to {bound} of such prompts" in sentence
    assert ("says little" in sentence) == (prompts < 5)


def test_flip_sentence():
    sentence = said(make(flips=[(0, 2), (1, 3)]), "2 flips in 8 steps, in 2 of 2 prompts")
    assert "at most 0.125 apart" in sentence
    assert "2 exact ties" in sentence


def test_free_running_is_limited_to_the_paths_own_tokens():
    drift = make()
    drift.arrays["fed"][0, 1] = 7  # not what path a would have chosen
    assert "not path a's own choice" in said(drift, "Left to themselves")
    assert "not path a's own choice" not in said(make(), "Left to themselves")


def test_steps_between_the_measured_ones_are_admitted():
    drift = make()
    drift.arrays["steps"] = np.arange(4) * 5
    drift.arrays["fed"] = np.ones((2, 16), dtype=np.int64)
    assert "were not looked at" in said(drift, "Left to themselves")


def test_bit_identical_is_claimed_only_where_every_cell_is():
    drift = make(level=(0.0,) * 4)
    assert said(drift, "bit-identical after every layer at every step")
    drift.arrays["drift/resid_post/rel_l2"][0, 1, 3] = 1e-3
    sentence = said(drift, "At most steps the residual stream is bit-identical")
    assert "17 % of 6 steps" in sentence


def test_control_sentence():
    control = make(dtype="float32")
    control.arrays["drift/logits/kl"][:] = 5e-9
    sentence = said(replace(make(), control=control), "In float32, on the same tokens")
    assert "1e8× smaller" in sentence
    assert "no flip" in sentence


def test_html_and_text_hold_the_same_and_html_is_escaped():
    drift = make()
    bad = "<script>alert(1)</script>"
    drift = replace(drift, a=info(bad), notes=(f"A note {bad}.",))
    assert bad not in summary.html(drift)
    assert "&lt;script&gt;" in summary.html(drift)
    assert f"A note {bad}." in summary.summary(drift)
    flat = " ".join(summary.summary(drift).split())
    for sentence in summary.reading(drift):
        assert sentence in flat


def test_a_folder_is_named_without_its_parents(tmp_path):
    drift = replace(
        make(), a=info("cache-ON", model=str(tmp_path / "mine")), b=info("cache-OFF", model=str(tmp_path / "mine"))
    )
    assert str(tmp_path) not in summary.summary(drift)
    assert "mine" in summary.headline(drift)
