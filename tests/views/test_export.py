"""Figures outside of a live notebook: in what nbconvert writes, and as pictures."""

import re
import shutil
from pathlib import Path

import plotly.io
import pytest

from kvdrift.views import growth


def documented():
    page = Path(__file__).parents[2] / "docs" / "gallery.md"
    return re.search(r'plotly\.io\.renderers\.default = "([^"]+)"', page.read_text(encoding="utf-8"))[1]


def exported(fig):
    """The page that nbconvert writes of a notebook whose only output is this figure."""
    nbformat, nbconvert = pytest.importorskip("nbformat"), pytest.importorskip("nbconvert")
    output = nbformat.v4.new_output("display_data", data=fig._repr_mimebundle_())
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("fig", outputs=[output])])
    return nbconvert.HTMLExporter().from_notebook_node(notebook)[0]


@pytest.mark.parametrize(("renderer", "shown"), [("plotly_mimetype", False), (documented(), True)])
@pytest.mark.filterwarnings("ignore:Your element with mimetype")
def test_an_exported_notebook_shows_figures_with_the_line_of_the_docs(drift, monkeypatch, renderer, shown):
    monkeypatch.setattr(plotly.io.renderers, "default", plotly.io.renderers.default)  # so that it is put back
    plotly.io.renderers.default = renderer
    page = exported(growth(drift))
    assert ("plotly-graph-div" in page) == shown
    assert ("rounding floor" in page) == shown


@pytest.mark.browser
def test_a_figure_is_written_as_a_picture(drift, tmp_path):
    pytest.importorskip("kaleido", reason="kvdrift[export] is not installed")
    if not shutil.which("chromium"):
        pytest.skip("no chromium here")
    path = tmp_path / "growth.png"
    growth(drift).write_image(path, width=1000)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 20_000
