"""kvdrift: trace, measure and explain the numerical drift between KV-cached and cache-free decoding."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvdrift.version import __version__ as __version__

if TYPE_CHECKING:
    from kvdrift import experiments, models, nnsight, views
    from kvdrift.controls import counterfactual
    from kvdrift.controls.attention_backend import SdpaBackend
    from kvdrift.controls.attention_float32 import AttentionFloat32
    from kvdrift.controls.fixed_shape import FixedShape, fixed_shape
    from kvdrift.controls.head_float32 import HeadFloat32
    from kvdrift.controls.layer_cast import LayerCast
    from kvdrift.controls.matmul_float32 import MatmulFloat32
    from kvdrift.controls.reroll import ReRoll
    from kvdrift.controls.true_float32 import TrueFloat32
    from kvdrift.controls.true_float64 import TrueFloat64
    from kvdrift.controls.wide_sums import WideSums
    from kvdrift.diagnosis.diagnose import diagnose
    from kvdrift.diagnosis.verdict import Verdict
    from kvdrift.drift import metrics
    from kvdrift.drift.compare import compare
    from kvdrift.drift.result import Drift
    from kvdrift.evaluation.evaluate import evaluate
    from kvdrift.evaluation.gsm8k import GSM8K
    from kvdrift.evaluation.jsonl import JsonlTask
    from kvdrift.evaluation.result import Evaluation
    from kvdrift.evaluation.strategies import Greedy, Temperature, TopK, TopP
    from kvdrift.ladder.falsify import falsify
    from kvdrift.ladder.result import Ladder
    from kvdrift.models.load import load
    from kvdrift.patching.factorial import factorial
    from kvdrift.patching.factorial_result import Factorial
    from kvdrift.patching.patch import patch
    from kvdrift.patching.patched import patched
    from kvdrift.patching.result import PatchResult, Sweep
    from kvdrift.patching.schedule import Schedule
    from kvdrift.patching.spec import Patch
    from kvdrift.patching.sweep import sweep
    from kvdrift.paths.cache_off import CacheOff
    from kvdrift.paths.cache_on import CacheOn
    from kvdrift.paths.loss import Dropped, Rounded
    from kvdrift.paths.prefix import Prefix
    from kvdrift.paths.record import record
    from kvdrift.report.write import write_report
    from kvdrift.tracing.tap import tap
    from kvdrift.tracing.trace import Trace

_HOMES = {
    "AttentionFloat32": "controls.attention_float32",
    "CacheOff": "paths.cache_off",
    "CacheOn": "paths.cache_on",
    "Drift": "drift.result",
    "Dropped": "paths.loss",
    "Evaluation": "evaluation.result",
    "Factorial": "patching.factorial_result",
    "FixedShape": "controls.fixed_shape",
    "GSM8K": "evaluation.gsm8k",
    "Greedy": "evaluation.strategies",
    "HeadFloat32": "controls.head_float32",
    "JsonlTask": "evaluation.jsonl",
    "Ladder": "ladder.result",
    "LayerCast": "controls.layer_cast",
    "MatmulFloat32": "controls.matmul_float32",
    "Patch": "patching.spec",
    "PatchResult": "patching.result",
    "Prefix": "paths.prefix",
    "ReRoll": "controls.reroll",
    "Rounded": "paths.loss",
    "Schedule": "patching.schedule",
    "SdpaBackend": "controls.attention_backend",
    "Sweep": "patching.result",
    "Temperature": "evaluation.strategies",
    "TopK": "evaluation.strategies",
    "TopP": "evaluation.strategies",
    "Trace": "tracing.trace",
    "TrueFloat32": "controls.true_float32",
    "TrueFloat64": "controls.true_float64",
    "Verdict": "diagnosis.verdict",
    "WideSums": "controls.wide_sums",
    "compare": "drift.compare",
    "counterfactual": "controls.counterfactual",
    "diagnose": "diagnosis.diagnose",
    "evaluate": "evaluation.evaluate",
    "experiments": "experiments",
    "factorial": "patching.factorial",
    "falsify": "ladder.falsify",
    "fixed_shape": "controls.fixed_shape",
    "load": "tracing",
    "metrics": "drift.metrics",
    "models": "models",
    "nnsight": "nnsight",
    "patch": "patching.patch",
    "patched": "patching.patched",
    "record": "paths.record",
    "sweep": "patching.sweep",
    "tap": "tracing.tap",
    "views": "views",
    "write_report": "report.write",
}
_MODULES = ("counterfactual", "experiments", "metrics", "models", "nnsight", "views")
__all__ = [
    "GSM8K",
    "AttentionFloat32",
    "CacheOff",
    "CacheOn",
    "Drift",
    "Dropped",
    "Evaluation",
    "Factorial",
    "FixedShape",
    "Greedy",
    "HeadFloat32",
    "JsonlTask",
    "Ladder",
    "LayerCast",
    "MatmulFloat32",
    "Patch",
    "PatchResult",
    "Prefix",
    "ReRoll",
    "Rounded",
    "Schedule",
    "SdpaBackend",
    "Sweep",
    "Temperature",
    "TopK",
    "TopP",
    "Trace",
    "TrueFloat32",
    "TrueFloat64",
    "Verdict",
    "WideSums",
    "compare",
    "counterfactual",
    "diagnose",
    "evaluate",
    "experiments",
    "factorial",
    "falsify",
    "fixed_shape",
    "load",
    "metrics",
    "models",
    "nnsight",
    "patch",
    "patched",
    "record",
    "sweep",
    "tap",
    "views",
    "write_report",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that ``kvdrift --help`` needs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'kvdrift' has no attribute {name!r}")
    if name == "models":
        import_module("kvdrift.tracing")  # which finds a model's sites
    home = import_module(f"kvdrift.{_HOMES[name]}")
    value = home if name in _MODULES else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
