"""Passes that belong to no step, such as drafts: nothing watches them and nothing is written into them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from kvdrift.models.model import Model


class Watching(Protocol):
    """Reads or writes inside the passes of a model while it is enabled."""

    model: Model
    enabled: bool


IN_PLACE: list[Watching] = []
"""What reads or writes now: taps and site editors note themselves here."""


@contextmanager
def aside(model: Model) -> Iterator[None]:
    """Run passes of a model that belong to no step of a path: taps do not see them, and patches leave them alone.

    Examples
    --------
    >>> import torch
    >>> import kvdrift as kd
    >>> model = kd.load(kd.models.tiny("llama"), quiet=True)
    >>> with kd.tap(model, "resid_post") as taps:
    ...     with aside(model):
    ...         _ = model.hf(torch.tensor([[1, 2, 3]]))
    >>> len(taps.steps)
    0
    """
    silenced = [one for one in IN_PLACE if one.enabled and one.model.hf is model.hf]
    for one in silenced:
        one.enabled = False
    try:
        yield
    finally:
        for one in silenced:
            one.enabled = True
