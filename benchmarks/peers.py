"""What recording costs here and elsewhere, as ratios to a bare decoding loop from one paired run.

    python benchmarks/peers.py --model smollm2-135m --steps 32 --rounds 7

Everybody records the same tensors over the same tokens: the residual stream after every layer at the current position,
and every layer's new key and value, over a prefill and N - 1 cached decode steps. Every round runs each variant once,
in turn (starting with another one each time), so that all of them see the same machine. Printed are medians over
rounds of the ratio within a round, by wall clock and by processor time, and the ratio of the least processor times of
all rounds, which other work on the machine disturbs least. What was recorded is compared: kvdrift, nnsight and
``output_hidden_states`` must agree in every bit, and the bridge with kvdrift under eager attention, the only one that
it has. ``output_hidden_states`` does not give the last layer (its last entry comes after the final norm), so it is
compared without it. Each peer is used in the fastest way that was found: keys and values are read off the cache at the
end, hooks and saves take the residual stream alone, and nnsight runs one `generate` session, not one per step.

The TransformerLens bridge needs a repair to decode with a cache at all under transformers 5.24.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import nnsight
import torch
from nnsight import TransformersModel
from tokenizers import Tokenizer, models
from torch import Tensor
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import DynamicCache, PreTrainedTokenizerFast

import kvdrift as kd
from kvdrift.backends.transformer_lens import repaired
from kvdrift.models.model import Model

PROMPT = (
    "A baker fills 14 trays with 12 rolls each. She sells 95 rolls before noon and 48 after it, and gives the rest "
    "to a school in equal bags of 5. To find how many bags that makes, she first"
)
Recorded = tuple[Tensor, Tensor, Tensor]
"""``resid_post`` [step, layer, feature], then ``k`` and ``v`` [step, layer, kv_head, feature]."""


@torch.no_grad()
def loop(
    call: Callable[..., Any], ids: list[int], follow: list[int], each: Callable[[Any], None], **options: Any
) -> None:
    """Prefill, then decode the tokens of ``follow``; ``each`` is given what a pass returns."""
    fed, start = ids, 0
    for token in follow:
        positions = torch.arange(start, start + len(fed)).unsqueeze(0)
        out = call(torch.tensor([fed]), position_ids=positions, use_cache=True, logits_to_keep=1, **options)
        int(out.logits[0, -1].argmax())
        each(out)
        start, fed = start + len(fed), [token]


def entries(cache: DynamicCache, n_steps: int) -> tuple[Tensor, Tensor]:
    """The latest ``n_steps`` keys and values of every layer, ``[step, layer, kv_head, feature]``."""
    pairs = [(layer.keys[0, :, -n_steps:], layer.values[0, :, -n_steps:]) for layer in cache.layers]
    keys, values = (torch.stack(side).permute(2, 0, 1, 3).contiguous() for side in zip(*pairs, strict=True))
    return keys, values


def bare(hf: Any, ids: list[int], follow: list[int]) -> None:
    """Nothing is recorded."""
    cache = DynamicCache(config=hf.config)
    loop(hf, ids, follow, lambda out: None, cache=cache)


def with_kvdrift(model: Model, ids: list[int], follow: list[int]) -> Recorded:
    """`kvdrift.record`."""
    trace = kd.record(model, ids, sites=["resid_post", "k", "v"], tokens=follow, progress=False)
    return trace["resid_post"], trace["k"], trace["v"]


def with_hidden_states(hf: Any, ids: list[int], follow: list[int]) -> Recorded:
    """Transformers' own ``output_hidden_states``, and the cache."""
    cache, steps = DynamicCache(config=hf.config), []

    def keep(out: Any) -> None:
        steps.append(torch.stack([hidden[0, -1] for hidden in out.hidden_states[1:-1]]))

    loop(hf, ids, follow, keep, cache=cache, output_hidden_states=True)
    return torch.stack(steps), *entries(cache, len(follow))


def with_nnsight(wrapper: Any, layers: Any, ids: list[int], follow: list[int]) -> Recorded:
    """One ``generate`` session; it chooses its tokens by itself, greedily, which are those of ``follow``."""
    cache, n_steps = DynamicCache(config=wrapper._module.config), len(follow)
    with (
        torch.no_grad(),
        wrapper.generate(
            {"input_ids": torch.tensor([ids])},
            cache=cache,
            max_new_tokens=n_steps,
            min_new_tokens=n_steps,
            do_sample=False,
        ) as tracer,
    ):
        steps = nnsight.save([])
        for _ in tracer.iter[:n_steps]:
            steps.append(torch.stack([layer.output[0, -1] for layer in layers]))
    return torch.stack(steps), *entries(cache, n_steps)


