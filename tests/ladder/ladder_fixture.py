"""A made-up `Ladder` with everything a figure or a table may meet: no model runs here."""

from __future__ import annotations

import numpy as np

from kvdrift.ladder.arms import ARMS, FLOOR, HALF
from kvdrift.ladder.result import METRICS, Ladder
from kvdrift.ladder.rung import Rung
from kvdrift.models.architecture import Architecture, LayerInfo
from kvdrift.models.labels import PathInfo, Prompt

LEVELS = {
    "wide-sums": 0.0,
    "float64": 1e-29, "float32": 2e-12, "bfloat16": 1e-3, "float16": 1e-5, "layercast": 2e-12,
    "attention-float32": 8e-4, "matmul-float32": 1e-3, "head-float32": 5e-4, "eager": 1e-3,
    "sdpa-math": 0.0, "sdpa-flash": 1e-3, "re-roll": 1.1e-3, FLOOR: 1.2e-3, "fixed-shape": 0.0,
}  # fmt: skip
BROKEN = {"sdpa-efficient": "not run", "sdpa-cudnn": "not run"}
REASON = "<b>no</b> kernel in layer 3"


def architecture() -> Architecture:
    layers = tuple(LayerInfo(index=i, attention="full", window=None, n_kv_heads=2, head_dim=32) for i in range(4))
    return Architecture(
        model_type="tiny", n_layers=4, d_model=256, n_heads=8, n_kv_heads=2, head_dim=32, vocab_size=384,
        max_positions=256, positional="rope", qk_norm=False, attn_softcap=None, final_softcap=None,
        tied_embeddings=True, layers=layers,
    )  # fmt: skip


def ladder(
    n_prompts: int = 6, n_steps: int = 8, broken=None, levels=None, base: str = "bfloat16", seed: int = 0
) -> Ladder:
    """Log-normal KL around `LEVELS`, drift its square root, prompts of different lengths, some flips and ties."""
    rng = np.random.default_rng(seed)
    levels, broken = LEVELS | (levels or {}), BROKEN | (broken or {})
    names = [name for name in ARMS if name in levels or name in broken]
    lengths = np.array([max(1, n_steps - p) for p in range(n_prompts)])
    inside = np.arange(n_steps) < lengths[:, None]
    arrays = {metric: np.full((len(names), n_prompts, n_steps), np.nan) for metric in METRICS}
    noise = {"layercast": "float32", "sdpa-flash": base}
    draws = {name: rng.lognormal(0, 0.5, (n_prompts, n_steps)) for name in names}
    for place, name in enumerate(names):
        if name in broken:
            continue
        kl = levels[name] * draws[noise.get(name, name)]
        values = {
            "kl": kl, "kl_float32_head": kl / 2, "logit_l2": 400 * np.sqrt(kl), "logit_max": 3 * np.sqrt(kl),
            "drift": np.sqrt(kl) / 2, "flip": kl > 2e-3, "tie": kl > 1.5e-3,
        }  # fmt: skip
        for metric, value in values.items():
            arrays[metric][place] = np.where(inside, value, np.nan)
    arrays["fed"] = np.where(inside, 7, -1)
    arrays["n_steps"] = lengths
    return Ladder(
        model=PathInfo("cache-ON", "tiny-llama", base, "sdpa", "cpu"),
        base=base,
        rungs=tuple(rung(name, broken.get(name, "ran"), base) for name in names),
        architecture=architecture(),
        prompts=tuple(Prompt((1, 2, 3 + p), ("1", "2", str(3 + p)), f"prompt <i>{p}</i>") for p in range(n_prompts)),
        arrays=arrays,
        token_texts={7: "seven"},
        notes=("a <u>note</u>",),
        provenance={"settings": {"seed": seed}},
    )


def rung(name: str, status: str, base: str) -> Rung:
    arm = ARMS[name]
    dtype = base if arm.dtype in ("base", HALF) else arm.dtype
    return Rung(
        name=name, what=arm.what, dtype=dtype, stored=arm.stored or dtype, attn=arm.attn or "sdpa",
        kernels=("flash",) if name == base else (), status=status, reason=None if status == "ran" else REASON,
        weights_changed=1e-3 if name == "float16" else 0.0,
    )  # fmt: skip
