"""Cache-OFF: recompute the whole prefix at every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from kvdrift.backends.manner import check_manner
from kvdrift.controls import Control
from kvdrift.errors import InputError
from kvdrift.models.load import load
from kvdrift.models.model import Model
from kvdrift.paths.execution import Execution
from kvdrift.paths.path import Path, Step
from kvdrift.tracing.seam import Link


@dataclass(frozen=True)
class CacheOff(Path):
    """The path without a cache.

    Parameters
    ----------
    model
        Run this model (anything `kvdrift.load` takes) instead of the one given to the verb.
    attn
        Attention implementation; the model's own by default.
    controls
        Changes of arithmetic, for example ``ReRoll(0)``.
    call
        The manner of calling the model, as for `kvdrift.paths.cache_on.CacheOn`.
    """

    model: Model | None = None
    attn: str | None = None
    controls: tuple[Control, ...] = ()
    call: str = field(default="explicit", kw_only=True)
    label: str = field(default="cache-OFF", kw_only=True)

    stateless: ClassVar[bool] = True
    """Its runs keep nothing but tokens."""

    def __post_init__(self) -> None:
        check_manner(self.call)
        if self.model is not None:
            object.__setattr__(self, "model", load(self.model, quiet=True))

    @property
    def links(self) -> Sequence[Link]:
        """Links of the attention seam in every pass of its runs; a subclass gives its own, which keep no state."""
        return ()

    def start(self, model: Model, ids: Sequence[int], controls: tuple[Control, ...] | None = None) -> CacheOffRun:
        """Begin a run over a prompt."""
        return CacheOffRun(self, self.model or model, list(ids), self.controls if controls is None else controls)


class CacheOffRun:
    """A cache-OFF run under way, which keeps nothing but tokens; see `kvdrift.paths.path.Run`."""

    stateless = True

    def __init__(
        self, path: CacheOff, model: Model, tokens: list[int], controls: tuple[Control, ...], started: bool = False
    ) -> None:
        self.path, self.model, self.controls = path, model, controls
        self.attn = path.attn
        self._tokens, self._started, self._n_passes = tokens, started, 0
        self._execution = Execution(model, path.attn, controls, path.call, path.links)

    def step(self, token: int | None = None) -> Step:
        """Recompute everything, with ``token`` appended (none at the first step)."""
        if (token is None) != (not self._started):
            raise InputError("The first step takes no token, every later one takes the token to consume.")
        self._started = True
        if token is not None:
            self._tokens.append(token)
        return self._last(1)[-1]

    def extend_rows(self, tokens: Sequence[int], n_rows: int | None = None) -> tuple[Step, ...]:
        """Recompute everything with several tokens appended; the last ``n_rows`` rows of it (one a token by default).

        Raises
        ------
        InputError
            If there are no tokens, fewer than rows, or the prompt was not consumed yet.
        """
        n_rows = len(tokens) if n_rows is None else n_rows
        if not self._started or not 1 <= n_rows <= len(tokens):
            raise InputError(
                f"extend_rows({list(tokens)}, {n_rows}): give tokens, at most as many rows, after the first step has "
                "consumed the prompt."
            )
        self._tokens += tokens
        return self._last(n_rows)

    def _last(self, n_rows: int) -> tuple[Step, ...]:
        """The last rows of one pass over all tokens."""
        logits = self._execution.forward(self._tokens, 0, None, rows=n_rows)
        self._n_passes += 1
        first = len(self._tokens) - n_rows
        return tuple(Step(row, first + i, i, n_rows, self._n_passes - 1) for i, row in enumerate(logits))

    def skip(self, token: int) -> None:
        """Append a token and compute nothing."""
        self._started = True
        self._tokens.append(token)

    def key_positions(self, layer: int, n_keys: int) -> Sequence[int]:
        """Every position of the prefix."""
        return range(n_keys)

    def fork(self, controls: tuple[Control, ...] | None = None) -> CacheOffRun:
        """An independent continuation from here."""
        chosen = self.controls if controls is None else controls
        other = CacheOffRun(self.path, self.model, list(self._tokens), chosen, self._started)
        other._n_passes = self._n_passes
        return other

    def close(self) -> None:
        """Let go of the controls."""
        self._execution.close()
