"""Results of patching in plain sentences and plain data. What they say is what the numbers carry, no more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvdrift.models.ending import nothing_followed, other_notes
from kvdrift.statistics.resampling import MIN_PROMPTS
from kvdrift.words.numbers import count, plural
from kvdrift.words.plain import json_safe, not_finite

if TYPE_CHECKING:
    import pandas as pd

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


_REFERENCES = {"placebo": "noise at the same place", "unpatched": "no patch"}
NOTICED = 0.05
"""A recovery below this is too small to be divided among causes."""


def headline(result: Outcomes) -> str:
    """Who is patched from whom, and over how much."""
    n, steps = len(result.prompts), int(result.arrays["n_steps"].sum())
    return (
        f"{result.recipient.model} · {result.recipient.dtype} · {result.recipient.label} ← {result.donor.label} · "
        f"{n} {plural(n, 'prompt')}, {steps} {plural(steps, 'step')}"
    )


def patch_summary(result: PatchResult) -> str:
    """What one patch did, beside its controls."""
    lines = [headline(result), f"patch: {result.cells[0].label}"]
    if not result.counted().any():
        return "\n".join([*lines, *_recovered(result, "written"), *reading(result), *other_notes(result.notes)])
    roles = dict.fromkeys(arm.role for arm in result.arms)
    distances = [f"{NAMES[role]} {_spread(result.distance(role))}" for role in roles]
    lines.append("mean distance to the donor after the first write (centred logit L2): " + "; ".join(distances))
    if result.ends():
        lines += _recovered(result, "written")
    lines += _recovered(result, "after")
    signatures = {role: result.signature(role) for role in ("patched", "unpatched", "re-roll") if result.find(role)}
    if math.isfinite(signatures["patched"]):
        shares = [f"{NAMES[role]} {value:.2f}" for role, value in signatures.items()]
        lines.append(f"error against float32 in common with the donor's (cosine): {', '.join(shares)}")
    followed = {role: result.followed(role) for role in ("patched", "unpatched", result.reference())}
    if all(np.isfinite(x).all() for x in followed.values()):
        texts = [f"{NAMES[role]} {x.mean():.3g}" for role, x in followed.items()]
        lines.append(f"tokens in common with the donor, of {result.arrays['n_steps'].mean():.3g}: {', '.join(texts)}")
    return "\n".join([*lines, *reading(result), *result.notes])


def _recovered(result: Outcomes, steps: str) -> list[str]:
    """Recovery with both references, restored bits and flips over the written steps, or those that follow."""
    n = int(result.counted(0, steps).sum())
    if not n:
        return []
    found, plain = (result.recovery(0, steps=steps, against=against) for against in (None, "unpatched"))
    where = f"{_at(result, 0, steps)}: " if result.ends() else ""
    return [
        f"{where}recovery {number(found)} against {_REFERENCES[found.reference]}, {number(plain)} against no patch; "
        f"restored bit for bit at {result.restored(steps=steps):.0%} of {n} {plural(n, 'step')}; "
        f"{result.flips(steps=steps)} of them pick another token than the donor "
        f"({result.flips(steps=steps, role='unpatched')} without the patch)"
    ]


def _at(result: Outcomes, cell: int, steps: str) -> str:
    """Which steps are meant, as in ``at the written step 3``."""
    if steps == "after":
        return "over the steps that follow"
    written = np.flatnonzero(result.counted(cell, "written").any(axis=0))
    return f"at the written step{f' {written[0]}' if len(written) == 1 else f's {written[0]} to {written[-1]}'}"


def reading(result: Outcomes, cell: int = 0) -> list[str]:
    """What the recovery of one cell does and does not show: where it is written, if that ends, and after it."""
    return [*(_reading_written(result, cell) if result.ends(cell) else []), *_reading_after(result, cell)]


def _reading_written(result: Outcomes, cell: int) -> list[str]:
    """What is shown by the steps at which a patch that ends is written."""
    if not result.counted(cell, "written").any() or result.wrote_nothing(cell):
        return []
    at = _at(result, cell, "written")
    if result.trivial(cell, "written"):
        return [f"{at} the donor's last residual is written: recovery there is 1 by construction and proves nothing"]
    if math.isnan(result.recovery(cell, steps="written", against="unpatched").value):
        return [f"{at} there is nothing to recover: without a patch the recipient has the donor's logits"]
    if result.restored(cell, "written") == 1:
        return [
            f"{at} the patch gives the donor's logits bit for bit: what differs between the paths there passes "
            "through it"
        ]
    return []


def _reading_after(result: Outcomes, cell: int) -> list[str]:
    if not result.counted(cell).any():
        return [_nothing(result, result.cells[cell].first)]
    found, plain = result.recovery(cell), result.recovery(cell, against="unpatched")
    if math.isnan(plain.value):
        return ["nothing to recover: without a patch the recipient has the donor's logits at every step that follows"]
    if result.wrote_nothing(cell):
        return [nothing_written(result, cell)]
    if result.trivial(cell):
        return ["the donor's last residual is written at every step: recovery is 1 by construction and proves nothing"]
    said = []
    if result.ends(cell) and (result.values("unchanged", "patched", cell)[0][result.counted(cell)] == 1).all():
        return ["over the steps that follow, no bit of the logits is another than without the patch"]
    if result.restored(cell) == 1:
        said.append("the patch gives the donor's logits bit for bit: what differs between the paths passes through it")
    elif math.isnan(plain.low):
        said.append(
            f"fewer than {MIN_PROMPTS} prompts: whether the patch does more than chance, more of them must tell"
        )
    elif plain.low > 0:
        said.append("the patch brings the recipient nearer to the donor than no patch does")
    else:
        said.append(
            "the patch brings the recipient no nearer to the donor than no patch does"
            + (": what it gains on the placebo is the harm that noise does" if found.low > 0 else "")
        )
    if result.find("re-rolled patched", cell) and result.find("re-roll", cell):
        again = result.recovery(cell, role="re-rolled patched", against="re-roll")
        sentence = f"with the recipient's sums re-rolled, the patch against no patch is {number(again)}"
        if loses(again, plain):
            sentence += (
                f": what that lacks of {plain.value:.2f} comes from the two paths' kernels rounding alike, not from "
                "what is written"
            )
        said.append(sentence)
    return said


def _nothing(result: Outcomes, first: int) -> str:
    """Why no step follows the first write."""
    what = f"no step follows the first write at step {first}"
    return nothing_followed(result.arrays, result.provenance, result.notes, what)


def nothing_written(result: Outcomes, cell: int = 0) -> str:
    """That a cell's patches had nothing new to write (see `Outcomes.wrote_nothing`), when, and what to do."""
    steps = np.flatnonzero(result.counted(cell, "written").any(axis=0))
    when = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    sentence = f"nothing was changed: at {when} donor and recipient still held the same values there"
    persistent = any(patch.schedule.last is None for patch in result.cells[cell].patches)
    return sentence if persistent else f"{sentence}; patch a later step"


