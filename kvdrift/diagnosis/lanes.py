"""Lanes: the same tokens in other manners of calling the model than the one under test."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from kvdrift.backends.manner import MANNERS, Manner
from kvdrift.diagnosis.cases import Case
from kvdrift.diagnosis.evidence import Finding
from kvdrift.models.model import Model
from kvdrift.paths.cache_off import CacheOff
from kvdrift.paths.capabilities import stateless
from kvdrift.paths.path import Path
from kvdrift.paths.path_capabilities import manner

_Lane = tuple[str, Manner]
PROMPT, STEPS = 6, 3
CALLED = {
    "explicit": "with explicit positions",
    "all-logits": "where all logits are asked for",
    "default": "in model(ids) calls",
    "mask": "in calls with a mask alone",
}
"""Where a fault shows that one lane alone has."""
APART = {
    "all-logits": "between calls for one row of logits and for all",
    "default": "between the model's default positions and explicit ones",
    "mask": "between calls with and without a mask of ones",
}
"""Where a fault shows that sets a lane apart from the one before it."""

MEANS = {
    "all-logits": "This model gives other logits for the last position when all are asked for than when that one is.",
    "default": "This model's default positions differ from those that generate() and kvdrift pass (0, 1, …).",
    "mask": "An attention mask of ones, which hides nothing, changes what this model computes.",
}


def lane_cases(model: Model, a: Path, b: Path, seed: int = 0) -> list[Case]:
    """A short prompt in every other manner of calling the model, and each manner against the one before it.

    Within a lane both paths call the model alike. Between two lanes, which differ in one argument, both run without a
    cache. Manners that are one for this model (it takes no positions, say) are run once.

    Parameters
    ----------
    model
        The model under test.
    a, b
        The path under test and the reference. Lanes are made for paths that call alike, and can call otherwise.
    seed
        Decides the tokens.

    Examples
    --------
    >>> import kvdrift as kd
    >>> model = kd.load(kd.models.tiny("bloom"), quiet=True)
    >>> [case.name for case in lane_cases(model, kd.CacheOn(), kd.CacheOff())][:1]
    ['model(ids)']
    """
    now = manner(a)
    if stateless(a) or now is None or now != manner(b):
        return []
    if (a.model or model).backend.module is not (b.model or model).backend.module:
        return []  # two models may well differ in what they default to
    a, b = a.varied(left_padding=0) or a, b.varied(left_padding=0) or b  # default positions count padding
    prompt, feed = _tokens(model, seed)
    lanes = manners(model)
    others = [(call, str(shown)) for call, shown in lanes.items() if call != now]
    within = [case for call, shown in others for case in _within(a, b, call, shown, prompt, feed)]
    return [*within, *(_between(a, *pair, prompt, feed[:1]) for pair in pairwise(lanes.items()))]


def not_run(a: Path, b: Path) -> dict[str, str]:
    """Why there are no lanes for these paths, where one of them cannot be called otherwise."""
    own = [path.label for path in (a, b) if manner(path) is None]
    return {"other manners of calling": f"{own[0]} takes no call="} if own else {}


def manners(model: Model) -> dict[str, Manner]:
    """The manners of calling a model by name, those that are one for it once."""
    found: dict[Manner, str] = {}
    for call in MANNERS:
        found.setdefault(model.backend.manner(call), call)
    return {call: manner for manner, call in found.items()}


def apart(findings: Sequence[Finding]) -> list[str]:
    """What the lanes say that were found to compute different functions."""
    cases = [finding.moment.case for finding in findings if finding.check == "manner" and finding.moment is not None]
    return [MEANS[call] for call in dict.fromkeys(manner(case.a) or "" for case in cases)]


def told(ran: Sequence[Case]) -> list[str]:
    """A sentence on the lanes that were run, if any were."""
    lanes = [case.name for case in ran if case.b is not None and not case.between_manners]
    if not lanes:
        return []
    last = f"{', '.join(lanes[:-1])} and {lanes[-1]}" if len(lanes) > 1 else lanes[0]
    return [f"The model was also called as {last}, with and without a cache, and each against the one before it."]


def _within(a: Path, b: Path, call: str, shown: str, prompt: tuple[int, ...], feed: tuple[int, ...]) -> list[Case]:
    ours, theirs = a.varied(call=call), b.varied(call=call)
    if ours is None or theirs is None:
        return []
    return [Case(shown, prompt, feed, STEPS, ours, manner=CALLED[call], b=theirs)]


def _between(a: Path, plain: _Lane, other: _Lane, prompt: tuple[int, ...], feed: tuple[int, ...]) -> Case:
    path = CacheOff(a.model, a.attn, a.controls, call=other[0], label=str(other[1]))
    reference = CacheOff(a.model, a.attn, a.controls, call=plain[0], label=str(plain[1]))
    name = f"{other[1]} against {plain[1]}"
    return Case(name, prompt, feed, len(feed), path, manner=APART[other[0]], b=reference)


def _tokens(model: Model, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A prompt and what follows, without the padding token, which some models give no position."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.vocab_size, (PROMPT + STEPS,), generator=generator).tolist()
    padding = getattr(model.hf.config.get_text_config(), "pad_token_id", None)
    kept = [(token + 1) % model.vocab_size if token == padding else token for token in ids]
    return tuple(kept[:PROMPT]), tuple(kept[PROMPT:])
