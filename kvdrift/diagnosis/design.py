"""Differences that are no faults: what a cache declares to give up, and what a model is known to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from transformers import QuantizedCache

from kvdrift.diagnosis.cases import Case
from kvdrift.diagnosis.evidence import Excuse
from kvdrift.diagnosis.lockstep import Moment
from kvdrift.paths.cache_on import CacheOn
from kvdrift.paths.loss import Declared, Dropped, Rounded, as_losses, said
from kvdrift.paths.path import Path

if TYPE_CHECKING:
    from kvdrift.models.model import Model


def declared_loss(path: Path) -> Declared | None:
    """What a path declares to give up: its ``lossy``, or a quantised cache, which is taken for a sentence.

    Examples
    --------
    >>> import kvdrift as kd
    >>> declared_loss(kd.CacheOn(lossy="keys in float16")), declared_loss(kd.CacheOn())
    ('keys in float16', None)
    """
    declared = getattr(path, "lossy", None)
    if isinstance(path, CacheOn) or isinstance(declared, (str, Dropped, Rounded)):
        if declared:
            return as_losses(declared)
    elif declared:  # of a path of somebody's own
        return str(declared)
    if isinstance(path, CacheOn) and path.cache is not None and isinstance(path.cache(), QuantizedCache):
        return "the cache is quantised"
    return None


def without_loss(cases: Sequence[Case], lossy: Declared | None) -> list[Case]:
    """The cases of a lossy cache once more with the model's own, in which nothing that differs is excused by it."""
    return [
        replace(
            case,
            name=f"{case.name} with the model's own cache",
            a=replace(case.a, cache=None, lossy=None),
            lossless=True,
        )
        for case in cases
        if lossy is not None and isinstance(case.a, CacheOn) and case.a.cache is not None and not case.a.begins_filled
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
