"""Hand-made drifts, where every answer is known."""

import numpy as np

from kvdrift.drift.result import Drift, PathInfo, Prompt
from kvdrift.models.architecture import Architecture, LayerInfo
from kvdrift.summaries import drift as summary

KINDS = ("full", "sliding", "full", "full")


def info(label, dtype="bfloat16", model="made-up"):
    return PathInfo(label=label, model=model, dtype=dtype, attn="sdpa", device="cpu")


def architecture(layers=4):
    return Architecture(
        model_type="made-up", n_layers=layers, d_model=8, n_heads=2, n_kv_heads=1, head_dim=4, vocab_size=9,
        max_positions=64, positional="rope", qk_norm=False, attn_softcap=None, final_softcap=None,
        tied_embeddings=True,
        layers=tuple(LayerInfo(i, KINDS[i], 4 if KINDS[i] == "sliding" else None, 1, 4) for i in range(layers)),
    )  # fmt: skip


def make(
    prompts=2, steps=4, *, level=(1e-3, 1e-2, 1e-2, 1e-2), over_floor=None, local=None, flips=(), dtype="bfloat16"
):
    """A drift of constant profile; step 0 holds absurd values that no statistic may use."""
    shape = (prompts, steps)
    per_layer = np.broadcast_to(np.array(level), (*shape, len(level))).copy()
    per_layer[:, 0] = 99.0
    top_a = np.ones(shape, dtype=np.int64)
    top_b = top_a.copy()
    for prompt, step in flips:
        top_b[prompt, step] = 2
    kl = np.full(shape, 0.5)
    kl[:, 0] = 99.0
    fed = np.ones(shape, dtype=np.int64)
    arrays = {
        "steps": np.arange(steps),
        "measured": np.ones(shape, dtype=bool),
        "fed": fed,
        "n_steps": np.full(prompts, steps),
        "top1_a": top_a,
        "top1_b": top_b,
        "layers/resid_post": np.arange(len(level)),
        "drift/resid_post/rel_l2": per_layer,
        "drift/logits/kl": kl,
        "drift/logits/kl_float32_head": kl / 2,
        "drift/logits/logit_max": kl,
        "drift/logits/margin_a": np.full(shape, 0.125),
        "drift/logits/margin_b": np.full(shape, 0.0625),
        "drift/logits/tie_a": np.zeros(shape, dtype=bool),
        "drift/logits/tie_b": top_a != top_b,
    }
    if over_floor is not None:
        # every prompt its own ratio, so that the bootstrap has something to resample
        ratios = np.linspace(over_floor[0], over_floor[1], prompts)
        arrays["floor/resid_post/rel_l2"] = (per_layer / ratios[:, None, None])[None].repeat(2, axis=0)
    if local is not None:
        arrays["local/resid_post/rel_l2"] = np.broadcast_to(np.array(local), per_layer.shape).copy()
        arrays["layers/local"] = np.arange(len(level))
    return Drift(
        a=info("cache-ON", dtype),
        b=info("cache-OFF", dtype),
        architecture=architecture(len(level)),
        prompts=tuple(Prompt((1, 2, 3 + p), ("a", "b", "c"), None) for p in range(prompts)),
        arrays=arrays,
        token_texts={1: "one", 2: "two"},
    )


def said(drift, *words):
    """The one sentence of the reading that holds all these words."""
    found = [s for s in summary.reading(drift) if all(word in s for word in words)]
    assert len(found) == 1, (words, summary.reading(drift))
    return found[0]
