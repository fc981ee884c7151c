import pytest

from kvdrift.experiments.paper_patching import CONDITIONS, SCHEDULES, PaperPatching
from kvdrift.patching.spec import Cell, Patch
from kvdrift.report import load_result, write_report
from kvdrift.report.packed import unpack
from kvdrift.report.paper_patching_section import section


@pytest.fixture(scope="module")
def result(made):
    schedules = {"one-shot": "one_shot(2)", "persistent": "persistent"}
    cells = tuple(
        Cell(f"{condition}, {name}", tuple(Patch(site, schedule=schedules[name]) for site in sites))
        for name in SCHEDULES
        for condition, sites in CONDITIONS.items()
    )
    remains = [1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.5, 0.9, 0.9, 0.0]
    sweeps = [
        made.sweep(cells, remains, over=(), controls=True, recipient=r, donor=d)
        for r, d in ((made.ON, made.OFF), (made.OFF, made.ON))
    ]
    return PaperPatching(*sweeps)


def test_both_directions_are_drawn_and_tabled(result, tmp_path):
    made = section(result, "x")
    assert [figure.id for figure in made.figures] == [
        f"x-{direction}-{view}"
        for direction in ("on_from_off", "off_from_on")
        for view in ("recovery", "recovery_curve")
    ]
    table = result.to_dataframe()
    rows = made.tables[0].rows
    assert len(rows) == len(table)
    for row, (_, expected) in zip(rows, table.iterrows(), strict=True):
        assert row[:3] == [expected.direction, expected.schedule, expected.condition]
        assert row[3] == f"{expected.recovery:.2f}".replace("-", "−")
    assert made.reading == result.reading()
    assert all(sentence.startswith(("ON ← OFF: ", "OFF ← ON: ")) for sentence in made.reading)
    assert "KV, persistent" in unpack(made.figures[1].packed)
    assert write_report(tmp_path / "r.html", result).is_file()


def test_tiles_are_recoveries_against_no_patch(result):
    made = {tile.label: tile for tile in section(result, "x").tiles}
    lasting = result.on_from_off.recovery(6, against="unpatched")
    assert made["K/V, persistently"].value == f"{lasting.value:.2f}"
    assert made["residual, once"].tone == "quiet"


def test_a_saved_folder_is_read(result, tmp_path):
    loaded = load_result(result.save(tmp_path / "paper"))
    assert isinstance(loaded, PaperPatching)
    assert loaded.off_from_on.cells == result.off_from_on.cells


def test_one_direction_alone_is_enough(result, tmp_path):
    alone = PaperPatching(off_from_on=result.off_from_on)
    made = section(alone, "x")
    assert [figure.id for figure in made.figures] == ["x-off_from_on-recovery", "x-off_from_on-recovery_curve"]
    assert all(row[0] == "OFF ← ON" for row in made.tables[0].rows)
    loaded = load_result(alone.save(tmp_path / "paper"))
    assert loaded.on_from_off is None
    assert loaded.reading() == alone.reading()
