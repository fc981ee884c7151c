"""What the diagnosis says, and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from kvdrift.diagnosis.locate import Where
from kvdrift.result import say

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
        return str(say(self, "summary"))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return str(say(self, "html"))
