"""Layouts by name: of tensors, for annotations, and of the arrays of a result, which are checked when it is made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from jaxtyping import Bool, Float
from torch import Tensor

from kvdrift.errors import InputError

Queries = Float[Tensor, "batch head query feature"]
"""What the kernel computes from, after RoPE and QK-norm."""
Keys = Float[Tensor, "batch kv_head key key_feature"]
"""What the kernel reads, cached entries included."""
KeyValues = Float[Tensor, "batch kv_head key value_feature"]
"""The values beside the keys; with as many features, or (latent attention) with others."""
Attended = Float[Tensor, "batch query head value_feature"]
"""What an attention function returns."""
Logits = Float[Tensor, " vocab"]
"""Of one position."""
Visible = Bool[Tensor, "query key"]
"""Which keys each query reads."""

Shaped = tuple[str, Sequence[int], Sequence[str]]
"""An array's name, its shape, and the names of its axes."""


def check_shapes(arrays: Iterable[Shaped], lengths: Mapping[str, int]) -> None:
    """See that arrays have their axes, and that an axis is as long in one array as in the next.

    Parameters
    ----------
    arrays
        What a result holds.
    lengths
        Axes whose length is known beforehand, such as the number of prompts.

    Raises
    ------
    InputError
        If one has another number of axes, or an axis has another length.

    Examples
    --------
    >>> check_shapes([("fed", (2, 5), ("prompt", "step")), ("kl", (2, 4), ("prompt", "step"))], {"prompt": 2})
    Traceback (most recent call last):
    kvdrift.errors.InputError: The array 'kl' has the shape [2, 4], but [prompt 2, step 5] was expected.
    """
    known = dict(lengths)
    for name, shape, axes in arrays:
        if len(shape) != len(axes) or any(known.setdefault(axis, n) != n for axis, n in zip(axes, shape, strict=True)):
            expected = ", ".join(f"{axis} {known[axis]}" if axis in known else axis for axis in axes)
            raise InputError(f"The array {name!r} has the shape {list(shape)}, but [{expected}] was expected.")
