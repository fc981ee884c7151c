"""What every control offers: a label, and a context that can be entered around each forward pass of a run."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from kvdrift.models.model import Model


class Bound(Protocol):
    """A control bound to one model: a context manager that can be entered again and again.

    Inside the context the model's forward passes are executed under the control. What the control keeps
    between two passes (copies of weights, say) is freed by `close`, or when the object goes away.
    """

    def __enter__(self) -> Self:
        """Put the control in place."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the control away, also after an exception."""
        ...

    def close(self) -> None:
        """Free whatever is kept between two passes."""
        ...


class Control(Protocol):
    """A change of arithmetic that leaves the mathematical function alone.

    A control that decides a part of the arithmetic alone (which kernel attention runs, in which precision products are
    summed) names it in a class attribute ``decides``, and is refused beside another one that does, too; see
    `kvdrift.controls.combine`.
    """

    @property
    def label(self) -> str:
        """A short name for figures and tables, such as ``"re-roll 3"``."""
        ...

    def bind(self, model: Model) -> Bound:
        """Prepare the control for the forward passes of ``model``; every run and every fork of a run asks for it."""
        ...
