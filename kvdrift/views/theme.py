"""How every figure looks: two Plotly templates (light, dark), the fixed colours, and layout helpers.

The templates are registered as ``kvdrift`` and ``kvdrift_dark`` in `plotly.io.templates`. Colours that are set
on traces (and so do not change with the template) read well on both.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
import plotly.io as pio

from kvdrift.views.words import escape

IDENTICAL = "#a3aab4"  # exact zeros: bit-identical
NOT_FINITE = "#e5484d"  # NaN or infinity where a number was expected
FLIP = "#e5484d"
PATH_A = "#2f7fd1"
PATH_B = "#e08a2e"
FLOOR = "rgba(138,146,158,0.28)"
FLOOR_LINE = "#8a929e"
BOUNDARY = "#8a929e"
SERIES = ("#2f7fd1", "#e08a2e", "#2e9e73", "#c9578f", "#8d6cc9", "#b59a00", "#19a3b8", "#d4552d")

TITLE_WIDTH = 70  # characters at the title's size in a figure 850 px wide, as in JupyterLab
SUBTITLE_WIDTH = 108
NARROW = 700  # pixels: the narrowest plot, as in a notebook, whose dropdowns do not overlap
LINE = 22  # pixels from one title line to the next


def _template(*, text: str, paper: str, grid: str, control: str, border: str) -> go.layout.Template:
    axis = {
        "gridcolor": grid, "linecolor": border, "tickcolor": border, "zeroline": False, "showline": True,
        "ticks": "outside", "ticklen": 4, "title": {"standoff": 8, "font": {"size": 13}}, "automargin": True,
    }  # fmt: skip
    bar = {
        "outlinewidth": 0,
        "thickness": 14,
        "ticks": "outside",
        "ticklen": 3,
        "title": {"side": "right", "font": {"size": 13}},
    }
    control_style = {"bgcolor": control, "bordercolor": border, "font": {"color": text, "size": 12}}
    return go.layout.Template(
        layout={
            "font": {"family": "system-ui, 'Segoe UI', Helvetica, Arial, sans-serif", "size": 13, "color": text},
            "paper_bgcolor": paper,
            "plot_bgcolor": paper,
            "colorway": list(SERIES),
            "title": {"x": 0, "xref": "paper", "xanchor": "left", "font": {"size": 17, "color": text}},
            "margin": {"l": 70, "r": 30, "b": 60, "t": 90},
            "xaxis": axis,
            "yaxis": axis,
            "coloraxis": {"colorbar": bar},
            "legend": {"bgcolor": "rgba(0,0,0,0)", "font": {"size": 12}},
            "hoverlabel": {"align": "left", "bgcolor": control, "bordercolor": border,
                           "font": {"color": text, "size": 12}},
            "modebar": {"remove": ["sendChartToCloud"]},  # a figure stays on the machine that drew it
            "annotationdefaults": {"font": {"color": text}, "showarrow": False},
            "updatemenudefaults": {**control_style, "pad": {"r": 6, "t": 0, "b": 0}},
            "sliderdefaults": {**control_style, "activebgcolor": SERIES[0], "tickcolor": border},
        }
    )  # fmt: skip


LIGHT = _template(text="#1f2430", paper="#ffffff", grid="#e6e9ee", control="#f4f6f8", border="#b8c0cc")
DARK = _template(text="#e6e9ef", paper="#15181e", grid="#2b303a", control="#222730", border="#4a5260")
pio.templates["kvdrift"] = LIGHT
pio.templates["kvdrift_dark"] = DARK


def apply(fig: go.Figure, dark: bool = False) -> go.Figure:
    """Give ``fig`` the light or the dark template and return it.

    Examples
    --------
    >>> import plotly.graph_objects as go
    >>> apply(go.Figure(), dark=True).layout.template.layout.font.color
    '#e6e9ef'
    """
    fig.update_layout(template="kvdrift_dark" if dark else "kvdrift")
    return fig


def title_text(headline: str, *details: str) -> str:
    """A bold takeaway, then what is shown in smaller type, wrapped; every part is escaped."""
    head = "<br>".join(f"<b>{escape(line)}</b>" for line in textwrap.wrap(headline, TITLE_WIDTH))
    lines = [escape(line) for detail in details if detail for line in textwrap.wrap(detail, SUBTITLE_WIDTH)]
    return head + "".join(f'<br><span style="font-size:13px">{line}</span>' for line in lines)


def lay_out(
    fig: go.Figure, title: str, *, dark: bool, height: int = 620, menus: Sequence[dict[str, Any]] = ()
) -> go.Figure:
    """Template, title, and a row of dropdowns between title and plot, left to right."""
    top = room_for(title, bool(menus))
    apply(fig, dark)
    fig.update_layout(
        title={"text": title, "y": 1 - 28 / height, "yref": "container", "yanchor": "top"},
        margin={"t": top},
        height=height,
        hovermode="closest",
    )
    if menus:
        fig.update_layout(updatemenus=_row(menus))
    return fig


def room_for(title: str, menus: bool) -> int:
    """Pixels above the plot: the title's lines, a dropdown row if there is one, and panel titles."""
    return 28 + LINE * title.count("<br>") + 30 + (42 if menus else 0)


def _row(menus: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Place dropdowns side by side by the length of their longest label."""
    x, placed = 0.0, []
    for menu in menus:
        placed.append({"type": "dropdown", "direction": "down", "x": x, "xanchor": "left", "y": 1,
                       "yanchor": "bottom", "pad": {"b": 14, "r": 6}, **menu})  # fmt: skip
        x += (max(len(button["label"]) for button in menu["buttons"]) * 7.2 + 44) / NARROW
    return placed
