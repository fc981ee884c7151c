"""What both paths would write, token by token, and how sure each of them was."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvdrift.drift.result import Drift
from kvdrift.errors import SiteError
from kvdrift.views.parts import takeaway_drift as takeaway
from kvdrift.views.parts.choices import MAX_PROMPTS, check_prompt, prompt_menu, whole_numbers
from kvdrift.views.parts.curves import LogAxis
from kvdrift.views.parts.labels import cell_text, prompt_label, step_texts, token_label, versus
from kvdrift.views.parts.theme import FLIP, PATH_A, PATH_B, lay_out, title_text
from kvdrift.words.numbers import number

LINE_HEIGHT = 58  # pixels for the two rows of one line
MAX_LINES = 12
TIE = "#d9a400"
SAME, FLIPPED = "rgba(138,146,158,0.16)", "rgba(229,72,77,0.42)"
TIE_MARK = {"symbol": "circle", "size": 8, "color": TIE}


def tokens(drift: Drift, *, prompt: int = 0, dark: bool = False) -> go.Figure:
    """Both rows of top-1 tokens on the same fed tokens, and the top-2 margins below.

    Tokens run in lines like text, path *a* above path *b*. A flip (different top-1 tokens) is red, an exact tie
    of a path's two best logits is yellow, and a triangle stands where free-running generations part. The lower
    panel shows each step's margin, ``drift.values("logits", "margin_a")``, with exact ties on their own row.

    Parameters
    ----------
    drift
        What `kvdrift.compare` found, with the logits among its sites.
    prompt
        The prompt shown first; a dropdown offers the others (up to 12 prompts).
    dark
        Use the dark template.

    Raises
    ------
    SiteError
        If logits were not measured.
    InputError
        If there is no such prompt.

    Examples
    --------
    >>> import kvdrift as kd
    >>> drift = kd.compare(kd.load(kd.models.tiny("llama")), [1, 2, 3], max_new_tokens=4, progress=False)
    >>> fig = kd.views.tokens(drift)
    """
    if not drift.has("logits", "margin_a"):
        raise SiteError("tokens needs the logits, which were not measured: run compare(..., sites=[..., 'logits']).")
    check_prompt(drift, prompt)
    prompts = list(range(len(drift.prompts))) if len(drift.prompts) <= MAX_PROMPTS else [prompt]

    count = max(int(drift.measured[p].sum()) for p in prompts)
    width = 16 if count <= 16 * MAX_LINES // 2 else 24
    lines = min(MAX_LINES, max(1, math.ceil(count / width)))
    grid, below = lines * LINE_HEIGHT + 10, 230
    axis = LogAxis.of([drift.values("logits", f"margin_{path}")[drift.measured] for path in "ab"])
    fig = make_subplots(
        rows=2, cols=1, row_heights=[grid, below], vertical_spacing=62 / (grid + below + 62),
    )  # fmt: skip
    owner = []
    for p in prompts:
        rows = np.flatnonzero(drift.measured[p])
        upper = _grid_traces(drift, p, rows[: lines * width], width)
        lower = _margin_traces(drift, p, rows, axis)
        for panel, traces in ((1, upper), (2, lower)):
            for trace in traces:
                fig.add_trace(trace.update(visible=p == prompt), row=panel, col=1)
                owner.append(p)
    fig.add_traces(_legend())
    owner += [-1] * (len(fig.data) - len(owner))

    fig.update_xaxes(range=[-0.5, width - 0.5], visible=False, row=1, col=1)
    first = [int(drift.steps[i * width]) for i in range(lines) if i * width < len(drift.steps)]
    fig.update_yaxes(
        tickvals=[-3.0 * i - k for i in range(len(first)) for k in (0, 1)],
        ticktext=[label for s in first for label in (f"step {s}…   a", "b")],
        range=[-3 * lines + 1.3, 1.0], showgrid=False, showline=False, ticks="", row=1, col=1,
    )  # fmt: skip
    fig.update_yaxes(title_text="top-2 margin (logits)", **axis.settings("exact tie"), row=2, col=1)
    last = max(int(drift.steps.max(initial=0)), 1)
    fig.update_xaxes(
        title_text="step (each step predicts one new token)", range=[-0.7, last + 0.7],
        **whole_numbers(len(drift.steps)), row=2, col=1,
    )  # fmt: skip
    titles = {p: _title(drift, p, lines * width, len(prompts)) for p in prompts}
    args = [[{"visible": [o in (p, -1) for o in owner]}, {"title.text": titles[p]}] for p in prompts]
    menus = prompt_menu(drift, prompts, prompt, args)
    return lay_out(fig, titles[prompt], dark=dark, menus=menus, plot=grid + below + 62, above=8)


def _title(drift: Drift, prompt: int, drawn: int, n_prompts: int) -> str:
    rest = int(drift.measured[prompt].sum()) - drawn
    return title_text(
        takeaway.tokens(drift, prompt),
        f"Top-1 token of each path after the same fed tokens. {versus(drift)}.",
        "" if n_prompts > 1 else f"Shown: {prompt_label(drift, prompt, 80)}",
        f"The token rows show the first {drawn} measured steps; {rest} more are in the panel below."
        if rest > 0
        else "",
    )


def _grid_traces(drift: Drift, prompt: int, rows: np.ndarray, width: int) -> list[Any]:
    """Cells, their words, ties, and the mark where free runs part, for the measured rows given."""
    place = np.arange(len(rows))
    x, line = place % width, place // width
    tops = [drift.top1(path)[prompt, rows] for path in "ab"]
    flip = tops[0] != tops[1]
    hover = _hover(drift, prompt, rows)
    lines = int(line.max(initial=0)) + 1
    z = np.full((3 * lines, width), np.nan)
    cells = np.full((3 * lines, width, hover.shape[1]), "", dtype=object)
    for k in (0, 1):
        z[3 * line + k, x] = flip
        cells[3 * line + k, x] = hover
    traces: list[Any] = [
        go.Heatmap(
            x=np.arange(width), y=-np.arange(3 * lines), z=z, customdata=cells, hovertemplate=HOVER, name="tokens",
            colorscale=[[0, SAME], [0.5, SAME], [0.5, FLIPPED], [1, FLIPPED]], zmin=0, zmax=1, showscale=False,
            xgap=3, ygap=2, hoverongaps=False,
        )
    ]  # fmt: skip
    for k, path in enumerate("ab"):
        limit = 9 if width == 16 else 6
        words = [token_label(drift.token_texts.get(int(t), str(t)), limit) for t in tops[k]]
        traces.append(
            go.Scatter(
                x=x, y=-3.0 * line - k, mode="text", text=words, showlegend=False, hoverinfo="skip",
                name=f"tokens of path {path}",
                textfont={"size": 12 if width == 16 else 10, "family": "ui-monospace, Menlo, Consolas, monospace"},
            )
        )  # fmt: skip
        tie = np.flatnonzero(_flags(drift, f"tie_{path}", prompt, rows))
        traces.append(
            go.Scatter(
                x=x[tie] - 0.4, y=-3.0 * line[tie] - k + 0.2, mode="markers", showlegend=False, marker=TIE_MARK,
                name=f"ties of path {path}",
                hovertemplate=f"path {path}: its two best logits are equal<extra></extra>",
            )
        )  # fmt: skip
    step = drift.free_divergence[prompt]
    here = np.flatnonzero(drift.steps[rows] == step) if step is not None else np.empty(0, int)
    traces.append(
        go.Scatter(
            x=x[here], y=-3.0 * line[here] + 0.75, mode="markers", showlegend=False, name="free runs part",
            marker={"symbol": "triangle-down", "size": 13, "color": FLIP},
            hovertemplate=f"free-running generations part here (step {step})<extra></extra>",
        )
    )  # fmt: skip
    return traces


HOVER = "<b>step %{customdata[0]}</b><br>%{customdata[1]}<br>%{customdata[2]}<br>%{customdata[3]}<extra></extra>"


def _flags(drift: Drift, name: str, prompt: int, rows: np.ndarray) -> np.ndarray:
    if not drift.has("logits", name):
        return np.zeros(len(rows), dtype=bool)
    return drift.values("logits", name)[prompt, rows].astype(bool)


def _hover(drift: Drift, prompt: int, rows: np.ndarray) -> np.ndarray:
    """Per row: step, what is read and written, margins and ties, KL."""
    texts = step_texts(drift, prompt)
    margins = [drift.values("logits", f"margin_{path}")[prompt, rows] for path in "ab"]
    ties = [_flags(drift, f"tie_{path}", prompt, rows) for path in "ab"]
    kl = drift.values("logits", "kl")[prompt, rows] if drift.has("logits", "kl") else np.full(len(rows), np.nan)
    table: list[list[Any]] = []
    for i, row in enumerate(rows):
        sides = [f"{path} {'exact tie' if ties[k][i] else number(float(margins[k][i]))}" for k, path in enumerate("ab")]
        nats = f"KL: {number(float(kl[i]))} nats"
        table.append([int(drift.steps[row]), texts[row], f"top-2 margin: {', '.join(sides)}", nats])
    return np.array(table, dtype=object).reshape(len(rows), 4)


def _margin_traces(drift: Drift, prompt: int, rows: np.ndarray, axis: LogAxis) -> list[go.Scatter]:
    """Margins of both paths by step, and a line at every flip."""
    steps = drift.steps[rows]
    hover = _hover(drift, prompt, rows)
    flip = drift.flips[prompt, rows]
    low, high = (10**end for end in axis.settings()["range"])
    at = steps[flip]
    traces = [
        go.Scatter(
            x=np.stack([at, at, at], axis=1).ravel(), y=np.tile([low, high, np.nan], len(at)), mode="lines",
            line={"color": FLIP, "width": 1.5, "dash": "dot"}, showlegend=False, hoverinfo="skip", name="flips",
        )
    ]  # fmt: skip
    for path, colour, symbol, size in (("a", PATH_A, "circle", 8), ("b", PATH_B, "diamond-open", 10)):
        margin = drift.values("logits", f"margin_{path}")[prompt, rows]
        traces.append(
            go.Scatter(
                x=steps, y=axis.place(margin), mode="markers", name=f"margin of path {path}", showlegend=False,
                marker={"color": colour, "symbol": symbol, "size": size, "line": {"width": 2}},
                text=cell_text(margin, "0 (exact tie)"), customdata=hover, hovertemplate=HOVER,
            )
        )  # fmt: skip
    return traces


def _legend() -> list[go.Scatter]:
    """Entries without data, so that the legend stays the same whichever prompt is shown."""
    marks = [
        ("flip", {"symbol": "square", "size": 13, "color": FLIPPED}),
        ("exact tie", TIE_MARK),
        ("free runs part", {"symbol": "triangle-down", "size": 12, "color": FLIP}),
        ("margin of a", {"symbol": "circle", "size": 8, "color": PATH_A}),
        ("margin of b", {"symbol": "diamond-open", "size": 9, "color": PATH_B, "line": {"width": 2}}),
    ]
    return [
        go.Scatter(x=[None], y=[None], mode="markers", name=name, marker=marker, hoverinfo="skip")
        for name, marker in marks
    ]
