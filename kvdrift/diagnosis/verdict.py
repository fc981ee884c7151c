"""What the diagnosis says, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from kvdrift import markup
from kvdrift.diagnosis.locate import Where

VerdictKind = Literal["exact", "rounding", "lossy", "by_design", "bug", "nonfinite", "nondeterministic", "inconclusive"]
KINDS: tuple[VerdictKind, ...] = get_args(VerdictKind)
EXIT_CODES: dict[VerdictKind, int] = {
    "exact": 0, "rounding": 0, "lossy": 0, "by_design": 0,
    "bug": 1, "nonfinite": 1, "nondeterministic": 1,
    "inconclusive": 2,
}  # fmt: skip
MEANING: dict[VerdictKind, str] = {
    "exact": "the two paths compute the same function and give the same bits",
    "rounding": "the two paths compute the same function; their difference is rounding",
    "lossy": "the cache gives up precision or entries, as it declares",
    "by_design": "the two paths are known to compute different functions here",
    "bug": "the two paths compute different functions",
    "nonfinite": "NaN or infinity appears",
    "nondeterministic": "the same path over the same tokens gives different bits",
    "inconclusive": "no verdict is possible on this machine or for this model",
}


@dataclass(frozen=True)
class Verdict:
    """Why two paths of a model differ; made by `kvdrift.diagnose`.

    ``exact`` and ``rounding`` mean that the paths compute the same function, not that the function is right.

    Attributes
    ----------
    kind
        One of `KINDS`; `MEANING` says what each means.
    model
        The model's name, dtype and attention.
    a, b
        Labels of the path under test and of the reference.
    reasons
        The evidence, in the order in which it was gathered, each a sentence.
    where
        The first place whose inputs agree while its outputs differ, or the call that was convicted; else None.
    signature
        When it happens: ``"from the first decode step"``, ``"at the window"``, …
    wrong
        Which of the two paths is wrong, ``"a"`` or ``"b"``, where that can be told.
    suggestion
        What to do next.
    not_examined
        What could not be looked at, each with the reason: the verdict says nothing about it.
    """

    kind: VerdictKind
    model: str
    a: str
    b: str
    reasons: tuple[str, ...]
    where: Where | None = None
    signature: tuple[str, ...] = ()
    wrong: Literal["a", "b"] | None = None
    suggestion: str = ""
    not_examined: tuple[str, ...] = ()

    @property
    def equivalent(self) -> bool:
        """Whether the two paths compute the same function: ``exact`` or ``rounding``."""
        return self.kind in ("exact", "rounding")

    @property
    def exit_code(self) -> int:
        """0 for what is as it should be, 1 for a fault, 2 for no verdict."""
        return EXIT_CODES[self.kind]

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold."""
        return asdict(self) | {"meaning": MEANING[self.kind]}

    def __str__(self) -> str:
        lines = [self._headline(), f"{self.model}: {self.a} against {self.b}"]
        lines += [f"{name}: {value}" for name, value in self._circumstances()]
        lines += [f"  {number}. {reason}" for number, reason in enumerate(self.reasons, 1)]
        lines += [f"not examined: {case}" for case in self.not_examined]
        if self.suggestion:
            lines.append(f"next: {self.suggestion}")
        return "\n".join(lines)

    __repr__ = __str__

    def _headline(self) -> str:
        return f"{self.kind.upper().replace('_', ' ')}: {MEANING[self.kind]}."

    def _circumstances(self) -> Iterator[tuple[str, str]]:
        """Where, which path and when, as far as they are known."""
        if self.where is not None:
            yield "where", str(self.where)
        if self.wrong is not None:
            yield "wrong path", self.a if self.wrong == "a" else self.b
        if self.signature:
            yield "when", ", ".join(self.signature)

    def _repr_html_(self) -> str:
        return markup.block(
            self._headline(),
            markup.paragraph(f"{self.model}: {self.a} against {self.b}"),
            markup.table(self._circumstances()),
            markup.listing(self.reasons, numbered=True),
            *(markup.paragraph(f"Not examined: {case}") for case in self.not_examined),
            markup.paragraph(f"Next: {self.suggestion}" if self.suggestion else ""),
        )
