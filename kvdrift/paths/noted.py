"""Whether the controls that a path of somebody else's was given are in place while it runs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import ExitStack

from kvdrift.controls import Bound, Control
from kvdrift.controls.scope import Scope
from kvdrift.models.model import Model


def noted(controls: Sequence[Control]) -> tuple[tuple[Control, ...], list[Control]]:
    """Copies of controls, alike in everything, and a list of the controls that nobody has entered yet.

    Examples
    --------
    >>> import kvdrift as kd
    >>> model, (copies, idle) = kd.load(kd.models.tiny("llama"), quiet=True), noted([kd.ReRoll(3)])
    >>> copies, idle
    ((ReRoll(seed=3),), [ReRoll(seed=3)])
    >>> kd.CacheOff().start(model, [1, 2], copies).step().position, idle
    (1, [])
    """
    idle = list(controls)

    def copied(control: Control) -> Control:
        def bind(model: Model) -> Bound:
            bound = control.bind(model)

            def enter(stack: ExitStack) -> None:
                stack.enter_context(bound)
                idle[:] = [one for one in idle if one is not control]

            return Scope(enter, bound.close)

        other = copy.copy(control)
        try:
            object.__setattr__(other, "bind", bind)
        except AttributeError:  # one with slots, which cannot be noted
            idle.remove(control)
            return control
        return other

    return tuple(map(copied, controls)), idle
