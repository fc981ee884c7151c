from dataclasses import replace

import pytest

from kvdrift.report import load_result, write_report
from kvdrift.report.evaluation_section import MAX_ITEMS, item_table, section


@pytest.fixture(scope="module")
def found(made_evaluation):
    return made_evaluation.evaluation()


def test_a_page_about_an_evaluation(found, tmp_path):
    text = write_report(tmp_path / "e.html", found).read_text(encoding="utf-8")
    assert "Answers and texts of made-up-135m in bfloat16" in text
    for view in ("accuracy", "agreement", "answers"):
        assert f'id="result-1-{view}"' in text
    for sentence in found.reading():
        assert sentence[:60].replace("'", "&#39;").replace('"', "&#34;") in text
    assert "<u>questions" not in text
    assert "<u>markup" not in text
    assert "McNemar&#39;s test" in text, "the glossary"
    assert "kvdrift evaluate made-up" in text


def test_a_saved_evaluation_is_found_by_its_header(found, tmp_path):
    loaded = load_result(found.save(tmp_path / "e.safetensors"))
    assert loaded == found
    assert write_report(tmp_path / "e.html", loaded).is_file()


def test_tables_are_those_of_the_result(found):
    direction, rate, items = section(found, "x").tables
    table = found.to_dataframe()
    for row, rates, (_, known) in zip(direction.rows, rate.rows, table.iterrows(), strict=True):
        assert row[0] == rates[0] == known["strategy"]
        assert row[1] == f"{round(20 * known['accuracy_a'])} of 20 ({100 * known['accuracy_a']:.0f} %)"
        assert row[5] == f"{known['only_a']} : {known['only_b']}"
        assert row[12] == f"{known['invalid_a']} : {known['invalid_b']}"
        assert "cannot tell" in row[8]
        assert rates[3] == f"{100 * known['divergence']:.0f} %"
    assert all(len(row) == len(table.columns) for table in (direction, rate, items) for row in table.rows)
    trials = found.to_dataframe("trials")
    for row in items.rows:
        steps = trials[(trials.item == row[0]) & (trials.arm == "b")].divergence.dropna()
        assert row[4] == f"{len(steps)} of 3"
        assert row[5] == (str(int(steps.min()) + 1) if len(steps) else "none")


def test_without_answers_and_null(made_evaluation, tmp_path):
    found = made_evaluation.evaluation(answers=False, gold=False, replicates=0, parting=0.0, n_items=2)
    made = section(found, "x")
    assert made.tables[0].rows == []
    assert "No answers were scored" in made.tables[0].caption
    assert [tile.label for tile in made.tiles] == ["items", "texts that part"]
    assert write_report(tmp_path / "e.html", found).is_file()


def test_a_direction_that_stands_out_is_marked(made_evaluation):
    found = made_evaluation.evaluation(n_items=40, lost=0.9, flipping=0.02, null_parting=0.2)
    tones = {tile.label: tile.tone for tile in section(found, "x").tiles}
    assert tones["a direction in"] == "warn"
    assert tones["rates that stand out"] == "warn"


def test_no_item_has_run(found):
    made = section(replace(found, records=()), "x")
    assert [tile.value for tile in made.tiles] == ["0"]
    assert len(made.missing) == 3


def test_only_so_many_items_are_listed(found):
    many = replace(found, records=tuple(replace(found.records[0], item=str(n)) for n in range(MAX_ITEMS + 1)))
    items = item_table(many)
    assert len(items.rows) == MAX_ITEMS
    assert f"The first {MAX_ITEMS} of {MAX_ITEMS + 1} items" in items.caption
