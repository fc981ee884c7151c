"""Do the fast tests notice a small mistake? Each of some mutations is made in a copy of the package and tested.

    python benchmarks/mutations.py [--only METRICS]

A mutation changes one expression; the tests beside the file must fail. Prints one row each and ends with 1 if one was
not noticed, or if the tests named do not pass without it. Not part of CI: run it when you thin out tests.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("kvdrift", "tests")
FAILED, PASSED = 1, 0


@dataclass(frozen=True)
class Mutation:
    """One mistake: where, what stands there and what instead, and the tests that must notice."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    says: str


METRICS = ("tests/drift/test_metrics.py",)
RECOVERY = ("tests/patching/test_recovery.py", "tests/summaries/test_patch.py")
SEAM = ("tests/tracing/test_seam.py",)
ATTENTION = ("tests/diagnosis/test_attention_witness.py",)
OPERATORS = ("tests/diagnosis/test_operator_witness.py",)
STORE = ("tests/runs/test_store.py",)
POSITIONS = ("tests/paths/test_written.py", "tests/paths/test_evicting.py", "tests/models/test_positions.py")
DECIDE = ("tests/diagnosis/test_decide.py",)

MUTATIONS = (
    Mutation(
        "kvdrift/drift/metrics.py",
        "(norm_d / norm_y) * (scale_d / scale_y)",
        "(norm_d / _norm(y + delta)) * (scale_d / scale_y)",
        METRICS,
        "relative to a instead of b",
    ),
    Mutation(
        "kvdrift/drift/metrics.py",
        "a.abs().double() + b.abs().double()",
        "a.abs().double() - b.abs().double()",
        METRICS,
        "ulps across zero in float64",
    ),
    Mutation(
        "kvdrift/drift/metrics.py",
        'result["topk_overlap"] = common.sum((-2, -1)).double() / top_k',
        'result["topk_overlap"] = common.sum((-2, -1)).double() / max(top_k, 2)',
        METRICS,
        "overlap of the top one counted of two",
    ),
    Mutation(
        "kvdrift/drift/metrics.py",
        "valid = valid_a & values_b[..., 0].isfinite()",
        "valid = valid_a",
        METRICS,
        "a reference without a softmax",
    ),
    Mutation(
        "kvdrift/patching/recovery.py",
        "seeds.mean(axis=0)], axis=1)",
        "seeds.max(axis=0)], axis=1)",
        RECOVERY,
        "held against the worst placebo",
    ),
    Mutation(
        "kvdrift/patching/recovery.py",
        "low = -np.inf if ratio.interval is not None and ratio.interval[0] == 0 else low",
        "low = low",
        RECOVERY,
        "an interval without a lower end",
    ),
    Mutation(
        "kvdrift/patching/recovery.py",
        "not plain.low <= 0",
        "plain.low > 0",
        RECOVERY,
        "no interval taken for one around zero",
    ),
    Mutation(
        "kvdrift/tracing/seam.py",
        "key=lambda link: link.order)",
        "key=lambda link: -link.order)",
        SEAM,
        "stages in the wrong order",
    ),
    Mutation(
        "kvdrift/tracing/seam.py",
        "for r in _STATE.links if id(module) in r.modules)",
        "for r in _STATE.links)",
        SEAM,
        "links see another model's calls",
    ),
    Mutation(
        "kvdrift/tracing/seam.py",
        "if table.get(name) is not wrapper:",
        "if False:",
        SEAM,
        "takes away what another put into the table",
    ),
    Mutation(
        "kvdrift/tracing/seam.py",
        "other.link != new.link and other.modules & new.modules",
        "other.link != new.link",
        SEAM,
        "refuses the kernel of another model",
    ),
    Mutation(
        "kvdrift/diagnosis/attention_witness.py",
        "(u + w * (n_keys + 16)) * (1 + 2 * mean + square).sqrt()",
        "(u + 8 * w * (n_keys + 16)) * 4 * (1 + 2 * mean + square).sqrt()",
        ATTENTION,
        "a bound too wide for attention",
    ),
    Mutation(
        "kvdrift/diagnosis/attention_witness.py",
        "ratios = ratios.where(output[:, :, rows].isfinite(), math.inf)",
        "ratios = ratios.where(output[:, :, rows].isfinite(), 0.0)",
        ATTENTION,
        "NaN of a kernel passes",
    ),
    Mutation(
        "kvdrift/diagnosis/operator_witness.py",
        "(n + 4) * w * magnitude",
        "(n + 4) * 64 * w * magnitude",
        OPERATORS,
        "a bound too wide for products",
    ),
    Mutation(
        "kvdrift/diagnosis/operator_witness.py",
        "yield from _columns(args[0][start:end], factor",
        "yield from _columns(args[0][start : end - 1], factor",
        OPERATORS,
        "the last row of a group unseen",
    ),
    Mutation(
        "kvdrift/runs/store.py",
        'self._file.truncate(content.rfind(b"\\n") + 1)',
        "self._file.truncate(len(content))",
        STORE,
        "half a line stays",
    ),
    Mutation("kvdrift/runs/store.py", "if key in found:", "if False:", STORE, "a key twice in the file"),
    Mutation(
        "kvdrift/runs/store.py",
        "left = left[self._file.write(left) :]",
        "self._file.write(left)\n                break",
        STORE,
        "a short write is the end",
    ),
    Mutation(
        "kvdrift/paths/written.py",
        "return [self.start + slot for slot in heads[0]]",
        "return list(heads[0])",
        POSITIONS,
        "positions counted from a cache's own beginning",
    ),
    Mutation(
        "kvdrift/paths/written.py",
        "found.append(places[row].pop())",
        "found.append(places[row].pop(0))",
        POSITIONS,
        "the oldest of entries that are alike",
    ),
    Mutation(
        "kvdrift/models/positions.py",
        "if _alike(told, own) or not _alike(told,",
        "if _alike(told, own) or _alike(told,",
        POSITIONS,
        "other default positions are not told",
    ),
    Mutation(
        "kvdrift/statistics/survival.py",
        "tokens=tuple(int(t) + 1 for t in times)",
        "tokens=tuple(int(t) for t in times)",
        ("tests/statistics/test_survival.py",),
        "a step taken for a number of tokens",
    ),
    Mutation(
        "kvdrift/statistics/multiplicity.py",
        "np.maximum.accumulate(steps)",
        "steps",
        ("tests/statistics/test_multiplicity.py",),
        "Holm without its steps down",
    ),
    Mutation(
        "kvdrift/statistics/resampling.py",
        "(n - 1) / n * ((left_out",
        "n / (n - 1) * ((left_out",
        ("tests/statistics/test_resampling.py",),
        "the jackknife's factor turned round",
    ),
    Mutation(
        "kvdrift/statistics/rates.py",
        "wilson(len(hits) * events / n, len(hits))",
        "wilson(events, n)",
        ("tests/statistics/test_rates.py",),
        "seeds counted as items",
    ),
    Mutation(
        "kvdrift/diagnosis/decide.py",
        '("crash", "stale", "prefix", "unfilled", "visibility", "loss") for finding in faults',
        '("crash", "stale", "prefix", "unfilled", "loss") for finding in faults',
        DECIDE,
        "a misread waits for the repeats",
    ),
    Mutation(
        "kvdrift/diagnosis/decide.py",
        "votes.pop() if len(votes) == 1 else None",
        "votes.pop() if votes else None",
        DECIDE,
        "a path is named where the votes differ",
    ),
    Mutation(
        "kvdrift/diagnosis/decide.py",
        'evidence.native_equal and evidence.counts.get("native")',
        "evidence.native_equal",
        DECIDE,
        "exact without a native step",
    ),
)


