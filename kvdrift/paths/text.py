"""Free running: a path writes a text by feeding itself."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from kvdrift.paths.sampling import Sampler
from kvdrift.paths.stepper import Shown, Stepper


def write(
    stepper: Stepper, choose: Sampler, stop: frozenset[int] = frozenset(), first: Shown | None = None
) -> Iterator[tuple[Shown, int]]:
    """What each step showed, with the token that was chosen from it and that the next step consumes.

    It goes on until a token of ``stop`` was chosen; to end it earlier, ask for no more.

    Parameters
    ----------
    stepper
        The run, not begun yet unless ``first`` is given.
    choose
        Chooses each token.
    stop
        Tokens that end the text.
    first
        What the latest step showed, if there was one already.

    Raises
    ------
    NonFiniteError
        If the path gives logits that are not finite.

    Examples
    --------
    >>> from itertools import islice
    >>> import kvdrift as kd
    >>> from kvdrift.paths.sampling import greedy
    >>> from kvdrift.paths.stepper import started
    >>> model = kd.load(kd.models.tiny("llama"), quiet=True)
    >>> with started(kd.CacheOn(), model, [1, 2, 3]) as stepper:
    ...     len([token for _, token in islice(write(stepper, greedy), 4)]), len(stepper.tokens)
    (4, 6)
    """
    token: int | None = None
    for number in count():
        shown = stepper.step(token) if number or first is None else first
        token = choose(shown.logits, number)
        yield shown, token
        del shown  # nothing that a step showed is held while the next one runs
        if token in stop:
            return
