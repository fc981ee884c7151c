"""Placebos: what is written instead of the donor's values, of equal size but without their content."""

from __future__ import annotations

import zlib

import torch
from jaxtyping import Float
from torch import Tensor

CLOSE_ENOUGH = 0.05
"""The norm of what rounding leaves of the noise is brought within so much of the target, where it can be."""
_ROUNDS = 8


def generator(*key: object) -> torch.Generator:
    """A generator that depends on the key alone: the same noise in any order and on any device."""
    return torch.Generator().manual_seed(zlib.crc32("|".join(map(str, key)).encode()))


def noisy(
    own: Float[Tensor, "*rows feature"], given: Float[Tensor, "*rows feature"], random: torch.Generator
) -> Float[Tensor, "*rows feature"]:
    """``own`` plus noise as large as ``given − own``, row by row.

    Each row gets a Gaussian direction of the norm of that row's difference; a row without a difference gets none.
    Rounding to the dtype of ``own`` swallows noise well below one ulp, so the whole is scaled by one factor, found
    by bisection, until the norm of what is left matches that of the difference.

    Returns
    -------
    Tensor
        Of the shape, dtype and device of ``own``.

    Examples
    --------
    >>> import torch
    >>> own, given = torch.zeros(2, 64), torch.ones(2, 64)
    >>> placebo = noisy(own, given, generator(0))
    >>> round(float(placebo.norm() / given.norm()), 3)
    1.0
    """
    wide = own.double() if own.dtype == torch.float64 else own.float()
    difference = given.to(wide.dtype) - wide
    target = float(difference.norm())
    if target == 0:
        return own.clone()
    direction = torch.randn(own.shape, generator=random, dtype=torch.float32).to(wide.device, wide.dtype)
    direction *= difference.norm(dim=-1, keepdim=True) / direction.norm(dim=-1, keepdim=True)
    low, high, scale = 0.0, None, 1.0
    for _ in range(_ROUNDS):
        written = (wide + scale * direction).to(own.dtype)
        ratio = float((written.to(wide.dtype) - wide).norm()) / target
        if abs(ratio - 1) <= CLOSE_ENOUGH:
            break
        if ratio < 1:
            low = scale
        else:
            high = scale
        scale = 2 * scale if high is None else (low + high) / 2
    return written


def nudged(own: Float[Tensor, "*rows feature"], random: torch.Generator) -> Float[Tensor, "*rows feature"]:
    """``own`` with one entry, chosen at random, moved by one ulp away from zero.

    Examples
    --------
    >>> import torch
    >>> (nudged(torch.ones(8), generator(0)) != 1).sum().item()
    1
    """
    changed = own.clone(memory_format=torch.contiguous_format)
    flat = changed.view(-1)
    place = int(torch.randint(flat.numel(), (1,), generator=random))
    entry = flat[place]
    away = torch.full_like(entry, float("inf") if entry >= 0 else -float("inf"))
    flat[place] = torch.nextafter(entry, away)
    return changed
