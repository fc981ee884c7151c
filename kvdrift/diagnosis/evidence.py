"""What the checks found, gathered before anything is concluded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvdrift.controls.self_test import Failure
from kvdrift.diagnosis.float64 import Float64
from kvdrift.diagnosis.locate import Where
from kvdrift.diagnosis.lockstep import Moment

Check = Literal[
    "crash",
    "stale",
    "prefix",
    "unfilled",
    "visibility",
    "loss",
    "past",
    "arm",
    "witness",
    "operator",
    "manner",
    "generate",
]


@dataclass(frozen=True)
class Excuse:
    """Why a finding is no fault: the path declares a loss, or the paths are known to differ there."""

    kind: Literal["lossy", "by_design"]
    why: str


@dataclass(frozen=True)
class Finding:
    """One thing that ought not to be.

    Attributes
    ----------
    check
        Which check found it.
    path
        Label of the path that was seen to do it; of both, joined, where only their disagreement was seen.
    what
        A clause about it, to be read after the moment, the path and the place.
    moment
        When; None if it has no time.
    where
        The place.
    excuse
        Why it is no fault, or None.
    """

    check: Check
    path: str
    what: str
    moment: Moment | None = None
    where: Where | None = None
    excuse: Excuse | None = None

    @property
    def clause(self) -> str:
        """Path, place and what, without the moment."""
        place = "" if self.where is None else f", {self.where}"
        return f"{self.path}{place}: {self.what}"

    def __str__(self) -> str:
        when = "" if self.moment is None else f"{self.moment}: "
        return f"{when}{self.clause}"


@dataclass(frozen=True)
class NonFiniteFinding:
    """NaN or infinity in the logits of a path.

    Attributes
    ----------
    sentence
        What, where, when.
    where
        The first place; None if it is a weight or cannot be told.
    advice
        What to do next.
    manner
        The circumstance, as in `Case.manner`.
    """

    sentence: str
    where: Where | None
    advice: str
    manner: str | None = None


@dataclass
class Evidence:
    """Everything that the verdict rests on.

    Attributes
    ----------
    repeats
        Labels of paths that gave other bits when run again.
    nonfinite
        The first NaN or infinity; None if there is none.
    self_test
        Failures of the control's own test.
    not_covered
        Layers for which the shape-invariant arm promises nothing, with reasons.
    unlike
        Whether the two paths run different modules or controls, so that the arm promises nothing at all.
    looks_ahead
        Whether a mask of the model's lets tokens see later ones, in blocks.
    arm_differs
        Whether the shape-invariant arm gave other bits in the two paths at any step.
    findings
        What ought not to be, in the order found.
    unsettled
        Sentences on what could be judged neither a fault nor clean.
    float64
        The float64 witness, by case; empty if it was not called.
    native_equal
        Whether no bit differed natively at any step that was run.
    native_drift
        Largest native difference of logits, relative to the largest logit.
    notes
        Cases run on a tiny twin, and what else is to be said.
    not_examined
        Cases that were left out → why.
    lost
        Whether anything read by a path that declares a loss was not what it had written, or may not have been.
    unread
        What a check cannot judge, and why → in which layers.
    counts
        How much was looked at, by check.
    """

    repeats: list[str] = field(default_factory=list)
    nonfinite: NonFiniteFinding | None = None
    self_test: list[Failure] = field(default_factory=list)
    not_covered: dict[int, str] = field(default_factory=dict)
    unlike: bool = False
    looks_ahead: bool = False
    arm_differs: bool = False
    findings: list[Finding] = field(default_factory=list)
    unsettled: list[str] = field(default_factory=list)
    float64: list[Float64] = field(default_factory=list)
    native_equal: bool = True
    native_drift: float = 0.0
    notes: list[str] = field(default_factory=list)
    not_examined: dict[str, str] = field(default_factory=dict)
    lost: bool = False
    unread: dict[str, set[int]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def note(self, sentence: str) -> None:
        """Keep a sentence, once."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def count(self, what: str, n: int = 1) -> None:
        """Add to how much was looked at."""
        self.counts[what] = self.counts.get(what, 0) + n
