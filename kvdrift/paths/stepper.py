"""The watched stepper: a run, what a tap on its model shows of each step, and forks that are closed after use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvdrift.controls import Control
from kvdrift.errors import NonFiniteError
from kvdrift.models.architecture import LayerInfo
from kvdrift.models.sites import LOGITS, PATTERN
from kvdrift.paths.capabilities import extend, unplaced
from kvdrift.paths.nonfinite import explain_nonfinite
from kvdrift.paths.path import Path, Run, Step
from kvdrift.paths.path_capabilities import rows_per_pass
from kvdrift.shapes import Logits
from kvdrift.tracing.finite import is_nonfinite
from kvdrift.tracing.tap import Tap, Values, Where, at_row
from kvdrift.tracing.writer import as_index

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
    def logits(self) -> Logits:
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
        path: Path | None = getattr(run, "path", None)  # a run of somebody else's need not say it
        self._rows = 1 if path is None else rows_per_pass(path)
        self._latest: Shown | None = None  # the pass whose rows are not all served yet

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
        tap = self.tap if watch or self._rows > 1 else None  # a row may be served later, without a pass
        if self.tap is not None:
            self.tap.enabled = tap is not None
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
        if tap is None:
            return Shown(step, (), (), {}, {})
        passes, consumed = tap.take()
        if passes or self._latest is None:
            keys = {layer: self.run.key_positions(layer, n) for layer, n in _n_keys(tap, passes).items()}
            shown = Shown(step, passes, consumed, keys, self._left_out(keys))
        else:
            shown = replace(self._latest, step=step)
        if self._rows == 1 and not isinstance(tap.where, int):
            return shown
        self._latest = replace(shown, passes=shown.passes[-1:], consumed=(1,)) if step.rows_after else None
        return _own_row(shown, tap, self.run.model.architecture.layers) if watch else Shown(step, (), (), {}, {})

    def skip(self, token: int) -> None:
        """Consume a token without needing what follows from it."""
        if self._rows > 1:
            self.step(token, watch=False, finite=False)
            return
        if self.tap is not None:
            self.tap.enabled = False
        self.run.skip(token)
        self.tokens.append(token)

    @contextmanager
    def fork(self, controls: tuple[Control, ...] | None = None) -> Iterator[Stepper]:
        """An independent continuation from here, with other controls if given; closed when the block is left."""
        run = self.run.fork() if controls is None else self.run.fork(controls)
        try:
            other = Stepper(run, self.tokens, self.tap)
            other._latest = self._latest
            yield other
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


def rows_where(*paths: Path) -> Where:
    """What a tap on the runs of these paths keeps, so that each step has its row: the ``where`` of `Tap`."""
    n_rows = rows_per_pass(*paths)
    return n_rows if n_rows > 1 else "current"


def _n_keys(tap: Tap, passes: Sequence[Values]) -> dict[int, int]:
    """How many keys the kernel of each layer read in the last pass, where a site shows it."""
    found: dict[int, int] = {}
    for site in (PATTERN, "v", "k") if passes else ():
        if site == PATTERN or tap.kv_where == "all":
            axis = -1 if site == PATTERN else 2
            found |= {layer: value.shape[axis] for layer, value in passes[-1].get(site, {}).items()}
    return found


def _own_row(shown: Shown, tap: Tap, layers: Sequence[LayerInfo]) -> Shown:
    """What a step of a pass of several rows showed: its row, and the keys that this row sees."""
    step, after = shown.step, shown.step.rows_after
    last, kv = shown.values, [site for site in ("k", "v") if site in shown.values]
    rows = [site for site in last if site not in kv]
    if isinstance(tap.where, int):
        last = at_row(last, rows, -1 - after)
    elif tap.where == "all":  # the first row comes with those before it, which give no logits
        last = at_row(last, rows, slice(None if step.row == 0 else -1 - after, -after or None))
    if isinstance(tap.kv_where, int):
        last = at_row(last, kv, -1 - after)
    keys = dict(shown.keys)
    for layer, at in shown.keys.items() if step.n_rows > 1 else ():
        if layer in shown.left_out:
            continue
        since = layers[layer].first_seen(step.position)
        seen = as_index([slot for slot, position in enumerate(at) if since <= position <= step.position])
        keys[layer] = at[seen] if isinstance(seen, slice) else [at[slot] for slot in seen]
        cut: dict[str, Any] = {PATTERN: (..., seen)}
        if tap.kv_where == "all":
            cut |= dict.fromkeys(kv, (slice(None), slice(None), seen))
        for site, index in cut.items():
            if layer in last.get(site, {}):
                last = last | {site: last[site] | {layer: last[site][layer][index]}}
    if LOGITS in last:
        last = last | {LOGITS: {0: step.logits[None]}}
    consumed = shown.consumed if step.row else (*shown.consumed[:-1], *(n - after for n in shown.consumed[-1:]))
    return replace(shown, passes=(*shown.passes[:-1], last), consumed=consumed, keys=keys)
