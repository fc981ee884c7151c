import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from kvdrift import views
from kvdrift.report import glossary, kinds, write_report
from kvdrift.report.packed import unpack
from kvdrift.report.patching_section import best_cell, sweep_section
from kvdrift.words.numbers import number


class Text(HTMLParser):
    """What a reader sees, and what each script holds."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.words, self.scripts, self.ids, self._inside = [], {}, [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.ids.append((tag, dict(attrs).get("id"), dict(attrs).get("class")))
        if tag in ("script", "style"):
            self._inside = dict(attrs).get("id", tag)

    def handle_endtag(self, tag):
        if tag in ("script", "style"):
            self._inside = None

    def handle_data(self, data):
        if self._inside:
            self.scripts[self._inside] = self.scripts.get(self._inside, "") + data
        else:
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def results(made):
    cells = made.layer_cells(("resid_post", "kv"), range(6))
    return made.patch_result(), made.sweep(cells), made.factorial()


@pytest.fixture(scope="module")
def page(drift, results, tmp_path_factory):
    path = write_report(tmp_path_factory.mktemp("report") / "r.html", drift, *results)
    return Text(path.read_text(encoding="utf-8"))


def test_every_result_has_its_section(page):
    assert [name for tag, name, _ in page.ids if tag == "section"] == [f"result-{n}" for n in (1, 2, 3, 4)]
    for heading in ("patch, cache-ON ← cache-OFF", "sweep of 12 cells, cache-ON ← cache-OFF", "K/V state × kernel"):
        assert heading in page.text
    assert "Cache drift and patching of tiny-llama in bfloat16 and made-up-135m in bfloat16" in page.text


def test_figures_are_what_the_views_return(page, results):
    patch, sweep, factorial = results
    expected = {
        "result-2-recovery_curve": views.recovery_curve(patch),
        "result-2-recovery": views.recovery(patch),
        "result-2-trajectories": views.trajectories(patch),
        "result-3-recovery": views.recovery(sweep),
        "result-3-recovery_curve": views.recovery_curve(sweep, best_cell(sweep)),
        "result-4-factorial": views.factorial(factorial),
    }
    found = {name for name in page.scripts if re.match(r"result-[234]-.*-data", name)}
    assert found == {f"{name}-data" for name in expected}
    for name, figure in expected.items():
        figure.layout.template = None
        assert json.loads(unpack(page.scripts[f"{name}-data"])) == json.loads(figure.to_json())
    plots = [name for _, name, kind in page.ids if kind == "plot"]
    assert len(plots) == len(set(plots))


def test_readings_and_notes_are_there_once(page, results):
    for result in results:
        lines = result.summary().splitlines()
        for line in lines[1 : -len(result.notes)]:
            assert " ".join(line.split()) in page.text
    assert page.text.count("Two positions were evicted.") == 2  # one patch, one sweep: not in the reading as well
    assert "A note about <b>." in page.text


def test_tiles_hold_the_recovery_and_what_no_patch_scores(results):
    _, sweep, _ = results
    made = {tile.label: tile for tile in sweep_section(sweep, "x").tiles}
    best = sweep.best().iloc[0]
    assert made["best recovery"].value == f"{best.recovery:.2f}"
    assert f"{best.recovery_low:.2f} to {best.recovery_high:.2f}" in made["best recovery"].detail
    assert best.label in made["best recovery"].detail
    assert made["without a patch"].value == f"{sweep.recovery(int(best.cell), role='unpatched').value:.2f}"
    assert made["prompts"].value == "6"
    assert made["tokens followed"].value == f"{best.followed:.3g}"


def test_cells_table_is_the_dataframe(page, results):
    for result in results[:2]:
        for _, row in result.to_dataframe().iterrows():
            p = "none" if np.isnan(row.p_holm) else number(row.p_holm)
            interval = f"({row.recovery_low:.2f} to {row.recovery_high:.2f})"
            start = f"{row.cell} {row.label} {row.recovery:.2f} {interval}".replace("-", "−")
            written = f"{row.recovery_written:.2f}".replace("-", "−")
            written = "1 by construction" if row.trivial_written else written
            assert f"{start} {written} {p} " in page.text
            assert (
                f"{number(row.logit_l2)} {number(row.logit_l2_reference)} {number(row.logit_l2_unpatched)}" in page.text
            )
    assert page.text.count("1 by construction") >= 2  # the last layer's residual: in the table and in the glossary


def test_trivial_and_undefined_results_are_said(made):
    trivial = kinds.kind_of(made.patch_result("resid_post", 0.0)).section(made.patch_result("resid_post", 0.0), "x")
    tile = next(t for t in trivial.tiles if t.label == "recovery")
    assert (tile.value, tile.tone) == ("1 by construction", "warn")
    cells = made.layer_cells(("k",), range(2))
    nothing = sweep_section(made.sweep(cells, [float("nan")] * 2), "x")
    assert [t.value for t in nothing.tiles] == ["6", "undefined"]
    assert "undefined" in nothing.tables[0].rows[0]


def test_texts_that_were_not_kept_leave_a_sentence(made):
    result = made.patch_result(trajectories=False)
    section = kinds.kind_of(result).section(result, "x")
    assert [m.heading for m in section.missing] == ["The texts"]
    assert "trajectories=True" in section.missing[0].sentence


def test_factorial_table_is_the_result(results):
    factorial = results[2]
    section = kinds.kind_of(factorial).section(factorial, "x")
    rows = {row[0]: row for row in section.tables[0].rows}
    table = factorial.to_dataframe()
    for pair, row in rows.items():
        counted = table[(table.pair == pair) & (table.step >= 1)]
        mean = counted.groupby("prompt").logit_l2.mean().mean()
        assert row[2] == number(mean)
    assert len(rows) == 7


def test_provenance_names_both_paths_and_the_command(page):
    assert "donor: cache-OFF; recipient: cache-ON" in page.text
    assert "kvdrift patch made-up" in page.text
    assert "on: cache-ON; off: cache-OFF" in page.text


def test_glossary_holds_the_words_of_the_kinds_shown(made, bare, page, tmp_path):
    for word, meaning in (*glossary.DRIFT, *glossary.PATCHING):
        assert word in page.text
        assert " ".join(meaning.split()) in page.text
    only = Text(write_report(tmp_path / "r.html", made.factorial()).read_text(encoding="utf-8")).text
    assert "rounding floor The drift" not in only
    assert {word for word, _ in glossary.PATCHING} >= {
        "patch", "donor", "recipient", "recovery", "placebo", "one-shot", "persistent", "factorial"
    }  # fmt: skip
    drift_only = Text(write_report(tmp_path / "d.html", bare).read_text(encoding="utf-8")).text
    assert "placebo" not in drift_only


def test_only_drifts_are_drawn_together(drift, made, tmp_path):
    page = Text(write_report(tmp_path / "r.html", drift, made.factorial(), drift).read_text(encoding="utf-8"))
    assert "together-families-data" in page.scripts
    alone = Text(write_report(tmp_path / "s.html", drift, made.factorial()).read_text(encoding="utf-8"))
    assert "together-families-data" not in alone.scripts
