"""A model in float64, if there is room for it."""

from __future__ import annotations

import torch

from kvdrift.controls.precision import cast_copy
from kvdrift.errors import ModelError
from kvdrift.models.model import Model
from kvdrift.tracing.trace import free_memory


def lack_of_room(model: Model) -> str | None:
    """Why a float64 copy of the model would not fit in memory; None if it would."""
    needed = 8 * sum(parameter.numel() for parameter in model.hf.parameters())
    free = free_memory(model.device)
    if needed > 0.8 * free:
        return f"a float64 copy needs {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free"
    return None


def float64_copy(model: Model) -> Model:
    """A copy of the model in float64; see `cast_copy`.

    Raises
    ------
    ModelError
        If it would not fit in memory, or its weights cannot be cast.

    Examples
    --------
    >>> import kvdrift as kd
    >>> float64_copy(kd.load(kd.models.tiny("llama"), quiet=True)).dtype_name
    'float64'
    """
    lack = lack_of_room(model)
    if lack is not None:
        raise ModelError(lack)
    return model.around(cast_copy(model.hf, torch.float64))
