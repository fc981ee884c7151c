"""Where a model that was loaded by name came from, so that another process can load it the same way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Source:
    """What `kvdrift.load` was given.

    Attributes
    ----------
    name
        Preset, Hub id or absolute folder.
    device
        Kind of device the model went to (``"cpu"``, ``"cuda"``).
    attn
        Attention implementation asked for, or ``"auto"``.
    device_map
        As it was passed through, or None.
    tokenizer
        Whether the tokenizer is the one beside the weights, not one given by the user.
    """

    name: str
    device: str
    attn: str = "auto"
    device_map: Any = None
    tokenizer: bool = True
