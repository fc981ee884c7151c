"""Wrong positions, and rotary embeddings that are not the prefill's."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from faults.fault import fault
from faults.passes import Pass, before_pass, during, watched
from torch import Tensor, nn

from kvdrift.models.architecture import describe


def rotary_modules(hf: Any) -> list[nn.Module]:
    """Modules that turn positions into rotary embeddings."""
    return [m for m in hf.modules() if any(n.endswith("inv_freq") for n, _ in m.named_buffers(recurse=False))]


def is_rotary(hf: Any) -> bool:
    """Whether the model has rotary embeddings."""
    return bool(rotary_modules(hf))


def reads_positions(hf: Any) -> bool:
    """Whether position ids reach an embedding."""
    return is_rotary(hf) or describe(hf).positional == "learned"


def positions_of(now: Pass, kwargs: dict[str, Any]) -> Tensor:
    """The positions that a body is given, or else those that it takes by itself."""
    given = kwargs.get("position_ids")
    return torch.arange(now.past, now.past + now.queries).unsqueeze(0) if given is None else given


@fault(reads_positions, signature="from the first decode step")
def positions_one_too_high_at_decode(hf: Any) -> Iterator[None]:
    """Every decoded token is placed one position too far."""

    def change(now: Pass, kwargs: dict[str, Any]) -> None:
        if now.decoding:
            kwargs["position_ids"] = positions_of(now, kwargs) + 1

    with before_pass(hf.base_model, change):
        yield


@fault(reads_positions, signature="from the first decode step")
def positions_reset_at_decode(hf: Any) -> Iterator[None]:
    """Positions start again at 0 with the first decoded token."""

    def change(now: Pass, kwargs: dict[str, Any]) -> None:
        if now.decoding:
            kwargs["position_ids"] = torch.zeros_like(positions_of(now, kwargs))

    with before_pass(hf.base_model, change):
        yield


@fault(reads_positions, signature="at a chunk boundary")
def positions_restart_at_a_chunk(hf: Any) -> Iterator[None]:
    """Each further chunk of a chunked prefill counts its positions from 0."""

    def change(now: Pass, kwargs: dict[str, Any]) -> None:
        if now.later_chunk:
            kwargs["position_ids"] = torch.arange(now.queries).unsqueeze(0)

    with before_pass(hf.base_model, change):
        yield


@fault(reads_positions, signature="in a pass of several tokens")
def positions_of_drafts_repeat(hf: Any) -> Iterator[None]:
    """In a pass of 2 to 4 tokens on top of a cache all of them have the position of the first."""

    def change(now: Pass, kwargs: dict[str, Any]) -> None:
        if now.drafted:
            kwargs["position_ids"] = kwargs["position_ids"][:, :1].expand(-1, now.queries)

    with before_pass(hf.base_model, change):
        yield


@fault(reads_positions, signature="with left padding")
def left_padding_counted_at_decode(hf: Any) -> Iterator[None]:
    """A decoded token is placed by its slot in the cache, so that left padding counts as positions."""

    def change(now: Pass, kwargs: dict[str, Any]) -> None:
        if now.decoding:
            kwargs["position_ids"] = torch.full_like(positions_of(now, kwargs), now.past)

    with before_pass(hf.base_model, change):
        yield


@fault(is_rotary, signature="from the first decode step")
def rope_base_at_decode(hf: Any) -> Iterator[None]:
    """Rotary embeddings of decoded tokens use another base than those of the prompt."""
    with watched(hf.base_model) as now:

        def other_base(module: nn.Module) -> Any:
            names = [n for n, _ in module.named_buffers(recurse=False) if n.endswith("inv_freq") and now.decoding]
            kept = {name: module._buffers[name] for name in names}
            module._buffers.update({name: buffer**1.05 for name, buffer in kept.items()})
            return lambda: module._buffers.update(kept)

        with during(rotary_modules(hf), other_base):
            yield


@fault(reads_positions)
def cache_off_positions_skip_one(hf: Any) -> Iterator[None]:
    """Without a cache, every position from the fifth on is one too high: the reference arm is the wrong one."""
    tables = [m for m in hf.base_model.children() if isinstance(m, nn.Embedding)][1:]

    with watched(hf.base_model) as now, ExitStack() as stack:

        def skip(positions: Tensor) -> Tensor:
            return positions if now.cached else positions + (positions > 3)

        def at_rotary(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            given = inspect.signature(module.forward).bind(*args, **kwargs)
            given.arguments["position_ids"] = skip(given.arguments["position_ids"])
            return given.args, given.kwargs

        for module in rotary_modules(hf):
            stack.callback(module.register_forward_pre_hook(at_rotary, with_kwargs=True).remove)
        for table in tables:
            stack.callback(table.register_forward_pre_hook(lambda _, args: (skip(args[0]), *args[1:])).remove)
        yield
