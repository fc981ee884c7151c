"""How fast an evaluation runs: against transformers' `generate`, and with two Ray workers against one.

    python benchmarks/evaluate.py --model smollm2-135m --prompts 2 --tokens 48 --rounds 5
    python benchmarks/evaluate.py --ray --model smollm2-135m --prompts 8 --tokens 32 --rounds 2

The first form writes the same texts greedily, one prompt at a time: `generate` and a path's own loop with and without a
cache, and the whole of `kvdrift.evaluate`, which writes both. Their tokens must be equal. Every round runs each variant
once, in turn (starting with another one each time). Printed are tokens per second, the median over rounds of the ratio
within a round, by wall clock and by processor time, and the ratio of the least processor times of all rounds, which
other work on the machine disturbs least.

The second form runs `kvdrift.evaluate(engine="ray")` with one and with two workers of one thread each. A call starts
and ends its workers, so a run over a third of the prompts is timed too: the difference is what the other two thirds
took, without the start. Their records must be equal. It needs two free cores to say anything.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

import kvdrift as kd
from kvdrift.models.model import Model

CLAUSES = (
    "A baker fills 14 trays with 12 rolls each. ",
    "She sells 95 rolls before noon and 48 after it. ",
    "The rest goes to a school in equal bags of 5. ",
    "A train covers 80 kilometres in an hour and stops for 9 minutes at every fourth station. ",
)
"""Each prompt is these, begun at another one and left unfinished, so that no model ends its text at once."""
Texts = list[tuple[int, ...]]


def prompts_for(model: Model, n: int) -> list[list[int]]:
    """Token ids of ``n`` different prompts."""
    if model.tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        return [torch.randint(model.architecture.vocab_size, (64,), generator=generator).tolist() for _ in range(n)]
    shift = [CLAUSES[k % 4 :] + CLAUSES[: k % 4] for k in range(n)]
    return [
        model.encode("".join(text) + f"Question {k + 1}: how many in all? First, we") for k, text in enumerate(shift)
    ]


def with_generate(model: Model, prompts: list[list[int]], n_tokens: int, use_cache: bool) -> Texts:
    """Transformers' own loop."""
    options = {"max_new_tokens": n_tokens, "do_sample": False, "use_cache": use_cache}
    written = [model.hf.generate(torch.tensor([ids]), **options)[0, len(ids) :] for ids in prompts]
    return [tuple(text.tolist()) for text in written]


def with_path(model: Model, prompts: list[list[int]], n_tokens: int, path: kd.CacheOn | kd.CacheOff) -> Texts:
    """A path that feeds itself, and nothing else."""
    texts = []
    for ids in prompts:
        choose, tokens = kd.Greedy().sampler(0, ""), []
        run = path.start(model, ids)
        while len(tokens) < n_tokens and not (tokens and tokens[-1] in model.eos_ids):
            tokens.append(choose(run.step(tokens[-1] if tokens else None).logits, len(tokens)))
        run.close()
        texts.append(tuple(tokens))
    return texts


def with_evaluate(model: Model, prompts: list[list[int]], n_tokens: int, **options: object) -> list[Texts]:
    """`kvdrift.evaluate` on both paths: their texts."""
    found = kd.evaluate(model, prompts, strategies="greedy", max_new_tokens=n_tokens, progress=False, **options)
    return [[getattr(record.trials[0], path).tokens for record in found.records] for path in ("a", "b")]


def against_generate(model: Model, options: argparse.Namespace) -> None:
    prompts, n = prompts_for(model, options.prompts), options.tokens
    on, off = "generate, with a cache", "generate, without"
    both = "generate, both"
    variants: dict[str, Callable[[], object]] = {
        on: partial(with_generate, model, prompts, n, True),
        "kvdrift, cache-ON": partial(with_path, model, prompts, n, kd.CacheOn()),
        off: partial(with_generate, model, prompts, n, False),
        "kvdrift, cache-OFF": partial(with_path, model, prompts, n, kd.CacheOff()),
        "kvdrift.evaluate, both": partial(with_evaluate, model, prompts, n),
    }
    written = {name: run() for name, run in variants.items()}  # kernels, caches and allocators warm up
    assert written[on] == written["kvdrift, cache-ON"], "another text with a cache"
    assert written[off] == written["kvdrift, cache-OFF"], "another text without a cache"
    assert written["kvdrift.evaluate, both"] == [written[on], written[off]], "another text in evaluate"
    counts = {name: sum(map(len, texts)) for name, texts in written.items() if name != "kvdrift.evaluate, both"}
    counts |= {"kvdrift.evaluate, both": counts[on] + counts[off], both: counts[on] + counts[off]}
    names, seconds = list(variants), {name: [] for name in (*variants, both)}
    for number in range(options.rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            wall, processor = time.perf_counter(), time.process_time()
            variants[name]()
            seconds[name].append((time.perf_counter() - wall, time.process_time() - processor))
        seconds[both].append(tuple(x + y for x, y in zip(seconds[on][-1], seconds[off][-1], strict=True)))
    print(f"{'':24s} {'tokens/s':>8s} {'wall':>8s} {'processor':>9s} {'at best':>9s}")
    for name, base in zip(names, (on, on, off, off, both), strict=True):
        pairs = list(zip(seconds[name], seconds[base], strict=True))
        wall, processor = (statistics.median(theirs[clock] / mine[clock] for mine, theirs in pairs) for clock in (0, 1))
        best = min(theirs[1] for _, theirs in pairs) / min(mine[1] for mine, _ in pairs)
        rate = counts[name] / statistics.median(mine[0] for mine, _ in pairs)
        print(f"{name:24s} {rate:8.1f} {wall:7.3f}x {processor:8.3f}x {best:8.3f}x the speed of {base}")


def one_and_two_workers(model: Model, options: argparse.Namespace) -> None:
    prompts = prompts_for(model, options.prompts)
    few = prompts[: max(2, len(prompts) // 3)]
    seconds: dict[tuple[int, int], list[float]] = {}
    texts = []
    for _ in range(options.rounds):
        for workers in (1, 2):
            for chosen in (few, prompts):
                start = time.perf_counter()
                found = with_evaluate(model, chosen, options.tokens, engine="ray", workers=workers, threads=1)
                seconds.setdefault((workers, len(chosen)), []).append(time.perf_counter() - start)
            texts.append(found)
    assert all(found == texts[0] for found in texts), "the texts depend on the number of workers"
    whole = {workers: seconds[workers, len(prompts)] for workers in (1, 2)}
    rest = {w: [x - y for x, y in zip(whole[w], seconds[w, len(few)], strict=True)] for w in (1, 2)}
    for name, times in (("whole calls", whole), (f"{len(prompts) - len(few)} prompts, no start", rest)):
        one, two = (statistics.median(times[workers]) for workers in (1, 2))
        ratio = statistics.median(x / y for x, y in zip(times[1], times[2], strict=True))
        print(f"{name:24s} one worker {one:7.1f} s, two {two:7.1f} s: two are {ratio:.2f}x as fast")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a preset, or 'tiny'")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--ray", action="store_true", help="two Ray workers against one")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.model == "tiny":
        model = kd.load(kd.models.tiny("llama", dtype=getattr(torch, options.dtype)), quiet=True)
    else:
        model = kd.load(options.model, dtype=options.dtype, quiet=True)
    print(
        f"{options.model}, {options.dtype}, {options.prompts} prompts, {options.tokens} tokens each, "
        f"{options.rounds} rounds, {1 if options.ray else options.threads} threads"
    )
    (one_and_two_workers if options.ray else against_generate)(model, options)


if __name__ == "__main__":
    main()