def loses(rerolled: Recovery, plain: Recovery) -> bool:
    """Whether there is a recovery against no patch at all, and re-rolled sums take some of it away."""
    return bool(plain.value >= NOTICED and not plain.low <= 0 and rerolled.value < plain.value)


def patch_dict(result: PatchResult) -> dict[str, Any]:
    """A patch result as plain data."""
    arms = {}
    for role in dict.fromkeys(arm.role for arm in result.arms):
        arms[role] = {
            **_arm_dict(result, role, "after"),
            "written": _arm_dict(result, role, "written"),
            "signature": result.signature(role),
            "followed": result.followed(role).mean(axis=0),
        }
    return json_safe(
        {
            "recipient": result.recipient.label,
            "donor": result.donor.label,
            "model": result.recipient.model,
            "dtype": result.recipient.dtype,
            "patch": [patch.to_dict() for patch in result.cells[0].patches],
            "prompts": len(result.prompts),
            "steps": result.arrays["n_steps"],
            "recovery": recovery_dict(result.recovery()),
            "recovery_kl": recovery_dict(result.recovery(metric="kl")),
            "recovery_against_unpatched": recovery_dict(result.recovery(against="unpatched")),
            "recovery_written": recovery_dict(result.recovery(steps="written")),
            "recovery_written_against_unpatched": recovery_dict(result.recovery(steps="written", against="unpatched")),
            "free_recovery": recovery_dict(result.free_recovery()),
            "trivial": result.trivial(),
            "trivial_written": result.trivial(steps="written"),
            "arms": arms,
            "reading": reading(result),
            "notes": list(result.notes),
        },
        not_finite,
    )


