"""What tracing and comparing cost, as ratios against bare loops from one paired run.

    python benchmarks/tracing.py --model smollm2-135m --steps 48 --rounds 5

Every round runs each variant once, in turn, so that all of them see the same machine; the medians over rounds are
compared. Nothing here is a test: speed is measured, not asserted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from transformers import DynamicCache

import kvdrift as kd
from kvdrift.drift.lockstep import RESIDUAL

PROMPT = (
    "A baker fills 14 trays with 12 rolls each. She sells 95 rolls before noon and 48 after it, and gives the rest "
    "to a school in equal bags of 5. How many bags does the school get?"
)


@torch.no_grad()
def bare_on(hf: torch.nn.Module, ids: list[int], steps: int) -> list[int]:
    """Prefill, then decode with a cache: nothing but the model."""
    cache, tokens, fed = DynamicCache(config=hf.config), list(ids), list(ids)
    for _ in range(steps):
        start = len(tokens) - len(fed)
        positions = torch.arange(start, len(tokens)).unsqueeze(0)
        out = hf(torch.tensor([fed]), position_ids=positions, cache=cache, use_cache=True, logits_to_keep=1)
        fed = [int(out.logits[0, -1].argmax())]
        tokens += fed
    return tokens[len(ids) :]


@torch.no_grad()
def bare_off(hf: torch.nn.Module, ids: list[int], follow: list[int]) -> None:
    """Recompute the whole prefix at every step: nothing but the model."""
    tokens = list(ids)
    for token in follow:
        positions = torch.arange(len(tokens)).unsqueeze(0)
        out = hf(torch.tensor([tokens]), position_ids=positions, use_cache=False, logits_to_keep=1)
        int(out.logits[0, -1].argmax())
        tokens.append(token)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--floor", type=int, default=0, help="also time a comparison with so many re-rolls")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = kd.load(options.model, dtype=options.dtype)
    ids, steps = model.encode(PROMPT), options.steps
    follow = bare_on(model.hf, ids, steps)
    residual = [site for site in RESIDUAL if site in model.coverage.sites]

    def record() -> None:
        kd.record(model, ids, sites=[*residual, "k", "v"], tokens=follow, progress=False)

    def compare(sites: list[str], local: bool = False, floor: int = 0) -> Callable[[], object]:
        return lambda: kd.compare(model, ids, tokens=follow, sites=sites, local=local, floor=floor, progress=False)

    variants: dict[str, Callable[[], object]] = {
        "bare ON loop": lambda: bare_on(model.hf, ids, steps),
        "record residual sites + K/V": record,
        "bare ON + OFF loops": lambda: (bare_on(model.hf, ids, steps), bare_off(model.hf, ids, follow)),
        "compare residual sites + logits": compare(residual),
        "compare with q, k, v, z": compare([*residual, "q", "k", "v", "z"]),
        "compare with local drift": compare(residual, local=True),
    }
    if options.floor:
        variants[f"… and {options.floor} re-rolls"] = compare(residual, local=True, floor=options.floor)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for variant in variants.values():
        variant()  # kernels, caches and allocators warm up
    for _ in range(options.rounds):
        for name, variant in variants.items():
            start = time.perf_counter()
            variant()
            seconds[name].append(time.perf_counter() - start)
    print(f"{model!r}\n{len(ids)} prompt tokens, {steps} steps, {options.rounds} rounds, {options.threads} threads")
    for name, times in seconds.items():
        base = "bare ON loop" if name.startswith(("bare ON loop", "record")) else "bare ON + OFF loops"
        ratios = [mine / theirs for mine, theirs in zip(times, seconds[base], strict=True)]
        print(f"{name:42s} {statistics.median(times):7.2f} s   x{statistics.median(ratios):.3f} of {base}")


if __name__ == "__main__":
    main()
