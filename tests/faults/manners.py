"""Faults that show when a model is called otherwise than with explicit positions and for one row of logits."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from faults.fault import fault
from faults.passes import Pass, before_pass
from faults.positions import reads_positions
from torch import Tensor, nn

from kvdrift.models.architecture import describe


def defaults_positions(hf: Any) -> bool:
    """Whether the model takes position ids that reach an embedding, and finds its own where it is given none."""
    return reads_positions(hf) and "position_ids" in inspect.signature(hf.forward).parameters


def defaults_learned_positions(hf: Any) -> bool:
    """Whether those come from a table; all moved alike, rotary ones are the same function."""
    return defaults_positions(hf) and describe(hf).positional == "learned"


def has_head(hf: Any) -> bool:
    """Whether the model can be asked for the logits of one row."""
    return "logits_to_keep" in inspect.signature(hf.forward).parameters


@fault(defaults_positions, signature="in model(ids) calls")
def default_positions_ignore_the_cache(hf: Any) -> Iterator[None]:
    """Positions that are not given count from 0 in every pass, whatever the cache holds."""

    def change(now: Pass, kwargs: dict[str, Any]) -> None:
        if kwargs.get("position_ids") is None:
            kwargs["position_ids"] = torch.arange(now.queries)[None]

    with before_pass(hf, change):
        yield


@fault(defaults_learned_positions, signature="between the model's default positions and explicit ones")
def default_positions_begin_at_two(hf: Any) -> Iterator[None]:
    """Positions that are not given count from 2, as behind the padding index of RoBERTa."""

    def change(now: Pass, kwargs: dict[str, Any]) -> None:
        if kwargs.get("position_ids") is None:
            kwargs["position_ids"] = torch.arange(now.past, now.past + now.queries)[None] + 2

    with before_pass(hf, change):
        yield


@fault(defaults_learned_positions, signature="between calls with and without a mask of ones")
def positions_of_a_mask_begin_at_one(hf: Any) -> Iterator[None]:
    """Positions that are not given are the running sum of the mask, one too high."""

    def change(now: Pass, kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        if kwargs.get("position_ids") is None and isinstance(mask, Tensor):
            kwargs["position_ids"] = mask.cumsum(-1)[:, -now.queries :]

    with before_pass(hf, change):
        yield


@fault(defaults_positions, signature="in calls with a mask alone")
def a_mask_resets_positions_at_decode(hf: Any) -> Iterator[None]:
    """Given a mask but no positions, a decoded token is placed at 0."""

    def change(now: Pass, kwargs: dict[str, Any]) -> None:
        if now.decoding and kwargs.get("position_ids") is None and kwargs.get("attention_mask") is not None:
            kwargs["position_ids"] = torch.zeros((1, 1), dtype=torch.long)

    with before_pass(hf, change):
        yield


@fault(has_head, signature="where all logits are asked for")
def head_off_for_one_row(hf: Any) -> Iterator[None]:
    """The LM head multiplies by 1.01 where it is given a single row."""

    def hook(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return output * 1.01 if output.shape[-2] == 1 else output

    handle = hf.get_output_embeddings().register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
