"""All faults by name."""

from __future__ import annotations

from faults import attention, cache, declared, manners, masks, native, one_row, positions, prefixes, recurrent, windows
from faults.fault import Fault

FAULTS: dict[str, Fault] = {
    found.name: found
    for module in (positions, cache, windows, masks, attention, native, recurrent, manners, one_row, prefixes, declared)
    for found in vars(module).values()
    if isinstance(found, Fault)
}
