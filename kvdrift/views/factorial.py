"""K/V state crossed with kernel: one factor changed at a time, beside both and a one-ulp placebo."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvdrift.errors import InputError
from kvdrift.models.labels import model_name
from kvdrift.patching.factorial_result import EDGES, PLACEBOS, WHOLE, Factorial
from kvdrift.views.parts import takeaway_patching as takeaway
from kvdrift.views.parts.choices import whole_numbers
from kvdrift.views.parts.curves import LogAxis
from kvdrift.views.parts.interventions import of_steps, size
from kvdrift.views.parts.labels import escape
from kvdrift.views.parts.step_curves import step_curve, step_traces, zero_words
from kvdrift.views.parts.text_width import wrap
from kvdrift.views.parts.theme import FLOOR_LINE, NARROW, PATH_A, PATH_B, SERIES, lay_out, title_text

LINES: dict[str, dict[str, Any]] = {
    "both: the whole path": {"colour": SERIES[4], "width": 3.0, "shade": True},
    "placebo: one entry by one ulp": {"colour": FLOOR_LINE, "width": 2.0, "dash": "dash"},
    "the kernel alone": {"colour": PATH_A, "width": 2.0},
    "K/V alone": {"colour": PATH_B, "width": 2.0},
}
PANELS = {
    "Starting from {off}, change …": (WHOLE, "ulp-y00", "y10-y00", "y01-y00"),
    "Starting from {on}, change …": (WHOLE, "ulp-y11", "y01-y11", "y10-y11"),
}
"""The pair of each of `LINES`, by panel."""
METRICS = {"logit_l2": "distance (centred L2 of the logits)", "kl": "KL in nats"}


def factorial(factorial: Factorial, *, metric: str = "logit_l2", dark: bool = False) -> go.Figure:
    """Distances by step: the kernel changed, the K/V changed, both, and one entry of the K/V moved by one ulp.

    Lines are medians over prompts of ``factorial.to_dataframe()``, one panel per path that one starts from; the shade
    around the whole path is a 95 % bootstrap interval over prompts. Where a median is exactly zero (all logits equal
    bit for bit) a grey mark stands at the bottom and the line stops. The lengths do not add up to shares: drift runs
    to a plateau whatever set it off, which is what the one-ulp placebo is there to show.

    Parameters
    ----------
    factorial
        What `kvdrift.factorial` found.
    metric
        ``"logit_l2"`` (centred over the vocabulary) or ``"kl"`` (nats).
    dark
        Use the dark template.

    Raises
    ------
    InputError
        If it is another kind of result, or there is no such metric.

    Examples
    --------
    >>> import kvdrift as kd
    >>> model = kd.load(kd.models.tiny("llama"), quiet=True)
    >>> fig = kd.views.factorial(kd.factorial(model, [1, 2, 3], max_new_tokens=4, progress=False))
    """
    if not isinstance(factorial, Factorial):
        raise InputError(f"factorial was given a {type(factorial).__name__}; it shows what kvdrift.factorial returns.")
    if metric not in METRICS:
        raise InputError(f"metric={metric!r}: choose {' or '.join(METRICS)}.")
    ran = factorial.ran
    curves = {}
    for pair in dict.fromkeys(pair for pairs in PANELS.values() for pair in pairs):
        values, same = factorial.values(pair, metric), factorial.values(pair, "identical")
        curves[pair] = step_curve(values, same, ran, intervals=pair == WHOLE)
    axis = LogAxis.of([np.stack([curve.median, curve.low, curve.high]) for curve in curves.values()])
    words = EDGES | PLACEBOS | {WHOLE: f"{factorial.on.label} against {factorial.off.label}"}
    headings = [
        _panel_title(heading.format(on=factorial.on.label, off=factorial.off.label), _equal(factorial, pairs))
        for heading, pairs in PANELS.items()
    ]
    lines = max(heading.count("<br>") for heading in headings)
    fig = make_subplots(
        rows=1, cols=2, horizontal_spacing=0.05, shared_yaxes=True,
        subplot_titles=headings,
    )  # fmt: skip
    for column, pairs in enumerate(PANELS.values(), start=1):
        for (name, look), pair in zip(LINES.items(), pairs, strict=True):
            what = f"{words[pair]} ({pair})"
            traces = step_traces(curves[pair], axis, name=name, what=what, legend=column == 1, **look)
            fig.add_traces(traces, rows=1, cols=column)
    last = max(int(factorial.n_steps.max(initial=1)) - 1, 1)
    fig.update_xaxes(title_text="step (each step predicts one new token)", range=[-0.6, last + 0.6],
                     **whole_numbers(last + 1))  # fmt: skip
    zero = zero_words(*(np.stack([factorial.values(pair, name) for pair in curves]) for name in (metric, "identical")))
    fig.update_yaxes(**axis.settings(zero))
    fig.update_yaxes(title_text=METRICS[metric], row=1, col=1)
    title = title_text(
        takeaway.factorial(factorial, metric),
        f"K/V state × kernel by step, on the same tokens; median over prompts (shade: 95 % interval). "
        f"{model_name(factorial.on.model)} in {factorial.on.dtype}, {size(factorial)}. Kernel: one-token decode or "
        "full recompute.",
    )
    return lay_out(fig, title, dark=dark, above=24 + 19 * lines)


def _equal(factorial: Factorial, pairs: tuple[str, ...]) -> str:
    """Shares of counted steps at which all logits are equal in every bit."""
    if not factorial.counted.any():
        return "no step counts"
    shares = [_share(factorial, pair) for pair in pairs]
    both, ulp, kernel, state = (of_steps(share) for share in shares)
    return f"bit for bit equal: kernel {kernel}, K/V {state}, both {both}, placebo {ulp} of steps"


def _panel_title(heading: str, equal: str) -> str:
    """A panel's heading and its shares, broken to half of the narrowest figure."""
    room = (NARROW - 130) / 2
    bold = "<br>".join(f"<b>{escape(line)}</b>" for line in wrap(heading, room, 16, bold=True))
    return bold + "".join(f"<br><span style='font-size:12px'>{line}</span>" for line in wrap(equal, room, 12))


def _share(factorial: Factorial, pair: str) -> float:
    """Mean over prompts of the share of its counted steps, as `Factorial.per_prompt` gives it."""
    shares = factorial.per_prompt(pair, "identical")
    return float(shares[np.isfinite(shares)].mean())
