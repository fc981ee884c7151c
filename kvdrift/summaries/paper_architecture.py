"""What the paper's architecture experiment says about grouping and windows, and never more than was measured."""

from __future__ import annotations

import math

import numpy as np

from kvdrift.drift.result import Drift
from kvdrift.experiments.course import Change, change, course, layer_changes, same_numbers
from kvdrift.experiments.paper_architecture import PaperArchitecture, grouping, windows
from kvdrift.models.ending import nothing_followed
from kvdrift.models.labels import model_name
from kvdrift.statistics.resampling import MIN_PROMPTS
from kvdrift.words.numbers import number, percent, plural

ALPHA = 0.05


def reading(result: PaperArchitecture) -> list[str]:
    """What the arms say about grouping and about windows."""
    original, kv_heads, widened, both = result.original, result.kv_heads, result.windows, result.both
    said = [_course(original)]
    if not original.counted.any():
        return said
    if kv_heads is not None:
        said += [f"{_grouping(original, kv_heads)}.", *_first_layer(original, kv_heads)]
        said.append(_layers(original, kv_heads))
    if widened is not None:
        said.append(f"{_windows(original, widened)}.")
    if both is not None and kv_heads is not None:
        alike = "exactly the numbers of" if same_numbers(both, kv_heads) else "other numbers than"
        said.append(f"Both at once give {alike} expanded KV heads alone.")
    if len(original.prompts) < MIN_PROMPTS:
        said.append(f"With {len(original.prompts)} prompts there are no intervals: take at least {MIN_PROMPTS}.")
    return said


def headline(result: PaperArchitecture) -> str:
    """The answer in one sentence, for a figure."""
    original, kv_heads, widened = result.original, result.kv_heads, result.windows
    parts = []
    if not original.counted.any():
        return _course(original)
    if kv_heads is not None:
        parts.append(_grouping(original, kv_heads))
    if widened is not None:
        same = same_numbers(original, widened)
        parts.append("widening the windows changes no bit" if same else "widening the windows changes the drift")
    text = "; ".join(parts) or _course(original)
    return text[0].upper() + text[1:]


def _course(drift: Drift) -> str:
    name = f"{model_name(drift.a.model)} in {drift.a.dtype} ({grouping(drift.architecture)}, windows: "
    name += f"{windows(drift.architecture)})"
    if not drift.counted.any():
        return f"{name}. {nothing_followed(drift)}"
    accumulated, local = course(drift, "drift"), course(drift, "local")
    share = _average(accumulated.first_share)
    if math.isnan(share):
        return f"{name}: no drift at the last layer, so there is no course through the layers."
    even, alone = percent(1 / len(accumulated.layers)), _average(local.first_share)
    made = "" if math.isnan(alone) else f", and makes {percent(alone)} of what all layers make by themselves"
    return (
        f"{name}: the first layer holds {percent(share)} of the final drift{made} (even: {even}); the "
        f"largest step from one layer to the next is {percent(_average(accumulated.largest_share))}, mostly at layer "
        f"{accumulated.largest_layer}."
    )


def _grouping(original: Drift, copy: Drift) -> str:
    """The answer to the claim that grouping makes drift jump at the first layer."""
    before, after = (course(drift, "drift") for drift in (original, copy))
    a, b = _average(before.first_share), _average(after.first_share)
    few, many = original.architecture.n_kv_heads, copy.architecture.n_kv_heads
    if math.isnan(a) or math.isnan(b):
        return "No final drift in one of the two, so nothing can be said about grouping and a first-layer jump"
    if same_numbers(original, copy):
        return (
            f"Grouping does not shape this drift: with {many} KV heads instead of {few} no bit of it changes (the "
            f"first layer holds {percent(a)} of the final drift with either{', a jump' if before.jumps else ''})"
        )
    heads = f"{few} {plural(few, 'KV head')}"
    shares = f"the first layer holds {percent(a)} of the final drift with {heads} and {percent(b)} with {many}"
    if not before.jumps and not after.jumps:
        return f"Grouping makes no first-layer jump: {shares}"
    if before.jumps and after.jumps:
        return f"The first-layer jump stays without grouping, which therefore does not make it: {shares}"
    if after.jumps:
        return f"A first-layer jump comes only when grouping is taken away: {shares}"
    if change(after.first_share, before.first_share).high < 0:
        return f"The first-layer jump goes with the grouping, which therefore makes it: {shares}"
    return f"The first-layer jump is smaller without grouping, but not with confidence: {shares}"


