"""Two models compute the same function: checked in float64, where rounding is too small to hide a difference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvdrift.controls.float64_copy import float64_copy, lack_of_room
from kvdrift.controls.precision import promote_float32
from kvdrift.errors import ModelError
from kvdrift.models.model import Model

TOLERANCE = 1e-10
"""Largest difference of the logits over the largest logit: rounding in float64 stays below 1e-12."""
DECODED = 3
"""At most so many of the tokens are consumed one by one, with a cache."""


def check_same_function(original: Model, copy: Model, n_tokens: int) -> str | None:
    """Compare two models in float64, without and with a cache, on seeded random tokens.

    One float64 copy is alive at a time; hard-coded float32 casts are promoted.

    Parameters
    ----------
    original, copy
        The models; neither is touched.
    n_tokens
        How many tokens both consume, the last ``DECODED`` of them one by one on the path with a cache.

    Returns
    -------
    str or None
        None if they agree; why nothing was checked if a float64 copy would not fit in memory.

    Raises
    ------
    ModelError
        If they differ by more than `TOLERANCE`.

    Examples
    --------
    >>> import kvdrift as kd
    >>> model = kd.load(kd.models.tiny("llama"), quiet=True)
    >>> check_same_function(model, model, 8)
    """
    lack = lack_of_room(max(original, copy, key=lambda model: sum(weight.numel() for weight in model.hf.parameters())))
    if lack is not None:
        return lack
    ids = torch.randint(original.vocab_size, (n_tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    expected, found = _logits(original, ids), _logits(copy, ids)
    error = float((found - expected).abs().max() / expected.abs().max())
    if not error < TOLERANCE:
        raise ModelError(
            f"In float64 the logits of {copy.name} differ from those of {original.name} by {error:.1e} of the largest "
            f"one (at most {TOLERANCE:.0e} is rounding), so it is another function and was not made: this model "
            "computes its attention in a way that kvdrift does not rewrite correctly."
        )
    return None


@torch.no_grad()
def _logits(model: Model, ids: Sequence[int]) -> Tensor:
    """Float64 logits after the whole text without a cache, then after each of the last tokens with one."""
    exact = float64_copy(model)
    tokens = torch.tensor([list(ids)], device=exact.device)
    first = max(len(ids) - DECODED, 1)
    with exact.evaluating(), promote_float32():
        found = [exact.backend.forward(tokens, 0)]
        cache = exact.backend.new_cache()
        exact.backend.forward(tokens[:, :first], 0, cache)
        for place in range(first, len(ids)):
            found.append(exact.backend.forward(tokens[:, place : place + 1], place, cache))
    return torch.stack(found)
