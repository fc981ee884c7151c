"""kvdrift: trace, measure and explain the numerical drift between KV-cached and cache-free decoding."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvdrift import models, views
    from kvdrift.controls.reroll import ReRoll
    from kvdrift.drift.compare import compare
    from kvdrift.drift.result import Drift
    from kvdrift.models.load import load
    from kvdrift.paths.cache_off import CacheOff
    from kvdrift.paths.cache_on import CacheOn
    from kvdrift.paths.record import record
    from kvdrift.report.write import write_report
    from kvdrift.tracing.tap import tap
    from kvdrift.tracing.trace import Trace

__version__ = "0.1.0"
_HOMES = {
    "CacheOff": "paths.cache_off",
    "CacheOn": "paths.cache_on",
    "Drift": "drift.result",
    "ReRoll": "controls.reroll",
    "Trace": "tracing.trace",
    "compare": "drift.compare",
    "load": "models.load",
    "models": "models",
    "record": "paths.record",
    "tap": "tracing.tap",
    "views": "views",
    "write_report": "report.write",
}
__all__ = [
    "CacheOff",
    "CacheOn",
    "Drift",
    "ReRoll",
    "Trace",
    "compare",
    "load",
    "models",
    "record",
    "tap",
    "views",
    "write_report",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that ``kvdrift --help`` needs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'kvdrift' has no attribute {name!r}")
    home = import_module(f"kvdrift.{_HOMES[name]}")
    value = home if _HOMES[name] == name else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
