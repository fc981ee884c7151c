"""The rows of one pass over several tokens, served as steps one by one."""

from __future__ import annotations

from dataclasses import dataclass

from kvdrift.paths.path import Step


@dataclass(frozen=True)
class Rows:
    """What a pass over several tokens gave, and how much of it was served.

    Frozen, so that forks of a run share it: `serve` gives what is left beside the row.

    Attributes
    ----------
    tokens
        What the pass consumed: the token that was asked for, then those drafted.
    steps
        What follows each.
    served
        How many of them were served.

    Examples
    --------
    >>> import kvdrift as kd
    >>> run = kd.CacheOn().start(kd.load(kd.models.tiny("llama"), quiet=True), [1, 2, 3])
    >>> _ = run.step()
    >>> rows = Rows((4, 5, 6), run.extend_rows([4, 5, 6]))
    >>> step, rows = rows.serve(4)
    >>> step.position, rows.left, rows.serve(7)
    (3, 2, None)
    """

    tokens: tuple[int, ...] = ()
    steps: tuple[Step, ...] = ()
    served: int = 0

    def serve(self, token: int) -> tuple[Step, Rows] | None:
        """The next row, if ``token`` is what it consumed, and the rows after it; None if the draft was another."""
        if not self.left or self.tokens[self.served] != token:
            return None
        return self.steps[self.served], Rows(self.tokens, self.steps, self.served + 1)

    @property
    def left(self) -> int:
        """How many tokens were consumed and not served: so many are taken back where the draft was wrong."""
        return len(self.tokens) - self.served
