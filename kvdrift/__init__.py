"""kvdrift: trace, measure and explain the numerical drift between KV-cached and cache-free decoding."""

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
