"""How every figure looks: two Plotly templates (light, dark), the fixed colours, and layout helpers.

The templates are registered as ``kvdrift`` and ``kvdrift_dark`` in `plotly.io.templates`. Colours that are set
on traces (and so do not change with the template) read well on both.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
import plotly.io as pio

from kvdrift.views.parts.labels import escape
from kvdrift.views.parts.text_width import width, wrap

IDENTICAL = "#a3aab4"  # exact zeros: bit-identical
NOT_FINITE = "#e5484d"  # NaN or infinity where a number was expected
FLIP = "#e5484d"
PATH_A = "#2f7fd1"
PATH_B = "#e08a2e"
FLOOR = "rgba(138,146,158,0.28)"
FLOOR_LINE = "#8a929e"
BOUNDARY = "#8a929e"
SERIES = ("#2f7fd1", "#e08a2e", "#2e9e73", "#c9578f", "#8d6cc9", "#b59a00", "#19a3b8", "#d4552d")

NARROW = 700  # pixels: the narrowest figure, as in a notebook, in which nothing overlaps
EDGE = 16  # pixels left free at both sides of titles and legends
MODEBAR = 28  # pixels at the top that belong to Plotly's buttons
LINE = 22  # pixels from one title line to the next
TITLE, SUBTITLE, SMALL = 17, 13, 12  # font sizes
MENU = 40  # pixels of a row of dropdowns
SLIDER = 130  # pixels below a plot that has ticks, an axis title and a slider
LEGEND = 21  # pixels of a row of the legend


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
            "title": {"xanchor": "left", "font": {"size": TITLE, "color": text}},
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
    """A bold takeaway, then what is shown in smaller type, wrapped to the narrowest figure; every part is escaped."""
    room = NARROW - 2 * EDGE
    head = "<br>".join(f"<b>{escape(line)}</b>" for line in wrap(headline, room, TITLE, bold=True))
    lines = [escape(line) for detail in details for line in wrap(detail, room, SUBTITLE)]
    return head + "".join(f'<br><span style="font-size:{SUBTITLE}px">{line}</span>' for line in lines)


def lay_out(
    fig: go.Figure,
    title: str,
    *,
    dark: bool,
    plot: int = 420,
    above: int = 30,
    below: int = 64,
    left: int = 70,
    right: int = 30,
    menus: Sequence[dict[str, Any]] = (),
) -> go.Figure:
    """Template and lanes, from top to bottom: Plotly's buttons, title, dropdowns, plot, legend.

    Every lane has its own pixels, reserved for the tallest title that a dropdown can set and for a figure `NARROW`
    pixels wide, so that nothing lies over anything else at any width from there on.

    Parameters
    ----------
    plot
        Height of the plot, pixels.
    above, below
        Pixels for what stands right above the plot (titles of panels) and below it (ticks, axis titles, sliders).
    left, right
        Pixels beside the plot; ticks make more room for themselves.
    menus
        Dropdowns; rows of them stand between title and plot.
    """
    rows = _rows(menus, NARROW - left - right)
    lines = max(text.count("<br>") + 1 for text in (title, *_titles(menus)))
    top = MODEBAR + LINE * lines + 12 + MENU * len(rows) + above
    legend = _legend_height(fig)
    height = top + plot + below + legend
    apply(fig, dark)
    fig.update_layout(
        title={"text": title, "x": 0, "xref": "container", "pad": {"l": EDGE}, "y": 1 - (MODEBAR + TITLE) / height,
               "yref": "container", "yanchor": "top"},
        margin={"t": top, "b": below + legend, "l": left, "r": right},
        legend={"orientation": "h", "x": EDGE / NARROW, "xref": "container", "xanchor": "left", "y": 0,
                "yref": "container", "yanchor": "bottom"},
        height=height,
        hovermode="closest",
    )  # fmt: skip
    if menus:
        fig.update_layout(updatemenus=_placed(rows, above))
    return fig


def _titles(menus: Sequence[dict[str, Any]]) -> list[str]:
    """The titles that dropdowns set."""
    parts = [part for menu in menus for button in menu["buttons"] for part in button["args"]]
    return [part["title.text"] for part in parts if isinstance(part, dict) and "title.text" in part]


def _menu_width(menu: dict[str, Any]) -> float:
    return max(width(html.unescape(button["label"]), SMALL) for button in menu["buttons"]) + 46


def _rows(menus: Sequence[dict[str, Any]], room: float) -> list[list[dict[str, Any]]]:
    """Dropdowns in rows that fit the narrowest figure."""
    rows: list[list[dict[str, Any]]] = []
    taken = room
    for menu in menus:
        wanted = _menu_width(menu)
        if not rows or taken + wanted > room:
            rows.append([])
            taken = 0
        rows[-1].append(menu)
        taken += wanted
    return rows


def _placed(rows: Sequence[Sequence[dict[str, Any]]], above: int) -> list[dict[str, Any]]:
    """Every dropdown at its place in pixels, whatever the width of the plot: padding counts in pixels."""
    placed = []
    for down, row in enumerate(rows):
        x, up = 0.0, len(rows) - 1 - down
        for menu in row:
            pad = {"l": round(x), "b": above + 6 + MENU * up, "t": 0, "r": 0}
            placed.append({"type": "dropdown", "direction": "down", "x": 0, "xanchor": "left", "y": 1,
                           "yanchor": "bottom", "pad": pad, **menu})  # fmt: skip
            x += _menu_width(menu)
    return placed


def _legend_height(fig: go.Figure) -> int:
    """Pixels that the legend takes in the narrowest figure; each group is a column, as Plotly sets them."""
    if fig.layout.showlegend is False:
        return 0
    groups: dict[str, dict[str, float]] = {}
    named = [trace for trace in fig.data if trace.showlegend is not False and trace.name]
    shown = [trace for trace in named if trace.type != "heatmap"]  # which has no entry by default
    for trace in shown:
        name = html.unescape(trace.name)
        groups.setdefault(trace.legendgroup or f"alone {name}", {})[name] = 52 + width(name, SMALL)
    if len(shown) < 2 and not any(trace.showlegend for trace in shown):
        return 0  # Plotly shows no legend of a single trace
    room = NARROW - 2 * EDGE
    sizes = [(max(names.values()), len(names)) for names in groups.values()]
    grouped = any(trace.legendgroup for trace in shown)
    if not grouped and sum(size for size, _ in sizes) > room:  # then all entries get the width of the longest
        sizes = [(max(size for size, _ in sizes), 1)] * len(sizes)
    height, taken, tallest = 0, 0.0, 0
    for size, count in sizes:
        if taken and taken + size > room:
            height, taken, tallest = height + tallest, 0.0, 0
        taken, tallest = taken + size, max(tallest, count)
    return LEGEND * (height + tallest) + 14
