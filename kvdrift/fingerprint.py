"""A short hash of a module's weights, taken once in a job however often it is asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch

_Memory = WeakKeyDictionary[Any, Any]
_WEIGHTS: ContextVar[_Memory | None] = ContextVar("weights", default=None)
_FIRST: ContextVar[_Memory | None] = ContextVar("first", default=None)


@contextmanager
def one_job() -> Iterator[None]:
    """Read the weights of each module once inside the block, which must not change them.

    Outside of every block they are read whenever they are asked for, so that a change between two jobs is noticed.
    It decorates functions, too.

    Examples
    --------
    >>> import kvdrift as kd
    >>> module = kd.models.tiny("llama")
    >>> with one_job():
    ...     fingerprint(module) == fingerprint(module)
    True
    """
    if _WEIGHTS.get() is not None:
        yield
        return
    weights, first = _WEIGHTS.set(WeakKeyDictionary()), _FIRST.set(WeakKeyDictionary())
    try:
        yield
    finally:
        _WEIGHTS.reset(weights)
        _FIRST.reset(first)


def first_in_job(thing: Any, value: Any) -> Any:
    """What this was first called with for ``thing`` in the job under way; ``value`` itself outside of every job.

    Examples
    --------
    >>> with one_job():
    ...     first_in_job(len, 3), first_in_job(len, 4)
    (3, 3)
    """
    first = _FIRST.get()
    try:
        return value if first is None else first.setdefault(thing, value)
    except TypeError:  # it cannot be remembered
        return value


def fingerprint(module: Any) -> str:
    """Hash the configuration and, for every weight as it is now, its dtype, a sample and a checksum."""
    taken = _WEIGHTS.get()
    if taken is None:
        return _taken(module)
    if module not in taken:
        taken[module] = _taken(module)
    return taken[module]


def _taken(module: Any) -> str:
    config: Any = getattr(module, "config", None)
    digest = hashlib.sha256(config.to_json_string().encode() if hasattr(config, "to_json_string") else b"")
    generator = torch.Generator().manual_seed(0)
    for name, weight in module.named_parameters():
        digest.update(f"{name}|{weight.dtype}|{tuple(weight.shape)}|".encode())
        if weight.is_meta or not weight.numel():  # offloaded
            continue
        flat = weight.detach().flatten()
        places = torch.randint(flat.numel(), (64,), generator=generator)  # a stride would keep to a few columns
        digest.update(flat[places.to(flat.device)].cpu().view(torch.uint8).numpy().tobytes())
        n_bytes = flat.numel() * flat.element_size()
        if flat.storage_offset() * flat.element_size() % 8:  # a slice that no wider view can start at
            flat = flat.clone()
        words = flat.view(torch.int64 if n_bytes % 8 == 0 else torch.uint8)
        digest.update(str(int(words.sum(dtype=torch.int64))).encode())
    return digest.hexdigest()[:16]
