"""Differences that are no faults: what a cache declares to give up, and what a model is known to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvdrift.diagnosis.cases import Case
from kvdrift.diagnosis.evidence import Excuse
from kvdrift.diagnosis.lockstep import Moment
from kvdrift.models.model import Model
from kvdrift.paths.loss import Declared, said
from kvdrift.paths.path_capabilities import begins_filled, own_cache


def without_loss(cases: Sequence[Case], lossy: Declared | None) -> list[Case]:
    """The cases of a lossy cache once more with the model's own, in which nothing that differs is excused by it."""
    return [
        replace(case, name=f"{case.name} with the model's own cache", a=a, lossless=True)
        for case in cases
        if lossy is not None and own_cache(case.a) is not None and not begins_filled(case.a)
        if (a := case.a.varied(cache=None, lossy=None)) is not None
    ]


def excuse(moment: Moment, lossy: Declared | None, bidirectional: bool) -> Excuse | None:
    """Why two paths may differ at a moment, or None."""
    if lossy is not None and not moment.case.lossless:
        return Excuse("lossy", said(lossy))
    if bidirectional:
        return Excuse("by_design", "the model declares, by its configuration or its mask, that tokens see later ones")
    switch = moment.case.switch
    if switch is not None and moment.position + 1 > switch:
        return Excuse(
            "by_design",
            f"beyond {switch} tokens the rotary embedding changes for every position (dynamic NTK or LongRoPE), and "
            "keys that are cached already keep the old one",
        )
    return None


def bidirectional(model: Model) -> bool:
    """Whether the model declares that its attention looks ahead."""
    modules = [module for module in model.tree.attention_modules if module is not None]
    return any(getattr(module, "is_causal", True) is False for module in modules)