def main() -> int:
    """Try them, print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", help="a part of the file or of what it says")
    only = parser.parse_args().only.lower()
    chosen = [mutation for mutation in MUTATIONS if only in f"{mutation.file} {mutation.says}".lower()]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in FOLDERS:
            shutil.copytree(ROOT / name, copy / name)
        shutil.copy(ROOT / "pyproject.toml", copy)
        tests = sorted({test for mutation in chosen for test in mutation.tests})
        if run(copy, tests, quiet=False) != PASSED:
            print("These tests do not pass without a mutation.")
            return 1
        survivors = [mutation for mutation in chosen if not noticed(copy, mutation)]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} noticed")
    return 1 if survivors else 0


def noticed(copy: Path, mutation: Mutation) -> bool:
    """Whether the tests fail while the mutation is in the copy; prints its row."""
    file, start = copy / mutation.file, time.perf_counter()
    text = file.read_text(encoding="utf-8")
    if text.count(mutation.old) != 1:
        raise SystemExit(f"{mutation.file} has {text.count(mutation.old)} times: {mutation.old}")
    file.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        found = run(copy, mutation.tests) == FAILED
    finally:
        file.write_text(text, encoding="utf-8")
    seconds = time.perf_counter() - start
    place = mutation.file.removeprefix("kvdrift/").removesuffix(".py")
    print(f"{'noticed ' if found else 'SURVIVED'}  {place:28}  {mutation.says:48}  {seconds:5.1f} s", flush=True)
    return found


def run(copy: Path, tests: Sequence[str], quiet: bool = True) -> int:
    """Exit code of pytest over some fast tests of the copy, in a process that has torch already."""
    queue = CONTEXT.SimpleQueue()
    process = CONTEXT.Process(target=_run, args=(copy, tests, quiet, queue))
    process.start()
    process.join()
    return 2 if queue.empty() else queue.get()


def _run(copy: Path, tests: Sequence[str], quiet: bool, queue: multiprocessing.SimpleQueue) -> None:
    import pytest

    os.chdir(copy)
    sys.path[:] = [str(copy), *(path for path in sys.path if Path(path).resolve() not in (ROOT, ROOT / "benchmarks"))]
    with redirect_stdout(StringIO()) if quiet else nullcontext():
        queue.put(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests])))


CONTEXT = multiprocessing.get_context("fork")
if __name__ == "__main__":
    sys.dont_write_bytecode = True
    for name in (
        "torch",
        "transformers.models.llama.modeling_llama",
        "pandas",
        "scipy.stats",
        "plotly.io",
        "hypothesis",
    ):
        importlib.import_module(name)  # once for all
    raise SystemExit(main())
