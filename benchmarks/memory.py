"""Peak memory of `compare` against the number of steps: it grows by the numbers kept and by nothing else.

    python benchmarks/memory.py --steps 8 32 96

Every run follows the same tokens in a process of its own, with a prompt shortened so that the last step always has
the same length. The two paths first run alone over those tokens, since PyTorch keeps compiled kernels for every length
it has seen; printed is the peak beside the weights, what of it `compare` takes beyond the paths alone (one of them
re-rolled, as for a rounding floor), and the size of the arrays in its result.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

LENGTH = 160


def measure(name: str, dtype: str, steps: int) -> dict[str, float]:
    """Run one comparison that ends at position `LENGTH` and report its memory, in MB."""
    import resource

    import torch

    import kvdrift as kd

    model = kd.load(name, dtype=dtype, quiet=True)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.vocab_size, (LENGTH,), generator=generator).tolist()
    options = {"floor": 1, "progress": False}
    for path in (kd.CacheOn(), kd.CacheOff(), kd.CacheOn(controls=(kd.ReRoll(0),))):
        run = path.start(model, tokens[:-steps])
        run.step()
        for token in tokens[-steps:-1]:
            run.step(token)
        run.close()
    weights = sum(weight.nbytes for weight in model.hf.parameters())
    before = _peak(resource, torch)
    drift = kd.compare(model, tokens[:-steps], tokens=tokens[-steps:], **options)
    kept = sum(array.nbytes for array in drift.arrays.values())
    peak = _peak(resource, torch)
    return {"steps": steps, "peak": peak, "weights": weights / 1e6, "more": peak - before, "kept": kept / 1e6}


def _peak(resource: object, torch: object) -> float:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--steps", type=int, nargs="+", default=[8, 32, 96])
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.model, options.dtype, options.one)))
        return
    command = [sys.executable, __file__, "--model", options.model, "--dtype", options.dtype, "--one"]
    for steps in options.steps:
        line = subprocess.run([*command, str(steps)], check=True, capture_output=True, text=True).stdout
        found = json.loads(line.splitlines()[-1])
        print(
            f"{found['steps']:4d} steps: peak {found['peak']:7.1f} MB, weights {found['weights']:7.1f} MB; "
            f"{found['more']:6.1f} MB above the paths alone, results {found['kept']:6.2f} MB"
        )


if __name__ == "__main__":
    main()
