"""The paper's patching experiment: its table is what single patches give, its words are what the numbers carry."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import kvdrift as kd
from kvdrift.errors import FileError, InputError
from kvdrift.experiments.paper_patching import CONDITIONS, PaperPatching

PROMPTS = [list(range(3, 17)), list(range(40, 58))]  # long enough for native drift in bfloat16
SETTINGS = {"max_new_tokens": 6, "placebos": 2, "progress": False}


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama", torch.bfloat16)


@pytest.fixture(scope="module")
def found(model):
    return kd.experiments.paper_patching(model, PROMPTS, step=2, **SETTINGS)


def test_every_condition_schedule_and_direction_is_a_row(found):
    table = found.to_dataframe()
    keys = list(zip(table["direction"], table["schedule"], table["condition"], strict=True))
    assert len(set(keys)) == len(keys)
    for direction in ("ON ← OFF", "OFF ← ON"):
        for schedule in ("one-shot", "persistent"):
            for condition in (*CONDITIONS, "placebo (KV noise)", "re-roll, no patch", "no patch", "KV, re-rolled sums"):
                assert (direction, schedule, condition) in keys


@pytest.mark.parametrize("recipient", [kd.CacheOn(), kd.CacheOff()], ids=["on", "off"])
@pytest.mark.parametrize("schedule", ["one_shot(2)", "persistent"])
@pytest.mark.parametrize("condition", ["KV", "residual + KV"])
def test_a_row_is_what_a_single_patch_gives(recipient, schedule, condition, model, found):
    patches = [kd.Patch(site, schedule=schedule) for site in CONDITIONS[condition]]
    alone = kd.patch(model, PROMPTS, patches, recipient=recipient, trajectories=False, **SETTINGS)
    table = found.to_dataframe()
    row = table[
        (table["direction"] == ("ON ← OFF" if isinstance(recipient, kd.CacheOn) else "OFF ← ON"))
        & (table["schedule"] == ("persistent" if schedule == "persistent" else "one-shot"))
        & (table["condition"] == condition)
    ].iloc[0]
    expected = alone.recovery()
    assert row["recovery"] == pytest.approx(expected.value, nan_ok=True, rel=1e-12)
    assert row["recovery_se"] == pytest.approx(expected.standard_error, nan_ok=True, rel=1e-12)
    assert row["logit_l2"] == pytest.approx(alone.distance("patched").mean(), rel=1e-12)
    assert row["restored"] == alone.restored()
    assert row["trivial"] == (condition != "KV" and schedule == "persistent")


def test_a_one_shot_into_cache_off_leaves_nothing_and_the_reading_says_so(found):
    off = found.off_from_on
    for cell, made in enumerate(off.cells):
        if made.label.endswith("one-shot"):
            assert (off.values("unchanged", "patched", cell)[0][off.counted(cell)] == 1).all()
    assert any(line.startswith("OFF ← ON: no bit of a one-shot patch is left") for line in found.reading())
    assert all(line.startswith(("ON ← OFF: ", "OFF ← ON: ")) for line in found.reading())


def test_a_placebo_against_itself_recovers_exactly_nothing(found):
    table = found.to_dataframe()
    placebos = table[table["condition"] == "placebo (KV noise)"]
    assert (placebos["recovery"] == 0).all()


def test_one_direction_alone(model, tmp_path):
    alone = kd.experiments.paper_patching(model, PROMPTS[0], directions=["on_from_off"], **SETTINGS)
    assert alone.off_from_on is None
    assert set(alone.to_dataframe()["direction"]) == {"ON ← OFF"}
    loaded = PaperPatching.load(alone.save(tmp_path / "saved"))
    assert loaded.off_from_on is None
    assert loaded.reading() == alone.reading()
    for name, array in alone.on_from_off.arrays.items():
        assert np.array_equal(array, loaded.on_from_off.arrays[name], equal_nan=array.dtype.kind == "f"), name


def test_an_interrupted_experiment_goes_on_from_its_results(model, found, tmp_path, monkeypatch):
    first = kd.experiments.paper_patching(model, PROMPTS, step=2, store=tmp_path, **SETTINGS)

    def never(*_, **__):
        raise AssertionError("a finished cell ran again")

    monkeypatch.setattr("kvdrift.patching.cells.one_prompt", never)
    again = kd.experiments.paper_patching(model, PROMPTS, step=2, store=tmp_path, **SETTINGS)
    for name, array in found.off_from_on.arrays.items():
        for other in (first, again):
            assert np.array_equal(array, other.off_from_on.arrays[name], equal_nan=array.dtype.kind == "f"), name


@pytest.mark.parametrize(
    ("options", "words"),
    [({"step": 0}, "step=0"), ({"step": 5}, "from 1 to 4"), ({"directions": ["both"]}, "on_from_off, off_from_on")],
)
def test_bad_arguments_are_one_sentence(options, words, model):
    with pytest.raises(InputError, match=words):
        kd.experiments.paper_patching(model, PROMPTS, **(SETTINGS | options))


def test_a_folder_without_the_experiment_is_refused(tmp_path):
    with pytest.raises(FileError, match="no saved patching experiment"):
        PaperPatching.load(tmp_path)


def test_a_one_shot_patch_that_wrote_nothing_is_named_and_not_judged(found):
    sweep = found.on_from_off
    labels = [cell.label for cell in sweep.cells]
    arrays = {name: array.copy() for name, array in sweep.arrays.items()}
    arrays["moved"] = np.where(np.isnan(arrays["moved"]), np.nan, 1.0)
    for name in ("KV", "V"):
        arrays["moved"][:, sweep.find("patched", labels.index(f"{name}, one-shot"))] *= 0.0
    kv, residual = (sweep.find("patched", labels.index(f"{name}, one-shot")) for name in ("KV", "residual"))
    arrays["unchanged"][:, kv], arrays["unchanged"][:, residual] = 1.0, 0.0
    silent = PaperPatching(on_from_off=replace(sweep, arrays=arrays)).reading()
    assert (
        "ON ← OFF: KV, V once: nothing was changed: at step 2 donor and recipient still held the same values there; "
        "patch a later step"
    ) in silent
    assert not any("paper" in line for line in silent)  # K/V were not tried
    arrays["moved"] = np.where(np.isnan(arrays["moved"]), np.nan, 1.0)
    tried = PaperPatching(on_from_off=replace(sweep, arrays=arrays)).reading()
    assert not any("nothing was changed" in line for line in tried)
    assert any("paper" in line for line in tried)
