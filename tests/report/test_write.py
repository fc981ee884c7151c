import json
import re
from html.parser import HTMLParser
from pathlib import Path

import plotly.io as pio
import pytest

from kvdrift import views
from kvdrift.errors import FileError, InputError, SiteError
from kvdrift.report import figures, write_report
from kvdrift.report.drift_section import LOGIT_NAMES, logit_table
from kvdrift.report.packed import plotlyjs, unpack
from kvdrift.summaries import drift as summary
from kvdrift.words.numbers import number

VIEWS = ("growth", "layer_step", "tokens", "precision", "kv_heads", "kv_positions")


class Page(HTMLParser):
    """Every tag with its attributes, the visible text, and what each script holds."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.scripts, self.words, self._inside = [], {}, [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._inside = dict(attrs).get("id", f"{tag}-{len(self.tags)}")

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


def unpacked(page, name):
    return unpack(page.scripts[name]) if re.fullmatch("[A-Za-z0-9+/=]+", page.scripts[name]) else page.scripts[name]


@pytest.fixture(scope="module")
def page(drift, tmp_path_factory):
    path = write_report(tmp_path_factory.mktemp("report") / "r.html", drift, command="kvdrift demo --x '<b>'")
    return Page(path.read_text(encoding="utf-8"))


def test_reading_is_at_the_top(drift, page):
    for sentence in summary.reading(drift):
        assert sentence in page.text
    assert page.text.index(summary.reading(drift)[0]) < page.text.index("Drift through the layers")


def test_every_view_is_there_and_is_what_the_view_returns(drift, page):
    for name in VIEWS:
        stored = json.loads(unpack(page.scripts[f"result-1-{name}-data"]))
        figure = getattr(views, name)(drift)
        figure.layout.template = None
        assert stored == json.loads(figure.to_json())
        assert ("div", f"result-1-{name}") in [(tag, attrs.get("id")) for tag, attrs in page.tags]


def test_nothing_is_loaded_from_anywhere(page):
    loading = [
        (tag, attrs) for tag, attrs in page.tags if "src" in attrs or (tag == "link" and "href" in attrs) or tag in
        ("iframe", "object", "embed", "base", "img")
    ]  # fmt: skip
    assert loading == []
    links = [attrs["href"] for tag, attrs in page.tags if "href" in attrs]
    assert all(link.startswith("#") for link in links)
    styles = "".join(text for name, text in page.scripts.items() if name.startswith("style"))
    assert not re.search(r"url\(|@import", styles)
    policy = next(attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv"))
    assert "default-src 'none'" in policy


def test_plotly_is_there_once(drift, tmp_path):
    path = write_report(tmp_path / "two.html", drift, drift)
    page = Page(path.read_text(encoding="utf-8"))
    assert len([name for name in page.scripts if re.search(r"\* plotly\.js v\d", unpacked(page, name))]) == 1
    assert "MIT licence, © Plotly" in page.text


def test_texts_of_tokens_and_prompts_come_out_as_text(page):
    scripts = [attrs for tag, attrs in page.tags if tag == "script"]
    assert len(scripts) == len(VIEWS) + 1 + 2  # figures, templates, plotly.js, the page's own
    assert not any("onerror" in attrs for _, attrs in page.tags)
    assert "Say <script>alert(1)</script>" in page.text
    assert "A note about <script>alert(1)</script>." in page.text
    data = page.scripts["result-1-tokens-data"]
    assert re.fullmatch("[A-Za-z0-9+/=]+", data)


def test_templates_are_those_of_the_theme(page):
    stored = json.loads(page.scripts["templates"])
    assert stored["dark"]["layout"]["paper_bgcolor"] == pio.templates["kvdrift_dark"].layout.paper_bgcolor
    assert stored["light"]["layout"]["paper_bgcolor"] == pio.templates["kvdrift"].layout.paper_bgcolor


def test_provenance_and_command(drift, page):
    assert "kvdrift demo --x '<b>'" in page.text
    for word in ("float32 matmul precision", "tf32 matmul", "sdpa backends", "weight dtypes", "intra op"):
        assert word in page.text
    assert drift.a.attn in page.text


def test_no_folder_of_this_machine(page):
    assert str(Path.home()) not in page.text
    assert str(Path.cwd()) not in page.text


def test_a_figure_without_data_gives_its_sentence(bare, tmp_path):
    page = Page(write_report(tmp_path / "r.html", bare).read_text(encoding="utf-8"))
    with pytest.raises(Exception, match=r".") as refusal:
        views.kv_heads(bare)
    assert " ".join(str(refusal.value).split()) in page.text
    assert "result-1-kv_heads-data" not in page.scripts
    assert "result-1-growth-data" in page.scripts


def test_a_fault_in_a_view_is_not_hidden(drift, tmp_path, monkeypatch):
    def broken(drift):
        raise ZeroDivisionError

    monkeypatch.setattr(views, "growth", broken)
    with pytest.raises(ZeroDivisionError):
        write_report(tmp_path / "r.html", drift)
    assert list(tmp_path.iterdir()) == []


def test_only_the_refused_view_is_missing(drift, monkeypatch):
    def refused(drift):
        raise SiteError("There is no such site.")

    monkeypatch.setattr(views, "growth", refused)
    drawn, missing = figures.drift_figures(drift, "x")
    assert [m.sentence for m in missing] == ["There is no such site."]
    assert len(drawn) == len(VIEWS) - 1


def test_several_results(drift, bare, tmp_path):
    page = Page(write_report(tmp_path / "r.html", drift, bare, title="Two of <them>").read_text(encoding="utf-8"))
    ids = [attrs.get("id") for tag, attrs in page.tags if tag == "section"]
    assert ids == ["result-1", "result-2", "together"]
    assert "together-families-data" in page.scripts
    assert "Two of <them>" in page.text
    plots = [attrs["id"] for _, attrs in page.tags if attrs.get("class") == "plot"]
    assert len(plots) == len(set(plots))
    assert {f"{plot}-data" for plot in plots} == {name for name in page.scripts if name.endswith("-data")}


def test_layer_table_equals_the_summary(drift, page):
    for row in summary.as_dict(drift)["layers"]:
        cells = f"{row['layer']} {row['kind']} {number(row['rel_l2_median'])}"
        assert re.search(cells.replace(" ", r"\s+"), page.text)


def test_every_logit_metric_that_was_measured_has_a_row(drift):
    rows = {row[0]: row for row in logit_table(drift).rows}
    assert set(rows) == {LOGIT_NAMES[metric] for metric in LOGIT_NAMES if drift.has("logits", metric)}
    head = drift.values("logits", "kl_float32_head")[drift.counted]
    assert rows["KL with the LM head in float32, nats"][1] == number(float(head.mean()))


@pytest.mark.parametrize("results", [(), ("text",), (None,)])
def test_other_things_are_refused(results, tmp_path):
    with pytest.raises(InputError, match="write_report was given"):
        write_report(tmp_path / "r.html", *results)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written(bare, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="Cannot write"):
        write_report(tmp_path / "file" / "r.html", bare)


def test_a_report_is_small(drift, page, tmp_path):
    """Beside plotly.js, which is packed once, figures take a third of their JSON at most."""
    path = write_report(tmp_path / "r.html", drift)
    drawn = [getattr(views, name)(drift).to_json() for name in VIEWS]
    packed = [len(page.scripts[f"result-1-{name}-data"]) for name in VIEWS]
    assert sum(packed) < sum(map(len, drawn)) / 3
    assert len(plotlyjs()) < 2_200_000
    assert path.stat().st_size < len(plotlyjs()) + sum(packed) + 150_000


def test_a_report_is_the_same_bytes_each_time(drift, tmp_path):
    one, other = (write_report(tmp_path / f"{n}.html", drift).read_bytes() for n in (1, 2))
    assert one == other
