"""The tables of the architecture experiment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from kvdrift.drift.result import Drift
from kvdrift.experiments.architecture_numbers import KINDS, change, course, layer_changes, same_numbers
from kvdrift.models.architecture import Architecture

MEASURES = ("first", "first_share", "largest_share")


def arms(drifts: Mapping[str, Drift]) -> pd.DataFrame:
    """One row per arm and kind of drift; the original is the first arm."""
    original = next(iter(drifts.values()))
    return pd.DataFrame([_arm(name, drift, original, of) for name, drift in drifts.items() for of in KINDS])


def _arm(name: str, drift: Drift, original: Drift, of: str) -> dict[str, Any]:
    found, reference = course(drift, of), course(original, of)
    row: dict[str, Any] = {
        "arm": name,
        "of": of,
        "model": drift.a.model,
        "dtype": drift.a.dtype,
        "grouping": grouping(drift.architecture),
        "windows": windows(drift.architecture),
        "prompts": len(drift.prompts),
        "steps": int(drift.counted.sum()),
        "same_numbers": same_numbers(drift, original),
        "even_share": 1 / len(found.layers),
        "largest_layer": found.largest_layer,
        "last": float(found.mean[-1]),
        "first_floor": float(found.floor_band[1][0]),
        "last_floor": float(found.floor_band[1][-1]),
    }
    for measure in MEASURES:
        here, there = getattr(found, measure), getattr(reference, measure)
        paired = change(here, there)
        row |= {
            measure: float(np.nanmean(here)) if not np.isnan(here).all() else float("nan"),
            f"{measure}_change": paired.mean,
            f"{measure}_change_low": paired.low,
            f"{measure}_change_high": paired.high,
            f"{measure}_p": paired.p,
            f"{measure}_higher": paired.higher,
            f"{measure}_lower": paired.lower,
        }
    return row


def layers(drifts: Mapping[str, Drift]) -> pd.DataFrame:
    """One row per arm, kind of drift and layer."""
    original = next(iter(drifts.values()))
    rows = []
    for name, drift in drifts.items():
        for of in KINDS:
            found = course(drift, of)
            changes, adjusted = layer_changes(found, course(original, of))
            columns = {
                "layer": found.layers,
                "value": found.mean,
                "low": found.interval[0],
                "high": found.interval[1],
                "floor_low": found.floor_band[0],
                "floor": found.floor_band[1],
                "floor_high": found.floor_band[2],
                "change": [paired.mean for paired in changes],
                "change_low": [paired.low for paired in changes],
                "change_high": [paired.high for paired in changes],
                "p": [paired.p for paired in changes],
                "p_holm": adjusted,
            }
            rows.append(pd.DataFrame({"arm": name, "of": of, **columns}))
    return pd.concat(rows, ignore_index=True)


def grouping(architecture: Architecture) -> str:
    """Query heads to KV heads, as in ``GQA 9:3``."""
    return f"{architecture.grouping} {architecture.n_heads}:{architecture.n_kv_heads}"


def windows(architecture: Architecture) -> str:
    """The windows, as in ``15 of 18 layers: 512``; ``none`` without one."""
    found = [layer.window for layer in architecture.layers if layer.window is not None]
    sizes = "/".join(str(size) for size in sorted(set(found)))
    return f"{len(found)} of {architecture.n_layers} layers: {sizes}" if found else "none"
