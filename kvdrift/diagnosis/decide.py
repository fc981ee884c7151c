"""From evidence to a verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

import torch

from kvdrift.diagnosis.evidence import Evidence, Finding
from kvdrift.diagnosis.locate import PAST, Where
from kvdrift.diagnosis.signature import signature
from kvdrift.diagnosis.verdict import Verdict, VerdictKind
from kvdrift.models.model import Model
from kvdrift.paths.path import Path
from kvdrift.words.numbers import plural

SHOWN = 3
"""At most so many sentences are told of the findings of one check; the rest is counted."""
LISTED = 6
"""At most so many steps of one sentence are named; the rest is counted."""


FACTS = ("crash", "stale", "prefix", "unfilled", "visibility", "loss", "witness", "past")
"""Checks that look at one path by itself, and so name the one that is wrong."""


ON_THE_ARM = ("generate",)
"""Checks that rest on the shape-invariant arm alone; its own disagreements convict only where float64 confirms them if
the self-test failed."""


def decide(evidence: Evidence, model: Model, a: Path, b: Path) -> Verdict:
    """Conclude.

    NaN comes first, since nothing can be compared then. A path that raises where the other one runs, and what a call
    reads, are facts whatever the arithmetic, so a crash, a misread or a stale cache convicts before the repeats are
    looked at; everything else only convicts if the paths repeat themselves. A failed self-test of the control takes
    away what rests on the control alone, and nothing else: where float64 says that the paths differ, they do.
    """
    faults = [finding for finding in evidence.findings if finding.excuse is None]
    kind = _kind(evidence, faults)
    told = faults if kind == "bug" else [f for f in evidence.findings if f.excuse is not None and f.excuse.kind == kind]
    where = evidence.nonfinite.where if evidence.nonfinite else _where(told)
    between = bool(told) and all(finding.check == "manner" for finding in told)
    ours, reference = _compared(told[0]) if between else (a.label, b.label)
    wrong = _wrong(told, evidence, a, b) if kind == "bug" else None
    return Verdict(
        kind=kind,
        model=f"{model.name} · {model.dtype_name} · attn {model.attn}",
        a=ours,
        b=reference,
        reasons=tuple(_reasons(evidence, kind, told)),
        where=where if kind in ("bug", "nonfinite", "lossy", "by_design") else None,
        signature=_signature(evidence, told, model),
        wrong=wrong,
        suggestion=_suggestion(kind, where, wrong, told, evidence, model),
        not_examined=tuple(_together(evidence.not_examined)),
    )


def _compared(finding: Finding) -> tuple[str, str]:
    """Labels of the two manners of calling that a finding holds against each other."""
    assert finding.moment is not None
    assert finding.moment.case.b is not None
    return finding.moment.case.a.label, finding.moment.case.b.label


def _signature(evidence: Evidence, told: Sequence[Finding], model: Model) -> tuple[str, ...]:
    if evidence.nonfinite is not None:
        return () if evidence.nonfinite.manner is None else (evidence.nonfinite.manner,)
    return signature(told, model.architecture)


def _kind(evidence: Evidence, faults: Sequence[Finding]) -> VerdictKind:
    if evidence.nonfinite is not None:
        return "nonfinite"
    if any(finding.check in ("crash", "stale", "prefix", "unfilled", "visibility", "loss") for finding in faults):
        return "bug"
    if evidence.repeats:
        return "nondeterministic"
    if any(finding.check in ("witness", "operator") for finding in faults):
        return "bug"
    if any(not (evidence.self_test and finding.check in ON_THE_ARM) for finding in faults):
        return "bug"
    excused = [finding for finding in evidence.findings if finding.excuse is not None]
    excuses = [finding.excuse.kind for finding in excused if finding.excuse is not None]
    looked_ahead = set(excuses) == {"by_design"} and {finding.check for finding in excused} == {"visibility"}
    if excuses and not (looked_ahead and not evidence.arm_differs and not evidence.unsettled):
        return "lossy" if "lossy" in excuses else "by_design"
    if evidence.self_test and (faults or evidence.arm_differs) and not (evidence.not_covered or evidence.unlike):
        return "inconclusive"
    if evidence.unsettled:
        return "inconclusive"
    return "exact" if evidence.native_equal and evidence.counts.get("native") else "rounding"


def _where(findings: Sequence[Finding]) -> Where | None:
    """The place that the most precise check names: the arm's first difference, else the first conviction's."""
    placed = [finding for finding in findings if finding.where is not None]
    unfilled = [finding for finding in placed if finding.check == "unfilled"]
    lost = [finding for finding in placed if finding.check == "loss"]
    arm = [finding for finding in placed if finding.check in ("arm", "past")]
    return (unfilled or lost or arm or placed)[0].where if placed else None


def _wrong(findings: Sequence[Finding], evidence: Evidence, a: Path, b: Path) -> Literal["a", "b"] | None:
    """Which path is wrong: the one whose call was convicted, or the one that a third computation leaves alone."""
    seen = {f.path for f in findings if f.check in FACTS}
    if seen and a.label != b.label:
        if seen == {a.label}:
            return "a"
        if seen == {b.label}:
            return "b"
    votes = {witness.wrong for witness in evidence.float64 if witness.wrong is not None}
    return votes.pop() if len(votes) == 1 else None


def _reasons(evidence: Evidence, kind: VerdictKind, told: Sequence[Finding]) -> list[str]:
    reasons: list[str] = []
    if evidence.nonfinite is not None:
        return [evidence.nonfinite.sentence, *evidence.notes]
    if evidence.repeats:
        reasons.append(f"Run again over the same tokens, {' and '.join(evidence.repeats)} gave other bits.")
    elif evidence.counts.get("repeats"):
        reasons.append("Each path repeats itself in every bit.")
    reasons += [f"The control failed its self-test: {failure}." for failure in evidence.self_test[:SHOWN]]
    if evidence.self_test and kind not in ("inconclusive", "nondeterministic"):
        reasons.append("The verdict does not rest on the control.")
    if told:
        for check in dict.fromkeys(finding.check for finding in told):
            same = [finding for finding in told if finding.check == check]
            groups = _alike(same)
            reasons += [_sentence(group) for group in groups[:SHOWN]]
            if left := sum(map(len, groups[SHOWN:])):
                reasons.append(f"… and {left} more {plural(left, 'finding')} of the same check.")
            for why in dict.fromkeys(finding.excuse.why for finding in same if finding.excuse is not None):
                reasons.append(f"This is expected: {why}.")
    else:
        reasons += _clean(evidence)
    reasons += evidence.unsettled[:SHOWN]
    if evidence.unlike:
        reasons.append(
            "The paths run different models or controls, so no bit is promised; the verdict rests on float64."
        )
    elif evidence.not_covered:
        layers = _layers(evidence.not_covered)
        why = "; ".join(dict.fromkeys(evidence.not_covered.values()))
        rest = "float64" if evidence.float64 else "bits that agree all the same"
        reasons.append(f"No bitwise promise in layers {layers} ({why}); there the verdict rests on {rest}.")
    if evidence.float64:
        error = max(witness.error for witness in evidence.float64)
        reasons.append(f"In float64 the paths differ by at most {error:.1g} of the largest logit.")
    unread = [f"{sentence} (layers {_layers(layers)})." for sentence, layers in evidence.unread.items()]
    return [*reasons, *evidence.notes, *unread]


def _together(reasons: dict[str, str]) -> list[str]:
    """Cases that were left out, those with one reason together."""
    names: dict[str, list[str]] = {}
    for name, why in reasons.items():
        names.setdefault(why, []).append(name)
    return [f"{', '.join(cases)}: {why}." for why, cases in names.items()]


def _layers(layers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(layers)))


def _clean(evidence: Evidence) -> list[str]:
    counts, found = evidence.counts, Counter(finding.check for finding in evidence.findings)
    reasons = []
    if counts.get("visibility") and found["visibility"]:
        reasons.append(
            f"Of {counts['visibility']} distinct attention calls {found['visibility']} see other positions than "
            "causality and windows imply, which is excused."
        )
    elif counts.get("visibility"):
        reasons.append(
            f"All {counts['visibility']} distinct attention calls see the positions that they should, and no other."
        )
    if counts.get("arm") and not evidence.arm_differs:
        reasons.append(f"In shape-invariant arithmetic the paths agree in every bit at all {counts['arm']} steps.")
    if (counts.get("witness") or counts.get("operators")) and not (found["witness"] or found["operator"]):
        reasons.append(
            f"{counts.get('witness', 0)} attention calls and {counts.get('operators', 0)} kinds of operators stay "
            "within their rounding bounds against float64."
        )
    if counts.get("prefix"):
        reasons.append("The saved prefix is what the model gives for its tokens, up to rounding.")
    if counts.get("native"):
        said = (
            "no bit differs"
            if evidence.native_equal
            else f"logits differ by up to {evidence.native_drift:.1g} of the largest"
        )
        reasons.append(f"Natively {said} over {counts['native']} steps.")
    return reasons


def _alike(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Findings that say the same and differ by their step at most, together, in the order found."""
    groups: dict[tuple[str | None, str], list[Finding]] = {}
    for finding in findings:
        case = None if finding.moment is None else finding.moment.case.name
        groups.setdefault((case, finding.clause), []).append(finding)
    return list(groups.values())


