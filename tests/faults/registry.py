"""All faults by name."""

from __future__ import annotations

from faults import attention, cache, manners, masks, native, positions, recurrent, windows
from faults.fault import Fault

FAULTS: dict[str, Fault] = {
    found.name: found
    for module in (positions, cache, windows, masks, attention, native, recurrent, manners)
    for found in vars(module).values()
    if isinstance(found, Fault)
}
