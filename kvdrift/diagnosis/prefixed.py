"""Cases of a path that starts from a saved prefix, and whether that prefix is what the model gives for its tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvdrift.controls import Control
from kvdrift.controls.reroll import ReRoll
from kvdrift.diagnosis.cases import Case
from kvdrift.diagnosis.evidence import Finding
from kvdrift.diagnosis.locate import PAST, in_order, pairs, place
from kvdrift.diagnosis.lockstep import Moment
from kvdrift.diagnosis.observe import Observer, Snapshot
from kvdrift.models.model import Model
from kvdrift.paths.path import Path
from kvdrift.paths.path_capabilities import anew, holds

KV = ("k", "v", *PAST.values())
RE_ROLLS = (0, 1)
MARGIN = 8
"""A right prefix lies at most so many times as far from a fresh one as re-rolls of it, or as one rounding in its dtype;
a wrong token or position lies some hundred times as far."""


def begun_with(cases: Sequence[Case], held: Sequence[int]) -> list[Case]:
    """The cases with prompts that begin with the tokens ``held`` by the path's cache, at the lengths that they had."""
    n = len(held)
    return [
        case
        if case.of_user or not held
        else replace(case, prompt=(*held, *(case.prompt[n:] if len(case.prompt) > n else case.prompt)))
        for case in cases
    ]


def stale_prefix(model: Model, case: Case, path: Path) -> Finding | None:
    """Hold a saved prefix against a fresh one and re-rolls of it.

    What is compared is what the first pass after the prefix reads and computes, natively.
    """
    held = holds(path, case.prompt)
    again = anew(path, held)
    rolled = [(again, (*again.controls, ReRoll(seed))) for seed in RE_ROLLS]
    runs = [(path, path.controls), (again, again.controls), *rolled]
    saved, fresh, *others = (_first_step(model, case, *run) for run in runs)
    experts = bool((path.model or model).architecture.n_experts)
    known = [{key: (x, y) for key, x, y in pairs(other, fresh)} for other in others]
    wrong = []
    for key, x, y in pairs(saved, fresh):
        if not y.numel() or (experts and key[1] not in KV):
            continue
        middle = experts and key[0] > 0
        found = _distance(key[1], x, y, middle) if x.shape == y.shape else math.inf
        beside = [_distance(key[1], *each[key], middle) for each in known if key in each]
        allowed = max(torch.finfo(y.dtype).eps, *beside)
        if not found <= MARGIN * allowed:
            wrong.append((key, found / allowed))
    if not wrong:
        return None
    key, times = min(wrong, key=lambda found: in_order(found[0]))
    what = (
        f"the saved prefix of {len(held)} tokens is not what the model gives for them: {times:.2g} times as far from a "
        "fresh one as re-rolled sums are"
    )
    return Finding("prefix", path.label, what, Moment(case, 0, len(case.prompt) - 1), place(model, *key))


def _first_step(model: Model, case: Case, path: Path, controls: tuple[Control, ...]) -> Snapshot:
    run = path.start(model, case.prompt, controls)
    try:
        return Observer(run).step()
    finally:
        run.close()


def _distance(site: str, x: Tensor, y: Tensor, middle: bool) -> float:
    """L2 distance at each position of a site, relative to the mean size of ``y`` at one: the largest, or the median.

    The median leaves out single tokens that rounding sends to other experts.
    """
    if site in KV:
        x, y = x.movedim(1, 0), y.movedim(1, 0)  # heads stand first
    if y.dim() == 1:
        x, y = x[None], y[None]
    x, y = x.double().flatten(1), y.double().flatten(1)
    scale, apart = y.norm(dim=1).square().mean().sqrt(), (x - y).norm(dim=1)
    return float((apart.median() if middle else apart.max()) / scale) if scale > 0 else 0.0
