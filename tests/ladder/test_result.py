import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import kvdrift as kd
from kvdrift.errors import FileError, InputError
from kvdrift.ladder.result import METRICS


@pytest.fixture(scope="module")
def found(made_ladder):
    return made_ladder.ladder()


def cells(ladder, arm, metric):
    """Values at the counted steps, one list per prompt, gathered by hand."""
    place = [rung.name for rung in ladder.rungs].index(arm)
    return [
        [float(x) for x in ladder.arrays[metric][place, prompt, 1:n]]
        for prompt, n in enumerate(ladder.arrays["n_steps"])
    ]


@pytest.mark.parametrize("arm", ["bfloat16", "float16", "float64", "fixed-shape"])
def test_the_table_against_sums_by_hand(found, arm):
    row = found.to_dataframe().set_index("arm").loc[arm]
    kl = [sum(x) / len(x) for x in cells(found, arm, "kl") if x]
    assert row["kl"] == pytest.approx(sum(kl) / len(kl), rel=1e-14)
    assert row["kl_se"] == pytest.approx(pd.Series(kl).sem(), rel=1e-12)
    assert row["kl_median"] == pytest.approx(sorted(kl)[len(kl) // 2 - 1] / 2 + sorted(kl)[len(kl) // 2] / 2)
    squares = [sum(d * d for d in x) / len(x) for x in cells(found, arm, "drift")]
    assert row["drift"] == pytest.approx(math.sqrt(sum(squares) / len(squares)), rel=1e-14)
    for event in ("flip", "tie"):
        steps = cells(found, arm, event)
        assert row[f"{event}s"] == sum(map(sum, steps))
        assert row[f"{event}_prompts"] == sum(any(x) for x in steps)
    assert row["n"] == len(kl)
    assert row["identical"] == np.mean([x == 0 for row in cells(found, arm, "logit_max") for x in row])


def test_step_0_does_not_count(found):
    arrays = {name: x.copy() for name, x in found.arrays.items()}
    for metric in METRICS:
        arrays[metric][:, :, 0] = 1e9
    again = replace(found, arrays=arrays)
    pd.testing.assert_frame_equal(
        again.to_dataframe().drop(columns="first_flips"), found.to_dataframe().drop(columns="first_flips")
    )


@pytest.mark.parametrize("reference", [None, "float16"])
def test_ratios_against_the_table(found, reference):
    name = reference or "bfloat16"
    table, ratios = found.to_dataframe().set_index("arm"), found.ratios(reference).set_index("arm")
    u = {"float64": 2**-53, "float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8}
    assert set(ratios["reference"]) == {name}
    assert "sdpa-cudnn" not in ratios.index
    for arm, row in ratios.iterrows():
        assert row["kl"] == pytest.approx(table.loc[arm, "kl"] / table.loc[name, "kl"])
        assert row["drift_squared"] == pytest.approx((table.loc[arm, "drift"] / table.loc[name, "drift"]) ** 2)
        law = (u[table.loc[arm, "stored"]] / u[name]) ** 2
        assert row["roundoff_squared"] == law
        assert row["over_roundoff"] == pytest.approx(row["kl"] / law)
        if row["kl"] > 0:
            assert row["over_drift"] == pytest.approx(row["kl"] / row["drift_squared"])
    assert ratios.loc["layercast", "roundoff_squared"] == ratios.loc["float32", "roundoff_squared"]


def test_drift_is_made_so_that_the_law_holds(found):
    """The fixture's drift is the root of its KL: measured over predicted is 1, with an interval of no width."""
    rows = found.ratios()
    rows = rows[rows["kl"] > 0]
    for name in ("over_drift", "over_drift_low", "over_drift_high"):
        np.testing.assert_allclose(rows[name], 1)


def test_a_reference_must_have_run(found):
    with pytest.raises(InputError, match="did not run"):
        found.ratios("sdpa-cudnn")
    with pytest.raises(InputError, match="no arm 'float8'"):
        found.ratios("float8")
    with pytest.raises(InputError, match="no metric 'kll'"):
        found.values("float32", "kll")


def test_arms_without_numbers_have_none(found):
    row = found.to_dataframe().set_index("arm").loc["sdpa-efficient"]
    assert row["status"] == "not run"
    assert "no</b> kernel" in row["reason"]
    assert all(math.isnan(row[name]) for name in ("kl", "kl_se", "logit_l2", "drift", "flip_bound", "identical"))
    assert row["flips"] == 0
    assert row["n"] == 0


def test_twins_are_arms_with_the_same_numbers(found):
    assert found.twins == {"layercast": "float32", "sdpa-flash": "bfloat16"}
    arrays = {name: x.copy() for name, x in found.arrays.items()}
    arrays["logit_l2"][found.names.index("layercast"), 0, 1] *= 1 + 1e-15
    assert replace(found, arrays=arrays).twins == {"sdpa-flash": "bfloat16"}


def test_first_flips(found):
    arrays = {name: x.copy() for name, x in found.arrays.items()}
    place = found.names.index("float32")
    arrays["flip"][place, 1, 3:5] = 1
    assert replace(found, arrays=arrays).first_flips("float32") == (None, 3, None, None, None, None)


def test_a_saved_ladder_is_the_same(found, tmp_path):
    again = kd.Ladder.load(found.save(tmp_path / "l.safetensors"))
    assert {**again.__dict__, "arrays": None, "twins": None} == {**found.__dict__, "arrays": None, "twins": None}
    for name, values in found.arrays.items():
        assert again.arrays[name].dtype == values.dtype
        np.testing.assert_array_equal(again.arrays[name], values)
    assert again.summary() == found.summary()


def test_other_files_are_refused(found, tmp_path):
    path = found.save(tmp_path / "l.safetensors")
    content = path.read_bytes()
    path.write_bytes(content[:-9])
    with pytest.raises(FileError, match="not a whole kvdrift file"):
        kd.Ladder.load(path)
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(FileError, match="changed after it was saved"):
        kd.Ladder.load(path)
    path.write_bytes(content)
    with pytest.raises(FileError, match="holds a ladder"):
        kd.Drift.load(path)


def test_plain_data_is_json(found):
    plain = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    arms = {row["arm"]: row for row in plain["arms"]}
    assert arms["float32"]["kl"] == found.mean("float32").value
    assert arms["sdpa-cudnn"]["kl"] is None
    assert {row["arm"] for row in plain["ratios"]} == {rung.name for rung in found.rungs if rung.ran}
    assert plain["reading"] == found.reading()


def test_one_prompt_and_one_step(made_ladder):
    lonely = made_ladder.ladder(n_prompts=1, n_steps=1)
    assert lonely.reading() == ["No step after step 0, the prefill, was measured: ask for more new tokens."]
    assert math.isnan(lonely.mean("float32").value)
    json.dumps(lonely.to_dict(), allow_nan=False)
    assert "No step after step 0" in repr(lonely)
