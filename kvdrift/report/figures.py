"""Views as data for the page: which ones a result supports, and their JSON packed for the page."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import plotly.graph_objects as go
import plotly.io as pio
from markupsafe import Markup

from kvdrift import views
from kvdrift.drift.result import Drift
from kvdrift.errors import KvdriftError
from kvdrift.report.packed import pack

DEFAULT_HEIGHT = 560


@dataclass(frozen=True)
class Figure:
    """One drawn figure: its id on the page, heading, caption, height in pixels and its JSON, packed by `pack`."""

    id: str
    heading: str
    caption: str
    height: int
    packed: Markup


@dataclass(frozen=True)
class Missing:
    """A figure that could not be drawn, and the sentence that says why."""

    heading: str
    sentence: str


@dataclass(frozen=True)
class View:
    """A view of one result: the name of its function in `kvdrift.views`, a heading and how to read it."""

    name: str
    heading: str
    caption: str


DRIFT_VIEWS = (
    View(
        "growth",
        "Drift through the layers",
        "Each point is one layer, on a log axis. The band is the rounding floor: what the order of summation alone "
        "does. A curve inside the band is no larger than rounding alone makes it; "
        "that does not rule out a small fault.",
    ),
    View(
        "layer_step",
        "Layer by step",
        "One cell per layer and generated token. Grey cells are equal in every bit.",
    ),
    View(
        "tokens",
        "Tokens",
        "What each path would write at every step, fed the same tokens; a flip is a step where they disagree.",
    ),
    View(
        "precision",
        "In another precision",
        "The same tokens once more in the control dtype. Rounding shrinks as precision grows; a fault in the code "
        "would usually not.",
    ),
    View(
        "kv_heads",
        "Keys and values by head",
        "How far the keys and values that the kernels read differ, by KV head.",
    ),
    View(
        "kv_positions",
        "Keys and values by position",
        "The same, by absolute position in the sequence; positions outside a window are left blank.",
    ),
)
FAMILIES = View(
    "families", "Side by side", "Growth of every model on a shared axis: relative depth from first layer to last."
)


def drift_figures(drift: Drift, prefix: str) -> tuple[list[Figure], list[Missing]]:
    """All views that one drift supports, and the others with the reason."""
    return sort(
        [draw(view, f"{prefix}-{view.name}", partial(getattr(views, view.name), drift)) for view in DRIFT_VIEWS]
    )


def sort(figures: Sequence[Figure | Missing]) -> tuple[list[Figure], list[Missing]]:
    """Those that were drawn, and those that could not be."""
    drawn = [figure for figure in figures if isinstance(figure, Figure)]
    return drawn, [figure for figure in figures if isinstance(figure, Missing)]


def families_figure(drifts: list[Drift]) -> Figure | Missing:
    """Growth of several drifts on one axis."""
    return draw(FAMILIES, "together-families", partial(views.families, drifts))


def templates_json() -> str:
    """The light and the dark template, for the page's own switch."""
    modes = {"light": "kvdrift", "dark": "kvdrift_dark"}
    return script_safe(json.dumps({mode: pio.templates[name].to_plotly_json() for mode, name in modes.items()}))


def script_safe(json_text: str) -> str:
    r"""JSON that no HTML parser can mistake for markup, whatever texts it holds.

    Examples
    --------
    >>> script_safe('"</script>"')
    '"\\u003c/script\\u003e"'
    """
    for character in "<>&\u2028\u2029":
        json_text = json_text.replace(character, f"\\u{ord(character):04x}")
    return json_text


def draw(view: View, figure_id: str, build: Callable[[], go.Figure]) -> Figure | Missing:
    """Build one figure for the page; a refusal becomes the sentence that says why."""
    try:
        figure = build()
    except KvdriftError as reason:
        return Missing(view.heading, str(reason))
    figure.layout.template = None  # the page holds both templates once and sets the one in use
    return Figure(
        id=figure_id,
        heading=view.heading,
        caption=view.caption,
        height=int(figure.layout.height or DEFAULT_HEIGHT),
        packed=pack(figure.to_json()),
    )
