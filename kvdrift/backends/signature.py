"""What a model takes and where it runs, told also through what is wrapped around it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

CACHE_ARGUMENTS = ("cache", "cache_params", "past_key_values")
"""What models call their cache, the newest name first."""


def forward_parameters(module: nn.Module) -> frozenset[str]:
    """The names of the arguments that reach the model's own forward.

    A forward that hands on whatever it is given says nothing by its own signature (an adapter's, one that was put in
    the place of the class's, one in a class of the user's): the next one beneath is asked then, until one names a
    cache. Beneath a forward is that of its class and of the classes that this one extends, and beneath a module that
    is no transformers model the first such model in it.

    Examples
    --------
    >>> import kvdrift as kd
    >>> model = kd.models.tiny("llama")
    >>> plain = forward_parameters(model)
    >>> given = model.forward
    >>> model.forward = lambda *args, **kwargs: given(*args, **kwargs)
    >>> forward_parameters(model) == plain, "logits_to_keep" in plain
    (True, True)
    """
    own: frozenset[str] | None = None
    for forward in _forwards(module):
        parameters = inspect.signature(forward).parameters
        names = frozenset(parameters)
        own = names if own is None else own
        if names.intersection(CACHE_ARGUMENTS):
            return names
        if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
            break  # nothing else gets through
    return own or frozenset()


def beneath(module: nn.Module) -> PreTrainedModel | None:
    """The transformers model itself: the module, or the first such model inside a wrapper; None if there is none."""
    return next((inner for inner in module.modules() if isinstance(inner, PreTrainedModel)), None)


def execution_device(module: nn.Module) -> torch.device | None:
    """Where a hook of `accelerate` brings a module's offloaded weights while it runs; None without such a hook."""
    hook = getattr(module, "_hf_hook", None)
    for one in getattr(hook, "hooks", (hook,)):
        device = getattr(one, "execution_device", None)
        if device is not None:
            return torch.device(device)
    return None


def _forwards(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """The forward of a module and what it may hand its arguments to, outermost first."""
    yield module.forward
    for kind in type(module).__mro__:
        if "forward" in vars(kind) and kind is not nn.Module:
            yield vars(kind)["forward"].__get__(module, kind)
    inner = beneath(module)
    if inner is not None and inner is not module:
        yield from _forwards(inner)
