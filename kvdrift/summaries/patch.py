"""One patch in plain sentences and plain data, beside its controls: what the numbers carry, no more."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvdrift import markup
from kvdrift.models.ending import nothing_followed, other_notes
from kvdrift.patching.outcome import Outcomes
from kvdrift.patching.recovery import loses
from kvdrift.patching.result import PatchResult
from kvdrift.statistics.resampling import MIN_PROMPTS
from kvdrift.summaries.recovery import REFERENCES, recovery_dict, short
from kvdrift.words.json import json_safe, not_finite
from kvdrift.words.numbers import plural

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
DISTANCE, RESTORED, FLIPS = "mean distance to the donor (centred logit L2)", "restored bit for bit", "flips"


def headline(result: Outcomes) -> str:
    """Who is patched from whom, and over how much."""
    n, steps = len(result.prompts), int(result.n_steps.sum())
    return (
        f"{result.recipient.model} · {result.recipient.dtype} · {result.recipient.label} ← {result.donor.label} · "
        f"{n} {plural(n, 'prompt')}, {steps} {plural(steps, 'step')}"
    )


def summary(result: PatchResult) -> str:
    """What one patch did, beside its controls."""
    return "\n".join([headline(result), *sentences(result), *other_notes(result.notes, result.counted().any())])


def sentences(result: PatchResult) -> list[str]:
    """The summary without its headline and without notes."""
    lines = [f"patch: {result.cells[0].label}"]
    if not result.counted().any():
        return [*lines, *_recovered(result, "written"), *reading(result)]
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
    return [*lines, *reading(result)]


def _recovered(result: Outcomes, steps: str) -> list[str]:
    """Recovery with both references, restored bits and flips over the written steps, or those that follow."""
    n = int(result.counted(0, steps).sum())
    if not n:
        return []
    found, plain = (result.recovery(0, steps=steps, against=against) for against in (None, "unpatched"))
    where = f"{at_steps(result, 0, steps)}: " if result.ends() else ""
    return [
        f"{where}recovery {short(found)} against {REFERENCES[found.reference]}, {short(plain)} against no patch; "
        f"restored bit for bit at {result.restored(steps=steps):.0%} of {n} {plural(n, 'step')}; "
        f"{result.flips(steps=steps)} of them pick another token than the donor "
        f"({result.flips(steps=steps, role='unpatched')} without the patch)"
    ]


def at_steps(result: Outcomes, cell: int, steps: str) -> str:
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
    at = at_steps(result, cell, "written")
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
        return [nothing_after(result, result.cells[cell].first)]
    found, plain = result.recovery(cell), result.recovery(cell, against="unpatched")
    if math.isnan(plain.value):
        return ["nothing to recover: without a patch the recipient has the donor's logits at every step that follows"]
    if result.wrote_nothing(cell):
        return [nothing_written(result, cell)]
    if result.trivial(cell):
        return ["the donor's last residual is written at every step: recovery is 1 by construction and proves nothing"]
    said = []
    if result.ends(cell) and result.same_as_unpatched(cell):
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
        sentence = f"with the recipient's sums re-rolled, the patch against no patch is {short(again)}"
        if loses(again, plain):
            sentence += (
                f": what that lacks of {plain.value:.2f} comes from the two paths' kernels rounding alike, not from "
                "what is written"
            )
        said.append(sentence)
    return said


def nothing_after(result: Outcomes, first: int) -> str:
    """Why no step follows the first write."""
    what = f"no step follows the first write at step {first}"
    return nothing_followed(result, what)


def nothing_written(result: Outcomes, cell: int = 0) -> str:
    """That a cell's patches had nothing new to write (see `Outcomes.wrote_nothing`), when, and what to do."""
    steps = np.flatnonzero(result.counted(cell, "written").any(axis=0))
    when = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    sentence = f"nothing was changed: at {when} donor and recipient still held the same values there"
    persistent = any(patch.schedule.last is None for patch in result.cells[cell].patches)
    return sentence if persistent else f"{sentence}; patch a later step"


def html(result: PatchResult) -> str:
    """One patch: every arm in a table, then the sentences of its summary."""
    said = [*sentences(result), *other_notes(result.notes, result.counted().any())]
    rest = [line for line in said if not line.startswith("mean distance")]
    spans = [span for span in (["written"] if result.ends() else []) + ["after"] if result.counted(steps=span).any()]
    if not spans:
        return markup.block(headline(result), markup.listing(rest))
    where = {"written": "at the written steps", "after": "after the first write"}
    columns = [f"{name}, {where[span]}" for span in spans for name in (DISTANCE, RESTORED, FLIPS)]
    rows = []
    for role in dict.fromkeys(arm.role for arm in result.arms):
        row: list[object] = [NAMES[role]]
        for span in spans:
            row += [
                f"{np.nanmean(result.distance(role, steps=span)):.3g}",
                f"{result.restored(steps=span, role=role):.0%}",
                result.flips(steps=span, role=role),
            ]
        rows.append(row)
    return markup.block(headline(result), markup.table(rows, ("arm", *columns)), markup.listing(rest))


def as_dict(result: PatchResult) -> dict[str, Any]:
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
            "steps": result.n_steps,
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


def _spread(values: np.ndarray) -> str:
    """Mean over prompts, and its range over seeds where there are several."""
    each = np.nanmean(values, axis=1)
    return f"{each.mean():.3g}" + (f" ({each.min():.3g} to {each.max():.3g})" if len(each) > 1 else "")
