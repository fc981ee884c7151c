"""Parts of attention that are missing in one kind of pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from faults.fault import fault, second_attention_layer
from faults.passes import Pass, during, watched
from torch import nn

from kvdrift.models.architecture import describe
from kvdrift.models.tree import find_blocks


def attention_modules(hf: Any) -> dict[int, nn.Module]:
    """The attention modules by layer."""
    return {layer: m for layer, m in enumerate(find_blocks(hf).attention_modules) if m is not None}


def scale_name(hf: Any) -> str | None:
    """The attribute of attention modules that scales the scores, if the forward pass reads one."""
    names = ["inv_norm_factor"] if describe(hf).positional == "alibi" else ["scaling"]
    return next((n for m in attention_modules(hf).values() for n in names if hasattr(m, n)), None)


def has_scale(hf: Any) -> bool:
    """Whether attention modules have a scale."""
    return scale_name(hf) is not None


def has_sinks(hf: Any) -> bool:
    """Whether attention modules have sinks."""
    return any(isinstance(getattr(m, "sinks", None), nn.Parameter) for m in attention_modules(hf).values())


def _swapped(
    modules: list[nn.Module], name: str, value: Callable[[Any], Any], when: Callable[[], bool]
) -> AbstractContextManager[None]:
    """An attribute of these modules has another value while they run, in passes of a kind."""

    def enter(module: nn.Module) -> Callable[[], None] | None:
        if not when():
            return None
        kept = getattr(module, name)
        setattr(module, name, value(kept))
        return lambda: setattr(module, name, kept)

    return during(modules, enter)


def _missing(hf: Any, name: str, value: Callable[[Any], Any], when: Callable[[Pass], bool]) -> Iterator[None]:
    with watched(hf.base_model) as now, _swapped(list(attention_modules(hf).values()), name, value, lambda: when(now)):
        yield


@fault(has_scale, signature="from the first decode step")
def scale_missing_at_decode(hf: Any) -> Iterator[None]:
    """Attention scores of decoded tokens are not scaled."""
    yield from _missing(hf, scale_name(hf), lambda _: 1.0, lambda now: now.decoding)


@fault(lambda hf: describe(hf).attn_softcap is not None, signature="from the first decode step")
def soft_cap_missing_at_decode(hf: Any) -> Iterator[None]:
    """Attention scores of decoded tokens are not capped."""
    yield from _missing(hf, "attn_logit_softcapping", lambda _: None, lambda now: now.decoding)


@fault(has_sinks, signature="from the first decode step")
def sinks_missing_at_decode(hf: Any) -> Iterator[None]:
    """Attention of decoded tokens has no sinks."""

    def none(sinks: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(torch.full_like(sinks, torch.finfo(sinks.dtype).min), requires_grad=False)

    yield from _missing(hf, "sinks", none, lambda now: now.decoding)


@fault(has_scale, second_attention_layer)
def cache_off_scale_missing(hf: Any, layer: int) -> Iterator[None]:
    """Without a cache one layer does not scale its scores: the reference arm is the wrong one."""
    modules = [attention_modules(hf)[layer]]
    with watched(hf.base_model) as now, _swapped(modules, scale_name(hf), lambda _: 1.0, lambda: not now.cached):
        yield


@fault(lambda hf: describe(hf).final_softcap is not None, signature="from the first decode step")
def logit_cap_missing_at_decode(hf: Any) -> Iterator[None]:
    """Logits of decoded tokens are not capped."""
    with watched(hf) as now:

        def no_cap(model: nn.Module) -> Callable[[], None] | None:
            if not now.decoding:
                return None
            cap, model.config.final_logit_softcapping = model.config.final_logit_softcapping, None
            return lambda: setattr(model.config, "final_logit_softcapping", cap)

        with during([hf], no_cap):
            yield
