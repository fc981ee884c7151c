"""One case of the confusion table: what `kvdrift.diagnose` says about a model while a fault sits in it."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from faults.effect import THRESHOLD, effect
from faults.prefixes import TOKENS
from faults.registry import FAULTS

import kvdrift as kd
from kvdrift.models.architecture import describe
from kvdrift.models.tiny import tiny

ALARMS = ("bug", "nonfinite", "nondeterministic")
UPSTREAM = {"mamba": ("at a chunk boundary", "in a pass of several tokens")}
"""Families in which transformers 5.24 has a fault of its own, and when it shows (docs/coverage.md tells the cause).

A clean model is expected to be called a bug there and then only; an injected fault, to show elsewhere too.
"""
CLEAN = "(clean)"


@dataclass(frozen=True)
class Case:
    """One row of results.

    Attributes
    ----------
    fault, family, dtype
        The case; `CLEAN` stands for no fault.
    change
        The largest relative change of the float64 logits; None without a fault, or where it does not apply.
    kind
        The verdict, or the error that diagnosis died of; None where the case does not count.
    layer
        The layer in which the fault sits, where it sits in one.
    named
        The layer that the verdict names.
    signature, reasons
        The verdict's.
    seconds
        Time of the diagnosis.
    """

    fault: str
    family: str
    dtype: str
    change: float | None = None
    kind: str | None = None
    layer: int | None = None
    named: int | None = None
    signature: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def counts(self) -> bool:
        """Whether the fault changes the float64 output, or there is none to change it."""
        return self.fault == CLEAN or (self.change or 0.0) > THRESHOLD

    @property
    def right(self) -> bool:
        """A fault that counts raises an alarm, a clean model gets a verdict without one."""
        known = self.kind == "bug" and tuple(self.signature) == UPSTREAM.get(self.family)
        if self.fault == CLEAN:
            return known if self.family in UPSTREAM else self.kind in ("exact", "rounding")
        return not self.counts or (self.kind in ALARMS and not known)

    @property
    def layer_right(self) -> bool | None:
        """Whether the verdict names the layer of the fault; None where it sits in no single one."""
        return None if self.layer is None or not self.counts else self.named == self.layer

    @property
    def signature_right(self) -> bool | None:
        """Whether the verdict names the circumstance; None where that depends on the model."""
        expected = None if self.fault == CLEAN else FAULTS[self.fault].signature
        return None if expected is None or not self.counts else expected in self.signature

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def n_layers(family: str) -> int:
    """The fewest layers, two at least, that hold every kind and one with keys and values twice."""
    layers = describe(tiny(family)).layers
    kinds = [layer.attention for layer in layers]
    twice = [layer.attention for layer in layers if layer.n_kv_heads] or kinds
    for n in range(2, len(layers)):
        count = Counter(kinds[:n])
        if set(count) == set(kinds) and max(count[kind] for kind in twice) > 1:
            return n
    return len(layers)


def model_of(family: str, dtype: str = "float32") -> Any:
    """A fresh model, so that no fault can live on in it."""
    return tiny(family, dtype=getattr(torch, dtype), num_hidden_layers=n_layers(family))


def judge(fault: str, family: str, dtype: str, brief: bool = False) -> Case:
    """Run one case; ``brief`` looks for a change under all circumstances only where plain decoding shows none."""
    hf = model_of(family, dtype)
    change, layer, context, path = None, None, nullcontext(), None
    if fault != CLEAN:
        chosen = FAULTS[fault]
        if not chosen.applies(hf):
            return Case(fault, family, dtype)
        layer = chosen.layer(hf)
        change = max(effect(chosen, hf, ["cache-ON"]).values()) if brief else 0.0
        if change <= THRESHOLD:
            change = max(effect(chosen, hf).values())
        if change <= THRESHOLD:
            return Case(fault, family, dtype, change)
        context = chosen.apply(hf)
        path = None if chosen.prefix is None else kd.CacheOn(prefix=(TOKENS, chosen.prefix(hf)))
        path = path if chosen.lossy is None else kd.CacheOn(lossy=chosen.lossy)
    start = time.perf_counter()
    with context:
        try:
            verdict = kd.diagnose(hf, a=path, progress=False)
        except Exception as error:  # a diagnosis that dies is a wrong answer, and the table goes on
            told = f"{type(error).__name__}: {error}"
            trace = tuple(traceback.format_exc().splitlines()[-12:])
            return Case(fault, family, dtype, change, told, layer, reasons=trace)
    named = None if verdict.where is None else verdict.where.layer
    seconds = time.perf_counter() - start
    return Case(fault, family, dtype, change, verdict.kind, layer, named, verdict.signature, verdict.reasons, seconds)
