"""Paths of somebody else's: what they leave out has a default, or a sentence that says what needs it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kvdrift.backends.cache_state import refuse_full
from kvdrift.controls import Control
from kvdrift.errors import InputError
from kvdrift.models.load import load
from kvdrift.paths.cache_off import CacheOff
from kvdrift.paths.cache_on import CacheOn
from kvdrift.paths.path import Path, Run, Step
from kvdrift.settings import settings_of

if TYPE_CHECKING:
    from kvdrift.models.model import Model

RUN_MEMBERS = ("model", "attn", "controls", "skip", "key_positions", "fork", "close")


def check_path(path: Any, name: str) -> Path:
    """Return ``path``, which was given as argument ``name``, as a whole path.

    Only ``start(model, ids)`` is asked for, which gives an object with ``step(token)``. What else is missing gets the
    defaults of `OwnPath` and `OwnRun`.

    Raises
    ------
    InputError
        If it is no path.
    """
    if isinstance(path, type) or not callable(getattr(path, "start", None)):
        shown = path.__name__ if isinstance(path, type) else repr(path)
        raise InputError(f"{name}={shown} is no path; give an object, such as kd.CacheOn() or kd.CacheOff().")
    return path if isinstance(path, (CacheOn, CacheOff, OwnPath)) else OwnPath(path)


def check_room(path: Path, model: Model, n_tokens: int) -> None:
    """Refuse a run over ``n_tokens`` that the cache of a path could not hold, before it begins.

    Raises
    ------
    InputError
        If the cache is too short, cannot be made, or offloads to the device on which the model is.
    """
    if isinstance(path, CacheOn) and path.cache is not None:
        refuse_full(path.new_cache(path.model or model), n_tokens + path.left_padding)


class OwnPath:
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

    def __init__(self, path: Any) -> None:
        self.path = path
        self.label = str(getattr(path, "label", type(path).__name__))
        own = getattr(path, "model", None)
        self.model: Model | None = None if own is None else load(own, quiet=True)
        self.attn: str | None = getattr(path, "attn", None)
        self.controls: tuple[Control, ...] = tuple(getattr(path, "controls", ()))

    def __getattr__(self, name: str) -> Any:
        if name == "path":  # not made yet: a copy or an unpickled one
            raise AttributeError(name)
        return getattr(self.path, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OwnPath) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)

    def settings(self) -> Mapping[str, Any]:
        """What decides the numbers of the path beneath."""
        return settings_of(self.path)

    def start(self, model: Model, ids: Sequence[int], controls: tuple[Control, ...] | None = None) -> Run:
        """Begin a run over a prompt.

        Raises
        ------
        InputError
            If controls are given, and the path's ``start`` does not take them; if what it gives has no ``step``.
        """
        if controls is None or controls == self.controls:
            run = self.path.start(model, ids)
        elif _takes_controls(self.path.start):
            run = self.path.start(model, ids, controls)
        else:
            raise InputError(
                f"{self.label}: start(model, ids) takes no controls, which a rounding floor, local drift and the "
                "shape-invariant arithmetic of a diagnosis bring: add controls=None to it, or use floor=0 and "
                "local=False."
            )
        if not callable(getattr(run, "step", None)):
            raise InputError(f"{self.label}: start() gives a {type(run).__name__}, which has no step(token).")
        if all(hasattr(run, member) for member in RUN_MEMBERS):
            return run
        return OwnRun(run, self, self.model or model, len(ids), self.controls if controls is None else controls)


class OwnRun:
    """A run of somebody else's, with defaults for what it leaves out.

    ``step(token)`` gives a `Step`, or the logits ``[vocab]`` alone. Without ``skip`` a skipped token is a step; without
    ``key_positions`` the keys that a kernel reads are taken to end with the current position, one after the other;
    without ``close`` nothing is let go of. Without ``fork`` what needs one is refused.
    """

    def __init__(
        self, run: Any, path: OwnPath, model: Model, n_prompt: int, controls: tuple[Control, ...], n_steps: int = 0
    ) -> None:
        self.run, self.path, self._n_prompt, self._n_steps = run, path, n_prompt, n_steps
        self.model: Model = getattr(run, "model", model)
        self.attn: str | None = getattr(run, "attn", path.attn)
        self.controls: tuple[Control, ...] = getattr(run, "controls", controls)

    def __getattr__(self, name: str) -> Any:
        if name == "run":
            raise AttributeError(name)
        return getattr(self.run, name)

    def step(self, token: int | None = None) -> Step:
        """Consume a token (at step 0: the prompt) and predict the next.

        Raises
        ------
        InputError
            If the run's own ``step`` gives something else than a `Step` or logits ``[vocab]``.
        """
        self._n_steps += 1
        found = self.run.step(token)
        if isinstance(found, Tensor):
            found = Step(found, self._position)
        logits = getattr(found, "logits", None)
        if not isinstance(logits, Tensor) or logits.ndim != 1 or not isinstance(getattr(found, "position", None), int):
            shown = list(logits.shape) if isinstance(logits, Tensor) else type(found).__name__
            raise InputError(
                f"{self.path.label}: step() gives {shown}; give kvdrift.paths.path.Step(logits, position) with logits "
                "[vocab], or such logits alone."
            )
        return found

    def skip(self, token: int) -> None:
        """Consume a token without needing the prediction."""
        own = getattr(self.run, "skip", None)
        if not callable(own):
            self.step(token)
            return
        self._n_steps += 1
        own(token)

    def key_positions(self, layer: int, n_keys: int) -> Sequence[int]:
        """Absolute positions of the keys that the kernel of ``layer`` reads in the latest pass."""
        own = getattr(self.run, "key_positions", None)
        return own(layer, n_keys) if callable(own) else range(self._position + 1 - n_keys, self._position + 1)

    def fork(self, controls: tuple[Control, ...] | None = None) -> OwnRun:
        """An independent continuation from here.

        Raises
        ------
        InputError
            If the run has no ``fork``.
        """
        own = getattr(self.run, "fork", None)
        if not callable(own):
            raise InputError(
                f"{self.path.label}: its runs have no fork(controls=None), an independent continuation, which local "
                "drift, sweeps, the factorial and evaluations with several strategies start from: add one, or, for "
                "kd.compare, use local=False."
            )
        chosen = self.controls if controls is None else controls
        run = own() if controls is None else own(controls)
        return OwnRun(run, self.path, self.model, self._n_prompt, chosen, self._n_steps)

    def close(self) -> None:
        """Let go of what the run holds, if it says how."""
        own = getattr(self.run, "close", None)
        if callable(own):
            own()

    @property
    def _position(self) -> int:
        """The last position that the latest step consumes."""
        return self._n_prompt + self._n_steps - 2


def _takes_controls(start: Any) -> bool:
    parameters = inspect.signature(start).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) > 2 or any(p.kind is p.VAR_POSITIONAL for p in parameters)
