"""A seeded, made-up `Drift` with everything a figure may meet: no model runs here."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvdrift.drift.result import Drift, PathInfo, Prompt
from kvdrift.models.architecture import Architecture, LayerInfo

SITES = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
WORDS = [" The", " cat", " <b>bold</b>", "\n", " sat", " on", " $18", " and", " $20", "</script>", ".", " &amp"]


def architecture(n_layers: int, n_kv_heads: int, window: int | None, full_every: int) -> Architecture:
    layers = tuple(
        LayerInfo(
            index=i,
            attention="sliding" if window and (i + 1) % full_every else "full",
            window=window if window and (i + 1) % full_every else None,
            n_kv_heads=n_kv_heads,
            head_dim=64,
        )
        for i in range(n_layers)
    )
    return Architecture(
        model_type="tiny", n_layers=n_layers, d_model=256, n_heads=2 * n_kv_heads, n_kv_heads=n_kv_heads,
        head_dim=64, vocab_size=len(WORDS), max_positions=4096, positional="rope", qk_norm=False,
        attn_softcap=None, final_softcap=None, tied_embeddings=True, layers=layers,
    )  # fmt: skip


def _site_metrics(rel: np.ndarray) -> dict[str, np.ndarray]:
    """The other metrics, tied to ``rel_l2`` so that zeros and non-finite cells agree."""
    return {
        "rel_l2": rel,
        "max_abs": rel * 3,
        "max_ulp": np.where(np.isfinite(rel), np.ceil(np.where(np.isfinite(rel), rel, 0) * 900), rel),
        "cosine": rel**2 / 2,
        "identical": np.where(rel == 0, 1.0, np.where(np.isnan(rel), np.nan, 1 - np.clip(rel * 40, 0, 0.99))),
    }


def build(
    *, n_layers: int = 12, n_prompts: int = 3, n_steps: int = 16, n_kv_heads: int = 3, window: int | None = 8,
    full_every: int = 4, prompt_length: int = 10, seeds: int = 3, local: bool = True, heads: bool = True,
    inf: bool = True, scale: float = 1.5e-2, all_zero: bool = False, control: bool = True, dtype: str = "bfloat16",
    model: str = "made-up-135m", seed: int = 0,
) -> Drift:  # fmt: skip
    """Prompts of different lengths, zeros, one inf, windows, a floor, local drift, K/V positions, a control."""
    rng = np.random.default_rng(seed)
    arch = architecture(n_layers, n_kv_heads, window, full_every)
    steps = np.arange(n_steps)
    n = np.array([max(1, n_steps - 2 * p) for p in range(n_prompts)])
    measured = steps < n[:, None]
    prompts = tuple(
        Prompt(
            ids=tuple(int(i) % len(WORDS) for i in range(prompt_length + p)),
            tokens=tuple(WORDS[i % len(WORDS)] for i in range(prompt_length + p)),
            text=f"made-up <i>prompt</i> {p}",
        )
        for p in range(n_prompts)
    )
    depth = (np.arange(n_layers) + 1) / n_layers
    curve = scale * np.minimum(1, (depth / 0.4) ** 3) * np.exp(0.1 * rng.standard_normal(n_layers))

    def blank(values: np.ndarray, fill: object = np.nan) -> np.ndarray:
        keep = measured.reshape(measured.shape + (1,) * (values.ndim - 2))
        return np.where(keep, values, fill)

    def cells(*extra: int, zeros: float = 0.15) -> np.ndarray:
        shape = (n_prompts, n_steps, n_layers, *extra)
        level = curve.reshape(n_layers, *(1 for _ in extra))
        values = level * np.exp(0.4 * rng.standard_normal(shape))
        values = np.where(rng.random(shape) < zeros, 0.0, values)
        if all_zero:
            values = values * 0.0
        values[:, 0] = 0.0
        return blank(values)

    arrays: dict[str, np.ndarray] = {"steps": steps, "measured": measured, "n_steps": n}
    for site in SITES:
        rel = cells(zeros=0.3 if site != "resid_post" else 0.05)
        if inf and site == "mlp_out" and n_steps > 3:
            rel[0, 3, -1], rel[0, 3, -2] = np.inf, np.nan
        arrays |= {f"drift/{site}/{name}": x for name, x in _site_metrics(rel).items()}
        arrays[f"layers/{site}"] = np.arange(n_layers)
        if seeds:
            arrays[f"floor/{site}/rel_l2"] = np.stack([cells(zeros=0) * 1.2 for _ in range(seeds)])
    if local:  # layer 1 offers no local drift, as a recurrent layer would
        where = np.delete(np.arange(n_layers), 1) if n_layers > 3 else np.arange(n_layers)
        arrays["layers/local"] = where
        for site in ("attn_out", "mlp_out", "resid_post"):
            made = np.where(where == min(2, n_layers - 1), 1e-4 * (not all_zero), 0.0) * (steps >= 1)[:, None]
            made = blank(np.broadcast_to(made, (n_prompts, n_steps, len(where))))
            arrays |= {f"local/{site}/{name}": x for name, x in _site_metrics(made).items()}
            floor = np.stack([cells(zeros=0)[..., where] * 0.1 for _ in range(max(1, seeds))])
            arrays[f"local_floor/{site}/rel_l2"] = floor
    for site in ("embed", "final_norm"):
        rel = blank(np.zeros((n_prompts, n_steps)) if site == "embed" else cells(zeros=0)[..., -1])
        arrays |= {f"drift/{site}/{name}": x for name, x in _site_metrics(rel).items()}
    if heads:
        for site in ("k", "v"):
            arrays |= {f"drift/{site}/{name}": x for name, x in _site_metrics(cells(n_kv_heads)).items()}
            arrays[f"layers/{site}"] = np.arange(n_layers)
        arrays |= _positions(rng, arch, prompts, measured, curve * (not all_zero))
    arrays |= _logits(rng, measured, scale, all_zero, seeds)
    fed = np.where(measured[:, 1:], arrays["top1_a"][:, :-1], -1)
    arrays["fed"] = np.concatenate([fed, np.full((n_prompts, 1), -1)], axis=1)
    made = Drift(
        a=PathInfo("cache-ON", model, dtype, "sdpa", "cpu"),
        b=PathInfo("cache-OFF", model, dtype, "sdpa", "cpu"),
        architecture=arch, prompts=prompts, arrays=arrays, token_texts=dict(enumerate(WORDS)),
    )  # fmt: skip
    if control:
        other = build(
            n_layers=n_layers, n_prompts=n_prompts, n_steps=n_steps, n_kv_heads=n_kv_heads, window=window,
            full_every=full_every, prompt_length=prompt_length, seeds=seeds, local=local, heads=False, inf=False,
            scale=scale * 1e-4, all_zero=all_zero, control=False, dtype="float32", model=model, seed=seed + 1,
        )  # fmt: skip
        made = replace(made, control=other)
    return made


def _positions(rng, arch, prompts, measured, curve) -> dict[str, np.ndarray]:  # type: ignore[no-untyped-def]
    n_prompts, n_steps = measured.shape
    kept = np.unique([0, n_steps // 2, n_steps - 1])
    length = max(len(p.ids) for p in prompts) + n_steps - 1
    seen = np.array([[len(p.ids) + t for t in kept] for p in prompts])[:, :, None, None]
    position = np.arange(length)
    window = np.array([layer.window or length for layer in arch.layers])[:, None]
    visible = (position < seen) & (position >= seen - window) & measured[:, kept, None, None]
    arrays = {"positions/steps": kept, "positions/visible_a": visible, "positions/visible_b": visible.copy()}
    for site in ("k", "v"):
        shape = (n_prompts, len(kept), arch.n_layers, arch.n_kv_heads, length)
        values = curve[:, None, None] * np.exp(0.5 * rng.standard_normal(shape)) * (rng.random(shape) > 0.3)
        arrays[f"positions/{site}/rel_l2"] = np.where(visible[:, :, :, None], values, np.nan).astype(np.float32)
    return arrays


def _logits(rng, measured, scale, all_zero, seeds) -> dict[str, np.ndarray]:  # type: ignore[no-untyped-def]
    shape = measured.shape
    top_a = rng.integers(len(WORDS), size=shape)
    flip = (rng.random(shape) < 0.15) & measured & (np.arange(shape[1]) >= 2) & (not all_zero)
    flip[0, 3:4] = not all_zero
    margin = np.round(np.exp(rng.standard_normal(shape)) * 8) / 8
    margin = np.where(flip, 0.125, np.maximum(margin, 0.125))
    tie = flip & (rng.random(shape) < 0.6)
    kl = (scale**2 * 4) * np.exp(rng.standard_normal(shape)) * (np.arange(shape[1]) > 0) * (not all_zero)
    floats = {
        "kl": kl, "kl_float32_head": kl / 2, "js": kl / 4, "margin_a": margin,
        "margin_b": np.where(tie, 0.0, margin), "topk_overlap": np.ones(shape),
        "logit_l2": np.sqrt(kl) * 300, "logit_max": np.sqrt(kl),
    }  # fmt: skip
    arrays = {f"drift/logits/{name}": np.where(measured, x, np.nan) for name, x in floats.items()}
    arrays |= {"drift/logits/flip": flip, "drift/logits/tie_b": tie, "drift/logits/tie_a": np.zeros(shape, bool)}
    arrays["top1_a"] = np.where(measured, top_a, -1)
    arrays["top1_b"] = np.where(measured, np.where(flip, (top_a + 1) % len(WORDS), top_a), -1)
    if seeds:
        noise = np.exp(rng.standard_normal((seeds, *shape)))
        arrays["floor/logits/kl"] = np.where(measured, kl * noise, np.nan)
        arrays["floor/logits/logit_l2"] = np.sqrt(arrays["floor/logits/kl"]) * 300
        arrays["floor/logits/flip"] = (noise > 3) & measured
    return arrays


@pytest.fixture(scope="session")
def make_drift():
    return build


@pytest.fixture(scope="session")
def drift():
    return build()
