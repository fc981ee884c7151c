"""What a layer sweep costs, as a ratio to the passes it cannot do without, from one paired run.

    python benchmarks/patching.py --model smollm2-135m --steps 32 --at 8 --rounds 3

The ideal is the donor (cache-OFF) once, the recipient (cache-ON) up to the patched step once, and from there one
cached decode per layer, all in bare loops. The sweep also measures every step, and runs the unpatched recipient to
the end. Every round runs each variant once, in turn; the medians over rounds are compared. Nothing here is a test.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache

import kvdrift as kd

PROMPT = (
    "A baker fills 14 trays with 12 rolls each. She sells 95 rolls before noon and 48 after it, and gives the rest "
    "to a school in equal bags of 5. How many bags does the school get?"
)


@torch.no_grad()
def donor(hf: torch.nn.Module, ids: list[int], steps: int) -> list[int]:
    """Recompute the whole prefix at every step."""
    tokens = list(ids)
    for _ in range(steps):
        positions = torch.arange(len(tokens)).unsqueeze(0)
        out = hf(torch.tensor([tokens]), position_ids=positions, use_cache=False, logits_to_keep=1)
        tokens.append(int(out.logits[0, -1].argmax()))
    return tokens[len(ids) :]


@torch.no_grad()
def decode(hf: torch.nn.Module, fed: list[list[int]], start: int, cache: Cache) -> None:
    """Feed pieces of a text to a cache, one after the other."""
    for tokens in fed:
        positions = torch.arange(start, start + len(tokens)).unsqueeze(0)
        out = hf(torch.tensor([tokens]), position_ids=positions, cache=cache, use_cache=True, logits_to_keep=1)
        int(out.logits[0, -1].argmax())
        start += len(tokens)


def ideal(model: kd.models.model.Model, ids: list[int], follow: list[int], at: int) -> None:
    """Nothing but the passes that are needed."""
    donor(model.hf, ids, len(follow))
    cache = DynamicCache(config=model.hf.config)
    decode(model.hf, [ids, *([token] for token in follow[: at - 1])], 0, cache)
    for _ in range(model.architecture.n_layers):
        rest = [[token] for token in follow[at - 1 : -1]]
        decode(model.hf, rest, len(ids) + at - 1, copy.deepcopy(cache))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--at", type=int, default=8, help="the patched step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = kd.load(options.model, dtype=options.dtype)
    ids = model.encode(PROMPT)
    follow = donor(model.hf, ids, options.steps)

    def sweep(placebos: int) -> Callable[[], object]:
        return lambda: kd.sweep(
            model, ids, sites="kv", over="layer", schedule=f"one_shot({options.at})", tokens=follow,
            placebos=placebos, checks="none", progress=False,
        )  # fmt: skip

    variants: dict[str, Callable[[], object]] = {
        "ideal": lambda: ideal(model, ids, follow, options.at),
        "sweep": sweep(0),
        "sweep with one placebo per cell": sweep(1),
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(options.rounds + 1):
        for name, run in variants.items():
            start = time.perf_counter()
            run()
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)
    base = statistics.median(seconds["ideal"])
    print(f"{options.model}, {options.dtype}, {torch.get_num_threads()} threads, {len(ids)} prompt tokens")
    print(f"{options.steps} steps, one-shot K/V at step {options.at}, {model.architecture.n_layers} layers")
    for name, times in seconds.items():
        print(f"{name:32s} {statistics.median(times):7.2f} s   {statistics.median(times) / base:5.2f}x")


if __name__ == "__main__":
    main()
