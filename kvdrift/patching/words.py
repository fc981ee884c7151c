"""Results of patching in plain sentences and plain data. What they say is what the numbers carry, no more."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from kvdrift.patching.factorial_result import Factorial
    from kvdrift.patching.outcome import Outcomes
    from kvdrift.patching.recovery import Recovery
    from kvdrift.patching.result import PatchResult, Sweep

NAMES = {
    "unpatched": "without a patch",
    "re-roll": "re-rolled sums, no patch",
    "full patch": "whole residual patched",
    "patched": "patched",
    "placebo": "placebo",
    "self-patch": "own values written back",
    "one ulp": "one entry moved by one ulp",
    "re-rolled patched": "patched, re-rolled sums",
    "float32 donor": "patched from a wider donor",
}


def headline(result: Outcomes) -> str:
    """Who is patched from whom, and over how much."""
    n, steps = len(result.prompts), result.arrays["n_steps"]
    return (
        f"{result.recipient.model} · {result.recipient.dtype} · {result.recipient.label} ← {result.donor.label} · "
        f"{n} prompt{'s' * (n > 1)}, {int(steps.sum())} steps"
    )


def patch_summary(result: PatchResult) -> str:
    """What one patch did, beside its controls."""
    lines = [headline(result), f"patch: {result.cells[0].label}"]
    if not result.counted().any():
        first = result.cells[0].first
        lines.append(f"no step follows the first write at step {first}: ask for more new tokens")
        return "\n".join([*lines, *result.notes])
    roles = dict.fromkeys(arm.role for arm in result.arms)
    distances = [f"{NAMES[role]} {_spread(result.distance(role))}" for role in roles]
    lines.append("mean distance to the donor after the first write (centred logit L2): " + "; ".join(distances))
    lines.append(f"recovery {number(result.recovery())} against the {result.reference()}s' distance")
    lines.append(
        f"against no patch at all: {number(result.recovery(against='unpatched'))}; restored bit for bit at "
        f"{result.restored():.0%} of {int(result.counted().sum())} steps; {result.flips()} of them pick another token "
        f"than the donor ({result.flips(role='unpatched')} without the patch)"
    )
    followed = {role: result.followed(role) for role in ("patched", "unpatched", result.reference())}
    if all(np.isfinite(x).all() for x in followed.values()):
        texts = [f"{NAMES[role]} {x.mean():.3g}" for role, x in followed.items()]
        lines.append(f"tokens in common with the donor, of {result.arrays['n_steps'].mean():.3g}: {', '.join(texts)}")
    return "\n".join([*lines, *reading(result), *result.notes])


def reading(result: Outcomes, cell: int = 0) -> list[str]:
    """What the recovery of one cell does and does not show."""
    if result.trivial(cell):
        return ["the donor's last residual is written at every step: recovery is 1 by construction and proves nothing"]
    found, plain = result.recovery(cell), result.recovery(cell, against="unpatched")
    if math.isnan(found.value):
        return ["nothing to recover: the reference has the donor's logits at every counted step"]
    said = []
    if found.value == 1 and result.restored(cell) == 1:
        said.append("the patch gives the donor's logits bit for bit: what differs between the paths passes through it")
    elif not plain.low > 0:
        said.append(
            "the patch brings the recipient no nearer to the donor than no patch does"
            + (": what it gains on the placebo is the harm that noise does" if found.low > 0 else "")
            + (" (one prompt has no interval)" if math.isnan(plain.low) else "")
        )
    else:
        said.append("the patch brings the recipient nearer to the donor than no patch does")
    if result.find("re-rolled patched", cell) and result.find("re-roll", cell):
        again = result.recovery(cell, role="re-rolled patched", against="re-roll")
        said.append(
            f"with the recipient's sums re-rolled, patch against no patch is {number(again)}: what is missing from "
            f"{plain.value:.2f} is the two paths' kernels agreeing, not what the patch carries"
        )
    return said


def patch_dict(result: PatchResult) -> dict[str, Any]:
    """A patch result as plain data."""
    arms = {}
    for role in dict.fromkeys(arm.role for arm in result.arms):
        arms[role] = {
            "logit_l2": _finite(np.nanmean(result.distance(role))) if result.counted().any() else None,
            "kl": _finite(np.nanmean(result.distance(role, metric="kl"))) if result.counted().any() else None,
            "restored": _finite(result.restored(role=role)),
            "flips": result.flips(role=role),
            "followed": [_finite(x) for x in result.followed(role).mean(axis=0)],
        }
    return {
        "recipient": result.recipient.label,
        "donor": result.donor.label,
        "model": result.recipient.model,
        "dtype": result.recipient.dtype,
        "patch": [patch.to_dict() for patch in result.cells[0].patches],
        "prompts": len(result.prompts),
        "steps": [int(n) for n in result.arrays["n_steps"]],
        "recovery": recovery_dict(result.recovery()),
        "recovery_kl": recovery_dict(result.recovery(metric="kl")),
        "recovery_against_unpatched": recovery_dict(result.recovery(against="unpatched")),
        "free_recovery": recovery_dict(result.free_recovery()),
        "trivial": result.trivial(),
        "arms": arms,
        "reading": reading(result),
        "notes": list(result.notes),
    }


def sweep_summary(sweep: Sweep) -> str:
    """The best cells of a sweep, and how they stand to the placebos."""
    lines = [headline(sweep), f"{len(sweep.cells)} cells over {', '.join(sweep.over) or 'the patches given'}"]
    table = sweep.to_dataframe()
    known = table[table["recovery"].notna() & ~table["trivial"]]
    if known.empty:
        return "\n".join([*lines, "no cell has a defined recovery: there is nothing to recover", *sweep.notes])
    for _, row in sweep.best(3).iterrows():
        if math.isnan(row["recovery"]):
            continue
        found = number(sweep.recovery(row["cell"]))
        lines.append(f"{row['label']}: {found}, restored at {row['restored']:.0%} of steps")
    above = int((known["recovery_low"] > known["placebo_high"].fillna(0)).sum())
    lines.append(
        f"recovery is held against the {' or '.join(dict.fromkeys(known['reference']))}; in {above} of {len(known)} "
        "cells the whole interval lies above zero and the placebos' spread (no correction for the number of cells)"
        if len(sweep.prompts) > 1
        else "one prompt: no interval, so no cell can be told from another by chance alone"
    )
    trivial = int(table["trivial"].sum())
    if trivial:
        lines.append(f"{trivial} left out, 1 by construction: the donor's last residual is written at every step")
    return "\n".join([*lines, *sweep.notes])


def sweep_dict(sweep: Sweep) -> dict[str, Any]:
    """A sweep as plain data."""
    rows = sweep.to_dataframe().to_dict(orient="records")
    return {
        "recipient": sweep.recipient.label,
        "donor": sweep.donor.label,
        "model": sweep.recipient.model,
        "dtype": sweep.recipient.dtype,
        "prompts": len(sweep.prompts),
        "steps": [int(n) for n in sweep.arrays["n_steps"]],
        "over": list(sweep.over),
        "cells": [{name: _plain(value) for name, value in row.items()} for row in rows],
        "notes": list(sweep.notes),
    }


def factorial_summary(result: Factorial) -> str:
    """The four distances in words, beside the whole and the placebo factor."""
    from kvdrift.patching.factorial_result import EDGES, PLACEBOS, WHOLE

    n = len(result.prompts)
    lines = [
        f"{result.on.model} · {result.on.dtype} · K/V state × kernel · {n} prompt{'s' * (n > 1)}, "
        f"{int(result.counted.sum())} steps",
    ]
    if not result.counted.any():
        return "\n".join([*lines, "no step follows the prompt: ask for two new tokens or more"])
    for pair, what in {WHOLE: f"{result.on.label} against {result.off.label}", **EDGES, **PLACEBOS}.items():
        distance, same = result.per_prompt(pair), result.per_prompt(pair, "identical")
        lines.append(
            f"{pair}: {np.nanmean(distance):.3g}, bit for bit equal at {np.nanmean(same):.0%} of steps ({what})"
        )
    whole = np.nanmean(result.per_prompt(WHOLE))
    if whole == 0:
        return "\n".join([*lines, "the two paths agree bit for bit at every step: there is nothing to explain"])
    silent = [EDGES[pair] for pair in EDGES if np.nanmean(result.per_prompt(pair, "identical")) == 1]
    lines += [f"this factor changes no bit: {what}" for what in silent]
    placebo = max(np.nanmean(result.per_prompt(pair)) for pair in PLACEBOS)
    lines.append(
        f"one entry moved by one ulp scores {placebo:.3g} where the whole path scores {whole:.3g}: drift runs to a "
        "plateau whatever sets it off, so these distances say what changes bits, not how much a factor owns"
        if placebo > whole / 2
        else f"one entry moved by one ulp scores {placebo:.3g}, the whole path {whole:.3g}"
    )
    return "\n".join([*lines, *result.notes])


def factorial_dict(result: Factorial) -> dict[str, Any]:
    """A factorial as plain data."""
    from kvdrift.patching.factorial_result import METRICS, PAIRS

    def mean(pair: str, metric: str) -> float | None:
        return _finite(np.nanmean(result.per_prompt(pair, metric))) if result.counted.any() else None

    return {
        "on": result.on.label,
        "off": result.off.label,
        "model": result.on.model,
        "dtype": result.on.dtype,
        "prompts": len(result.prompts),
        "steps": [int(n) for n in result.arrays["n_steps"]],
        "pairs": {pair: {metric: mean(pair, metric) for metric in METRICS} for pair in PAIRS},
        "notes": list(result.notes),
    }


def number(found: Recovery) -> str:
    """A recovery with its interval, in a few characters."""
    if math.isnan(found.value):
        return "undefined"
    text = f"{found.value:.2f}"
    if not math.isnan(found.low):
        text += f" [{found.low:.2f}, {found.high:.2f}]"
    if not math.isnan(found.spread[0]):
        text += f" (single placebos {found.spread[0]:.2f} to {found.spread[1]:.2f})"
    return text


def recovery_dict(found: Recovery) -> dict[str, Any]:
    """A recovery as plain data, undefined numbers as None."""
    return {
        "value": _finite(found.value),
        "low": _finite(found.low),
        "high": _finite(found.high),
        "standard_error": _finite(found.standard_error),
        "per_prompt": [_finite(x) for x in found.per_prompt],
        "placebo_spread": [_finite(x) for x in found.spread],
        "reference": found.reference,
        "n": found.n,
    }


def _spread(values: np.ndarray) -> str:
    """Mean over prompts, and its range over seeds where there are several."""
    each = np.nanmean(values, axis=1)
    return f"{each.mean():.3g}" + (f" ({each.min():.3g} to {each.max():.3g})" if len(each) > 1 else "")


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, (int, np.integer)):
        return int(value)
    return _finite(value)
