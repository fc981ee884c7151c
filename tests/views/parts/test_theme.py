"""Lanes that a figure reserves before a browser draws it."""

import plotly.graph_objects as go
import pytest

from kvdrift.views.parts.choices import menu
from kvdrift.views.parts.text_width import width, wrap
from kvdrift.views.parts.theme import EDGE, LEGEND, LINE, NARROW, SUBTITLE, TITLE, lay_out, title_text

LONG = "A takeaway that goes on and on about layers, steps, prompts and the floor of rounding beneath all of them"


def figure(names=()):
    return go.Figure([go.Scatter(x=[0], y=[0], name=name) for name in names])


@pytest.mark.parametrize("text", [LONG, "W" * 300, "i" * 300, "日本語" * 60, "one two"])
@pytest.mark.parametrize("bold", [False, True])
def test_lines_fit_and_lose_nothing(text, bold):
    lines = wrap(text, 300, 13, bold)
    assert all(width(line, 13, bold) <= 300 for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


def test_a_title_is_wrapped_to_the_narrowest_figure_and_escaped():
    title = title_text(f"{LONG} <b>", LONG, "")
    head, *rest = title.split("<br>")
    assert width(head.removeprefix("<b>").removesuffix("</b>"), TITLE, bold=True) <= NARROW - 2 * EDGE
    assert "&lt;b&gt;</b>" in title
    assert sum(f"font-size:{SUBTITLE}px" in line for line in rest) == 2


def test_the_tallest_title_of_a_dropdown_has_room():
    short, tall = title_text("Short"), title_text(LONG, LONG, LONG)
    args = [[{"visible": [True]}, {"title.text": text}] for text in (short, tall)]
    fig = lay_out(figure("a"), short, dark=False, menus=[menu("prompt", ["a", "b"], "a", args)])
    alone = lay_out(figure("a"), short, dark=False, menus=[menu("prompt", ["a"], "a", args[:1])])
    lines = tall.count("<br>") - short.count("<br>")
    assert fig.layout.margin.t == alone.layout.margin.t + LINE * lines
    assert fig.layout.height == alone.layout.height + LINE * lines, "the plot keeps its height"


def test_dropdowns_that_do_not_fit_take_another_row():
    menus = [menu(name, ["x" * 40], "x" * 40, [[{}]]) for name in ("one", "two", "three")]
    placed = lay_out(figure(), "t", dark=False, menus=menus).layout.updatemenus
    assert [m.name for m in placed] == ["one", "two", "three"]
    spots = [(m.pad.l, m.pad.b) for m in placed]
    assert len(set(spots)) == 3
    assert spots[0][1] > spots[-1][1], "the first row is the highest"


@pytest.mark.parametrize(
    ("traces", "rows"),
    [
        ([], 0),
        ([{"name": "alone"}], 0),
        ([{"name": "a"}, {"name": "b"}], 1),
        ([{"name": f"a name of some length {n}"} for n in range(6)], 2),
        ([{"name": f"{n}", "legendgroup": "one"} for n in range(4)], 4),
        ([{"name": "a"}, {"name": "b", "showlegend": False}], 0),
        ([{"name": "same", "legendgroup": "g"}, {"name": "same", "legendgroup": "g"}], 1),
    ],
)
def test_rows_of_the_legend(traces, rows):
    fig = lay_out(go.Figure([go.Scatter(x=[0], y=[0], **t) for t in traces]), "t", dark=False, below=60)
    assert fig.layout.margin.b == 60 + (LEGEND * rows + 14 if rows else 0)
