"""What controls without memory share: contexts put in place around a pass, once however often they are entered."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Self


class Scope:
    """A control bound to a module: everything that ``enter`` puts on the stack goes when the context is left.

    Entering it inside itself changes nothing more.

    Parameters
    ----------
    enter
        Puts the control in place: pushes what undoes it onto the stack it is given.
    close
        Frees what is kept between two passes.

    Examples
    --------
    >>> log = []
    >>> scope = Scope(lambda stack: stack.callback(log.append, "out"))
    >>> with scope, scope:
    ...     log.append("in")
    >>> log
    ['in', 'out']
    """

    def __init__(self, enter: Callable[[ExitStack], object], close: Callable[[], object] = lambda: None) -> None:
        self._enter, self._close = enter, close
        self._depth = 0
        self._stack: AbstractContextManager = ExitStack()

    def __enter__(self) -> Self:
        if self._depth == 0:
            with ExitStack() as stack:
                self._enter(stack)
                self._stack = stack.pop_all()
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._stack.__exit__(kind, error, trace)

    def close(self) -> None:
        """Free what is kept between two passes."""
        self._close()
