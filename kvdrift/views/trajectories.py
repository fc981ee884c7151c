"""The free-running texts of donor, unpatched and patched recipient, side by side."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import plotly.graph_objects as go

from kvdrift.errors import InputError
from kvdrift.patching.result import PatchResult
from kvdrift.views.parts import takeaway_patching as takeaway
from kvdrift.views.parts.choices import MAX_PROMPTS, check_prompt, prompt_menu
from kvdrift.views.parts.interventions import into
from kvdrift.views.parts.labels import escape, prompt_label, token_label
from kvdrift.views.parts.theme import FLIP, PATH_A, lay_out, title_text

LINE_HEIGHT = 84  # pixels for the three rows of one line
MAX_LINES = 12
ARMS = ("donor", "unpatched", "patched")
SAME, LEFT, AFTER = "rgba(138,146,158,0.16)", "rgba(229,72,77,0.5)", "rgba(224,138,46,0.22)"
LEAVES = {"symbol": "triangle-down", "size": 11, "color": FLIP}
MONO = "ui-monospace, Menlo, Consolas, monospace"


def trajectories(patch_result: PatchResult, *, prompt: int = 0, dark: bool = False) -> go.Figure:
    """What donor, unpatched and patched recipient write when each feeds itself, step above step.

    Tokens run in lines like text. A token is grey while the text is still the donor's, red (under a triangle) where
    it first differs, and orange after that: from there on the contexts differ, so that steps no longer compare. A
    blue bar marks the steps at which the patch is written, unless that is all of them from step 1 on.

    Parameters
    ----------
    patch_result
        What ``kvdrift.patch(..., trajectories=True)`` found; drawn is ``patch_result.trajectories[prompt]``.
    prompt
        The prompt shown first; a dropdown offers the others (up to 12 prompts).
    dark
        Use the dark template.

    Raises
    ------
    InputError
        If it is another kind of result, holds no trajectories, or has no such prompt.

    Examples
    --------
    >>> import kvdrift as kd
    >>> model = kd.load(kd.models.tiny("llama"), quiet=True)
    >>> result = kd.patch(model, [1, 2, 3], kd.Patch("kv"), max_new_tokens=4, progress=False)
    >>> fig = kd.views.trajectories(result)
    """
    if not isinstance(patch_result, PatchResult):
        raise InputError(
            f"trajectories was given a {type(patch_result).__name__}; it shows what kvdrift.patch returns."
        )
    if not patch_result.trajectories:
        raise InputError("This result holds no free-running texts: run patch(..., trajectories=True).")
    check_prompt(patch_result, prompt)
    prompts = list(range(len(patch_result.prompts))) if len(patch_result.prompts) <= MAX_PROMPTS else [prompt]
    count = max(len(text) for p in prompts for text in patch_result.trajectories[p].values())
    width = 16 if count <= 16 * MAX_LINES // 2 else 24
    lines = min(MAX_LINES, max(1, math.ceil(count / width)))

    fig = go.Figure()
    owner: list[int] = []
    for p in prompts:
        traces = _traces(patch_result, p, width, lines)
        fig.add_traces([trace.update(visible=p == prompt) for trace in traces])
        owner += [p] * len(traces)
    legend = _legend(_marks_steps(patch_result))
    fig.add_traces(legend)
    owner += [-1] * len(legend)

    fig.update_xaxes(range=[-0.5, width - 0.5], visible=False)
    rows = [(4 * line + row, arm) for line in range(lines) for row, arm in enumerate(ARMS)]
    fig.update_yaxes(
        tickvals=[-place for place, _ in rows],
        ticktext=[
            _row_label(patch_result, arm, f"step {place // 4 * width}…  " if arm == "donor" else "")
            for place, arm in rows
        ],
        range=[-4 * lines + 1.2, 1.1], showgrid=False, showline=False, ticks="",
        ticklabelstandoff=8,
    )  # fmt: skip
    titles = {p: _title(patch_result, p, lines * width, len(prompts)) for p in prompts}
    args = [[{"visible": [o in (p, -1) for o in owner]}, {"title.text": titles[p]}] for p in prompts]
    menus = prompt_menu(patch_result, prompts, prompt, args)
    return lay_out(fig, titles[prompt], dark=dark, menus=menus, plot=lines * LINE_HEIGHT + 30, above=8, below=20)


def _row_label(result: PatchResult, arm: str, before: str) -> str:
    path = result.donor.label if arm == "donor" else result.recipient.label
    return escape(f"{before}{arm} ({path})")


def _title(result: PatchResult, prompt: int, drawn: int, n_prompts: int) -> str:
    longest = max(len(text) for text in result.trajectories[prompt].values())
    return title_text(
        takeaway.trajectories(result, prompt),
        f"Free-running texts: each feeds itself. {into(result)}.",
        f"Patch: {result.cells[0].label}",
        "" if n_prompts > 1 else f"Shown: {prompt_label(result, prompt, 80)}",
        f"Only the first {drawn} of {longest} tokens are drawn." if longest > drawn else "",
    )


def _traces(result: PatchResult, prompt: int, width: int, lines: int) -> list[Any]:
    """Cells, their tokens, the mark where each text leaves the donor's, and the written steps."""
    texts = result.trajectories[prompt]
    z = np.full((4 * lines, width), np.nan)
    words, hover = np.full(z.shape, "", dtype=object), np.full(z.shape, "", dtype=object)
    marks: list[tuple[int, float, str]] = []
    limit = 7 if width == 16 else 5
    for row, arm in enumerate(ARMS):
        text = texts[arm]
        left = takeaway.leaves(texts["donor"], text)
        for step, token in enumerate(text[: lines * width]):
            at = (4 * (step // width) + row, step % width)
            z[at] = 0 if left is None or step < left else 1 if step == left else 2
            words[at] = token_label(result.token_texts.get(token, str(token)), limit)
            hover[at] = _hover(result, arm, step, token, texts["donor"], left)
        if left is not None and left < lines * width:
            marks.append((left, 4 * (left // width) + row, arm))
    x, y = np.arange(width), -np.arange(4 * lines)
    traces: list[Any] = [
        go.Heatmap(
            x=x, y=y, z=z, customdata=hover, hovertemplate="%{customdata}<extra></extra>", name="tokens", zmin=0,
            zmax=2, showscale=False, xgap=3, ygap=2, hoverongaps=False,
            colorscale=[[0, SAME], [0.33, SAME], [0.33, LEFT], [0.67, LEFT], [0.67, AFTER], [1, AFTER]],
        )
    ]  # fmt: skip
    for row, arm in enumerate(ARMS):
        i, j = np.nonzero((words != "") & (np.arange(4 * lines) % 4 == row)[:, None])
        traces.append(
            go.Scatter(
                x=j, y=-i, mode="text", text=words[i, j],
                name=f"tokens: {arm}", showlegend=False, hoverinfo="skip",
                textfont={"size": 12 if width == 16 else 10, "family": MONO},
            )
        )  # fmt: skip
    traces.append(
        go.Scatter(
            x=[step % width for step, _, _ in marks], y=[-place + 0.42 for _, place, _ in marks], mode="markers",
            name="leaves the donor's text", showlegend=False, marker=LEAVES,
            text=[f"{arm} leaves the donor's text at step {step}" for step, _, arm in marks],
            hovertemplate="%{text}<extra></extra>",
        )
    )  # fmt: skip
    return [*traces, _written(result, len(texts["patched"][: lines * width]), width)]


def _marks_steps(result: PatchResult) -> bool:
    """Whether the written steps are marked: not if they are all from step 1 on."""
    return any((patch.schedule.first, patch.schedule.last) != (1, None) for patch in result.cells[0].patches)


def _written(result: PatchResult, n: int, width: int) -> go.Scatter:
    """A bar under each patched token at whose step the patch is written."""
    steps = [step for step in range(n) if result.cells[0].covers(step)] if _marks_steps(result) else []
    x = [end for step in steps for end in (step % width - 0.45, step % width + 0.45, None)]
    y = [end for step in steps for end in (-(4 * (step // width) + 2) - 0.5,) * 2 + (None,)]
    return go.Scatter(
        x=x, y=y, mode="lines", line={"color": PATH_A, "width": 3}, name="patch is written", showlegend=False,
        hoverinfo="skip",
    )  # fmt: skip


def _hover(result: PatchResult, arm: str, step: int, token: int, donor: tuple[int, ...], left: int | None) -> str:
    """Step, token and id, and what the donor wrote there."""

    def named(number: int) -> str:
        return f"'{token_label(result.token_texts.get(number, str(number)))}' (id {number})"

    lines = [f"<b>step {step}, {arm}</b>", named(token)]
    if arm == "patched" and result.cells[0].covers(step):
        lines.append("the patch is written at this step")
    if left is not None and step >= left:
        lines.append(f"donor: {named(donor[step])}" if step < len(donor) else "the donor's text has ended")
        lines.append("leaves the donor's text here" if step == left else f"left the donor's text at step {left}")
    return "<br>".join(lines)


def _legend(written: bool) -> list[go.Scatter]:
    """Entries without data, so that the legend stays the same whichever prompt is shown."""
    square = {"symbol": "square", "size": 13}
    marks = [
        ("the donor's text", square | {"color": "rgba(138,146,158,0.4)"}),
        ("leaves it", LEAVES),
        ("after that", square | {"color": "rgba(224,138,46,0.5)"}),
    ]
    bar = {"symbol": "line-ew-open", "size": 14, "color": PATH_A, "line": {"width": 3}}
    marks += [("patch is written", bar)] * written
    return [
        go.Scatter(x=[None], y=[None], mode="markers", name=name, marker=marker, hoverinfo="skip")
        for name, marker in marks
    ]
