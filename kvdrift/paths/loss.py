"""What a cache may give up by design, declared so exactly that it can be held to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvdrift.errors import InputError


@dataclass(frozen=True)
class Dropped:
    """Entries that the cache lets go of; those that remain are read bit for bit.

    Parameters
    ----------
    first, last
        A pass reads, beside its own tokens, the ``first`` and the ``last`` entries of those consumed before it, and no
        other.
    at_least
        A pass reads, beside its own tokens, at least so many of the entries before it (all, where there are fewer) in
        every layer and head; which ones is not said.

    Without any of them nothing is said of what remains.

    Examples
    --------
    >>> str(Dropped(first=4, last=32))
    'drops all entries but the first 4 and the last 32'
    >>> sorted(Dropped(first=1, last=2).remain(range(6)))
    [0, 4, 5]
    """

    first: int | None = None
    last: int | None = None
    at_least: int | None = None

    def __post_init__(self) -> None:
        numbers = {"first": self.first, "last": self.last, "at_least": self.at_least}
        for name, number in numbers.items():
            if number is not None and (not isinstance(number, int) or number < 0):
                raise InputError(f"Dropped({name}={number!r}): give a number of entries, 0 for none.")
        if self.at_least is not None and self.exact:
            raise InputError("Dropped(at_least=…) says how many remain, first= and last= which: give one or the other.")

    @property
    def exact(self) -> bool:
        """Whether it says which entries remain."""
        return self.first is not None or self.last is not None

    def remain(self, before: Sequence[int]) -> set[int]:
        """Of the positions consumed before a pass, those whose entries remain, where `exact`."""
        last = self.last or 0
        return {*before[: self.first or 0], *before[len(before) - min(last, len(before)) :]}

    def __str__(self) -> str:
        if self.at_least is not None:
            return f"keeps at least {self.at_least} entries"
        if self.exact:
            return f"drops all entries but the first {self.first or 0} and the last {self.last or 0}"
        return "drops entries"


@dataclass(frozen=True)
class Rounded:
    """Entries that are read in fewer bits than they were written in.

    Parameters
    ----------
    absolute
        The largest error of any number.
    relative
        The largest error of any number, as a share of the largest one in the same entry (of one head, at one position).
        With ``absolute``, the sum of both is allowed.
    dtype
        Entries are stored in this dtype (``"float16"``), and nothing else happens to them: every bit is then known.

    Examples
    --------
    >>> str(Rounded(relative=1 / 127)), str(Rounded(dtype="float16"))
    ('rounds entries by at most 0.00787 of their largest number', 'keeps entries in float16')
    """

    absolute: float | None = None
    relative: float | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        bounds = (self.absolute, self.relative)
        if (self.dtype is None) == (bounds == (None, None)):
            raise InputError("Rounded(…): give absolute= or relative= (or both), or dtype= alone.")
        if any(bound is not None and not 0 <= bound < float("inf") for bound in bounds):
            raise InputError(f"Rounded(absolute={self.absolute}, relative={self.relative}): give errors of 0 or more.")
        if self.dtype is not None:
            object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
            found = getattr(torch, str(self.dtype), None)
            if not isinstance(found, torch.dtype) or not found.is_floating_point:
                raise InputError(f"Rounded(dtype={self.dtype!r}): give a floating-point dtype, such as 'float16'.")

    def stored(self, written: Tensor) -> Tensor:
        """What may be read of ``written``, but for the error allowed."""
        return written if self.dtype is None else written.to(getattr(torch, self.dtype)).to(written.dtype)

    def allowed(self, written: Tensor) -> Tensor:
        """The largest error of each entry, ``[…, 1]``, in float64."""
        largest = written.abs().amax(-1, keepdim=True).double()
        return (self.absolute or 0.0) + (self.relative or 0.0) * largest

    def __str__(self) -> str:
        if self.dtype is not None:
            return f"keeps entries in {self.dtype}"
        parts = [] if self.absolute is None else [f"{self.absolute:.3g}"]
        parts += [] if self.relative is None else [f"{self.relative:.3g} of their largest number"]
        return f"rounds entries by at most {' and '.join(parts)}"


Loss = Dropped | Rounded
Declared = str | Loss | Sequence[Loss]
"""A plain sentence, which is taken on trust, or what is lost, which is held to."""


def as_losses(declared: Declared | None) -> str | tuple[Loss, ...] | None:
    """A declaration in one form: a sentence, a tuple of one `Dropped` and one `Rounded` at most, or None.

    Raises
    ------
    InputError
        If it is anything else.
    """
    if declared is None or isinstance(declared, str):
        return declared or None
    found = (declared,) if isinstance(declared, (Dropped, Rounded)) else declared
    good = isinstance(found, (list, tuple)) and all(isinstance(loss, (Dropped, Rounded)) for loss in found)
    if not good or not found or len({type(loss) for loss in found}) < len(found):
        raise InputError(
            f"lossy={declared!r}: give a sentence, kd.Dropped(…), kd.Rounded(…), or one of each in a tuple."
        )
    return tuple(found)


def said(declared: Declared) -> str:
    """A declaration in words."""
    losses = as_losses(declared)
    return losses if isinstance(losses, str) else " and ".join(map(str, losses or ()))
