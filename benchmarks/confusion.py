"""The confusion table: what `kvdrift.diagnose` says about every fault, in every family of tiny models and dtype.

    python benchmarks/confusion.py --out confusion.jsonl
    python benchmarks/confusion.py --faults stale-last-key,heads-swapped --families llama,mistral --dtypes float32

Faults are those of tests/faults. A case counts where the fault changes the float64 output of the model; the last row
holds the clean models. Each finished case is appended to the file given with ``--out``, and the same command goes on
from there. The table is printed at the end; the exit code is 1 after a miss or a false alarm. Nothing here is a test.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
from faults.judge import CLEAN, Case, judge
from faults.registry import FAULTS

from kvdrift.models.tiny import FAMILIES

DTYPES = ("float32", "bfloat16")


def read(path: Path | None) -> dict[tuple[str, str, str], Case]:
    """Cases that were finished before; a line cut short by an interruption is run again."""
    found = {}
    for line in path.read_text().splitlines() if path is not None and path.exists() else []:
        try:
            values = json.loads(line)
        except json.JSONDecodeError:
            continue
        case = Case(**{**values, "signature": tuple(values["signature"]), "reasons": tuple(values["reasons"])})
        found[case.fault, case.family, case.dtype] = case
    return found


def run(todo: Sequence[tuple[str, str, str]], jobs: int) -> Iterator[Case]:
    """Judge cases, several at a time."""
    if jobs == 1:
        yield from (judge(*case) for case in todo)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for future in as_completed([pool.submit(judge, *case) for case in todo]):
            yield future.result()


def table(cases: Sequence[Case]) -> str:
    """The table in Markdown: a row per fault, clean models last."""
    lines = [
        "| fault | what goes wrong | cases | caught | verdicts | layer named | circumstance named |",
        "|---|---|---:|---:|---|---|---|",
    ]
    for name, fault in FAULTS.items():
        counted = [case for case in cases if case.fault == name and case.counts]
        if counted:
            caught = sum(case.right for case in counted)
            layer = _share(case.layer_right for case in counted)
            when = _share(case.signature_right for case in counted)
            told = f"{len(counted)} | {caught} | {_kinds(counted)} | {layer} | {when}"
            lines.append(f"| {name} | {fault.doc} | {told} |")
    clean = [case for case in cases if case.fault == CLEAN]
    if clean:
        alarms = sum(not case.right for case in clean)
        lines.append(f"| none | clean models | {len(clean)} | {alarms} false alarms | {_kinds(clean)} | – | – |")
    return "\n".join(lines)


def _share(right: Iterable[bool | None]) -> str:
    known = [one for one in right if one is not None]
    return f"{sum(known)} of {len(known)}" if known else "–"


def _kinds(cases: Sequence[Case]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in Counter(str(case.kind) for case in cases).most_common())


def line(case: Case) -> str:
    """One case for a person who watches."""
    if not case.counts:
        told = "does not apply" if case.change is None else f"no effect ({case.change:.0e})"
    else:
        told = f"{case.kind} in {case.seconds:.0f} s"
        if case.layer is not None:
            told += f", layer {case.layer}, named {case.named}"
    mark = "" if case.right else "  <- " + ("FALSE ALARM" if case.fault == CLEAN else "MISS")
    mark += "" if case.layer_right in (None, True) else "  <- LAYER"
    return f"{case.fault:36s} {case.family:12s} {case.dtype:9s} {told}{mark}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", default="all", help=f"names with commas between them; {CLEAN} for no fault")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time, one thread each")
    parser.add_argument("--out", type=Path, help="a JSON-lines file to append to and to go on from")
    options = parser.parse_args()
    torch.set_num_threads(1)
    faults = [CLEAN, *FAULTS] if options.faults == "all" else options.faults.split(",")
    wanted = [
        (fault, family, dtype)
        for family in options.families.split(",")
        for dtype in options.dtypes.split(",")
        for fault in faults
    ]
    known = read(options.out)
    done = {key: known[key] for key in wanted if key in known}
    todo = [key for key in wanted if key not in done]
    for number, case in enumerate(run(todo, options.jobs), len(done) + 1):
        done[case.fault, case.family, case.dtype] = case
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(json.dumps(case.to_dict()) + "\n")
        print(f"[{number}/{len(wanted)}] {line(case)}", file=sys.stderr, flush=True)
    cases = list(done.values())
    print(table(cases))
    wrong = [case for case in cases if not case.right or case.layer_right is False]
    for case in wrong:
        print(line(case), file=sys.stderr)
    counted = sum(case.counts and case.fault != CLEAN for case in cases)
    print(f"{counted} cases with a fault, {sum(not case.right for case in cases)} wrong verdicts", file=sys.stderr)
    return int(any(not case.right for case in cases))


if __name__ == "__main__":
    sys.exit(main())
