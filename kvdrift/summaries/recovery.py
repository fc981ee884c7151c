"""A recovery in a few characters and as plain data."""

from __future__ import annotations

import math
from typing import Any

from kvdrift.patching.recovery import Recovery

REFERENCES = {"placebo": "noise at the same place", "unpatched": "no patch"}


def short(found: Recovery) -> str:
    """A recovery with its interval, in a few characters."""
    if math.isnan(found.value):
        return "undefined"
    text = f"{found.value:.2f}"
    if not math.isnan(found.low):
        text += f" [{found.low:.2f}, {found.high:.2f}]"
    if not math.isnan(found.spread[0]):
        text += f" (single placebos {found.spread[0]:.2f} to {found.spread[1]:.2f})"
    return text


def recovery_dict(found: Recovery) -> dict[str, Any]:
    """A recovery as a dictionary."""
    return {"placebo_spread" if name == "spread" else name: value for name, value in vars(found).items()}
