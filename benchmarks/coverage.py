"""Every causal language model of the installed transformers, tiny: what is traced, what is exact, and why not.

    python benchmarks/coverage.py                          # all of them, in some minutes on one core
    python benchmarks/coverage.py --jobs 2                 # on two cores
    python benchmarks/coverage.py llama gemma3_text        # some
    python benchmarks/coverage.py --results rows.jsonl     # keeps rows there, and goes on after an interruption
    python benchmarks/coverage.py --markdown               # the table of docs/coverage.md
    python benchmarks/coverage.py --diagnose               # also the verdict of kd.diagnose, some seconds each

Each model is built from its configuration class as transformers builds it by default, with random float32 weights, and
decodes a few tokens after a prompt beyond its window and the tile. The numbers are the largest relative difference of
the logits of cache-ON and cache-OFF: as they are (``native``), under `kvdrift.controls.FixedShape` (``fixed``), and in
float64 with float32 casts promoted and experts one by one (``float64``: beyond rounding, the paths compute different
functions). Then `kd.compare`, `kd.patch` and, if asked, `kd.diagnose` are called with their default arguments, on
architectures that are left out of the measurements, too: each runs, or refuses with a sentence of its own; anything
else is an internal error of kvdrift.

Exits with 1 if a verb fails otherwise than by refusing, if fewer than 95 % of the architectures without recurrent parts
that use transformers' attention table are exact, with native drift above zero, or if one without an explanation is not.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import multiprocessing
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from architectures import LEFT_OUT, NAMES, NOTES, build
from torch import Tensor
from transformers.utils import logging as transformers_logging

import kvdrift as kd
from kvdrift.controls import cast_copy, promote_float32
from kvdrift.controls.fixed_shape import FixedShape, not_covered
from kvdrift.errors import InternalError, KvdriftError, one_line
from kvdrift.models.model import Model
from kvdrift.models.sites import ALL_SITES, PATTERN
from kvdrift.tracing.seam import AttentionCall, Order, Output, seam

PROMPT = (5, 9, 100, 33, 7, 8, 250, 301, 12, 44, 77, 21, 200, 5, 6, 7, 9, 3)  # beyond a window of 8 and a tile of 16
FOLLOW = (50, 51, 52, 53, 54)
TARGET = 0.95
SAME_FUNCTION = 1e-9  # relative difference in float64
REFUSED, INTERNAL = "refused", "internal error"


@dataclass(frozen=True)
class Row:
    """What was found about one architecture, as plain data.

    Attributes
    ----------
    name
        Model type.
    stopped
        Where it went wrong: ``"left out"``, ``"build"``, ``"load"``, ``"trace"``, ``"native"``, ``"fixed"``,
        ``"float64"``, or empty.
    reason
        Why, in one line.
    n_layers
        Number of blocks.
    kinds
        Attention kinds of the layers, each once.
    table
        Layers whose attention calls the table.
    recurrent
        Layers with recurrent or convolutional parts.
    uncovered
        Layers for which `not_covered` promises nothing, with its reason.
    missing
        Sites that at least one layer does not give.
    native, fixed, float64
        Relative differences, NaN where not measured.
    compare, patch
        ``"runs"``, ``"refused"`` or ``"internal error"``; empty if the model cannot be built.
    verdict, evidence
        What `kvdrift.diagnose` says, ``"refused"`` or ``"internal error"``, and its reasons where that is not ``exact``
        or ``rounding``; empty if not asked.
    said
        What a verb that did not run said, by its name.
    seconds
        What it took.
    """

    name: str
    stopped: str = ""
    reason: str = ""
    n_layers: int = 0
    kinds: tuple[str, ...] = ()
    table: tuple[int, ...] = ()
    recurrent: tuple[int, ...] = ()
    uncovered: dict[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    native: float = math.nan
    fixed: float = math.nan
    float64: float = math.nan
    compare: str = ""
    patch: str = ""
    verdict: str = ""
    evidence: tuple[str, ...] = ()
    said: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def group(self) -> str:
        """``"left out"``, ``"recurrent"``, ``"outside"`` (of the table), or ``"table"``, failures among them."""
        if self.stopped == "left out":
            return "left out"
        if self.recurrent:
            return "recurrent"
        return "outside" if self.n_layers and not self.table else "table"

    @property
    def exact(self) -> bool:
        """Whether the paths agree in every bit under fixed shape, while they do not as they are."""
        return self.fixed == 0 and self.native > 0

    def outcome(self, verb: str) -> str:
        """``"runs"``, ``"refused"``, ``"internal error"``, or empty if a verb was not called."""
        found = self.verdict if verb == "diagnose" else getattr(self, verb)
        return found if found in ("", REFUSED, INTERNAL) else "runs"

    @property
    def broken(self) -> bool:
        """Whether a verb failed otherwise than by refusing."""
        return INTERNAL in (self.compare, self.patch, self.verdict)

    @property
    def why(self) -> str:
        """Why it is not exact, or what is to be known about it; empty if nothing explains it."""
        if self.name in NOTES or self.stopped:
            return NOTES.get(self.name, self.reason)
        if self.exact or self.float64 > SAME_FUNCTION:
            return ""
        reasons: dict[str, list[str]] = {}
        for layer, reason in self.uncovered.items():
            reasons.setdefault(reason, []).append(layer)
        return "; ".join(f"{_layers(layers, self.n_layers)}: {reason}" for reason, layers in reasons.items())


class TableCalls:
    """Notes which layers call the attention table."""

    order = Order.OBSERVE

    def __init__(self, model: Model) -> None:
        self.model = model
        self.layers: set[int] = set()

    def __call__(self, call: AttentionCall, proceed: Callable[[AttentionCall], Output]) -> Output:
        layer = self.model.layer_of.get(id(call.module))
        if layer is not None:
            self.layers.add(layer)
        return proceed(call)


def examine(name: str, diagnose: bool = False) -> Row:
    """Build one architecture, measure it and call the verbs on it; what goes wrong is part of the row."""
    quiet()
    start, found = time.perf_counter(), dict[str, Any]()
    if name in LEFT_OUT:
        found |= {"stopped": "left out", "reason": LEFT_OUT[name]}
    else:
        try:
            for values in _stages(name):
                found |= values
            del found["stopped"]
        except Exception as error:
            found["reason"] = f"{type(error).__name__}: {one_line(error)}"[:300]
    try:
        hf = build(name)
    except Exception:  # the row says so already, or why it is not tried
        return Row(name, seconds=round(time.perf_counter() - start, 1), **found)
    return Row(name, **found, **_verbs(hf, diagnose), seconds=round(time.perf_counter() - start, 1))


def _verbs(hf: Any, diagnose: bool) -> dict[str, Any]:
    """What `kd.compare`, `kd.patch` and `kd.diagnose` do by default."""
    site = "kv"
    with suppress(Exception):  # which every verb meets, too
        site = "kv" if kd.load(hf, quiet=True).coverage.layers("k") else "resid_post"
    calls: dict[str, Callable[[], Any]] = {
        "compare": lambda: kd.compare(hf, PROMPT, max_new_tokens=4, progress=False),
        "patch": lambda: kd.patch(hf, PROMPT, site, max_new_tokens=4, progress=False),
    }
    if diagnose:
        calls["verdict"] = lambda: kd.diagnose(hf, progress=False)
    found: dict[str, Any] = {"said": {}}
    for verb, call in calls.items():
        try:
            result = call()
        except Exception as error:
            refused = isinstance(error, KvdriftError) and not isinstance(error, InternalError)
            found[verb] = REFUSED if refused else INTERNAL
            found["said"][verb] = f"{type(error).__name__}: {one_line(error)}"[:400]
            continue
        found[verb] = "runs"
        if verb == "verdict":
            found |= {"verdict": result.kind, "evidence": () if result.equivalent else result.reasons}
    return found


def _stages(name: str) -> Iterator[dict[str, Any]]:
    """The values of a row, as they are found; ``stopped`` names what comes next."""
    yield {"stopped": "build"}
    hf = build(name)
    yield {"stopped": "load"}
    model = kd.load(hf, quiet=True)
    yield {"stopped": "trace"}
    calls, layers = TableCalls(model), model.architecture.layers
    with seam(hf, calls):
        missing = [site for site in model.coverage.reasons if site != PATTERN]
    reasons = not_covered(model)
    yield {
        "n_layers": len(layers),
        "kinds": tuple(dict.fromkeys(layer.attention for layer in layers)),
        "table": tuple(sorted(calls.layers)),
        "recurrent": tuple(layer for layer, why in reasons.items() if why.startswith("recurrent")),
        "uncovered": {str(layer): reason for layer, reason in reasons.items()},
        "missing": tuple(site for site in ALL_SITES if site in missing),
        "stopped": "native",
    }
    yield {"native": difference(model), "stopped": "fixed"}
    yield {"fixed": difference(model, (FixedShape(64),)), "stopped": "float64"}
    with promote_float32():
        yield {"float64": difference(Model(cast_copy(hf, torch.float64))), "stopped": ""}


def difference(model: Model, controls: tuple[FixedShape, ...] = ()) -> float:
    """The largest relative difference of logits between the paths: exactly 0 if they agree in every bit."""
    on, off = (_logits(path(controls=controls), model) for path in (kd.CacheOn, kd.CacheOff))
    return max(0.0 if torch.equal(a, b) else float((a - b).norm() / b.norm()) for a, b in zip(on, off, strict=True))


def _logits(path: kd.CacheOn | kd.CacheOff, model: Model) -> list[Tensor]:
    run = path.start(model, PROMPT)
    try:
        return [run.step(token).logits.double() for token in (None, *FOLLOW)]
    finally:
        run.close()


def quiet() -> None:
    """One thread, since numbers depend on it, and no warnings of transformers."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers_logging.set_verbosity_error()


