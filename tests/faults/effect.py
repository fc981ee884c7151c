"""What a fault does to the float64 output of a model: a case counts where it changes it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from faults import prefixes
from faults.fault import Fault, can_crop
from torch import Tensor
from transformers import Cache, DynamicCache

from kvdrift.controls import cast_copy, promote_float32

THRESHOLD = 1e-9
LONG, OTHER = list(range(7, 28)), list(range(60, 39, -1))


def changes_float64(fault: Fault, hf: Any) -> bool:
    """Whether ``fault`` moves the logits of a float64 copy of ``hf`` by more than rounding, most by plain decoding."""
    return any(max(effect(fault, hf, names).values()) > THRESHOLD for names in (["cache-ON"], None))


def effect(fault: Fault, hf: Any, names: Iterable[str] | None = None) -> dict[str, float]:
    """By how much the fault moves the logits, relative to the largest, under each circumstance.

    Parameters
    ----------
    fault
        A fault that applies.
    hf
        A transformers model in any dtype; its float64 copy, made inside the block, is what runs.
    names
        Which of `CIRCUMSTANCES`; None for all that the model can be in.
    """
    if fault.prefix is not None:
        return _of_a_prefix(cast_copy(hf, torch.float64), fault.prefix)
    names = [name for name in names or CIRCUMSTANCES if "crop" not in name or can_crop(hf)]
    right = _outputs(cast_copy(hf, torch.float64), names)
    with fault.apply(hf):
        wrong = _outputs(cast_copy(hf, torch.float64), names)
    return {name: _relative(wrong[name], right[name]) for name in right}


def _of_a_prefix(hf: Any, make: Callable[[Any], Cache]) -> dict[str, float]:
    """What the logits after a saved prefix are off by."""
    start = len(prefixes.TOKENS)
    with promote_float32(), torch.no_grad():
        right, wrong = (run(hf, LONG[:4], start, cache) for cache in (prefixes.kept(hf, prefixes.TOKENS), make(hf)))
    return {"a saved prefix": _relative(wrong, right)}


def _outputs(hf: Any, names: Iterable[str]) -> dict[str, Tensor]:
    with promote_float32(), torch.no_grad():
        return {name: _logits(CIRCUMSTANCES[name], hf) for name in names}


def _logits(case: Callable[[Any], Tensor], hf: Any) -> Tensor:
    """What a case gives; not a number where a fault makes it break down."""
    try:
        return case(hf)
    except (RuntimeError, AttributeError, IndexError):
        return torch.tensor(torch.nan)


def cache_on(
    hf: Any,
    ids: Sequence[int],
    prompt: int,
    chunk: int | None = None,
    padding: int = 0,
    crop: int = 0,
    drafted: bool = False,
    several: int = 1,
    manner: str = "explicit",
) -> Tensor:
    """Logits ``[token, vocab]`` of real tokens: the prompt in chunks, the rest ``several`` at a time, with a cache.

    With ``crop``, so many other tokens are consumed after the prompt, in one pass if ``drafted``, and cropped again.
    """
    cache = DynamicCache(config=hf.config)
    tokens = [0] * padding + list(ids)
    ends = [*range(chunk or padding + prompt, padding + prompt, chunk or padding + prompt), padding + prompt]
    if crop:
        cache.activate_past_recording()
    found, start = [], 0
    for end in ends:
        found.append(run(hf, tokens[start:end], start - padding, cache, padding, manner))
        start = end
    if crop:
        for token in range(0, crop, crop if drafted else 1):
            run(hf, [100 + token + n for n in range(crop if drafted else 1)], start + token, cache)
        cache.crop(-crop)
    for end in range(start, len(tokens), several):
        found.append(run(hf, tokens[end : end + several], end - padding, cache, padding, manner))
        if crop:
            cache.crop(0)
    return torch.cat(found)[padding:]


def run(hf: Any, tokens: Sequence[int], start: int, cache: Any, padding: int = 0, manner: str = "explicit") -> Tensor:
    """Logits ``[token, vocab]`` of one pass over tokens whose first sits at position ``start``.

    The positions are told (``"explicit"``), or nothing is (``"default"``), or a mask alone (``"mask"``).
    """
    end = start + len(tokens)
    arguments: dict[str, Any] = {"input_ids": torch.tensor([tokens]), "use_cache": cache is not None, "cache": cache}
    if manner == "explicit" and "position_ids" in inspect.signature(hf.forward).parameters:
        arguments["position_ids"] = torch.arange(start, end).clamp(min=0)[None]
    if padding or manner == "mask":
        arguments["attention_mask"] = (torch.arange(-padding, end) >= 0).long()[None]
    return hf(**arguments).logits[0]


def _relative(x: Tensor, y: Tensor) -> float:
    """The largest difference relative to the largest entry; infinite where something is not finite."""
    if not torch.isfinite(x).all():
        return float("inf")
    return float((x - y).abs().max() / y.abs().max())


CIRCUMSTANCES: Mapping[str, Callable[[Any], Tensor]] = {
    "cache-ON": lambda hf: cache_on(hf, LONG, prompt=5),
    "a later prompt": lambda hf: cache_on(hf, OTHER, prompt=9),
    "chunked prefill": lambda hf: cache_on(hf, LONG, prompt=18, chunk=6),
    "left padding": lambda hf: cache_on(hf, LONG, prompt=6, padding=3),
    "several tokens": lambda hf: cache_on(hf, LONG, prompt=5, several=4),
    "after a crop": lambda hf: cache_on(hf, LONG, prompt=5, crop=3),
    "after a crop of drafts": lambda hf: cache_on(hf, LONG, prompt=5, crop=3, drafted=True),
    "without positions": lambda hf: cache_on(hf, LONG[:8], prompt=5, manner="default"),
    "with a mask alone": lambda hf: cache_on(hf, LONG[:8], prompt=5, manner="mask"),
    "cache-OFF": lambda hf: run(hf, LONG, 0, None),
    "cache-OFF at 16": lambda hf: run(hf, LONG[:16], 0, None),
}
"""Under which circumstances the logits are looked at."""
