"""Which backend drives what a user gave, and a module that comes without one."""

from __future__ import annotations

from typing import Any

from torch import nn

from kvdrift.backends.bridge_attention import is_bridge, is_bridged
from kvdrift.backends.hf import HFBackend
from kvdrift.backends.nnsight import NNsightBackend, is_nnsight
from kvdrift.backends.transformer_lens import BridgeBackend, backend_of
from kvdrift.errors import ModelError


def kind_of(module: nn.Module) -> type[HFBackend]:
    """The kind of backend for a module: a whole model, or a part of one.

    Examples
    --------
    >>> import kvdrift as kd
    >>> kind_of(kd.models.tiny("llama")).__name__
    'HFBackend'
    """
    return BridgeBackend if is_bridged(module) else HFBackend


def wrapped(x: Any, repair: bool) -> NNsightBackend | BridgeBackend | None:
    """The backend of what somebody has put around a model; None for anything else.

    Parameters
    ----------
    x
        What a user gave.
    repair
        Hand the cache to the attention of a bridge that does not find it.

    Raises
    ------
    ModelError
        If it is a module that a bridge has rebuilt in place, or a wrapper that its backend refuses.
    """
    if is_nnsight(x):
        return NNsightBackend(x)
    if is_bridge(x):
        return backend_of(x, repair)
    if isinstance(x, nn.Module) and is_bridged(x):
        raise ModelError(
            "A TransformerLens bridge has rebuilt this model in place; give the bridge itself, or load the model a "
            "second time."
        )
    return None