def _arm_dict(result: PatchResult, role: str, steps: str) -> dict[str, Any]:
    """What one arm did over the steps that count."""
    ran = result.counted(steps=steps).any()
    distances = {
        metric: np.nanmean(result.distance(role, metric=metric, steps=steps)) if ran else None
        for metric in ("logit_l2", "kl")
    }
    return {
        **distances,
        "restored": result.restored(steps=steps, role=role),
        "flips": result.flips(steps=steps, role=role),
    }


def sweep_summary(sweep: Sweep) -> str:
    """The best cells of a sweep, and how they stand to the placebos."""
    lines = [headline(sweep), f"{len(sweep.cells)} cells over {', '.join(sweep.over) or 'the patches given'}"]
    table = sweep.to_dataframe()
    known = table[table["recovery"].notna() & ~table["trivial"]]
    if known.empty:
        counted = any(sweep.counted(cell).any() for cell in range(len(sweep.cells)))
        first = min(cell.first for cell in sweep.cells)
        said = [*_best_written(sweep), *_trivial_written(table)]
        if not counted:
            return "\n".join([*lines, *said, _nothing(sweep, first), *other_notes(sweep.notes)])
        none = "no cell has a defined recovery: without a patch there is nothing to recover"
        return "\n".join([*lines, none, *said, *sweep.notes])
    shown = [int(cell) for cell in sweep.best(3)["cell"] if not math.isnan(table["recovery"][cell])]
    lines += [f"{sweep.cells[cell].label}: {_cell(sweep, cell)}" for cell in shown]
    lines += _best_written(sweep, shown)
    against = " or ".join(_REFERENCES[name] for name in dict.fromkeys(known["reference"]))
    if known["p_holm"].notna().any():
        above = int((known["p_holm"] < 0.05).sum())
        lines.append(f"{above} of {len(known)} cells recover more than {against} with confidence (Holm over the cells)")
    else:
        lines.append(f"fewer than {MIN_PROMPTS} prompts: no cell can be told from {against} by more than its number")
    silent = [cell for cell in known["cell"] if _changes_nothing(sweep, cell)]
    if silent:
        one = len(silent) == 1
        idle = sum(sweep.wrote_nothing(cell) for cell in silent)
        who = f"{idle} of them write" if idle < len(silent) else "it writes" if one else "they write"
        why = f": what {who} is what the recipient has" if idle else ""
        lines.append(f"{count(len(silent), 'cell', thousands='')} change{'s' * one} no bit of the logits{why}")
    trivial = int(table["trivial"].sum())
    if trivial:
        lines.append(f"{trivial} left out, 1 by construction: the donor's last residual is written at every step")
    return "\n".join([*lines, *_trivial_written(table), *sweep.notes])


def _cell(sweep: Sweep, cell: int) -> str:
    """Recovery of one cell in a line: over the steps that follow, and, if it ends, at the written ones too."""
    found, restored = sweep.recovery(cell), f"restored at {sweep.restored(cell):.0%}"
    if not sweep.ends(cell):
        return f"{number(found)}, {restored} of steps"
    return f"{number(found)} over the steps that follow, {restored}; {_cell_written(sweep, cell)}"