def _sentence(alike: Sequence[Finding]) -> str:
    """One sentence for findings that differ by their step at most."""
    moments = {finding.moment.step: finding.moment for finding in alike if finding.moment is not None}
    text = str(alike[0])
    if len(moments) > 1:
        tokens = [moment.position + 1 for moment in moments.values()]
        name = next(iter(moments.values())).case.name
        text = f"{name}, steps {_numbers(moments)} ({min(tokens)} to {max(tokens)} tokens): {alike[0].clause}"
    return f"{text[0].upper()}{text[1:]}."


def _numbers(numbers: Iterable[int]) -> str:
    """``3 and 5``; ``3, 5 and 9``; ``1 to 8`` where none between is missing; the first of many."""
    found = sorted(numbers)
    if len(found) > 2 and found[-1] - found[0] == len(found) - 1:
        return f"{found[0]} to {found[-1]}"
    said, left = found[:LISTED], len(found) - LISTED
    if left > 0:
        return f"{', '.join(map(str, said))} and {left} more"
    return f"{', '.join(map(str, said[:-1]))} and {said[-1]}"


NEXT: dict[VerdictKind, str] = {
    "exact": "Nothing to do.",
    "rounding": "Nothing to mend. kd.compare shows how far it carries; kd.falsify, what higher precision would change.",
    "lossy": "To measure what the loss costs, kd.compare this path with CacheOff().",
    "by_design": "Keep to one side of the switch, or expect the difference.",
    "nondeterministic": "Switch off dropout and non-deterministic kernels, then diagnose again.",
}


