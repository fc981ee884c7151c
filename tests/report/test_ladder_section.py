from kvdrift.report import write_report
from kvdrift.report.ladder_section import section
from kvdrift.words.numbers import number


def test_a_page_about_a_ladder(made_ladder, tmp_path):
    result = made_ladder.ladder()
    text = write_report(tmp_path / "l.html", result).read_text(encoding="utf-8")
    assert "The precision ladder of tiny-llama in bfloat16" in text
    assert 'id="result-1-ladder"' in text
    for sentence in result.reading():
        assert sentence.split("<")[0][:60].replace("'", "&#39;") in text
    assert "<u>note</u>" not in text
    assert "&lt;u&gt;note" in text
    assert "prompt <i>" not in text
    assert "predicted by drift²" in text, "the glossary"


def test_tables_are_those_of_the_result(made_ladder):
    result = made_ladder.ladder()
    arms, ratios, prompts = section(result, "x").tables
    table, measured = result.to_dataframe().set_index("arm"), result.ratios().set_index("arm")
    assert [row[0] for row in arms.rows] == list(table.index)
    for row in arms.rows:
        if table.loc[row[0], "status"] == "ran":
            assert row[2] == number(table.loc[row[0], "kl"])
            assert row[8] == str(table.loc[row[0], "flips"])
        else:
            assert row[2] == ""
            assert row[-1] == made_ladder.REASON
    for row in ratios.rows:
        assert row[1] == number(measured.loc[row[0], "kl"])
        assert row[3] == number(measured.loc[row[0], "drift_squared"])
    assert len(prompts.rows) == len(result.prompts)
    assert all(len(row) == len(table.columns) for table in (arms, ratios, prompts) for row in table.rows)


def test_tiles_warn_where_fixed_shape_is_not_exact(made_ladder):
    for level, tone in ((0.0, ""), (1e-9, "warn")):
        tiles = section(made_ladder.ladder(levels={"fixed-shape": level}), "x").tiles
        assert [tile.tone for tile in tiles if tile.label == "fixed shape"] == [tone]


def test_a_ladder_of_one_prompt_and_one_step(made_ladder, tmp_path):
    write_report(tmp_path / "l.html", made_ladder.ladder(n_prompts=1, n_steps=1))
