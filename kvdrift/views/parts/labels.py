"""The words on figures: what a metric is called, how a number is written, how token text is made safe."""

from __future__ import annotations

import html
import unicodedata
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvdrift.models.labels import model_name
from kvdrift.words.numbers import number, plural

if TYPE_CHECKING:
    from kvdrift.drift.result import Drift
    from kvdrift.models.architecture import LayerInfo
    from kvdrift.models.labels import Prompt

METRICS = {
    "rel_l2": "relative L2 drift, ‖a−b‖ / ‖b‖",
    "max_abs": "largest absolute difference",
    "max_ulp": "largest difference (ulps)",
    "cosine": "cosine distance, 1 − cos",
    "identical": "share of entries equal in every bit",
}
METRICS_SHORT = {
    "rel_l2": "relative L2", "max_abs": "max |a−b|", "max_ulp": "max ulps", "cosine": "1 − cosine",
    "identical": "identical share",
}  # fmt: skip
VISIBLE_SPACE = {" ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥"}


class Prompted(Protocol):
    """Any result over prompts: a drift, a patched run, a factorial."""

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """The prompts, first axis of every array."""


def escape(text: str) -> str:
    """Text that Plotly shows as it is: no tags, no entities, no formulas between dollar signs.

    Examples
    --------
    >>> escape("<b>1 & 2</b>")
    '&lt;b&gt;1 &amp; 2&lt;/b&gt;'
    """
    return html.escape(text, quote=False).replace("$", "&#36;")


def token_label(text: str, limit: int = 24) -> str:
    """One token, escaped, with white space and control characters made visible, cut to ``limit`` characters.

    Examples
    --------
    >>> token_label(" <b>")
    '␣&lt;b&gt;'
    """
    shown = "".join(
        VISIBLE_SPACE.get(c) or (f"\\x{ord(c):02x}" if unicodedata.category(c)[0] == "C" else c) for c in text
    )
    return escape(shown if len(shown) <= limit else shown[: limit - 1] + "…") or "∅"


def cell_text(values: np.ndarray, zero: str = "0 (bit-identical)") -> np.ndarray:
    """`number` for each cell, any shape; exact zeros are named."""
    flat = [zero if v == 0 else number(float(v)) for v in np.asarray(values, dtype=float).ravel()]
    return np.array(flat, dtype=object).reshape(np.shape(values))


def decade(exponent: int, factor: int = 1) -> str:
    """A tick label such as 10⁻³, with real superscripts; plain numbers from 1 to 500."""
    if 0 <= exponent <= 2:
        return str(factor * 10**exponent)
    power = f"10<sup>{str(exponent).replace('-', '−')}</sup>"
    return power if factor == 1 else f"{factor}·{power}"


def layer_kind(info: LayerInfo) -> str:
    """What kind of attention a layer has, as in ``sliding attention, window 512``."""
    kind = {"none": "no attention", "conv": "convolution"}.get(info.attention, f"{info.attention} attention")
    return f"{kind}, window {info.window}" if info.window else kind


def layer_kinds(drift: Drift, layers: np.ndarray) -> list[str]:
    """`layer_kind` of each layer number."""
    infos = {info.index: info for info in drift.architecture.layers}
    return [layer_kind(infos[int(n)]) for n in layers]


def cell_texts(drift: Drift, layers: np.ndarray, columns: list[str]) -> list[list[str]]:
    """Hover text of each cell ``[layer][column]``: the kind of layer, and what belongs to the column.

    Held once per cell of a figure, so it is short; the kind is left out of a model whose layers are all alike.
    """
    kinds = layer_kinds(drift, layers)
    if len(set(kinds)) == 1:
        return [columns for _ in kinds]
    return [[f"{kind}<br>{column}" for column in columns] for kind in kinds]


def versus(drift: Drift) -> str:
    """What is compared, as in ``smollm2-135m in bfloat16: cache-ON (a) against cache-OFF (b)``."""
    a, b = drift.a, drift.b
    model, other = model_name(a.model), model_name(b.model)
    if (a.model, a.dtype) == (b.model, b.dtype):
        return f"{model} in {a.dtype}: {a.label} (a) against {b.label} (b)"
    return f"{a.label} of {model} in {a.dtype} (a) against {b.label} of {other} in {b.dtype} (b)"


def counts(drift: Drift) -> str:
    """How much was measured, as in ``3 prompts, 48 steps``."""
    prompts = len(drift.prompts)
    steps = int(drift.counted.sum(axis=1).max(initial=0))
    many = "up to " if prompts > 1 else ""
    return f"{prompts} {plural(prompts, 'prompt')}, {many}{steps} {plural(steps, 'counted step')}"


def prompt_label(result: Prompted, prompt: int, limit: int = 34) -> str:
    """Number and beginning of a prompt, not escaped."""
    given = result.prompts[prompt]
    numbers = given.tokens == tuple(map(str, given.ids))  # a model without a tokenizer
    text = given.text or (" " if numbers else "").join(given.tokens)
    text = " ".join(text.split())
    return f"prompt {prompt}: {text[:limit]}{'…' if len(text) > limit else ''}"


def step_texts(drift: Drift, prompt: int) -> list[str]:
    """Per measured step, what the model reads and what each path would write next, escaped, ``[step]``."""
    fed, top = drift.fed[prompt], [drift.top1(path)[prompt] for path in "ab"]
    ids = drift.prompts[prompt].ids

    def text(token: int) -> str:
        return f"'{token_label(drift.token_texts.get(int(token), str(token)))}'"

    lines = []
    for row, step in enumerate(drift.steps):
        read = ids[-1] if step == 0 else fed[step - 1]
        a, b = top[0][row], top[1][row]
        if a < 0:
            lines.append("not measured")
            continue
        then = f"both say {text(a)}" if a == b else f"a says {text(a)}, b says {text(b)} (flip)"
        lines.append(f"reads {text(read)}; {then}")
    return lines
