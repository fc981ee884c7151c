"""Manners of calling a model: which of its optional arguments one forward pass is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvdrift.errors import InputError


@dataclass(frozen=True)
class Manner:
    """What a model's forward is given beside its tokens and its cache; printed as the call that somebody types.

    Attributes
    ----------
    positions
        Explicit position ids; without them the model takes those that it defaults to.
    mask
        An attention mask over everything consumed, of ones where there is no padding.
    one_row
        How many logits to keep: those of the last position, as ``generate`` asks.
    """

    positions: bool
    mask: bool
    one_row: bool

    def __str__(self) -> str:
        given = {
            "ids": True,
            "position_ids=…": self.positions,
            "attention_mask=…": self.mask,
            "logits_to_keep=1": self.one_row,
        }
        return f"model({', '.join(name for name, passed in given.items() if passed)})"


MANNERS: Mapping[str, Manner] = MappingProxyType(
    {
        "explicit": Manner(positions=True, mask=False, one_row=True),
        "all-logits": Manner(positions=True, mask=False, one_row=False),
        "default": Manner(positions=False, mask=False, one_row=False),
        "mask": Manner(positions=False, mask=True, one_row=False),
    }
)
"""By name; each differs from the one before it in one argument."""


def check_manner(call: str) -> str:
    """Return ``call``, the name of a manner.

    Raises
    ------
    InputError
        If there is none of this name.

    Examples
    --------
    >>> check_manner("default"), str(MANNERS["default"])
    ('default', 'model(ids)')
    """
    if call not in MANNERS:
        raise InputError(f"call={call!r}: choose one of {', '.join(MANNERS)}.")
    return call
