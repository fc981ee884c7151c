"""A drift in words: what was found, said plainly, and never more than was measured."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from kvdrift import markup
from kvdrift.drift import findings, peaks
from kvdrift.drift.profile import Growth, Onset
from kvdrift.drift.result import Drift
from kvdrift.models import ending
from kvdrift.models.labels import model_name
from kvdrift.statistics.rates import rule_of_three
from kvdrift.statistics.resampling import MIN_PROMPTS, Estimate
from kvdrift.words.json import json_safe
from kvdrift.words.layout import bullets
from kvdrift.words.numbers import count, number, percent, times

_MODULES = {"attn": ", in its attention", "mlp": ", in its MLP"}


def summary(drift: Drift) -> str:
    """The summary for a terminal: one line on what was compared, then the reading, then the notes.

    Examples
    --------
    >>> import kvdrift as kd
    >>> model = kd.load(kd.models.tiny("llama"))
    >>> drift = kd.compare(model, [1, 2, 3], max_new_tokens=4, floor=0, progress=False)
    >>> print(summary(drift).splitlines()[0])
    tiny-llama · float32 · attention sdpa · cache-ON against cache-OFF · 1 prompt, 4 steps
    """
    notes = ending.other_notes(drift.notes, drift.counted.any())
    return "\n".join([headline(drift), *bullets(reading(drift), notes)])


def html(drift: Drift) -> str:
    """The same for Jupyter; every text is escaped."""
    said = ending.other_notes(drift.notes, drift.counted.any())
    notes = (markup.paragraph("Please note"), markup.listing(said)) if said else ()
    return markup.block(headline(drift), markup.listing(reading(drift)), *notes)


def headline(drift: Drift) -> str:
    """What was compared: model, dtype, paths, attention, prompts, steps."""
    a, b = drift.a, drift.b
    steps = int(drift.measured.sum())
    size = f"{count(len(drift.prompts), 'prompt')}, {count(steps, 'step')}"
    if (a.model, a.dtype, a.attn) == (b.model, b.dtype, b.attn):
        return f"{model_name(a.model)} · {a.dtype} · attention {a.attn} · {a.label} against {b.label} · {size}"
    sides = (f"{s.label} of {model_name(s.model)} ({s.dtype}, attention {s.attn})" for s in (a, b))
    return f"{' against '.join(sides)} · {size}"


def reading(drift: Drift) -> list[str]:
    """Plain sentences: where drift starts, how it grows, against the floor, logits, flips, control.

    Each speaks only about what was measured; what was not, and how many prompts the rest stands on, is said.
    """
    if not drift.counted.any():
        return _nothing(drift)
    grows, start = findings.growth(drift), findings.onset(drift)
    sentences = [
        _some_ended(drift),
        _start(drift, start),
        *_growth(drift, grows),
        *_floor(drift, grows),
        *_excess(start),
        *_logits(drift),
        _flips(drift),
        _free(drift),
        *_control(drift),
    ]
    return [sentence for sentence in sentences if sentence]


# --- one sentence each


def _nothing(drift: Drift) -> list[str]:
    """Why no step counts; and what step 0 shows where the paths differ there (after a prefill in chunks they can)."""
    said = [ending.nothing_followed(drift)]
    first = drift.values("logits", "kl")[drift.measured] if drift.has("logits", "kl") else np.empty(0)
    if first.any():
        said.append(f"At step 0, the prefill, KL is {number(findings.largest(first))} nats at most. {_flips(drift)}")
    return said


def _some_ended(drift: Drift) -> str:
    """That some prompts have no step to measure; what follows is about the others."""
    empty = [not steps.any() for steps in drift.counted]
    if not any(empty):
        return ""
    counts = [n for n, no_step in zip(ending.ended(drift), empty, strict=True) if no_step]
    why = "there is no step after step 0"
    if early := [n for n in counts if n is not None]:
        why = f"the model ended its text {ending.after(early)}"
    return f"In {sum(empty)} of {len(empty)} prompts {why}: what follows is about the others."


def _start(drift: Drift, start: Onset | None) -> str:
    if start is None:
        return f"Where drift starts was not measured (no local drift). {_first_difference(drift)}".strip()
    if start.source_layer is None and start.n_pairs == 0:
        return f"Where drift starts is not known: no local drift was measured. {_first_difference(drift)}".strip()
    if start.source_layer is None:
        sentence = (
            "No layer makes drift by itself: on bitwise the same inputs, every layer gives the same bits in both "
            f"paths ({count(start.n_pairs, 'step')})"
        )
        if not findings.counted_logits(drift, "logit_max").any():
            return f"{sentence}."
        return (
            f"{sentence}. What differs comes in by another way: keys and values of earlier positions, which each "
            "path computes for itself, or the final norm and the LM head."
        )
    share = "" if start.source_share is None else f", at {percent(start.source_share)} of {start.n_pairs:,} steps"
    sentence = (
        f"Drift starts in layer {start.source_layer}{_MODULES.get(start.source_module or '', '')}: on bitwise the "
        f"same inputs it is the first whose output differs{share}.{_most(drift, start.source_layer)}"
    )
    shown = findings.shows_from(drift)
    if shown is None or shown <= start.source_layer:
        return sentence
    return (
        f"{sentence} In the residual stream it shows from layer {shown} on: what differs below rounds away where it is "
        "added."
    )


def _most(drift: Drift, source: int) -> str:
    """The layer that makes most drift by itself, for its floor: the first one need not be the one that matters."""
    peak, first = peaks.local_peak(drift), peaks.local_at(drift, source)
    if peak is None or first is None:
        return ""
    held = "Held against its own floor," if peak.floor is not None else "Without a floor to hold it against,"
    if peak.layer == source:
        return f" {held} it also makes most drift by itself: {_local(peak)}."
    module = _MODULES.get(peak.module or "", "")
    return (
        f" {held} layer {peak.layer} makes most drift by itself{module}: {_local(peak)}; layer {source} makes "
        f"{_local(first)}."
    )


def _local(made: peaks.LocalDrift) -> str:
    size = f"{number(made.rel_l2)} (relative L2)"
    if made.floor == 0:
        return f"{size} over a floor of zero"
    return size if made.ratio is None else f"{times(made.ratio)}, {size}"


def _first_difference(drift: Drift) -> str:
    if not drift.has(findings.SITE) or not drift.counted.any():
        return ""
    layer = findings.shows_from(drift)
    if layer is None:
        return "The residual stream is bit-identical after every layer."
    return f"The first layer after which the residual stream differs is layer {layer}."


def _growth(drift: Drift, grows: Growth | None) -> list[str]:
    if grows is None:
        return ["How drift grows was not measured: resid_post was not among the sites."]
    if grows.n_prompts == 0:
        return ["How drift grows is not known: no step after step 0 was measured."]
    if grows.final is None and (drift.values(findings.SITE)[drift.counted] == 0).all():
        return ["The residual stream is bit-identical after every layer at every step."]
    if grows.final is None:
        share = percent(findings.share_differing(drift) or 0.0)
        return [
            "At most steps the residual stream is bit-identical, so that its median drift is zero at every layer; "
            f"after the last layer it differs at {share} of {count(int(drift.counted.sum()), 'step')}."
        ]
    first, *_ = drift.layers(findings.SITE)
    parts = []
    if grows.first_layer_share is not None:
        parts.append(f"after layer {first} it is {percent(grows.first_layer_share.value)} of its final size")
    if grows.first_quarter_share is not None:
        parts.append(f"a quarter of the way up {percent(grows.first_quarter_share.value)}")
    if grows.plateau is not None:
        plateau = f"its plateau is {number(grows.plateau.value)} (relative L2)"
        if grows.plateau_layer is not None and grows.plateau_depth is not None:
            depth = grows.plateau_depth
            spread = "" if depth.interval is None else f"; 95 % interval {_spread(depth, percent)}"
            plateau += (
                f", reached at layer {int(grows.plateau_layer.value)} ({percent(depth.value)} of the depth{spread})"
            )
        parts.append(plateau)
    if not parts:
        return ["How drift grows has no clear numbers: it is zero or not finite in the last layers."]
    return [f"How it grows: {'; '.join(parts)}."]


def _floor(drift: Drift, grows: Growth | None) -> list[str]:
    if grows is None or grows.n_prompts == 0:
        return []
    if not drift.has(findings.SITE, of="floor"):
        return ["Whether it stands above rounding was not measured: there is no rounding floor (floor=0)."]
    if grows.final is None:
        return []
    ratio = grows.plateau_over_floor
    if ratio is None:
        return ["Drift and rounding floor cannot be divided in the last layers: both are zero, or not finite."]
    if ratio.interval is None:
        return [
            f"In the last layers it is {times(ratio.value)} the rounding floor; one prompt gives no interval, so "
            "this says little about other prompts."
        ]
    low, high = ratio.interval
    over = count(grows.n_prompts, "prompt")
    if grows.n_prompts < MIN_PROMPTS:
        return [
            f"In the last layers it is {times(ratio.value)} the rounding floor ({_spread(ratio, times)} over {over}); "
            f"{MIN_PROMPTS} prompts are needed to call it above or below."
        ]
    if low > 1:
        verdict = "It stands above the rounding floor"
        meaning = "more than summation order alone, which is not by itself a bug"
    elif high < 1:
        verdict, meaning = "It stays below the rounding floor", "no more than summation order alone does"
    else:
        verdict = "It is not distinguishable from the rounding floor"
        meaning = "summation order alone does as much"
    return [
        f"{verdict}: {times(ratio.value)} in the last layers, 95 % interval {_spread(ratio, times)} over {over}: "
        f"{meaning}."
    ]


def _excess(start: Onset | None) -> list[str]:
    if start is None or start.source_layer is None:
        return []
    if start.excess_layer is not None and start.excess_ratio is not None:
        chance = "" if start.excess_p is None else f", p = {number(start.excess_p)} after correction over layers"
        return [
            f"The first layer that by itself makes more than its own floor is layer {start.excess_layer}: "
            f"{times(start.excess_ratio.value)}{chance}."
        ]
    return [f"Layer by layer: {start.reason}."] if start.reason else []


def _logits(drift: Drift) -> list[str]:
    kl = findings.counted_logits(drift, "kl")
    mean, top = findings.mean(kl), findings.largest(kl)
    if mean is None:
        return ["How far the output distribution moves is not known: no step after step 0 was measured."]
    gaps = findings.counted_logits(drift, "logit_max")
    if gaps.size and not gaps.any():
        return ["The logits are equal at every step."]
    sentence = (
        f"The output distribution moves by {number(mean)} nats of KL on average, at most {number(top)}"
        f"{_at(drift, peaks.logit_peak(drift, 'kl'))}"
    )
    head = findings.mean(findings.counted_logits(drift, "kl_float32_head"))
    if head is not None:
        sentence += f"; with the LM head in float32 by {number(head)}"
    floor = findings.mean(findings.counted_logits(drift, "kl", "floor"))
    if floor is not None:
        sentence += f"; re-rolled sums alone move it by {number(floor)}"
    return [sentence + "."]


def _at(drift: Drift, peak: peaks.Peak | None) -> str:
    if peak is None:
        return ""
    return f" (step {peak.step}{f' of prompt {peak.prompt}' if len(drift.prompts) > 1 else ''})"


def _flips(drift: Drift) -> str:
    found = findings.flips(drift)
    steps, prompts = int(drift.measured.sum()), len(drift.prompts)
    if steps == 0:
        return "No step was measured, so nothing is known about flips."
    if not found:
        most = percent(rule_of_three(prompts))
        bound = f"flips in up to {most} of such prompts are still possible (exact 95 % bound)"
        little = ", which says little" if prompts < MIN_PROMPTS else ""
        return f"No flip in {count(steps, 'step')} of {count(prompts, 'prompt')}; {bound}{little}."
    sentence = (
        f"{count(len(found), 'flip')} in {count(steps, 'step')}, in {len({f.prompt for f in found})} of "
        f"{count(prompts, 'prompt')}"
    )
    margins = [flip.margin for flip in found if flip.margin is not None]
    if margins:
        where = "there" if len(found) == 1 else "at each"
        sentence += f"; the best two logits lie at most {number(max(margins))} apart {where}"
        ties = sum(flip.tie for flip in found)
        sentence += f", {count(ties, 'exact tie')} among them" if ties else ", with no exact tie"
    return sentence + "."


def _free(drift: Drift) -> str:
    if not drift.measured.any():
        return ""
    parted = [step for step in drift.free_divergence if step is not None]
    prompts = count(len(drift.prompts), "prompt")
    last = [int(drift.steps[row][-1]) + 1 for row in drift.measured if row.any()]
    limits = [free for free, row in zip(drift.free_steps, drift.measured, strict=True) if row.any()]
    cut = any(free < end for free, end in zip(limits, last, strict=True))
    gaps = drift.steps.size > 1 and int(np.diff(drift.steps).max()) > 1
    if parted:
        when = f"at step {parted[0]}" if len(parted) == 1 else f"first at steps {min(parted)} to {max(parted)}"
        sentence = f"Left to themselves the two paths part in {len(parted)} of {prompts}, {when}"
    else:
        sentence = f"Left to themselves the two paths write the same text, as far as measured ({prompts})"
    if cut and not gaps:
        sentence += "; where the tokens fed were not path a's own choice, what follows is not known"
    if gaps:
        sentence += "; steps between the measured ones were not looked at"
    return sentence + "."


def _control(drift: Drift) -> list[str]:
    control = drift.control
    if control is None:
        return []
    here = findings.mean(findings.counted_logits(drift, "kl"))
    there = findings.mean(findings.counted_logits(control, "kl"))
    flips = len(findings.flips(control))
    if here is None or there is None:
        return []
    sentence = f"In {control.a.dtype}, on the same tokens, the mean KL is {number(there)}"
    if there == 0 and here > 0:
        sentence += " (exactly zero)"
    elif 0 < there < here < np.inf:
        sentence += f", {times(here / there)} smaller"
    elif 0 < here < there < np.inf:
        sentence += f", {times(there / here)} larger"
    return [f"{sentence}, with {count(flips, 'flip') if flips else 'no flip'}."]


def _spread(estimate: Estimate, write: Any) -> str:
    low, high = (write(end) for end in estimate.interval or (estimate.value, estimate.value))
    return f"{low} to {high}" if low != high else f"{low}, the same in nearly all resamples"


# --- plain data


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
    found, start, grows = findings.flips(drift), findings.onset(drift), findings.growth(drift)
    kl = findings.counted_logits(drift, "kl")
    widest = max((flip for flip in found if flip.margin is not None), key=lambda flip: flip.margin or 0.0, default=None)
    onset_local = None if start is None or start.source_layer is None else peaks.local_at(drift, start.source_layer)
    peak = peaks.local_peak(drift)
    values = {
        "model": drift.a.model,
        "dtype": drift.a.dtype,
        "attn": drift.a.attn,
        "device": drift.a.device,
        "paths": {"a": drift.a.label, "b": drift.b.label},
        "prompts": len(drift.prompts),
        "steps": int(drift.measured.sum()),
        "kl_mean": findings.mean(kl),
        "kl_max": findings.largest(kl),
        "kl_max_at": _place(drift, peaks.logit_peak(drift, "kl")),
        "kv_max": {site: _kv_max(drift, site) for site in ("k", "v")},
        "kl_float32_head_mean": findings.mean(findings.counted_logits(drift, "kl_float32_head")),
        "kl_floor_mean": findings.mean(findings.counted_logits(drift, "kl", "floor")),
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


def _flip_at(flip: findings.Flip) -> dict[str, int]:
    return {name: getattr(flip, name) for name in ("prompt", "step", "token_a", "token_b")}


def _kv_max(drift: Drift, site: str) -> dict[str, Any] | None:
    peak = peaks.kv_peak(drift, site)
    return None if peak is None else {"rel_l2": peak.value, **(_place(drift, peak) or {})}


def _layers(drift: Drift) -> list[dict[str, Any]] | None:
    medians, floors = findings.over_prompts(drift, findings.SITE), findings.over_prompts(drift, findings.SITE, "floor")
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
        for i, number in enumerate(drift.layers(findings.SITE))
    ]


def _place(drift: Drift, peak: peaks.Peak | None) -> dict[str, Any] | None:
    """A peak's place for JSON: prompt, step, token and its text, and whichever of layer, head, position it has."""
    if peak is None:
        return None
    where = {name: getattr(peak, name) for name in ("layer", "head", "position")}
    return {
        "prompt": peak.prompt,
        "step": peak.step,
        "token": peak.token,
        "text": drift.token_texts.get(peak.token),
        **{name: value for name, value in where.items() if value is not None},
    }
