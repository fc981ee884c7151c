"""The numbers that a summary speaks about, taken from a drift in one place: pure, without words."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvdrift.drift.peaks import SITE, kv_peak, local_at, local_peak, logit_peak, peak_dict
from kvdrift.words.plain import json_safe

if TYPE_CHECKING:
    from kvdrift.drift.profile import Growth, Onset
    from kvdrift.drift.result import Drift


@dataclass(frozen=True)
class Flip:
    """One measured step at which the paths' top-1 tokens differ.

    `margin` is the larger of the two paths' distances between their best and second-best logit (None if it was
    not measured), `tie` whether either path has an exact tie there.
    """

    prompt: int
    step: int
    token_a: int
    token_b: int
    margin: float | None
    tie: bool


def flips(drift: Drift) -> tuple[Flip, ...]:
    """Every flip, by prompt and step; step 0 is included, for with a chunked prefill it can flip.

    Examples
    --------
    >>> import kvdrift as kd
    >>> model = kd.load(kd.models.tiny("llama"))
    >>> flips(kd.compare(model, [1, 2, 3], b=kd.CacheOn(), max_new_tokens=4, progress=False))
    ()
    """
    a, b = drift.arrays["top1_a"], drift.arrays["top1_b"]
    where = np.argwhere((a != b) & drift.measured)
    return tuple(
        Flip(
            prompt=int(p),
            step=int(drift.steps[s]),
            token_a=int(a[p, s]),
            token_b=int(b[p, s]),
            margin=_larger(_at(drift, "margin_a", p, s), _at(drift, "margin_b", p, s)),
            tie=bool(_at(drift, "tie_a", p, s)) or bool(_at(drift, "tie_b", p, s)),
        )
        for p, s in where
    )


def counted_logits(drift: Drift, metric: str, of: str = "drift") -> np.ndarray:
    """A logit metric at the counted cells (measured, steps ≥ 1), float ``[cell]``; a floor gives all seeds' cells.

    Empty where the metric was not measured.
    """
    if not drift.has("logits", metric, of):
        return np.empty(0)
    return np.asarray(drift.values("logits", metric, of), dtype=float)[..., drift.counted].ravel()


def mean(values: np.ndarray) -> float | None:
    """Mean, in which NaN and inf show; None of nothing."""
    with np.errstate(invalid="ignore", over="ignore"):
        return float(np.mean(values)) if values.size else None


def largest(values: np.ndarray) -> float | None:
    """Largest value, in which NaN shows; None of nothing."""
    return float(np.max(values)) if values.size else None


def over_prompts(drift: Drift, site: str, of: str = "drift") -> np.ndarray | None:
    """Median over prompts of each prompt's median over steps ≥ 1 (and seeds), ``[layer]``; None if not measured."""
    if not drift.has(site, of=of):
        return None
    rows = drift.per_prompt(site, of=of)
    rows = rows[drift.counted.any(axis=1)]
    return np.median(rows, axis=0) if len(rows) else np.full(rows.shape[1:], np.nan)


def share_differing(drift: Drift) -> float | None:
    """Share of the counted steps at which the residual stream differs after the last layer; None if unknown."""
    if not drift.has(SITE) or not drift.counted.any():
        return None
    return float((drift.values(SITE)[drift.counted][:, -1] != 0).mean())


def shows_from(drift: Drift, site: str = SITE) -> int | None:
    """The first layer whose residual site differs at any counted step; None if none does, or it was not measured.

    It can lie above the source of drift: a bit that differs in a layer's attention or MLP output can round away where
    that output is added to the residual stream.
    """
    if not drift.has(site):
        return None
    differs = np.flatnonzero((drift.values(site)[drift.counted] != 0).any(axis=0))
    return int(drift.layers(site)[differs[0]]) if differs.size else None


def growth(drift: Drift) -> Growth | None:
    """Growth at ``resid_post``; None where that site was not measured."""
    return drift.growth(SITE) if drift.has(SITE) else None


def onset(drift: Drift) -> Onset | None:
    """Onset at ``resid_post``; None where local drift was not measured."""
    return drift.onset(SITE) if drift.has(SITE, of="local") else None


