"""Whether a model that is given no positions takes the ones that kvdrift and ``generate`` pass."""

from __future__ import annotations

import torch
from torch import Tensor

from kvdrift.backends.backend import Backend
from kvdrift.bits import same_bits
from kvdrift.errors import one_line

N_PROMPT = 4
"""Tokens of the probe's first pass; a second one decodes one more."""


def default_positions(backend: Backend, vocab_size: int) -> str | None:
    """A sentence on a model whose default positions differ from explicit ones; None where they do not.

    A few tokens are run each way, prefilled and decoded, in the model's own dtype. The passes have the same shapes,
    so that equal positions give equal bits.

    Examples
    --------
    >>> import kvdrift as kd
    >>> model = kd.load(kd.models.tiny("gpt2"), quiet=True)
    >>> default_positions(model.backend, model.vocab_size) is None
    True
    """
    if not backend.takes_positions or backend.input_device.type == "meta":
        return None
    ids = torch.arange(2, N_PROMPT + 3, device=backend.input_device).unsqueeze(0) % vocab_size
    try:
        told = _logits(backend, ids, "all-logits")
    except Exception:  # whatever a model raises that does not run at all; what is asked of it next says so
        return None
    try:
        own = _logits(backend, ids, "default")
    except Exception as error:  # whatever a model raises that needs its positions told
        why = f"{type(error).__name__}: {one_line(error)}"
        return f"position_ids 0, 1, … are passed, as generate() does; without them this model does not run ({why})"
    if _alike(told, own) or not _alike(told, _logits(backend, ids, "all-logits")):
        return None
    return (
        "position_ids 0, 1, … are passed, as generate() does; this model's own default positions, of model(ids), give "
        "other logits: call='default' runs those"
    )


def _logits(backend: Backend, ids: Tensor, call: str) -> list[Tensor]:
    cache = backend.new_cache()
    return [
        backend.forward(ids[:, :N_PROMPT], 0, cache, call=call),
        backend.forward(ids[:, N_PROMPT:], N_PROMPT, cache, call=call),
    ]


def _alike(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(same_bits(x, y) for x, y in zip(some, others, strict=True))
