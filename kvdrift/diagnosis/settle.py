"""What a disagreement of the shape-invariant arm means, with the float64 witness where it is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvdrift.controls.float64_copy import float64_copy
from kvdrift.controls.precision import experts_note
from kvdrift.diagnosis.cases import Case
from kvdrift.diagnosis.design import bidirectional, excuse
from kvdrift.diagnosis.evidence import Check, Evidence, Finding
from kvdrift.diagnosis.float64 import Float64, float64_witness, in_float64
from kvdrift.diagnosis.locate import Where, place
from kvdrift.diagnosis.lockstep import Moment
from kvdrift.diagnosis.raised import cause
from kvdrift.errors import InternalError, KvdriftError, one_line
from kvdrift.models.model import Model
from kvdrift.paths.loss import Declared
from kvdrift.paths.path import Path

EVERYWHERE = -1
"""No place comes before it, the embedding included."""


@dataclass(frozen=True)
class Disagreement:
    """A step at which the paths gave other bits in shape-invariant arithmetic.

    Attributes
    ----------
    model
        Which model ran.
    moment
        When.
    key
        The first layer and site that differ.
    hint
        A clause on what else was seen, or empty.
    """

    model: Model
    moment: Moment
    key: tuple[int, str]
    hint: str = ""


def settle(
    evidence: Evidence,
    disagreements: Sequence[Disagreement],
    placed: Sequence[tuple[Model, Case]],
    b: Path,
    lossy: Declared | None,
) -> None:
    """Turn disagreements into findings, or into sentences on what stays open.

    A disagreement convicts by itself where the arm promises equality, unless float64 shows that the two paths compute
    one function. Where the arm promises nothing, or fails its own test, float64 alone decides.
    """
    uncovered = EVERYWHERE if evidence.unlike else min(evidence.not_covered, default=None)
    promised_anywhere = uncovered is None and not evidence.self_test
    differing = {one.moment.case.name for one in disagreements}
    todo = [(model, case) for model, case in placed if case.name in differing]
    if uncovered is not None:
        todo += [(model, case) for model, case in placed if case.name not in differing]
    if not todo:
        return
    witnesses, missing = _witnesses(todo[:1] if promised_anywhere else todo, b)
    if promised_anywhere and missing is None and all(witness.agrees for witness in witnesses.values()):
        more, missing = _witnesses(todo[1:], b)
        witnesses |= more
    evidence.float64 = list(witnesses.values())
    experts = experts_note(placed[0][0].hf)
    if witnesses and experts is not None:
        evidence.note(f"{experts[0].upper()}{experts[1:]}.")
    if any(witness.constants for witness in witnesses.values()):
        evidence.note(
            "In float64 the paths differ by the rounding of constants that the model holds in float32: when those move "
            "by less than float32 resolves, the difference becomes another."
        )
    if missing is not None:
        evidence.note(f"The float64 witness could not be called: {missing}.")
        if uncovered is not None and evidence.arm_differs:
            evidence.unsettled.append("Layers without a bitwise promise need the float64 witness.")

    judge = _Judge(evidence, b, lossy, bidirectional(placed[0][0]) or evidence.looks_ahead)
    for one in disagreements:
        promised = not evidence.self_test and (uncovered is None or one.key[0] < uncovered)
        judge(one, witnesses.get(one.moment.case.name), promised)
    for name, witness in witnesses.items():
        if name not in differing and witness.moment is not None:
            judge.convict(witness.moment, witness.where, _apart(witness))


@dataclass(frozen=True)
class _Judge:
    evidence: Evidence
    b: Path
    lossy: Declared | None
    bidirectional: bool

    def __call__(self, one: Disagreement, witness: Float64 | None, promised: bool) -> None:
        moment, where = one.moment, place(one.model, *one.key)
        bits = "other bits in shape-invariant arithmetic"
        hint = f"; {one.hint}" if one.hint else ""
        if witness is not None and not witness.agrees:
            named = witness.where  # which names the module
            if named is not None and (not promised or (where.layer, where.site) == (named.layer, named.site)):
                where = named
            self.convict(moment, where, f"{bits}, and {_apart(witness)}{hint}")
        elif witness is None and promised:
            self.convict(moment, where, bits + hint)
        elif witness is None:
            self.evidence.unsettled.append(f"{moment}: {bits} at {where}, where it promises nothing.")
        elif promised and moment.case.between_manners:
            self.evidence.note(f"{moment}: {bits}, and the same function in float64 (to {witness.error:.1g}).")
        elif promised:
            self.evidence.unsettled.append(
                f"{moment}: {bits} at {where}, while the paths agree to {witness.error:.1g} in float64: one of them "
                "rounds where the other does not (a cast, say), or an operator is not held at one shape."
            )

    def convict(self, moment: Moment, where: Where | None, what: str) -> None:
        case = moment.case
        both = f"{case.a.label} and {case.reference(self.b).label}"
        why = excuse(moment, self.lossy, self.bidirectional)
        check: Check = "manner" if case.between_manners else "arm"
        self.evidence.findings.append(Finding(check, both, what, moment, where, why))


def _apart(witness: Float64) -> str:
    moving = "; what is computed of a token depends there on those that follow it" if witness.rows_move else ""
    return f"float64 differs by {witness.error:.2g} of the largest logit{moving}"


def _witnesses(todo: Sequence[tuple[Model, Case]], b: Path) -> tuple[dict[str, Float64], str | None]:
    """The float64 witness of each case by name, and why not all could be called.

    Raises
    ------
    InternalError
        If both paths run in float64 by themselves, and fail only under kvdrift's eyes.
    """
    copies: dict[int, Model] = {}
    found: dict[str, Float64] = {}
    missing: str | None = None
    for model, case in todo:
        try:
            if id(model) not in copies:
                copies[id(model)] = float64_copy(model)
            copy, (case64, b64) = copies[id(model)], in_float64(case, b)
        except KvdriftError as error:
            return found, one_line(error)
        try:
            found[case.name] = float64_witness(copy, case64, b64)
        except InternalError:
            raise
        except Exception as error:  # whatever a model raises that has no float64
            why = cause(copy, case64, b64, error)
            missing = missing or (f"{why.path} {why.what}" if isinstance(why, Finding) else why)
    return found, missing
