"""Paths of somebody else's: what they leave out has a default, or a sentence that says what needs it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from kvdrift.controls import Control
from kvdrift.errors import InputError
from kvdrift.models.load import load
from kvdrift.models.model import Model
from kvdrift.paths.capabilities import Wrapper, extend, rewindable
from kvdrift.paths.noted import noted
from kvdrift.paths.path import Path, Step, with_attribute
from kvdrift.settings import settings_of


def check_path(path: Any, name: str) -> Path:
    """Return ``path``, which was given as argument ``name``, as a whole path.

    Only ``start(model, ids)`` is asked for, which gives an object with ``step(token)``. What else is missing gets the
    defaults of `OwnPath` and `OwnRun`, but for classes that inherit from `kvdrift.paths.path.Path`.

    Raises
    ------
    InputError
        If it is no path.
    """
    if isinstance(path, type) or not callable(getattr(path, "start", None)):
        shown = path.__name__ if isinstance(path, type) else repr(path)
        raise InputError(f"{name}={shown} is no path; give an object, such as kd.CacheOn() or kd.CacheOff().")
    return path if Path in type(path).__mro__ else OwnPath(path)


class OwnPath(Path, Wrapper):
    """A path of somebody else's, with defaults for what it leaves out.

    Parameters
    ----------
    path
        An object with ``start(model, ids)``. ``label`` is its class's name by default, ``model`` and ``attn`` None
        (what is given to the verb), ``controls`` empty. To be run under controls (a rounding floor, local drift,
        shape-invariant arithmetic) its ``start`` takes ``controls``, too.

    Examples
    --------
    >>> import kvdrift as kd
    >>> class Whole:
    ...     def start(self, model, ids):
    ...         return kd.CacheOff().start(model, ids)
    >>> OwnPath(Whole()).label
    'Whole'
    """

    label: str = ""
    model: Model | None = None
    attn: str | None = None
    controls: tuple[Control, ...] = ()

    def __init__(self, path: Any) -> None:
        self.beneath = path
        self.label = str(getattr(path, "label", type(path).__name__))
        own = getattr(path, "model", None)
        self.model = None if own is None else load(own, quiet=True)
        self.attn = getattr(path, "attn", None)
        self.controls = tuple(getattr(path, "controls", ()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OwnPath) and self.beneath == other.beneath

    def __hash__(self) -> int:
        return hash(self.beneath)

    def settings(self) -> Mapping[str, Any]:
        """What decides the numbers of the path beneath."""
        return settings_of(self.beneath)

    def with_model(self, model: Model) -> OwnPath:
        """The same path on another model, by its own ``with_model`` or with another attribute ``model``.

        Raises
        ------
        InputError
            If there is no way to make one.
        """
        own = getattr(self.beneath, "with_model", None)
        return OwnPath(own(model) if callable(own) else with_attribute(self.beneath, model))

    def varied(self, **options: Any) -> OwnPath | None:
        """The same path with other options, if it has a method ``varied`` that knows them."""
        own = getattr(self.beneath, "varied", None)
        other = own(**options) if callable(own) else None
        return None if other is None else OwnPath(other)

    def start(self, model: Model, ids: Sequence[int], controls: tuple[Control, ...] | None = None) -> OwnRun:
        """Begin a run over a prompt.

        Raises
        ------
        InputError
            If controls are given, and the path's ``start`` does not take them; if what it gives has no ``step``.
        """
        model = self.model or model
        controls = self.controls if controls is None else controls
        if not _takes(self.beneath.start, 3):
            if controls == self.controls:  # in place by itself, or none
                return OwnRun(self.beneath.start(model, ids), self, model, len(ids), controls)
            raise InputError(
                f"{self.label}: start(model, ids) takes no controls, which a rounding floor, local drift and the "
                "shape-invariant arithmetic of a diagnosis bring: add controls=None to it, or, for kd.compare, use "
                "floor=0 and local=False."
            )
        if not controls:
            return OwnRun(self.beneath.start(model, ids), self, model, len(ids), controls)
        copies, idle = noted(controls)
        return OwnRun(self.beneath.start(model, ids, copies), self, model, len(ids), controls, idle)


class OwnRun(Wrapper):
    """A run of somebody else's, with defaults for what it leaves out.

    ``step(token)`` gives a `Step`, or the logits ``[vocab]`` alone. Without ``skip`` a skipped token is a step; without
    ``key_positions`` the keys that a kernel reads are taken to end with the current position, one after the other;
    without ``close`` nothing is let go of. Without ``fork`` what needs one is refused.

    Raises
    ------
    InputError
        If the run has no ``step``.
    """

    def __init__(
        self,
        run: Any,
        path: OwnPath,
        model: Model,
        n_prompt: int,
        controls: tuple[Control, ...],
        idle: Sequence[Control] = (),
        n_steps: int = 0,
    ) -> None:
        if not callable(getattr(run, "step", None)):
            raise InputError(f"{path.label}: start() gives a {type(run).__name__}, which has no step(token).")
        own = getattr(run, "model", None)
        self.beneath, self.path, self._n_prompt, self._idle, self._n_steps = run, path, n_prompt, idle, n_steps
        self.model: Model = own if isinstance(own, Model) else model
        self.attn: str | None = getattr(run, "attn", path.attn)
        self.controls = controls

    def step(self, token: int | None = None) -> Step:
        """Consume a token (at step 0: the prompt) and predict the next.

        Raises
        ------
        InputError
            If the run's own ``step`` gives something else than a `Step` or logits ``[vocab]``, or runs with none of
            the controls that it was given.
        """
        self._n_steps += 1
        step = self._checked(self.beneath.step(token), "step")
        if self._idle:
            raise InputError(
                f"{self.path.label}: start(model, ids, controls) takes controls, and its first step ran outside "
                f"{self._idle[0]}, so that nothing would be measured under it: hand them on to a run inside "
                "(kd.CacheOn().start(model, ids, controls)), or enter control.bind(model) around every pass."
            )
        return step

    def skip(self, token: int) -> None:
        """Consume a token without needing the prediction."""
        own = getattr(self.beneath, "skip", None)
        if not callable(own):
            self.step(token)
            return
        self._n_steps += 1
        own(token)

    def extend(self, tokens: Sequence[int]) -> Step:
        """Consume several tokens in one pass, if the run can."""
        self._n_steps += len(tokens)
        return self._checked(extend(self.beneath, tokens), "extend")

    def rewind(self, n_tokens: int) -> None:
        """Forget the last tokens consumed, if the run can."""
        rewindable(self.beneath).rewind(n_tokens)
        self._n_steps -= n_tokens

    def keep_past(self) -> None:
        """Keep what `rewind` will need."""
        rewindable(self.beneath).keep_past()

    def key_positions(self, layer: int, n_keys: int) -> Sequence[int]:
        """Absolute positions of the keys that the kernel of ``layer`` reads in the latest pass."""
        own = getattr(self.beneath, "key_positions", None)
        return own(layer, n_keys) if callable(own) else range(self._position + 1 - n_keys, self._position + 1)

    def fork(self, controls: tuple[Control, ...] | None = None) -> OwnRun:
        """An independent continuation from here.

        Raises
        ------
        InputError
            If the run has no ``fork``, or one that takes no controls, which are given.
        """
        own = getattr(self.beneath, "fork", None)
        if not callable(own):
            raise InputError(
                f"{self.path.label}: its runs have no fork(controls=None), an independent continuation, which "
                "local drift, kd.patch, sweeps, the factorial and kd.evaluate start from: add one, or, for kd.compare, "
                "use local=False."
            )
        if controls is not None and not _takes(own, 1):
            raise InputError(
                f"{self.path.label}: fork() takes no controls, which local drift and re-rolled patches bring: add "
                "controls=None to it, or, for kd.compare, use local=False."
            )
        copies, idle = noted(controls or ())
        run = own() if controls is None else own(copies)
        chosen = self.controls if controls is None else controls
        return OwnRun(run, self.path, self.model, self._n_prompt, chosen, idle, self._n_steps)

    def close(self) -> None:
        """Let go of what the run holds, if it says how."""
        own = getattr(self.beneath, "close", None)
        if callable(own):
            own()

    def _checked(self, given: Any, name: str) -> Step:
        """What the run's own step gave, as a `Step`."""
        if isinstance(given, Tensor):
            given = Step(given, self._position)
        logits = getattr(given, "logits", None)
        if not isinstance(logits, Tensor) or logits.ndim != 1 or not isinstance(getattr(given, "position", None), int):
            shown = list(logits.shape) if isinstance(logits, Tensor) else type(given).__name__
            raise InputError(
                f"{self.path.label}: {name}() gives {shown}; give kvdrift.paths.path.Step(logits, position) with "
                "logits [vocab], or such logits alone."
            )
        return given

    @property
    def _position(self) -> int:
        """The last position that the latest step consumes."""
        return self._n_prompt + self._n_steps - 2


def _takes(function: Any, n: int) -> bool:
    """Whether a function takes so many positional arguments."""
    parameters = inspect.signature(function).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) >= n or any(p.kind is p.VAR_POSITIONAL for p in parameters)