def _first_layer(original: Drift, copy: Drift) -> list[str]:
    said = []
    for of, words in (
        ("drift", "First-layer drift (median over steps)"),
        ("local", "Made by the first layer alone (mean over steps)"),
    ):
        before, after = course(original, of), course(copy, of)
        if np.isnan(before.first).all():
            continue  # local drift is measured only where past K/V can be written
        floor = f"; its floor is {number(float(before.floor_band[1][0]))}" if len(before.floor) else ""
        said.append(
            f"{words}: {number(_average(before.first))} with grouping, {number(_average(after.first))} without; "
            f"{_paired(change(after.first, before.first))}{floor}."
        )
    return said


def _layers(original: Drift, copy: Drift) -> str:
    parts = []
    for of, words in (("drift", "accumulated drift"), ("local", "local drift")):
        changes, adjusted = layer_changes(course(copy, of), course(original, of))
        parts.append(f"{words}: {_layer_words(changes, adjusted, course(original, of).layers)}")
    return f"Layer by layer without grouping: {'; '.join(parts)}."


def _layer_words(changes: list[Change], adjusted: np.ndarray, layers: np.ndarray) -> str:
    n = max(found.n for found in changes)
    if all(found.higher == found.lower == 0 for found in changes):
        return "no layer changes"
    least = min(1.0, len(changes) * 2.0 ** (1 - n))
    sure = layers[adjusted < ALPHA]
    if least >= ALPHA:
        return f"{n} prompts are too few to test {len(changes)} layers at once"
    if not len(sure):
        return f"no layer changes with confidence (smallest p after Holm {np.nanmin(adjusted):.2g})"
    return f"layers {', '.join(map(str, sure))} change (Holm over {len(changes)} layers)"


def _windows(original: Drift, copy: Drift) -> str:
    sizes = [layer.window for layer in original.architecture.layers if layer.window is not None]
    reach = max(len(p.ids) + int(n) for p, n in zip(original.prompts, original.n_steps, strict=True))
    texts = f"texts of up to {reach} positions, window {min(sizes)}"
    if same_numbers(original, copy):
        return (
            f"Widening the windows of {len(sizes)} layers changes no bit of any drift, accumulated "
            f"or local: while a text fits in it, a window does nothing, and cannot shape the course of drift ({texts})"
        )
    before, after = course(original, "drift"), course(copy, "drift")
    found = change(after.largest_share, before.largest_share)
    return (
        f"The layer that adds most holds {percent(_average(before.largest_share))} of the final drift with windows and "
        f"{percent(_average(after.largest_share))} without; {_paired(found)} ({texts})"
    )


def _paired(found: Change) -> str:
    if found.n == 0:
        return "in no prompt are both known"
    if found.higher == found.lower == 0:
        return f"the same in all {found.n} prompts" if found.n > 1 else "the same in the one prompt"
    counts = f"higher in {found.higher} and lower in {found.lower} of {found.n} prompts"
    if math.isnan(found.low):
        return f"{counts} (mean difference {number(found.mean)})"
    interval = f"95 % interval {number(found.low)} to {number(found.high)}, sign-flip p = {found.p:.2g}"
    return f"{counts} (mean difference {number(found.mean)}, {interval})"


def _average(values: np.ndarray) -> float:
    return float(np.nanmean(values)) if not np.isnan(values).all() else math.nan
