"""One case, two paths: every step of both, observed on the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvdrift.controls import Control
from kvdrift.diagnosis.cases import Case
from kvdrift.diagnosis.observe import Observer, Snapshot
from kvdrift.paths.path import Path

if TYPE_CHECKING:
    from kvdrift.models.model import Model

Inspect = Callable[["Moment", Path, Snapshot], None]
"""Is shown every observed step of either path: when, which path, and what it showed."""


@dataclass(frozen=True)
class Moment:
    """When something happened.

    Attributes
    ----------
    case
        The case.
    step
        Its step; step 0 consumes the prompt.
    position
        The current position.
    tokens
        What was consumed: the prompt and what was fed, less what was taken back.
    """

    case: Case
    step: int
    position: int
    tokens: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.case.name}, step {self.step} ({self.position + 1} tokens)"


def lockstep(
    model: Model, case: Case, b: Path, controls: tuple[Control, ...], inspect: Inspect | None = None
) -> Iterator[tuple[Moment, Snapshot, Snapshot]]:
    """Run a case and yield every step of both paths.

    Path a runs through the whole case. Of the steps before tokens are taken back, path b is not asked.

    Parameters
    ----------
    model
        The model for paths that have none of their own.
    case
        The case, which holds path a.
    b
        The reference.
    controls
        Entered by both paths beside their own.
    inspect
        Is shown every step before the next one runs, while caches still hold what was read.
    """
    run_a = case.a.start(model, case.prompt, (*case.a.controls, *controls))
    observer = Observer(run_a)
    if case.crop is not None and hasattr(run_a, "keep_past"):
        run_a.keep_past()
    reference = _Reference(model, b, case, controls)
    fed: list[int] = []
    try:
        token, greedy = None, 0
        for step in range(case.steps + 1):
            if step:
                token = case.feed[step - 1] if case.feed is not None else greedy
                if case.crop is not None and step == case.crop[0] + 1:
                    n_back = case.crop[1]
                    run_a.crop(n_back)  # type: ignore[attr-defined] # cases with crop are made for such runs only
                    del fed[len(fed) - n_back :]
                fed.append(token)
            a = observer.step(token)
            greedy, moment = int(a.logits.argmax()), Moment(case, step, a.position, (*case.prompt, *fed))
            if inspect is not None:
                inspect(moment, case.a, a)
            if case.crop is not None and step <= case.crop[0]:
                continue
            reference_step = reference.step(fed)
            if inspect is not None:
                inspect(moment, b, reference_step)
            yield moment, a, reference_step
    finally:
        run_a.close()
        reference.close()


class _Reference:
    """Path b at chosen steps; begun anew after tokens were taken back."""

    def __init__(self, model: Model, path: Path, case: Case, controls: tuple[Control, ...]) -> None:
        self._begin = lambda: path.start(model, case.prompt, (*path.controls, *controls))
        self._observer: Observer | None = None
        self._fed: list[int] | None = None

    def step(self, fed: list[int]) -> Snapshot:
        """The step after the prompt and ``fed``."""
        if self._observer is None or (self._fed is not None and self._fed != fed[: len(self._fed)]):
            self.close()
            self._observer, self._fed = Observer(self._begin()), None
        run = self._observer.run
        todo: list[int | None] = [*fed[len(self._fed or ()) :]]
        if getattr(run, "stateless", False):
            for passed in fed[len(self._fed or ()) : -1]:
                run.skip(passed)
            todo = todo[-1:] or [None]
        elif self._fed is None:
            todo.insert(0, None)
        for token in todo:
            snapshot = self._observer.step(token)
        self._fed = list(fed)
        return snapshot

    def close(self) -> None:
        if self._observer is not None:
            self._observer.run.close()
            self._observer = None