def found_rows(names: list[str], known: dict[str, Row], diagnose: bool, jobs: int) -> Iterator[Row]:
    """Every row: those that are known, then the others as they are found."""
    yield from (known[name] for name in names if name in known)
    todo = [name for name in names if name not in known]
    if jobs < 2:
        for name in todo:
            yield examine(name, diagnose)
            gc.collect()
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), max_tasks_per_child=16) as pool:
        for done in as_completed([pool.submit(examine, name, diagnose) for name in todo]):
            yield done.result()


# --- rows on disk


def read(path: Path | None) -> dict[str, Row]:
    if path is None or not path.exists():
        return {}
    rows = [Row(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    return {row.name: row for row in rows}


# --- tables

HEAD = (
    *("architecture", "layers", "traced", "native", "fixed", "float64", "exact"),
    *("diagnose", "compare", "patch", "why not"),
)


def cells(row: Row) -> tuple[str, ...]:
    verbs = (row.verdict, row.compare, row.patch)
    if not row.n_layers:
        return (row.name, "", "", "", "", "", row.stopped, *verbs, row.why)
    kinds = ", ".join(row.kinds)
    traced = f"without {', '.join(row.missing)}" if row.missing else "all"
    numbers = ["" if math.isnan(x) else "0" if x == 0 else f"{x:.0e}" for x in (row.native, row.fixed, row.float64)]
    exact = "**no**" if not row.exact else "yes, unpromised" if row.uncovered else "yes"
    return (row.name, f"{row.n_layers} ({kinds})", traced, *numbers, exact, *verbs, row.why)


def line(row: Row, markdown: bool) -> str:
    if markdown:
        return "| " + " | ".join(cells(row)) + " |"
    name, layers, _, native, fixed, float64, exact, verdict, compare, patch, why = cells(row)
    numbers = f"{native:>7} {fixed:>7} {float64:>7}"
    said = "".join(f" {verb}: {words};" for verb, words in row.said.items() if getattr(row, verb) == INTERNAL)
    verbs = f"{verdict:12} {compare:8} {patch:8}"
    return f"{name:24} {layers:34} {numbers}  {exact.strip('*'):15} {verbs} {why}{said}".rstrip()


GROUPS = {
    "table": "attention through transformers' table, no recurrent parts",
    "recurrent": "recurrent or convolutional parts (no promise)",
    "outside": "attention outside the table (no promise)",
    "left out": "left out",
}


def summary(rows: list[Row]) -> list[str]:
    found = [
        f"{len(rows)} causal-LM architectures of transformers {transformers.__version__}, torch {torch.__version__}"
    ]
    for group, words in GROUPS.items():
        members = [row for row in rows if row.group == group]
        exact = sum(row.exact for row in members)
        found.append(f"{words}: {len(members)}" + ("" if group == "left out" else f", {exact} of them exact"))
    verdicts = Counter(row.verdict for row in rows if row.verdict)
    if verdicts:
        found.append("verdicts: " + ", ".join(f"{kind} {n}" for kind, n in verdicts.most_common()))
    for verb in ("diagnose", "compare", "patch"):
        outcomes = Counter(outcome for row in rows if (outcome := row.outcome(verb)))
        if outcomes:
            found.append(f"{verb} by default: " + ", ".join(f"{word} {n}" for word, n in outcomes.most_common()))
    broken = [row.name for row in rows if row.broken]
    found.append(f"internal errors: {', '.join(broken) or 'none'}")
    different = [row.name for row in rows if row.float64 > SAME_FUNCTION]
    found.append(f"paths that differ in float64 too: {', '.join(different) or 'none'}")
    return found


def unexplained(rows: list[Row]) -> list[str]:
    """Architectures that are not exact, differ in float64 or are no ``rounding``, for no reason that is known."""
    known = ("", "exact", "rounding", REFUSED)
    rows = [row for row in rows if row.stopped != "left out"]  # which has its reason
    unsound = [row.name for row in rows if row.verdict not in known and row.name not in NOTES]
    return unsound + [row.name for row in rows if not row.why and (not row.exact or row.float64 > SAME_FUNCTION)]


def share(rows: list[Row]) -> float:
    members = [row for row in rows if row.group == "table"]
    return sum(row.exact for row in members) / len(members) if members else math.nan


def _layers(layers: list[str], n_layers: int) -> str:
    return "all layers" if len(layers) == n_layers else f"layer{'s' * (len(layers) > 1)} {', '.join(layers)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="model types; all by default")
    parser.add_argument("--results", type=Path, help="keep rows in this file, and take those that it has from there")
    parser.add_argument("--jobs", type=int, default=1, help="how many to examine at a time, each on one core")
    parser.add_argument("--diagnose", action="store_true", help="also diagnose each")
    parser.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(NAMES))
    if unknown:
        parser.error(f"transformers {transformers.__version__} has no causal LM of type {', '.join(unknown)}")
    quiet()
    known, rows = read(options.results), []
    if options.markdown:
        print("| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD))
    names = options.names or list(NAMES)
    for row in found_rows(names, known, options.diagnose, options.jobs):
        name = row.name
        rows.append(row)
        if options.results and name not in known:
            with options.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(row)) + "\n")
        print(line(row, options.markdown), flush=True)

    rows.sort(key=lambda row: names.index(row.name))
    print("", *summary(rows), sep="\n")
    print(f"exact among the first group: {share(rows):.1%} (target {TARGET:.0%})")
    left = unexplained(rows)
    if left:
        print(f"without an explanation: {', '.join(left)}")
    sys.exit(int(bool(left) or share(rows) < TARGET or any(row.broken for row in rows)))


if __name__ == "__main__":
    main()