def with_bridge(bridge: Any, ids: list[int], follow: list[int], record: bool = True) -> Recorded | None:
    """Hooks of a TransformerLens bridge at ``hook_resid_post``, and the cache."""
    cache, steps = DynamicCache(config=bridge.original_model.config), []
    row: list[Tensor] = []

    def keep(value: Tensor, hook: Any) -> None:
        row.append(value[0, -1])

    def finish(out: Any) -> None:
        if record:
            steps.append(torch.stack(row))
            row.clear()

    hooks = [(f"blocks.{layer}.hook_resid_post", keep) for layer in range(len(bridge.blocks))] if record else []
    with bridge.hooks(fwd_hooks=hooks):
        loop(bridge.original_model, ids, follow, finish, cache=cache)
    return (torch.stack(steps), *entries(cache, len(follow))) if record else None


def load(options: argparse.Namespace, attn: str) -> Model:
    if options.model == "tiny":
        return kd.load(kd.models.tiny("llama", dtype=getattr(torch, options.dtype), attn=attn), quiet=True)
    return kd.load(options.model, dtype=options.dtype, attn=attn, quiet=True)


def some_tokenizer() -> PreTrainedTokenizerFast:
    """What nnsight wants to see; nothing is tokenised."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0}, "<pad>")), pad_token="<pad>"
    )


def check(name: str, mine: Recorded, theirs: Recorded) -> None:
    """Raise unless all that both recorded is equal in every bit."""
    n_layers = min(mine[0].shape[1], theirs[0].shape[1])
    for what, x, y in zip(("resid_post", "k", "v"), mine, theirs, strict=True):
        x, y = (x[:, :n_layers], y[:, :n_layers]) if what == "resid_post" else (x, y)
        if x.dtype != y.dtype or not torch.equal(x, y):
            far = (x.double() - y.double()).norm() / y.double().norm() if x.shape == y.shape else "another shape"
            raise SystemExit(f"{name} recorded another {what} than kvdrift (relative distance {far}).")
    print(f"{name} recorded what kvdrift did, bit for bit ({n_layers} of {mine[0].shape[1]} layers of resid_post)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a preset of the Llama architecture, or 'tiny'")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    model, eager = load(options, "sdpa"), load(options, "eager")
    ids = model.encode(PROMPT) if model.tokenizer else torch.randint(384, (56,)).tolist()
    follow = list(kd.record(model, ids, sites=["logits"], max_new_tokens=options.steps, progress=False).fed)
    wrapper = TransformersModel(load(options, "sdpa").hf, tokenizer=some_tokenizer())
    bridged = load(options, "eager").hf
    bridge = build_bridge_from_module(bridged, type(bridged).__name__, hf_config=bridged.config, tokenizer=None)

    variants: dict[str, Callable[[], Recorded | None]] = {
        "bare loop": partial(bare, model.hf, ids, follow),
        "kvdrift": partial(with_kvdrift, model, ids, follow),
        "output_hidden_states": partial(with_hidden_states, model.hf, ids, follow),
        "nnsight": partial(with_nnsight, wrapper, list(wrapper.model.layers), ids, follow),
        "bare loop, eager": partial(bare, eager.hf, ids, follow),
        "kvdrift, eager": partial(with_kvdrift, eager, ids, follow),
        "TransformerLens bridge": partial(with_bridge, bridge, ids, follow),
        "… recording nothing": partial(with_bridge, bridge, ids, follow, record=False),
    }
    bases = dict.fromkeys(variants, "bare loop")
    bases |= dict.fromkeys(list(variants)[4:], "bare loop, eager")
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    with repaired(bridge.original_model):
        warm = {name: run() for name, run in variants.items()}  # kernels, caches and allocators warm up
        check("output_hidden_states", warm["kvdrift"], warm["output_hidden_states"])
        check("nnsight", warm["kvdrift"], warm["nnsight"])
        check("TransformerLens bridge", warm["kvdrift, eager"], warm["TransformerLens bridge"])
        del warm
        names = list(variants)
        for number in range(options.rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                wall, processor = time.perf_counter(), time.process_time()
                variants[name]()
                seconds[name].append((time.perf_counter() - wall, time.process_time() - processor))
    print(
        f"{options.model}, {options.dtype}, {len(ids)} prompt tokens, {options.steps} steps, {options.rounds} rounds, "
        f"{options.threads} threads\n{'':24s} {'wall':>7s} {'processor':>9s} {'at best':>9s}"
    )
    for name, base in bases.items():
        pairs = list(zip(seconds[name], seconds[base], strict=True))
        wall, processor = (statistics.median(mine[clock] / theirs[clock] for mine, theirs in pairs) for clock in (0, 1))
        best = min(mine[1] for mine, _ in pairs) / min(theirs[1] for _, theirs in pairs)
        print(f"{name:24s} {wall:6.3f}x {processor:8.3f}x {best:8.3f}x of {base}")


if __name__ == "__main__":
    main()
