"""Runs every check of a diagnosis and gathers what it finds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from kvdrift.bits import same_bits
from kvdrift.controls import Control
from kvdrift.controls.fixed_shape import FixedShape, not_covered
from kvdrift.controls.self_test import N_TOKENS, Failure, self_test
from kvdrift.diagnosis import generated
from kvdrift.diagnosis.calls import CallChecks
from kvdrift.diagnosis.cases import Case, default_cases, fits, left_out, too_costly
from kvdrift.diagnosis.declared import judged
from kvdrift.diagnosis.design import excuse, without_loss
from kvdrift.diagnosis.evidence import Evidence, Finding
from kvdrift.diagnosis.lanes import apart, lane_cases, not_run, told
from kvdrift.diagnosis.locate import Where, cache_update, changed_past, first_difference, place
from kvdrift.diagnosis.lockstep import Moment, lockstep
from kvdrift.diagnosis.nonfinite import explain
from kvdrift.diagnosis.observe import Snapshot, by_uncached_pass
from kvdrift.diagnosis.operator_witness import OperatorWitness
from kvdrift.diagnosis.prefixed import begun_with, stale_prefix
from kvdrift.diagnosis.raised import cause, said
from kvdrift.diagnosis.settle import Disagreement, settle
from kvdrift.diagnosis.twin import twin
from kvdrift.errors import (
    InputError,
    InternalError,
    KvdriftError,
    ModelError,
    NotFaithfulError,
    StaleCacheError,
    one_line,
)
from kvdrift.models.model import Model
from kvdrift.models.rope import rope_switch
from kvdrift.paths.capabilities import cache_of
from kvdrift.paths.path import Path
from kvdrift.paths.path_capabilities import anew, begins_saved, declared_loss, has_cache, holds, own_cache
from kvdrift.shapes import Logits

REPEATED_STEPS = 3
NATIVE_SHARE = 0.1
"""Up to this share of the cost that sends a case to a twin, it is also run natively (slow in half precision)."""
SLACK = 16
"""Slots of the shape-invariant arm beyond the longest sequence, for caches that hold more than they should."""


class Gathering:
    """Gathers the evidence on one model and two paths.

    Parameters
    ----------
    model
        The model for paths that have none of their own.
    a, b
        The path under test and the reference.
    seed
        Decides random tokens and weights of a twin.
    bar
        A progress bar.
    """

    def __init__(self, model: Model, a: Path, b: Path, seed: int, bar: Any) -> None:
        self.model, self.a, self.b, self.seed, self.bar = model, a, b, seed, bar
        self.evidence = Evidence()
        self.lossy = declared_loss(a) or declared_loss(b)
        self.first = ""
        self.checks: dict[int, CallChecks] = {}
        self.disagreements: list[Disagreement] = []

    def run(self, cases: Sequence[Case], generate: Mapping[str, Any] | None = None) -> Evidence:
        """Run the checks over ``cases``, the first of which is a plain one.

        Raises
        ------
        ModelError
            If the model cannot be observed, or neither path can run the first case.
        InternalError
            If a check of kvdrift's own fails.
        """
        evidence, self.first = self.evidence, cases[0].name
        if self.model.hf.training:
            evidence.note("The model was in training mode; it was run in evaluation mode.")
        if not self._guarded(self.model, cases[0], self._repeat) or not evidence.counts.get("repeats"):
            return evidence
        try:
            self.model = by_uncached_pass(self.model)
        except (ModelError, NotFaithfulError):
            if evidence.repeats:  # which is why it cannot be traced
                return evidence
            raise
        self._filled(cases[0])
        self._prefix(cases[0])
        evidence.not_covered = not_covered(self.model)
        ours, reference = self.a.model or self.model, self.b.model or self.model
        _check_weights(ours, reference)
        evidence.unlike = ours.hf is not reference.hf or self.a.controls != self.b.controls
        evidence.self_test = self._self_test()
        placed = self._placed(cases)
        if declared_loss(self.b) is None:
            placed += [(model, again) for model, case in placed for again in without_loss([case], self.lossy)]
        ran: list[tuple[Model, Case]] = []
        for model, case in placed:
            if self._guarded(model, case, self._run):
                ran.append((model, case))
            if evidence.nonfinite is not None:
                return evidence
            if case is cases[0] and self._convicts(model, case):
                evidence.note(f"Only the first case, {case.name}, was run: it convicts.")
                return evidence
        self._guarded(self.model, cases[0], self._operators)
        if generate is not None:
            generated.examine(evidence, self.model, self.a, cases[0], generate, self.lossy)
        settle(evidence, self.disagreements, ran, self.b, self.lossy)
        self._no_cause()
        if self.lossy is not None:
            evidence.note(judged(self.lossy, evidence.counts.get("loss", 0), evidence.lost))
        for sentence in (*apart(evidence.findings), *told([case for _, case in ran if not case.lossless])):
            evidence.note(sentence)
        return evidence

    def _guarded(self, model: Model, case: Case, check: Callable[[Model, Case], None]) -> bool:
        """Run a check of a case; whether it could be run. An error becomes a crash, a case left out, or kvdrift's own.

        Raises
        ------
        ModelError
            If neither path can run the first case.
        KvdriftError
            If a path refuses the first case, or kvdrift itself failed.
        """
        first = model is self.model and case.name == self.first
        try:
            check(model, case)
            return True
        except InternalError:
            raise
        except Exception as error:  # whatever a model, a cache or a path of somebody's own raises
            found = cause(model, case, self.b, error)
            if isinstance(found, str) and first:
                if isinstance(error, KvdriftError):
                    raise
                raise ModelError(f"{self.model.name} cannot be diagnosed over {case.name}: {found}") from error
        self.disagreements = [one for one in self.disagreements if one.moment.case is not case]
        if isinstance(found, Finding) and model is not self.model and own_cache(case.a) is not None:
            found = f"{found.path} {found.what} on a tiny twin, for which its own cache need not be made"
        if isinstance(found, Finding):
            self.evidence.findings.append(found)
        else:
            self.evidence.not_examined[case.name] = found
        return False

    def _repeat(self, _: Model, case: Case) -> None:
        """Run each path twice; a cache that is not empty at the second time ends it."""
        for path in (self.a, self.b):
            try:
                first, again = self._logits(path, case), self._logits(path, case)
            except StaleCacheError as error:
                where = Where(None, "the KV cache", "past k")
                self.evidence.findings.append(Finding("stale", path.label, one_line(error), where=where))
                return
            if not all(same_bits(x, y) for x, y in zip(first, again, strict=True)):
                self.evidence.repeats.append(path.label)
        self.evidence.count("repeats")

    def _self_test(self) -> list[Failure]:
        """What fails in the self-test of fixed shape; the model itself may, over the tokens of the test."""
        longest = min(64, (rope_switch(self.model.hf.config) or 65) - 1)  # at the switch dynamic NTK still remembers
        try:
            return self_test(self.model, FixedShape(longest))
        except KvdriftError:
            raise
        except Exception as error:  # whatever the model raises
            ids = torch.zeros((1, N_TOKENS), dtype=torch.long, device=self.model.device)
            try:
                with self.model.evaluating():
                    self.model.hf(input_ids=ids, use_cache=False)
            except Exception as own:  # whatever the model raises
                return [Failure("junk", "a pass of the model", f"{N_TOKENS} tokens without a cache: {said(own)}")]
            raise InternalError.of(error, f"in the self-test of fixed shape on {self.model.name}") from error

    def _filled(self, case: Case) -> None:
        """Look for a path whose attention gives its keys and values to no layer of the cache."""
        for path in (self.a, self.b):
            model = path.model or self.model
            if not has_cache(path):
                continue
            run = path.start(model, case.prompt)
            try:
                run.step()
            finally:
                run.close()
            kinds = dict(enumerate(getattr(cache_of(run), "layers", ())))
            plain = {layer: kinds.get(layer) for layer in model.coverage.attention_layers}
            held = {layer: kind.get_seq_length() for layer, kind in plain.items() if isinstance(kind, DynamicLayer)}
            if held and not any(map(int, held.values())):
                n = len(case.prompt)
                what = f"attention never hands its keys and values to the cache, which is empty after {n} tokens"
                where = cache_update(model, min(held))
                self.evidence.findings.append(Finding("unfilled", path.label, what, where=where))

    def _prefix(self, case: Case) -> None:
        """Hold a prefix that path a starts from against what its model gives for the tokens."""
        path = self.a
        if not begins_saved(path):
            return
        found = stale_prefix(self.model, case, path)
        if found is None:
            self.evidence.count("prefix")
        elif found.moment is not None:
            why = excuse(found.moment, self.lossy, bidirectional=False)
            self.evidence.findings.append(replace(found, excuse=why))
            if why is not None and why.kind == "lossy":
                self.evidence.lost = True
                self.evidence.note(
                    "What the saved prefix lost was lost before, so it was not held to what is declared: it was taken "
                    "on trust."
                )

    def _logits(self, path: Path, case: Case) -> list[Logits]:
        """Logits of the first steps, natively and with nothing watching."""
        run = path.start(self.model, case.prompt)
        try:
            logits = [run.step().logits]
            for step in range(min(REPEATED_STEPS, case.steps)):
                logits.append(run.step(case.feed[step] if case.feed is not None else step).logits)
            self.bar.update(len(logits))
        finally:
            run.close()
        return logits

    def _placed(self, cases: Sequence[Case]) -> list[tuple[Model, Case]]:
        """Each case with the model that runs it: the model itself, or its tiny twin."""
        self.evidence.not_examined |= left_out(self.model, self.a) | not_run(self.a, self.b)
        for case in cases:
            if not fits(self.model, case):
                self.evidence.not_examined[case.name] = "the model's context is too short"
        cases = [case for case in cases if fits(self.model, case)]
        near = [case for case in cases if case.of_user or not too_costly(self.model, case)]
        far = [case.name for case in cases if case not in near]
        placed = [(self.model, case) for case in near]
        if far:
            try:
                small = twin(self.model, self.seed)
            except ModelError as error:
                self.evidence.not_examined |= dict.fromkeys(far, f"too costly. {one_line(error)}")
            else:
                self.evidence.note(f"Run on a tiny twin of the model, since they cost too much: {', '.join(far)}.")
                known = {case.name for case in near}
                held = tuple(token % small.vocab_size for token in holds(self.a, cases[0].prompt))
                a = anew(self.a, held)
                alike = [*default_cases(small, a, self.seed), *lane_cases(small, a, self.b, self.seed)]
                placed += [(small, case) for case in begun_with(alike, held) if case.name not in known]
        return placed

    def _run(self, model: Model, case: Case) -> None:
        """Run a case natively, where that is cheap, and in shape-invariant arithmetic."""
        if not case.between_manners and not too_costly(model, case, NATIVE_SHARE):
            self._native(model, case)
        if self.evidence.nonfinite is None:
            self._fixed(model, case)

    def _convicts(self, model: Model, case: Case) -> bool:
        """Whether the first case, a plain one, shows a fault: other cases would not describe it better."""
        evidence = self.evidence
        if any(finding.check == "crash" for finding in evidence.findings):
            return True
        if evidence.unlike or evidence.not_covered or evidence.repeats:
            return False
        settle(evidence, self.disagreements, [(model, case)], self.b, self.lossy)
        self._no_cause()
        if any(finding.excuse is None for finding in evidence.findings):
            return True
        evidence.unsettled.clear()  # to be judged again with what the other cases show
        evidence.findings = [finding for finding in evidence.findings if finding.check != "arm"]
        return False

    def _no_cause(self) -> None:
        """Where every attention layer read what it had written, bit for bit, no declared loss excuses anything."""
        evidence = self.evidence
        if evidence.counts.get("loss") and not evidence.lost and not evidence.not_covered:
            evidence.findings = [
                replace(finding, excuse=None) if finding.excuse and finding.excuse.kind == "lossy" else finding
                for finding in evidence.findings
            ]

    def _inspect(self, model: Model) -> CallChecks:
        return self.checks.setdefault(id(model), CallChecks(model, self.evidence, self.lossy))

    def _native(self, model: Model, case: Case) -> None:
        for moment, x, y in lockstep(model, case, self.b, (), self._inspect(model)):
            self.bar.update()
            if self._nonfinite(model, moment, x, y):
                return
            self.evidence.count("native")
            if first_difference(x, y) is not None:
                self.evidence.native_equal = False
            ours, reference = x.logits.double(), y.logits.double()
            drift = float((ours - reference).abs().max() / reference.abs().max())
            self.evidence.native_drift = max(self.evidence.native_drift, drift)

    def _fixed(self, model: Model, case: Case) -> None:
        fixed = (FixedShape(case.n_tokens + SLACK),)
        before: tuple[Moment, Snapshot] | None = None
        for moment, x, y in lockstep(model, case, self.b, fixed, self._inspect(model)):
            self.bar.update()
            if self._nonfinite(model, moment, x, y, fixed):
                return
            self.evidence.count("arm")
            rests = self.evidence.self_test and not has_cache(case.a)  # computes its past anew
            if before is not None and not (self.evidence.not_covered or self.evidence.unlike or rests):
                self._past(model, moment, *before, x)
            before = moment, x
            key = first_difference(x, y)
            if key is not None:
                self.evidence.arm_differs = True
                self.disagreements.append(
                    Disagreement(model, moment, key, _positions(case.reference(self.b), moment, x, y))
                )

    def _past(self, model: Model, moment: Moment, earlier: Moment, before: Snapshot, now: Snapshot) -> None:
        kept = sum(takewhile(bool, (x == y for x, y in zip(earlier.tokens, moment.tokens, strict=False))))
        key = changed_past(before, now, kept)
        if key is not None:
            what = "keys or values of earlier positions are no longer what they were one step before"
            why = excuse(moment, self.lossy, bidirectional=False)
            self.evidence.findings.append(Finding("past", moment.case.a.label, what, moment, place(model, *key), why))

    def _nonfinite(
        self, model: Model, moment: Moment, x: Snapshot, y: Snapshot, controls: tuple[Control, ...] = ()
    ) -> bool:
        for path, snapshot in ((moment.case.a, x), (moment.case.reference(self.b), y)):
            if not snapshot.logits.isfinite().all():
                self.evidence.nonfinite = explain(model, moment, path, controls, twin=model is not self.model)
                return True
        return False

    def _operators(self, _: Model, case: Case) -> None:
        """Hold every native operator of a short run of both paths against float64."""
        witness = OperatorWitness(self.model.hf)
        short = replace(case, steps=min(case.steps, 2))
        for path in (self.a, self.b):
            with witness:
                self._logits(path, short)
        self.evidence.count("operators", len(witness.worst))
        self.evidence.findings += [
            Finding("operator", "both paths", str(excess), where=Where(None, excess.module, excess.op))
            for excess in witness.excesses
        ]
        if witness.unchecked:
            self.evidence.note(f"Operators without a known rounding bound: {', '.join(sorted(witness.unchecked))}.")


def _check_weights(a: Model, b: Model) -> None:
    """Refuse two models that hold other numbers under one name.

    Raises
    ------
    InputError
        With the first such weight.
    """
    if a.hf is b.hf:
        return
    theirs = {b.backend.plain_name(name): weight for name, weight in b.hf.named_parameters()}
    for name, weight in a.hf.named_parameters():
        other = theirs.get(a.backend.plain_name(name))
        if other is None or other.shape != weight.shape or weight.is_meta or other.is_meta:
            continue
        if not torch.equal(weight.double(), other.to(weight.device).double()):
            raise InputError(
                f"The two paths run models with different weights ({name}), so they compute different functions by "
                "that alone; make one from the other with kvdrift.controls.cast_copy."
            )


def _positions(b: Path, moment: Moment, x: Snapshot, y: Snapshot) -> str:
    """A clause on position ids that are not what they should be; empty if there is nothing to say."""
    said = [
        f"the rotary embedding of {path.label} was given position {snapshot.rotary} for {snapshot.position}"
        for path, snapshot in ((moment.case.a, x), (b, y))
        if snapshot.rotary not in (None, snapshot.position)
    ]
    return " and ".join(said)
