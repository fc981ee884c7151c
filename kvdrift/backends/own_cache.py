"""Caches of a class of the model's own, which no cache of transformers replaces."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import Cache

from kvdrift.errors import ModelError, one_line


def takes_dynamic_cache(model: Any) -> bool:
    """Whether ``generate`` hands the model a `DynamicCache`; those that make one of their own say no."""
    return bool(getattr(model, "_supports_default_dynamic_cache", lambda: True)())


def own_cache(model: Any, forward: Callable[..., Any]) -> Callable[[], Cache]:
    """What makes an empty cache of the class that the model makes for itself when ``generate`` gives it none.

    Raises
    ------
    ModelError
        If it returns no cache of transformers' interface, or one that cannot be made without the model.
    """
    name = type(model).__name__
    ids = torch.zeros((1, 1), dtype=torch.long, device=model.get_input_embeddings().weight.device)
    try:
        with torch.no_grad():
            output = forward(input_ids=ids, use_cache=True)
    except Exception as error:  # whatever a model raises
        raise ModelError(
            f"{name} makes a cache of its own while it runs, and fails at that with one token "
            f"({type(error).__name__}: {one_line(error)})."
        ) from error
    found = next((value for value in dict(output).values() if isinstance(value, Cache)), None)
    if found is None:
        kinds = sorted({type(value).__name__ for value in dict(output).values()} - {"Tensor", "tuple", "NoneType"})
        raise ModelError(
            f"{name} keeps its state in {' and '.join(kinds) or 'a form of its own'}, which has not the interface of "
            "transformers.Cache, so that kvdrift cannot carry it from step to step; give a model that uses one."
        )
    kind = type(found)
    collected = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(kind).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in collected]
    if set(needed) - {"config"}:
        raise ModelError(
            f"{name} has a cache class of its own ({kind.__name__}) that asks for {', '.join(needed)}; pass "
            "CacheOn(cache=…) with a function that makes an empty one."
        )
    return partial(kind, **dict.fromkeys(needed, model.config))
