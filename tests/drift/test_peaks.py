"""Where a drift is largest: hand-made maxima, and faults planted in a layer of real (tiny) models."""

import numpy as np
import pytest
from drift.made import make, said

import kvdrift as kd
from kvdrift.drift import peaks
from kvdrift.report import write_report


def test_the_largest_kl_is_placed_by_prompt_step_and_token():
    drift = make()
    drift.arrays["drift/logits/kl"][1, 2] = 3.0
    drift.arrays["fed"][1, 2] = 2
    values = drift.to_dict()
    assert values["kl_max"] == 3.0
    assert values["kl_max_at"] == {"prompt": 1, "step": 2, "token": 2, "text": "two"}
    assert "at most 3 (step 2 of prompt 1)" in said(drift, "nats of KL on average")


def test_a_peak_is_never_at_step_zero_or_where_nothing_was_measured():
    drift = make()
    drift.arrays["measured"][1, 2:] = False
    drift.arrays["drift/logits/kl"][1, 2:] = 77.0
    assert peaks.logit_peak(drift, "kl").value == 0.5
    drift.arrays["measured"][:, 1:] = False
    assert peaks.logit_peak(drift, "kl") is None
    assert drift.to_dict()["kl_max_at"] is None


def test_steps_that_were_passed_over_keep_their_numbers():
    drift = make(steps=3)
    drift.arrays["steps"] = np.array([0, 4, 8])
    drift.arrays["fed"] = np.tile(np.arange(9), (2, 1))
    drift.arrays["drift/logits/kl"][0, 2] = 3.0
    peak = peaks.logit_peak(drift, "kl")
    assert (peak.prompt, peak.step, peak.token) == (0, 8, 8)


def test_a_measured_nan_is_the_largest():
    drift = make()
    drift.arrays["drift/logits/kl"][0, 3] = np.nan
    assert drift.to_dict()["kl_max"] == "nan"
    assert drift.to_dict()["kl_max_at"]["step"] == 3


def test_the_widest_flip_is_placed():
    drift = make(flips=[(0, 2), (1, 3)])
    drift.arrays["drift/logits/margin_a"][1, 3] = 4.0
    assert drift.to_dict()["flip_margin_max_at"] == {"prompt": 1, "step": 3, "token_a": 1, "token_b": 2}


def test_kv_peaks_are_those_of_the_table(tiny_model):
    drift = kd.compare(tiny_model("mistral"), [[1, 2, 3], [4, 5]], max_new_tokens=6, floor=0, progress=False)
    table = drift.to_dataframe("positions").query("step >= 1")
    for site, found in drift.to_dict()["kv_max"].items():
        row = table.loc[table.query(f"site == '{site}'").rel_l2.idxmax()]
        assert found["rel_l2"] == pytest.approx(row.rel_l2)
        where = (row.prompt, row.step, row.layer, row["head"], row.position)
        assert tuple(found[name] for name in ("prompt", "step", "layer", "head", "position")) == where


# --- the layer that makes most by itself


def scaled_at_one_row(module):
    """A module that is 2 % off where it reads one token: at decode, never in a prefill."""

    def hook(_module, _arguments, output):
        first = output[0] if isinstance(output, tuple) else output
        if first.shape[1] > 1:
            return output
        return (first * 1.02, *output[1:]) if isinstance(output, tuple) else first * 1.02

    module.register_forward_hook(hook)


@pytest.mark.parametrize(
    ("family", "place", "module"),
    [
        ("llama", "model.layers.2.mlp", "mlp"),
        ("gpt2", "transformer.h.1.attn", "attn"),
        ("mixtral", "model.layers.3.self_attn", "attn"),
        ("gpt-neox", "gpt_neox.layers.2.mlp", None),  # attention and MLP are added in one sum
    ],
)
def test_a_planted_fault_is_named_beside_the_first_layer_that_rounds(family, place, module, tmp_path):
    hf = kd.models.tiny(family)
    scaled_at_one_row(hf.get_submodule(place))
    layer = int(next(part for part in place.split(".") if part.isdigit()))
    drift = kd.compare(hf, [1, 2, 3, 4, 5], max_new_tokens=3, floor=1, progress=False)
    peak, values = peaks.local_peak(drift), drift.to_dict()
    assert (peak.layer, peak.module) == (layer, module)
    assert peak.ratio > 1000
    assert values["onset_layer"] == 0  # without a threshold: any bit of rounding
    assert values["local_peak"]["layer"] == layer
    assert values["onset_local"]["ratio"] < 10
    assert peak.ratio == pytest.approx(peak.rel_l2 / peak.floor)
    words = {"attn": ", in its attention", "mlp": ", in its MLP", None: ""}[module]
    sentence = said(drift, "Drift starts in layer 0")
    assert f"layer {layer} makes most drift by itself{words}: " in sentence
    assert "; layer 0 makes " in sentence
    assert f"layer {layer} makes most drift by itself" in drift._repr_html_()
    assert f"layer {layer}" in kd.views.growth(drift).layout.title.text.replace("<br>", "").replace("</b><b>", " ")
    report = write_report(tmp_path / "r.html", drift).read_text(encoding="utf-8")
    assert f"layer {layer} makes most for its floor" in report


def test_rounding_alone_gives_a_ratio_near_one_and_no_room_in_a_title(tiny_model):
    drift = kd.compare(tiny_model("llama"), [1, 2, 3, 4, 5], max_new_tokens=4, floor=2, progress=False)
    assert 0.5 < peaks.local_peak(drift).ratio < 2
    assert "its own floor" not in kd.views.growth(drift).layout.title.text


def test_one_bit_over_a_floor_of_zero_hides_no_fault():
    drift = make(local=(1e-8, 1e-8, 1e-2, 0.0))
    drift.arrays["local_floor/resid_post/rel_l2"] = np.broadcast_to(
        np.array([0.0, 1e-8, 1e-8, 1e-8]), (2, *drift.arrays["local/resid_post/rel_l2"].shape)
    )
    assert peaks.local_peak(drift).layer == 2
    assert peaks.local_at(drift, 0).ratio == np.inf
    assert drift.to_dict()["onset_local"]["ratio"] == "inf"
    assert "layer 0 makes 1e-8 (relative L2) over a floor of zero" in said(drift, "Drift starts in layer 0")


def test_without_floors_the_largest_local_drift_is_named_as_such():
    drift = make(local=(1e-7, 0.0, 1e-2, 1e-7))
    found = peaks.local_peak(drift)
    assert (found.layer, found.module, found.floor, found.ratio) == (2, None, None, None)
    assert "Without a floor to hold it against, layer 2 makes most" in said(drift, "Drift starts in layer 0")


def test_no_local_drift_no_peak():
    assert peaks.local_peak(make()) is None
    assert peaks.local_peak(make(local=(0.0, 0.0, 0.0, 0.0))) is None
    assert peaks.local_at(make(), 0) is None
