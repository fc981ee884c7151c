"""Whether the controls that a path of somebody else's was given are in place while it runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kvdrift.controls import Bound, Control

if TYPE_CHECKING:
    from kvdrift.models.model import Model


class Noted:
    """Controls that are noted when they are entered.

    Attributes
    ----------
    controls
        Copies, alike in everything, to be handed on.

    Examples
    --------
    >>> import kvdrift as kd
    >>> model, noted = kd.load(kd.models.tiny("llama"), quiet=True), Noted([kd.ReRoll(3)])
    >>> noted.controls, noted.idle
    ((ReRoll(seed=3),), [ReRoll(seed=3)])
    >>> kd.CacheOff().start(model, [1, 2], noted.controls).step().position, noted.idle
    (1, [])
    """

    def __init__(self, controls: Sequence[Control]) -> None:
        self._idle = dict(enumerate(controls))
        self.controls = tuple(self._noted(number, control) for number, control in enumerate(controls))

    @property
    def idle(self) -> list[Control]:
        """Those that nobody has entered yet."""
        return list(self._idle.values())

    def _noted(self, number: int, control: Control) -> Control:
        def bind(model: Model) -> Bound:
            return _Noted(control.bind(model), lambda: self._idle.pop(number, None))

        other = copy.copy(control)
        try:
            object.__setattr__(other, "bind", bind)
        except AttributeError:  # one with slots, which cannot be noted
            del self._idle[number]
            return control
        return other


class _Noted:
    """A bound control that says when it is entered."""

    def __init__(self, bound: Bound, entered: Callable[[], object]) -> None:
        self._bound, self._entered = bound, entered

    def __enter__(self) -> Self:
        self._bound.__enter__()
        self._entered()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bound.__exit__(kind, error, trace)

    def close(self) -> None:
        self._bound.close()
