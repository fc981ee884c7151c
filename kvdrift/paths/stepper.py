"""The watched stepper: a run, what a tap on its model shows of each step, and forks that are closed after use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from kvdrift.controls import Control
from kvdrift.errors import NonFiniteError
from kvdrift.models.sites import PATTERN
from kvdrift.paths.capabilities import extend, unplaced
from kvdrift.paths.nonfinite import explain_nonfinite
from kvdrift.paths.path import Path, Run, Step
from kvdrift.tracing.finite import is_nonfinite
from kvdrift.tracing.tap import Tap, Values

if TYPE_CHECKING:
    from kvdrift.models.model import Model


@dataclass(frozen=True)
class Shown:
    """What one step of a run showed.

    Attributes
    ----------
    step
        Its logits and its position.
    passes
        What the tap read, pass by pass: of the last pass alone, unless the tap keeps all. Empty if it did not watch.
    consumed
        How many tokens each pass consumed, if the tap keeps all.
    keys
        Layer → absolute position of each key that its kernel read in the last pass, where the tap shows how many.
    left_out
        Layer → why these positions cannot be told.
    """

    step: Step
    passes: Sequence[Values]
    consumed: Sequence[int]
    keys: dict[int, Sequence[int]]
    left_out: dict[int, str]

    @property
    def values(self) -> Values:
        """What the tap read in the last pass; nothing if it did not watch."""
        return self.passes[-1] if self.passes else {}

    @property
    def logits(self) -> Tensor:
        """Logits of the step, ``[vocab]``."""
        return self.step.logits

    @property
    def position(self) -> int:
        """The current position."""
        return self.step.position


class Stepper:
    """Steps a run and hands out what each step showed.

    Parameters
    ----------
    run
        The run, not begun yet.
    tokens
        Its prompt.
    tap
        A tap on the run's model, in place whenever a step is watched. It is enabled during such steps alone, so that
        several steppers can share it. None to watch nothing.

    Attributes
    ----------
    tokens
        What was consumed: the prompt and the tokens after it.

    Examples
    --------
    >>> import kvdrift as kd
    >>> model = kd.load(kd.models.tiny("llama"), quiet=True)
    >>> with Tap(model, {"resid_post": None}) as tap, started(kd.CacheOn(), model, [1, 2, 3], tap) as stepper:
    ...     stepper.step().position, stepper.step(4).values["resid_post"][0].shape
    (2, torch.Size([1, 256]))
    """

    def __init__(self, run: Run, tokens: Sequence[int], tap: Tap | None = None) -> None:
        self.run, self.tap, self.tokens = run, tap, list(tokens)

    def step(self, token: int | Sequence[int] | None = None, *, watch: bool = True, finite: bool = True) -> Shown:
        """Consume a token (none at step 0, several in one pass where the run can).

        Parameters
        ----------
        token
            What to consume.
        watch
            Read with the tap.
        finite
            Refuse logits that are not finite.

        Raises
        ------
        NonFiniteError
            If the logits hold NaN or infinity, with the place where it began.
        """
        tap = self.tap if watch else None
        if self.tap is not None:
            self.tap.enabled = watch
        if tap is not None:
            tap.take()  # what other passes left
        try:
            step = advance(self.run, token)
        finally:
            if self.tap is not None:
                self.tap.enabled = False
        self.tokens += [] if token is None else token if isinstance(token, Sequence) else [token]
        if finite and is_nonfinite(step.logits):
            raise self.nonfinite()
        passes, consumed = ((), ()) if tap is None else tap.take()
        n_keys = _n_keys(passes[-1]) if passes else {}
        keys = {layer: self.run.key_positions(layer, n) for layer, n in n_keys.items()}
        return Shown(step, passes, consumed, keys, self._left_out(keys))

    def skip(self, token: int) -> None:
        """Consume a token without needing what follows from it."""
        if self.tap is not None:
            self.tap.enabled = False
        self.run.skip(token)
        self.tokens.append(token)

    @contextmanager
    def fork(self, controls: tuple[Control, ...] | None = None) -> Iterator[Stepper]:
        """An independent continuation from here, with other controls if given; closed when the block is left."""
        run = self.run.fork() if controls is None else self.run.fork(controls)
        try:
            yield Stepper(run, self.tokens, self.tap)
        finally:
            run.close()

    def nonfinite(self) -> NonFiniteError:
        """The error that says where the first value that is not finite comes from."""
        return explain_nonfinite(self.run, self.tokens)

    def _left_out(self, keys: dict[int, Sequence[int]]) -> dict[int, str]:
        """Why positions cannot be told, where they are all negative."""
        return unplaced(self.run, {layer: len(at) for layer, at in keys.items() if len(at) and at[-1] < 0})


@contextmanager
def started(
    path: Path, model: Model, ids: Sequence[int], tap: Tap | None = None, controls: tuple[Control, ...] | None = None
) -> Iterator[Stepper]:
    """A stepper of a new run over a prompt, which is closed when the block is left; see `Path.start`."""
    run = path.start(model, ids) if controls is None else path.start(model, ids, controls)
    try:
        yield Stepper(run, ids, tap)
    finally:
        run.close()


def advance(run: Run, tokens: int | Sequence[int] | None) -> Step:
    """One step of a run: over its prompt (None), over a token, or over several tokens in one pass."""
    if not isinstance(tokens, Sequence):
        return run.step(tokens)
    return run.step(tokens[0]) if len(tokens) == 1 else extend(run, tokens)


def _n_keys(values: Values) -> dict[int, int]:
    """How many keys the kernel of each layer read, where a site shows it."""
    whole = {
        layer: value.shape[2] for site in ("v", "k") for layer, value in values.get(site, {}).items() if value.ndim == 4
    }
    return {layer: value.shape[-1] for layer, value in values.get(PATTERN, {}).items()} | whole
