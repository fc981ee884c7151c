"""Dropdowns, sliders and limits that several figures share."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvdrift.errors import InputError
from kvdrift.views.parts.labels import Prompted, escape, prompt_label
from kvdrift.words.numbers import count

MAX_CELLS = 200_000  # numbers drawn or held ready in one figure
MAX_PROMPTS = 12


def check_prompt(result: Prompted, prompt: int) -> None:
    """Refuse a prompt number that this result does not have."""
    if not 0 <= prompt < len(result.prompts):
        have = f"{count(len(result.prompts), 'prompt', thousands='')}"
        raise InputError(f"prompt={prompt} is out of range: this result has {have}, counted from 0.")


def menu(name: str, labels: list[str], chosen: str, args: list[list[Any]]) -> dict[str, Any]:
    """One dropdown; each entry is a Plotly ``update`` of traces and, if there is a second part, layout."""
    return {
        "name": name,
        "active": labels.index(chosen),
        "buttons": [
            {"label": label, "method": "update", "args": _plain(arg)} for label, arg in zip(labels, args, strict=True)
        ],
    }


def prompt_menu(result: Prompted, prompts: list[int], shown: int, args: list[list[Any]]) -> list[dict[str, Any]]:
    """The dropdown of prompts, or none if there is only one to choose from."""
    if len(prompts) < 2:
        return []
    labels = [escape(prompt_label(result, p)) for p in prompts]
    return [menu("prompt", labels, labels[prompts.index(shown)], args)]


def budget(result: Prompted, prompt: int, cells: int) -> tuple[list[int], int]:
    """Which prompts a figure holds, and how far its longest axis is strided.

    All prompts, if there are at most `MAX_PROMPTS` and their cells (``cells`` each) stay within `MAX_CELLS`;
    else the one asked for, strided until it fits.
    """
    prompts = list(range(len(result.prompts)))
    if len(prompts) > MAX_PROMPTS or cells * len(prompts) > MAX_CELLS:
        return [prompt], max(1, -(-cells // MAX_CELLS))
    return prompts, 1


def slider(prefix: str, labels: list[str], active: int, args: list[list[Any]]) -> dict[str, Any]:
    """One slider below the plot; each stop is a Plotly ``update``."""
    return {
        "active": active,
        "currentvalue": {"prefix": prefix, "xanchor": "left"},
        "pad": {"t": 46, "b": 4},
        "len": 1.0,
        "steps": [
            {"label": label, "method": "update", "args": _plain(arg)} for label, arg in zip(labels, args, strict=True)
        ],
    }


def whole_numbers(count: int) -> dict[str, Any]:
    """Axis settings that put ticks on whole numbers only; Plotly would halve them on a short axis."""
    return {"tickformat": "d", **({"dtick": 1} if count <= 10 else {})}


def stride_note(what: str, stride: int) -> str:
    """The sentence a strided figure carries, empty when nothing was left out."""
    if stride <= 1:
        return ""
    return f"To keep the figure light, only every {_ordinal(stride)} {what} is drawn."


def _ordinal(n: int) -> str:
    suffix = "th" if 10 <= n % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{suffix}"


def _plain(value: Any) -> Any:
    """Arrays as nested lists with None for NaN: Plotly does not decode typed arrays inside buttons."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind == "f":
            plain = value.astype(object)
            plain[~np.isfinite(value)] = None
            return plain.tolist()
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
