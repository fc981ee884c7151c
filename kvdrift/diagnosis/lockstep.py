"""One case, two paths: every step of both, observed on the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from kvdrift.controls import Control
from kvdrift.controls.combine import with_arm
from kvdrift.diagnosis.cases import Case
from kvdrift.diagnosis.observe import Observer, Snapshot
from kvdrift.models.model import Model
from kvdrift.paths.capabilities import rewindable, stateless
from kvdrift.paths.path import Path, Run
from kvdrift.paths.stepper import advance

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

    Path a runs through the whole case. Where tokens are taken back, path b is not asked before the first pass of
    several tokens or the first crop: until then other cases show as much.

    Parameters
    ----------
    model
        The model for paths that have none of their own.
    case
        The case, which holds path a.
    b
        The reference, if the case has none of its own.
    controls
        Entered by both paths beside their own.
    inspect
        Is shown every step before the next one runs, while caches still hold what was read.
    """
    b = case.reference(b)
    run_a = case.a.start(model, case.prompt, with_arm(case.a.controls, controls))
    observer, walk = Observer(run_a), _Walk(case, run_a)
    reference = _Reference(model, b, case, controls)
    try:
        for moment, tokens in walk:
            a = observer.step(tokens)
            walk.greedy = int(a.logits.argmax())
            moment = replace(moment, position=a.position)
            if inspect is not None:
                inspect(moment, case.a, a)
            if case.crops and not walk.cropped and len(tokens or ()) < 2:
                continue
            reference_step = reference.step(walk.fed)
            if inspect is not None:
                inspect(moment, b, reference_step)
            yield moment, a, reference_step
    finally:
        run_a.close()
        reference.close()


def alone(model: Model, case: Case, controls: tuple[Control, ...] = ()) -> Iterator[Moment]:
    """Run path a of a case with nothing watching it, natively by default; yields every step before it is run."""
    run = case.a.start(model, case.prompt, with_arm(case.a.controls, controls))
    walk = _Walk(case, run)
    try:
        for moment, tokens in walk:
            yield moment
            walk.greedy = int(advance(run, tokens).logits.argmax())
    finally:
        run.close()


class _Walk:
    """The passes of a case along its run, with what is taken back between them.

    Attributes
    ----------
    fed
        What was consumed after the prompt, less what was taken back.
    greedy
        The token to be consumed next where the case gives none: set by whoever steps the run.
    cropped
        Whether anything was taken back yet.
    """

    def __init__(self, case: Case, run: Run) -> None:
        self.case, self.run = case, run
        self.fed: list[int] = []
        self.greedy, self.cropped = 0, False

    def __iter__(self) -> Iterator[tuple[Moment, list[int] | None]]:
        """When the next pass is, and its tokens (None: the prompt)."""
        case, prompt = self.case, self.case.prompt
        if case.crops:
            rewindable(self.run).keep_past()
        yield Moment(case, 0, len(prompt) - 1, prompt), None
        given = None if case.feed is None else iter(case.feed)
        for step, one in enumerate(case.schedule, 1):
            tokens = [self.greedy] if given is None else list(islice(given, one.n_tokens))
            self.fed += tokens
            yield Moment(case, step, len(prompt) + len(self.fed) - 1, (*prompt, *self.fed)), tokens
            if one.taken_back:
                rewindable(self.run).rewind(one.taken_back)
                del self.fed[len(self.fed) - one.taken_back :]
                self.cropped = True


class _Reference:
    """Path b at chosen steps; begun anew after tokens were taken back."""

    def __init__(self, model: Model, path: Path, case: Case, controls: tuple[Control, ...]) -> None:
        self._begin = lambda: path.start(model, case.prompt, with_arm(path.controls, controls))
        self._observer: Observer | None = None
        self._fed: list[int] | None = None

    def step(self, fed: list[int]) -> Snapshot:
        """The step after the prompt and ``fed``."""
        if self._observer is None or (self._fed is not None and self._fed != fed[: len(self._fed)]):
            self.close()
            self._observer, self._fed = Observer(self._begin()), None
        run = self._observer.run
        todo: list[int | None] = [*fed[len(self._fed or ()) :]]
        if stateless(run):
            for passed in fed[len(self._fed or ()) : -1]:
                run.skip(passed)
            todo = todo[-1:] or [None]
        elif self._fed is None:
            todo.insert(0, None)
        for token in todo:
            snapshot = self._observer.step(None if token is None else [token])
        self._fed = list(fed)
        return snapshot

    def close(self) -> None:
        if self._observer is not None:
            self._observer.run.close()
            self._observer = None
