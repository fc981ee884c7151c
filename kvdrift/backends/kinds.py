"""Which backend drives a module that comes without one."""

from __future__ import annotations

from torch import nn

from kvdrift.backends.bridge_attention import is_bridged
from kvdrift.backends.hf import HFBackend
from kvdrift.backends.transformer_lens import BridgeBackend


def kind_of(module: nn.Module) -> type[HFBackend]:
    """The kind of backend for a module: a whole model, or a part of one.

    Examples
    --------
    >>> import kvdrift as kd
    >>> kind_of(kd.models.tiny("llama")).__name__
    'HFBackend'
    """
    return BridgeBackend if is_bridged(module) else HFBackend
