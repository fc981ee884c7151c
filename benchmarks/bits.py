"""Every number and sentence of every verb on tiny models, as digests: is a change of the code one of the arithmetic?

    python benchmarks/bits.py --out before.json          # with the code of before, two minutes on one core
    python benchmarks/bits.py --against before.json      # with the code of after: what differs; exit code 1 if anything
    python benchmarks/bits.py --against before.json --only compare,sweep --families llama,gemma3

Digests are of one machine and one set of library versions. Nothing here is a test: digests that differ between two
versions of the code ask for a reason.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from safetensors.numpy import load_file

import kvdrift as kd
from kvdrift.errors import KvdriftError
from kvdrift.models.tiny import FAMILIES

PROMPT = [5, 7, 11, 2, 9, 14, 3, 8]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FEW = ("llama", "gemma3", "mixtral", "deepseek-v3", "mamba")
"""Families in which the longer verbs run."""
MOVES = re.compile(r"\d+(\.\d+)? s\b|\d{4}-\d\d-\d\d[T ][\d:.+]+|/tmp/\S+")
"""Seconds, dates and temporary files, which no two runs share."""

Digests = Iterator[tuple[str, Any]]


def digest(value: Any) -> str:
    """A short digest of bytes, of a sentence, or of anything that JSON holds."""
    raw = value if isinstance(value, bytes) else MOVES.sub("", value if isinstance(value, str) else json.dumps(value))
    return hashlib.sha256(raw if isinstance(raw, bytes) else raw.encode()).hexdigest()[:16]


def saved(result: Any) -> Digests:
    """The tensors of a result's file, by name."""
    with tempfile.TemporaryDirectory() as folder:
        path = result.save(Path(folder) / "result.kvdrift")
        for name, array in sorted(load_file(path).items()):
            yield name, array.tobytes() + str((array.dtype, array.shape)).encode()


def told(result: Any) -> Digests:
    """What a result prints, in a terminal and in Jupyter, and its table."""
    yield "text", str(result)
    yield "html", result._repr_html_()
    if hasattr(result, "to_dataframe"):
        yield "table", result.to_dataframe().to_csv()


def record(model: Any) -> Digests:
    for path in (kd.CacheOn(), kd.CacheOff(), kd.CacheOn(prefill_chunk=3)):
        trace = kd.record(model, PROMPT, path=path, positions="all", max_new_tokens=4, progress=False)
        for site in trace.sites:
            by_layer = trace[site] if isinstance(trace[site], dict) else {0: trace[site]}
            for layer, value in by_layer.items():
                yield f"{path.label}/{site}/{layer}", value.contiguous().view(torch.uint8).numpy().tobytes()


def compare(model: Any) -> Digests:
    drift = kd.compare(model, [PROMPT, PROMPT[:5]], max_new_tokens=5, floor=2, self_drift=True, progress=False)
    yield from saved(drift)
    yield from told(drift)


def sweep(model: Any) -> Digests:
    sites = [site for site in ("resid_post", "kv") if site == "resid_post" or "k" in model.coverage.sites]
    write = "read" if "kv" in sites else None
    result = kd.sweep(model, PROMPT, sites=sites, max_new_tokens=4, write=write, progress=False)
    yield from saved(result)
    yield from told(result)


def patch(model: Any) -> Digests:
    result = kd.patch(model, PROMPT, "resid_post", max_new_tokens=4, placebos=1, progress=False)
    yield from saved(result)
    yield from told(result)


def factorial(model: Any) -> Digests:
    if "k" in model.coverage.sites:
        result = kd.factorial(model, PROMPT, max_new_tokens=4, progress=False)
        yield from saved(result)
        yield from told(result)


def falsify(model: Any) -> Digests:
    result = kd.falsify(model, [PROMPT, PROMPT[2:]], max_new_tokens=3, progress=False)
    yield from saved(result)
    yield from told(result)


def evaluate(model: Any) -> Digests:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "task.jsonl"
        path.write_text("".join(json.dumps({"prompt": PROMPT[n:], "answer": "7"}) + "\n" for n in range(3)))
        task = kd.JsonlTask(path)
        result = kd.evaluate(model, task, strategies=["greedy", "top-k"], null=2, max_new_tokens=6, progress=False)
    yield "records", json.dumps([asdict(record) for record in result.records], default=str)
    yield from told(result)


def diagnose(model: Any) -> Digests:
    verdict = kd.diagnose(model, progress=False)
    yield "verdict", json.dumps(verdict.to_dict(), default=str, sort_keys=True)
    yield "text", str(verdict)


VERBS: dict[str, Callable[[Any], Digests]] = {
    verb.__name__: verb for verb in (record, compare, sweep, patch, factorial, falsify, evaluate, diagnose)
}
EVERYWHERE = ("record", "compare")


def run(only: list[str], families: list[str]) -> dict[str, str]:
    """Name of a number or sentence → digest."""
    digests: dict[str, str] = {}
    for family in families:
        for name, dtype in DTYPES.items():
            model = kd.load(kd.models.tiny(family, dtype=dtype), quiet=True)
            for verb in only:
                if verb in EVERYWHERE or family in FEW:
                    where = f"{verb}/{family}/{name}"
                    try:
                        digests |= {f"{where}/{what}": digest(value) for what, value in VERBS[verb](model)}
                    except KvdriftError as error:
                        digests[f"{where}/refused"] = digest(str(error))
            print(f"{family} {name}", file=sys.stderr, flush=True)
    return digests


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the digests to this file")
    parser.add_argument("--against", type=Path, help="digests to compare with")
    parser.add_argument("--only", default=",".join(VERBS), help="verbs, separated by commas")
    parser.add_argument("--families", default=",".join(FAMILIES), help="tiny families, separated by commas")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    only, families = arguments.only.split(","), arguments.families.split(",")
    digests = run(only, families)
    if arguments.out:
        arguments.out.write_text(json.dumps(digests, indent=0, sort_keys=True))
    if arguments.against is None:
        print(f"{len(digests)} digests")
        return 0
    before = json.loads(arguments.against.read_text())
    asked = {key for key in before if key.split("/")[0] in only and key.split("/")[1] in families}
    differing = sorted(key for key in asked | set(digests) if before.get(key) != digests.get(key))
    for key in differing:
        state = "differs" if key in before and key in digests else "is new" if key in digests else "is gone"
        print(f"{key} {state}")
    print(f"{len(asked | set(digests)) - len(differing)} alike, {len(differing)} not")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