def _other_arithmetic(model: Model) -> str:
    """What to diagnose again with: something that was not run."""
    ways = []
    if model.dtype != torch.float32 or model.device.type != "cpu":
        ways.append("in float32 on the CPU")
    if model.attn != "eager":
        ways.append("with attn='eager'")
    return f"Diagnose again {' or '.join(ways) or 'in float64 (dtype=float64)'}."


def _suggestion(
    kind: VerdictKind, where: Where | None, wrong: str | None, told: Sequence[Finding], evidence: Evidence, model: Model
) -> str:
    if evidence.nonfinite is not None:
        return evidence.nonfinite.advice
    if kind == "by_design" and any(finding.check == "visibility" for finding in told):
        return "Expect the difference: what is cached of a token was made before the later ones were there."
    if kind == "inconclusive":
        return _other_arithmetic(model)
    if kind != "bug":
        return NEXT[kind]
    checks = {finding.check for finding in told}
    if "crash" in checks:
        crash = next(finding for finding in told if finding.check == "crash")
        place = "" if crash.where is None else f" in {crash.where}"
        return f"Look at what raises{place}: {crash.path} does, over tokens that the other path runs."
    if "stale" in checks:
        return "Make a new cache for every prompt."
    if "prefix" in checks:
        return (
            "Make the prefix anew from these very tokens, at positions 0, 1, … and with this model: "
            "kd.Prefix.make(model, tokens); kd.Prefix.save and load keep it bit for bit."
        )
    if "unfilled" in checks and where is not None:
        return (
            f"Look at how the layers hand the cache to {where.module.removesuffix(' (cache update)')}: under another "
            "argument name than the attention looks for, it is never updated."
        )
    if "generate" in checks and len(checks) == 1:
        return "Look at prepare_inputs_for_generation: the position ids and the mask that it makes."
    if checks == {"manner"}:
        return (
            "Call the model in one manner throughout: kvdrift and generate() pass position_ids 0, 1, …; "
            "kd.CacheOn(call=…) and kd.CacheOff(call=…) run the others."
        )
    if checks == {"operator"}:
        return "Run with another build of PyTorch or another kernel, and report the operator with these shapes."
    if where is not None and " hook " in where.module:
        return f"Look at {where}: what the hook makes of a token must not depend on which others are in the same pass."
    if wrong == "b":
        return f"The cache-free path is the wrong one; look at {where} in passes without a cache."
    if where is not None and where.site in PAST.values():
        return (
            f"Look at what the cache stores and returns in layer {where.layer}: kd.record both paths and compare k, v."
        )
    if "visibility" in checks or checks == {"witness"}:
        return f"Look at the mask and the attention function of {where}; attn='eager' tells them apart."
    return f"Look at {where}: record both paths with kd.record and compare what goes in and comes out."
