"""The paper's drift experiment: a table over models that says what each drift says."""

import pytest
import torch

import kvdrift as kd
from kvdrift.errors import InputError

PROMPTS = [[5, 9, 100, 33, 7], [8, 250, 301, 12]]


@pytest.fixture(scope="module")
def found(tiny_model):
    models = {"grouped": tiny_model("llama", torch.float32), "windows": tiny_model("gemma3", torch.float32)}
    return kd.experiments.paper_drift(models, PROMPTS, max_new_tokens=4, progress=False)


def test_a_row_says_what_the_drift_says(found):
    table = found.to_dataframe()
    for (_, row), drift in zip(table.iterrows(), found.drifts, strict=True):
        growth = drift.growth()
        assert row["first_layer_share"] == growth.first_layer_share.value
        assert row["first_quarter_share"] == growth.first_quarter_share.value
        assert row["plateau_over_floor"] == growth.plateau_over_floor.value
        assert row["onset"] == drift.onset().source_layer
    assert list(table["grouping"]) == ["GQA 8:2", "GQA 8:2"]
    assert list(table["sliding_layers"]) == [0, sum(x.window is not None for x in found.drifts[1].architecture.layers)]


def test_the_reading_has_one_sentence_per_model(found):
    grouped, windows = found.reading()
    share = found.drifts[1].growth().first_layer_share.value
    assert ("it jumps at the first layer" in windows) == (share > 0.5)
    assert grouped.startswith("tiny-llama in float32 (GQA 8:2, 0 of 4 layers sliding)")


def test_a_model_without_drift_has_no_profile(tiny_model, monkeypatch):
    fixed = (kd.FixedShape(16),)
    drift = kd.compare(
        tiny_model("llama"), PROMPTS[0], max_new_tokens=3, progress=False, floor=0,
        a=kd.CacheOn(controls=fixed), b=kd.CacheOff(controls=fixed),
    )  # fmt: skip
    (sentence,) = kd.experiments.PaperDrift((drift,)).reading()
    assert sentence.endswith("no drift at the last layer, so there is no profile")


def test_no_model_is_refused():
    with pytest.raises(InputError, match="There is no model"):
        kd.experiments.paper_drift([], PROMPTS)
