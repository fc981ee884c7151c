"""Mistakes with the states of layers that keep no keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from faults.fault import fault
from faults.passes import Pass, before_pass, cache_of

from kvdrift.models.architecture import describe


def _first(hf: Any, *kinds: str) -> int | None:
    return next((layer.index for layer in describe(hf).layers if layer.attention in kinds), None)


def conv_layer(hf: Any) -> int | None:
    """The first layer that keeps the last inputs of a convolution."""
    return _first(hf, "conv", "linear")


def recurrent_layer(hf: Any) -> int | None:
    """The first layer that keeps a recurrent state."""
    return _first(hf, "linear")


@fault(lambda hf: conv_layer(hf) is not None, conv_layer, "from the first decode step")
def convolution_one_token_late(hf: Any, layer: int) -> Iterator[None]:
    """In one layer a decoded token finds the inputs of the convolution shifted by one."""

    def change(now: Pass, kwargs: dict[str, Any]) -> None:
        if now.decoding:
            held = cache_of(kwargs).layers[layer]
            held.conv_states[0] = held.conv_states[0].roll(1, -1)

    with before_pass(hf.base_model, change):
        yield


@fault(lambda hf: recurrent_layer(hf) is not None, recurrent_layer, "from the first decode step")
def recurrent_state_lost_at_decode(hf: Any, layer: int) -> Iterator[None]:
    """In one layer a decoded token starts from an empty recurrent state."""

    def change(now: Pass, kwargs: dict[str, Any]) -> None:
        if now.decoding:
            held = cache_of(kwargs).layers[layer]
            held.recurrent_states[0] = torch.zeros_like(held.recurrent_states[0])

    with before_pass(hf.base_model, change):
        yield


@fault(lambda hf: recurrent_layer(hf) is not None, recurrent_layer, "from the first decode step")
def recurrent_state_narrow(hf: Any, layer: int) -> Iterator[None]:
    """In one layer the recurrent state is rounded to eight bits between passes."""

    def change(now: Pass, kwargs: dict[str, Any]) -> None:
        if now.decoding:
            held = cache_of(kwargs).layers[layer]
            state = held.recurrent_states[0]
            held.recurrent_states[0] = state.to(torch.float8_e5m2).to(state.dtype)

    with before_pass(hf.base_model, change):
        yield
