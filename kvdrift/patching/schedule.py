"""At which steps a patch is written."""

from __future__ import annotations

import re
from dataclasses import dataclass
from numbers import Integral

from kvdrift.errors import InputError

_ONE_SHOT = re.compile(r"one[_-]shot\((\d+)\)")
_WINDOW = re.compile(r"window\((\d+), *(\d+)\)")
_PERSISTENT = re.compile(r"persistent(?:\((\d+)\))?")


@dataclass(frozen=True)
class Schedule:
    """The steps at which a patch is written, each from the donor's same step.

    Attributes
    ----------
    first, last
        The first and the last step, 1 at the least: step 0 consumes the prompt, and both paths do the same work
        there. ``last=None`` goes on to the end of the run.

    Raises
    ------
    InputError
        If there is no step in it, or step 0 is.

    Examples
    --------
    >>> Schedule.one_shot(3), Schedule.window(2, 5), Schedule.persistent()
    (one_shot(3), window(2, 5), persistent)
    >>> [step for step in range(8) if Schedule.window(2, 5).covers(step)]
    [2, 3, 4, 5]
    """

    first: int
    last: int | None

    def __post_init__(self) -> None:
        ends = (self.first,) if self.last is None else (self.first, self.last)
        if not all(isinstance(end, Integral) and not isinstance(end, bool) for end in ends):
            raise InputError(f"A schedule is made of whole step numbers, not {ends}.")
        if self.first < 1:
            raise InputError(
                f"A patch at step {self.first}: steps start from 1; at step 0 both paths consume the prompt alike."
            )
        if self.last is not None and self.last < self.first:
            raise InputError(f"The schedule from step {self.first} to step {self.last} is empty; give first ≤ last.")

    @classmethod
    def one_shot(cls, step: int) -> Schedule:
        """Write at ``step`` alone; what follows runs untouched."""
        return cls(step, step)

    @classmethod
    def window(cls, first: int, last: int) -> Schedule:
        """Write at every step from ``first`` to ``last``, both included."""
        return cls(first, last)

    @classmethod
    def persistent(cls, first: int = 1) -> Schedule:
        """Write at every step from ``first`` on."""
        return cls(first, None)

    @classmethod
    def parse(cls, schedule: Schedule | str) -> Schedule:
        """A schedule itself, or one as text: ``"one_shot(3)"``, ``"window(2, 5)"``, ``"persistent"``.

        Raises
        ------
        InputError
            If it is neither.
        """
        if isinstance(schedule, Schedule):
            return schedule
        text = str(schedule).strip()
        if match := _ONE_SHOT.fullmatch(text):
            return cls.one_shot(int(match[1]))
        if match := _WINDOW.fullmatch(text):
            return cls.window(int(match[1]), int(match[2]))
        if match := _PERSISTENT.fullmatch(text):
            return cls.persistent(int(match[1] or 1))
        raise InputError(
            f"schedule={schedule!r} is none; give 'one_shot(3)', 'window(2, 5)', 'persistent' or a kd.Schedule."
        )

    @property
    def is_one_shot(self) -> bool:
        """Whether it is a single step."""
        return self.first == self.last

    @property
    def kind(self) -> str:
        """``"one-shot"``, ``"window"`` or ``"persistent"``."""
        return "persistent" if self.last is None else "one-shot" if self.is_one_shot else "window"

    def covers(self, step: int) -> bool:
        """Whether the patch is written at ``step``."""
        return self.first <= step and (self.last is None or step <= self.last)

    def __repr__(self) -> str:
        if self.last is None:
            return "persistent" if self.first == 1 else f"persistent({self.first})"
        return f"one_shot({self.first})" if self.is_one_shot else f"window({self.first}, {self.last})"

    __str__ = __repr__
