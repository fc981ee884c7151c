"""What changes a model's numbers, measured: the table of docs/gotchas.md.

python docs/gotchas.py               # SmolLM2-135M, a minute or two on two cores
python docs/gotchas.py --dtype float32
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import StaticCache

import kvdrift as kd
from kvdrift.controls.precision import cast_copy
from kvdrift.demo_prompts import DEMO_PROMPTS
from kvdrift.models.model import Model

STEPS = 8


class Bench:
    """The same prompt and tokens, run in one way after another."""

    def __init__(self, name: str, dtype: str) -> None:
        self.model = kd.load(name, dtype=dtype, quiet=True)
        self.ids = self.model.encode(DEMO_PROMPTS[0])
        first = kd.record(self.model, self.ids, sites=("logits",), max_new_tokens=STEPS, progress=False)
        self.tokens, self.plain = list(first.fed), first["logits"]

    def run(self, path: kd.CacheOn, model: Model | None = None) -> Tensor:
        """Logits ``[step, vocab]`` of a path over the same tokens."""
        trace = kd.record(
            model or self.model, self.ids, path=path, sites=("logits",), tokens=self.tokens, progress=False
        )
        return trace["logits"]

    def forward(self, rows: int = 1, **options: object) -> Tensor:
        """Logits of the last position of one pass over the prompt, ``[1, vocab]``."""
        batch = torch.tensor([self.ids] * rows)
        with torch.no_grad():
            return self.model.hf(batch, use_cache=False, **options).logits[:1, -1]


def attention_backend(bench: Bench) -> tuple[Tensor, Tensor]:
    return bench.run(kd.CacheOn(attn="eager")), bench.plain


def cache_off(bench: Bench) -> tuple[Tensor, Tensor]:
    return bench.plain, bench.run(kd.CacheOff())


def left_padding(bench: Bench) -> tuple[Tensor, Tensor]:
    return bench.run(kd.CacheOn(left_padding=3)), bench.plain


def chunked_prefill(bench: Bench) -> tuple[Tensor, Tensor]:
    return bench.run(kd.CacheOn(prefill_chunk=7)), bench.plain


def static_cache(bench: Bench) -> tuple[Tensor, Tensor]:
    config, length = bench.model.hf.config, len(bench.ids) + STEPS + 1
    return bench.run(kd.CacheOn(cache=lambda: StaticCache(config=config, max_cache_len=length))), bench.plain


def batching(bench: Bench) -> tuple[Tensor, Tensor]:
    return bench.forward(rows=3, logits_to_keep=1), bench.forward(logits_to_keep=1)


def logits_to_keep(bench: Bench) -> tuple[Tensor, Tensor]:
    return bench.forward(), bench.forward(logits_to_keep=1)


def threads(bench: Bench) -> tuple[Tensor, Tensor]:
    before = torch.get_num_threads()
    torch.set_num_threads(2 if before == 1 else 1)
    try:
        return bench.run(kd.CacheOn()), bench.plain
    finally:
        torch.set_num_threads(before)


def plain_copy(bench: Bench) -> tuple[Tensor, Tensor]:
    copy = kd.load(cast_copy(bench.model.hf, bench.model.dtype), quiet=True)
    return bench.run(kd.CacheOn(), copy), bench.plain


def rope_cast(bench: Bench) -> tuple[Tensor, Tensor]:
    wide = cast_copy(bench.model.hf, torch.float32)
    return bench.run(kd.CacheOn(), kd.load(wide.to(bench.model.dtype), quiet=True)), bench.plain


def folded_norms(bench: Bench) -> tuple[Tensor, Tensor]:
    """Each norm's weight multiplied into the products that read it, as TransformerLens' compatibility mode does."""
    hf = cast_copy(bench.model.hf, bench.model.dtype)
    hf.lm_head.weight = torch.nn.Parameter(hf.lm_head.weight.clone(), requires_grad=False)
    folds = [(hf.model.norm, [hf.lm_head])]
    for block in hf.model.layers:
        attention, mlp = block.self_attn, block.mlp
        folds.append((block.input_layernorm, [attention.q_proj, attention.k_proj, attention.v_proj]))
        folds.append((block.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj]))
    with torch.no_grad():
        for norm, readers in folds:
            for reader in readers:
                reader.weight.mul_(norm.weight)
            norm.weight.fill_(1)
    hf.config.tie_word_embeddings = False
    return bench.run(kd.CacheOn(), kd.load(hf, quiet=True)), bench.plain


CASES: tuple[Callable[[Bench], tuple[Tensor, Tensor]], ...] = (
    cache_off, attention_backend, left_padding, chunked_prefill, static_cache, batching, logits_to_keep, threads,
    plain_copy, rope_cast, folded_norms,
)  # fmt: skip


def row(name: str, a: Tensor, b: Tensor) -> str:
    """One line: share of steps with equal logits, mean KL, largest difference."""
    equal = (a == b).all(dim=-1).double().mean()
    p, q = (x.double().log_softmax(-1) for x in (b, a))
    kl = (p.exp() * (p - q)).sum(-1).clamp(min=0).mean()
    return f"{name:<18} {equal:>6.0%} {kl:>10.1e} {(a.double() - b.double()).abs().max():>10.2g}"


def main() -> None:
    parser = argparse.ArgumentParser(description="What changes a model's numbers.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    bench = Bench(options.model, options.dtype)
    print(f"{bench.model!r}\n{'':<18} {'equal':>6} {'KL':>10} {'max |Δ|':>10}")
    for case in CASES:
        if case is not rope_cast or bench.model.dtype.itemsize == 2:  # a float32 model has float32 frequencies anyway
            print(row(case.__name__, *case(bench)), flush=True)
    print(row("experts", *experts()))


def experts() -> tuple[Tensor, Tensor]:
    """The same tiny mixture of experts (float32) under two implementations of its experts."""
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        found = [
            kd.models.tiny("mixtral", experts_implementation=name)(ids).logits[0] for name in ("grouped_mm", "eager")
        ]
    return found[0], found[1]


if __name__ == "__main__":
    main()