def _cell_written(sweep: Sweep, cell: int) -> str:
    if sweep.trivial(cell, "written"):
        return f"1 by construction {_at(sweep, cell, 'written')}"
    found, restored = sweep.recovery(cell, steps="written"), sweep.restored(cell, "written")
    return f"{number(found)} {_at(sweep, cell, 'written')}, restored at {restored:.0%}"


def _best_written(sweep: Sweep, shown: Sequence[int] = ()) -> list[str]:
    """The cell that recovers most where it is written, if its patch ends and it is not among those shown."""
    ranked = sweep.best(len(sweep.cells), steps="written")
    ending = ranked[ranked["recovery"].notna() & ranked["cell"].map(sweep.ends)]
    if ending.empty or ending["cell"].iloc[0] in shown:
        return []
    cell = int(ending["cell"].iloc[0])
    return [f"best where it is written: {sweep.cells[cell].label}: {_cell_written(sweep, cell)}"]


def _trivial_written(table: pd.DataFrame) -> list[str]:
    """How many cells are 1 by construction at the written steps alone."""
    n = int((table["trivial_written"] & ~table["trivial"]).sum())
    if not n:
        return []
    return [f"{n} of the cells: 1 by construction at the written steps, where the donor's last residual is written"]


def _changes_nothing(sweep: Sweep, cell: int) -> bool:
    return bool((sweep.values("unchanged", "patched", cell)[0][sweep.counted(cell)] == 1).all())


def sweep_dict(sweep: Sweep) -> dict[str, Any]:
    """A sweep as plain data."""
    rows = sweep.to_dataframe().to_dict(orient="records")
    return json_safe(
        {
            "recipient": sweep.recipient.label,
            "donor": sweep.donor.label,
            "model": sweep.recipient.model,
            "dtype": sweep.recipient.dtype,
            "prompts": len(sweep.prompts),
            "steps": sweep.arrays["n_steps"],
            "over": list(sweep.over),
            "cells": rows,
            "notes": list(sweep.notes),
        },
        not_finite,
    )


def factorial_summary(result: Factorial) -> str:
    """The four distances in words, beside the whole and the placebo factor."""
    from kvdrift.patching.factorial_result import EDGES, PLACEBOS, WHOLE

    n, steps = len(result.prompts), int(result.counted.sum())
    lines = [
        f"{result.on.model} · {result.on.dtype} · K/V state × kernel · {n} {plural(n, 'prompt')}, "
        f"{steps} {plural(steps, 'step')}",
    ]
    if not result.counted.any():
        why = nothing_followed(result.arrays, result.provenance, result.notes)
        return "\n".join([*lines, why, *other_notes(result.notes)])
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
        return np.nanmean(result.per_prompt(pair, metric)) if result.counted.any() else None

    return json_safe(
        {
            "on": result.on.label,
            "off": result.off.label,
            "model": result.on.model,
            "dtype": result.on.dtype,
            "prompts": len(result.prompts),
            "steps": result.arrays["n_steps"],
            "pairs": {pair: {metric: mean(pair, metric) for metric in METRICS} for pair in PAIRS},
            "notes": list(result.notes),
        },
        not_finite,
    )


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
    """A recovery as a dictionary."""
    return {
        "value": found.value,
        "low": found.low,
        "high": found.high,
        "p_value": found.p_value,
        "standard_error": found.standard_error,
        "per_prompt": found.per_prompt,
        "placebo_spread": found.spread,
        "reference": found.reference,
        "n": found.n,
    }


def _spread(values: np.ndarray) -> str:
    """Mean over prompts, and its range over seeds where there are several."""
    each = np.nanmean(values, axis=1)
    return f"{each.mean():.3g}" + (f" ({each.min():.3g} to {each.max():.3g})" if len(each) > 1 else "")
