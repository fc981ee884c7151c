import math

import pytest
import torch

import kvdrift as kd
from kvdrift.report import load_result, write_report
from kvdrift.report.paper_architecture_section import section
from kvdrift.words.numbers import number, percent


@pytest.fixture(scope="module")
def found(tiny_model):
    model = tiny_model("gemma3", torch.float32)
    return kd.experiments.paper_architecture(model, [[1, 2, 3], [4, 5, 6]], max_new_tokens=3, progress=False)


def test_a_page_about_the_experiment(found, tmp_path):
    text = write_report(tmp_path / "a.html", found).read_text(encoding="utf-8")
    assert "The architecture experiment of tiny-gemma3 in float32" in text
    assert section(found, "x").heading == "tiny-gemma3 in float32: the paper's architecture experiment"
    assert 'id="result-1-architectures"' in text
    for sentence in found.reading():
        assert sentence.replace("'", "&#39;") in text
    assert "sign-flip test" in text, "the glossary"


def test_tables_are_those_of_the_result(found):
    arms, layers, prompts = section(found, "x").tables
    for row, (_, truth) in zip(arms.rows, found.to_dataframe().iterrows(), strict=True):
        assert row[:3] == [truth["arm"], truth["grouping"], truth["windows"]]
        assert row[4] == number(truth["first"])
        assert row[9] == percent(truth["first_share"])
        assert row[-1] == ("" if truth["arm"] == "original" else "yes" if truth["same_numbers"] else "no")
        assert row[7] == ("" if truth["arm"] == "original" else "none")
        assert math.isnan(truth["first_change_low"])
    for row, (_, truth) in zip(layers.rows, found.to_dataframe("layers").iterrows(), strict=True):
        assert row[2:4] == [str(truth["layer"]), number(truth["value"])]
    assert len(prompts.rows) == 2
    assert all(len(row) == len(table.columns) for table in (arms, layers, prompts) for row in table.rows)


def test_tiles_say_what_the_first_layer_holds(found):
    tiles = {tile.label: tile for tile in section(found, "x").tiles}
    table = found.to_dataframe()
    for arm in found.arms:
        row = table[(table["arm"] == arm) & (table["of"] == "drift")].iloc[0]
        assert tiles[f"first layer, {arm}"].value == percent(row["first_share"])
    assert "every number as in the original" in tiles["first layer, windows widened"].detail
    assert tiles["prompts"].detail.startswith("fewer than 5")


def test_a_saved_folder_is_recognised(found, tmp_path):
    again = load_result(found.save(tmp_path / "folder"))
    assert again.to_dict() == found.to_dict()