def as_dict(drift: Drift) -> dict[str, Any]:
    """The machine-readable summary, made of values that JSON can hold.

    What was not measured is None. A measured NaN or infinity is the text ``"nan"``, ``"inf"`` or ``"-inf"``,
    because JSON has no such numbers.

    Returns
    -------
    dict
        ``model, dtype, attn, device, paths``; ``prompts``: how many; ``steps``: measured steps, summed over
        prompts; ``kl_mean``, ``kl_max``, ``kl_float32_head_mean``, ``kl_floor_mean``: nats, over all measured steps
        ≥ 1; ``kl_max_at``: the ``prompt``, ``step`` and ``token`` (with its ``text``) predicted there; ``kv_max``:
        for ``k`` and ``v`` the largest ``rel_l2`` with its ``prompt, step, token, text, layer, head`` (a KV head)
        and absolute ``position``; ``flips``, ``exact_ties`` (flips at an exact tie), ``flip_margin_max``,
        ``flip_margin_max_at``; ``free_divergence`` and ``first_flip``: a step or None per prompt; ``layers``:
        ``{layer, kind, rel_l2_median, floor_median}`` at ``resid_post`` (medians over steps ≥ 1, then over
        prompts); ``onset_layer`` and ``onset_module``: the source; ``onset_share``; ``onset_local`` and
        ``local_peak``: ``{layer, module, rel_l2, floor, ratio}`` of the source layer and of the one whose local
        drift stands highest over its floor; ``excess_layer``, ``excess_ratio``; ``growth``; ``notes``; ``control``:
        the same for the control dtype, or None.
    """
    found, start, grows = flips(drift), onset(drift), growth(drift)
    kl = counted_logits(drift, "kl")
    widest = max((flip for flip in found if flip.margin is not None), key=lambda flip: flip.margin or 0.0, default=None)
    onset_local = None if start is None or start.source_layer is None else local_at(drift, start.source_layer)
    peak = local_peak(drift)
    values = {
        "model": drift.a.model,
        "dtype": drift.a.dtype,
        "attn": drift.a.attn,
        "device": drift.a.device,
        "paths": {"a": drift.a.label, "b": drift.b.label},
        "prompts": len(drift.prompts),
        "steps": int(drift.measured.sum()),
        "kl_mean": mean(kl),
        "kl_max": largest(kl),
        "kl_max_at": peak_dict(drift, logit_peak(drift, "kl")),
        "kv_max": {site: _kv_max(drift, site) for site in ("k", "v")},
        "kl_float32_head_mean": mean(counted_logits(drift, "kl_float32_head")),
        "kl_floor_mean": mean(counted_logits(drift, "kl", "floor")),
        "flips": len(found),
        "exact_ties": sum(flip.tie for flip in found),
        "flip_margin_max": None if widest is None else widest.margin,
        "flip_margin_max_at": None if widest is None else _flip_at(widest),
        "first_flip": drift.first_flip,
        "free_divergence": drift.free_divergence,
        "layers": _layers(drift),
        "onset_layer": start.source_layer if start else None,
        "onset_module": start.source_module if start else None,
        "onset_share": start.source_share if start else None,
        "onset_local": None if onset_local is None else asdict(onset_local),
        "local_peak": None if peak is None else asdict(peak),
        "excess_layer": start.excess_layer if start else None,
        "excess_ratio": start.excess_ratio.value if start and start.excess_ratio else None,
        "growth": grows.to_dict() if grows else None,
        "notes": drift.notes,
        "control": None,
    }
    plain: dict[str, Any] = json_safe(values)
    if drift.control is not None:
        plain["control"] = as_dict(drift.control)
    return plain


def _flip_at(flip: Flip) -> dict[str, int]:
    return {name: getattr(flip, name) for name in ("prompt", "step", "token_a", "token_b")}


def _kv_max(drift: Drift, site: str) -> dict[str, Any] | None:
    peak = kv_peak(drift, site)
    return None if peak is None else {"rel_l2": peak.value, **(peak_dict(drift, peak) or {})}


def _layers(drift: Drift) -> list[dict[str, Any]] | None:
    medians, floors = over_prompts(drift, SITE), over_prompts(drift, SITE, "floor")
    if medians is None:
        return None
    kinds = {info.index: info.attention for info in drift.architecture.layers}
    return [
        {
            "layer": int(number),
            "kind": kinds.get(int(number)),
            "rel_l2_median": float(medians[i]) if drift.counted.any() else None,
            "floor_median": float(floors[i]) if floors is not None and drift.counted.any() else None,
        }
        for i, number in enumerate(drift.layers(SITE))
    ]


def _at(drift: Drift, metric: str, prompt: int, step: int) -> float | None:
    return float(drift.values("logits", metric)[prompt, step]) if drift.has("logits", metric) else None


def _larger(first: float | None, second: float | None) -> float | None:
    both = [value for value in (first, second) if value is not None]
    return max(both) if both else None
