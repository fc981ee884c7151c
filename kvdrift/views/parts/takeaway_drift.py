"""The one sentence that leads a figure, computed from the data it shows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvdrift.drift import findings, peaks
from kvdrift.drift.result import Drift
from kvdrift.models.labels import model_name
from kvdrift.views.parts.curves import curve
from kvdrift.words.numbers import number, times

_WHERE = {"attn": "'s attention", "mlp": "'s MLP"}
WORTH_A_TITLE = 2.0
"""The largest of thirty ratios to a floor lies a little above 1 by chance; the summary says it, a title need not."""


def growth(drift: Drift, site: str) -> str:
    """Where drift starts, where it reaches its plateau, and how that compares with the rounding floor."""
    shape = curve(drift, site)
    if np.isnan(shape.median).all():
        return f"No step after step 0 was measured, so there is no drift at {site} to show"
    found = drift.growth(site)
    last = int(shape.layers[-1]) + 1
    if found.final is None or found.plateau is None:
        if np.nanmax(np.nan_to_num(drift.values(site)[drift.counted])) > 0:
            return f"At {site} the median drift is zero at every layer: most steps are bit-identical"
        return f"Bit-identical: the two paths agree in every bit at {site}, in every layer and counted step"
    start = _start(drift, site, shape.layers, shape.median)
    reached = "has no plateau"
    if found.plateau_layer is not None:
        layer = int(found.plateau_layer.value)
        reached = f"reaches its plateau ({number(found.plateau.value)}) at layer {layer} of {last}"
    text = f"{start} and {reached}"
    if found.plateau_over_floor is not None and np.isfinite(found.plateau_over_floor.value):
        return f"{text}; it stands at {times(found.plateau_over_floor.value)} the rounding floor"
    return text


def _start(drift: Drift, site: str, layers: np.ndarray, median: np.ndarray) -> str:
    """Where drift begins: the source layer if local drift was measured, else the first nonzero median.

    The source can lie below the first layer that differs at the site shown: then both are said.
    """
    if drift.has("resid_post", of="local"):
        onset = drift.onset("resid_post")
        source, shown = onset.source_layer, findings.shows_from(drift, site)
        most = "" if source is None else _most(drift, source)
        if source is not None and shown is not None and shown > source:
            module = _WHERE.get(onset.source_module or "", "")
            return f"Drift starts in layer {source}{module}{most}, shows at {site} from layer {shown} on"
        if source is not None:
            return f"Drift starts in layer {source}{most}"
    nonzero = np.flatnonzero(median > 0)
    return f"Drift is there from layer {int(layers[nonzero[0]])} on" if nonzero.size else "Drift is rare"


def _most(drift: Drift, source: int) -> str:
    """The layer that makes most drift by itself for its floor, if it is another one and worth the room of a title."""
    peak = peaks.local_peak(drift)
    if peak is None or peak.layer == source or peak.ratio is None or peak.ratio < WORTH_A_TITLE:
        return ""
    return f" (layer {peak.layer}{_WHERE.get(peak.module or '', '')} makes {times(peak.ratio)} its own floor)"


def heads(drift: Drift, sites: Sequence[str], prompt: int) -> str:
    """Which site, layer and head of a prompt carries most, and how far the heads of that layer lie apart."""
    medians = {site: drift.per_prompt(site)[prompt] for site in sites}
    tops = {site: float(np.nanmax(np.nan_to_num(values, nan=-1.0))) for site, values in medians.items()}
    site = max(sites, key=lambda s: tops[s])
    names = " and ".join(s.upper() if s in "qkv" else s for s in sites)
    if tops[site] < 0:
        return f"No step after step 0 was measured, so there is no drift of {names} to show"
    if tops[site] == 0:
        counted = drift.counted[prompt]
        if any(np.nan_to_num(drift.values(s)[prompt, counted]).any() for s in sites):
            return f"In most steps of prompt {prompt} {names} are bit-identical in every head (median drift 0)"
        return f"Bit-identical: in prompt {prompt} both paths read the same {names} in every layer and head"
    values = medians[site]
    row, head = np.unravel_index(int(np.nanargmax(values)), values.shape)
    text = (
        f"In prompt {prompt} {site.upper() if site in 'qkv' else site} of layer {int(drift.layers(site)[row])}, "
        f"head {head} drifts most ({number(tops[site])})"
    )
    others = values[row][~np.isnan(values[row])]
    if len(others) > 1 and others.min() > 0:
        return f"{text}; the heads of that layer lie within {times(float(others.max() / others.min()))} of each other"
    return text


def positions(drift: Drift, prompt: int) -> str:
    """Prompt positions against generated ones, at the last kept step of this prompt."""
    kept = drift.position_steps
    rows = [r for r, step in enumerate(kept) if drift.measured[prompt, np.searchsorted(drift.steps, step)]]
    if not rows:
        return f"No kept step of prompt {prompt} was measured"
    row, split = rows[-1], len(drift.prompts[prompt].ids)
    both = drift.visible("a")[prompt, row] & drift.visible("b")[prompt, row]
    values = np.concatenate(
        [drift.values(s, of="positions")[prompt, row].swapaxes(0, 1) for s in ("k", "v")], axis=0
    )  # [head, layer, position]
    seen = np.where(both, values, np.nan)
    old, new = (part[~np.isnan(part)] for part in (seen[..., :split], seen[..., split:]))
    step = int(kept[row])
    if not old.size or not new.size:
        everything = np.concatenate([old, new])
        return f"At step {step} of prompt {prompt} the median K/V drift over positions is {_median(everything)}"
    if not old.any() and not new.any():
        return f"Bit-identical: at step {step} of prompt {prompt} both paths read the same K and V at every position"
    before, after = float(np.median(old)), float(np.median(new))
    if before > 0 and after > 0:
        more, less = ("generated", "prompt") if after >= before else ("prompt", "generated")
        factor = times(max(before, after) / min(before, after))
        return (
            f"At step {step} of prompt {prompt} {more} positions carry {factor} the K/V drift of {less} positions "
            f"(median {number(max(before, after))} against {number(min(before, after))})"
        )
    return (
        f"At step {step} of prompt {prompt} the median K/V drift is {number(before)} at prompt positions "
        f"and {number(after)} at generated ones"
    )


def _median(values: np.ndarray) -> str:
    return number(float(np.median(values))) if values.size else "not measured"


def tokens(drift: Drift, prompt: int) -> str:
    """How often the paths choose the same token, and where free runs part."""
    measured = drift.measured[prompt]
    n = int(measured.sum())
    same = int((~drift.flips[prompt])[measured].sum())
    if n == 0:
        return f"No step of prompt {prompt} was measured"
    if same == n:
        where = f"all {n} measured steps" if n > 1 else "the one measured step"
        return f"The two paths choose the same token at {where} of prompt {prompt}"
    text = f"The two paths choose the same token at {same} of {n} steps"
    step = drift.free_divergence[prompt]
    if step is None:
        return f"{text}; the flips come after the fed tokens had left path a's own choice"
    row = int(np.searchsorted(drift.steps, step))
    ties = [p for p in "ab" if drift.has("logits", f"tie_{p}") and drift.values("logits", f"tie_{p}")[prompt, row]]
    if ties:
        return f"{text}; free runs part at step {step}, at an exact tie in path {' and '.join(ties)}"
    if drift.has("logits", "margin_a"):
        margin = float(drift.values("logits", "margin_a")[prompt, row])
        return f"{text}; free runs part at step {step}, where path a's top-2 margin is {number(margin)}"
    return f"{text}; free runs part at step {step}"


def precision(drift: Drift, control: Drift, site: str) -> str:
    """What the control's dtype does to the plateau, the KL and the flips."""
    if not drift.counted.any():
        return "No step after step 0 was measured, so there is nothing to compare"
    ends = [_plateau(d, site) for d in (drift, control)]
    kls = [findings.mean(findings.counted_logits(d, "kl")) for d in (drift, control)]
    flips = [int(d.values("logits", "flip")[d.counted].sum()) if d.has("logits", "flip") else None
             for d in (drift, control)]  # fmt: skip
    name = control.a.dtype if control.a.dtype != drift.a.dtype else "the control"
    parts = []
    if ends[0] == 0 and ends[1] == 0:
        parts.append(f"no drift at the last layers in {drift.a.dtype} or in {name}")
    elif ends[1] == 0:
        parts.append(f"{name} takes the drift of the last layers from {number(ends[0])} to exactly 0")
    elif ends[0] > 0:
        less = ends[0] >= ends[1]
        change = times(max(ends) / min(ends))
        parts.append(
            f"{name} {'lowers' if less else 'raises'} the drift of the last layers {change}, "
            f"from {number(ends[0])} to {number(ends[1])}"
        )
    else:
        parts.append(f"drift of the last layers is 0 in {drift.a.dtype} and {number(ends[1])} in {name}")
    if kls[0] is not None and kls[1] is not None:
        parts.append(f"mean KL {number(kls[0])} → {number(kls[1])}")
    if flips[0] is not None and flips[1] is not None:
        parts.append(f"flips {flips[0]} → {flips[1]}")
    text = "; ".join(parts)
    return text[0].upper() + text[1:] if not text.startswith(name) else text


def _plateau(drift: Drift, site: str) -> float:
    found = drift.growth(site)
    return found.plateau.value if found.plateau is not None else 0.0


def families(drifts: Sequence[tuple[str, Drift]], site: str) -> str:
    """The range of plateaus, and how they compare with their floors."""
    ends = {name: _plateau(drift, site) for name, drift in drifts}
    over = [drift.growth(site).plateau_over_floor for _, drift in drifts]
    ratios = [o.value for o in over if o is not None and np.isfinite(o.value)]
    low, high = min(ends, key=lambda n: ends[n]), max(ends, key=lambda n: ends[n])
    if len(drifts) == 1 or ends[low] == ends[high]:
        text = f"Drift ends at {number(ends[high])} in {'every model' if len(drifts) > 1 else model_name(high)}"
    else:
        text = f"Drift ends between {number(ends[low])} ({low}) and {number(ends[high])} ({high})"
    if not ratios:
        return text
    if len(ratios) == 1:
        return f"{text}, {times(ratios[0])} its rounding floor"
    return f"{text}: {times(min(ratios))} to {times(max(ratios))} each model's own rounding floor"
