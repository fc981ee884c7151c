"""Cache-ON: prefill once, then one token at a time with a KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor
from transformers import Cache

from kvdrift.backends.cache_state import first_positions, length, refuse_full, refuse_offloading
from kvdrift.backends.manner import check_manner
from kvdrift.controls import Control
from kvdrift.errors import InputError
from kvdrift.models.load import load
from kvdrift.models.model import Model
from kvdrift.paths.chunks import chunk_lengths, chunks
from kvdrift.paths.entries import overwrite, stored
from kvdrift.paths.execution import Execution
from kvdrift.paths.filled import check_fits, emptied, holds_state, mark_used, refuse_used, stale
from kvdrift.paths.forking import forked
from kvdrift.paths.loss import Declared, Dropped, as_losses
from kvdrift.paths.path import Path, Step
from kvdrift.paths.prefix import Prefix
from kvdrift.paths.written import Written, keeps_all, told_or_matched
from kvdrift.tracing.seam import Link
from kvdrift.tracing.writer import Index, shifted


@dataclass(frozen=True)
class CacheOn(Path):
    """The path with a KV cache.

    Parameters
    ----------
    model
        Run this model (anything `kvdrift.load` takes) instead of the one given to the verb.
    attn
        Attention implementation; the model's own by default.
    prefill_chunk
        Consume the prompt in chunks of so many tokens; at once by default. A list gives the lengths of the first
        passes, one by one; what they leave of a prompt is consumed in one more.
    cache
        Makes a cache, a new one at every call; by default ``DynamicCache(config=model.config)``. One that holds tokens
        already (a copy of a saved one) is taken as the prefix of every prompt; see ``prefix``. One that evicts entries
        can have a method ``positions(layer)`` that lists the positions which the latest pass reads; without it they are
        found among what was written, or K/V by position are left out with the reason.
    left_padding
        Tokens of padding before the prompt, hidden by an attention mask, as in a batch with a longer prompt.
        Positions count from the first real token.
    lossy
        What the cache gives up by design, so that `kvdrift.diagnose` does not take it for a fault: ``kd.Dropped(…)``,
        ``kd.Rounded(…)`` or both in a tuple, to which it is held; or a plain sentence (``"keys in 8 bits"``), which is
        taken on trust as far as a sentence can cover it. None if nothing.
    controls
        Changes of arithmetic, for example ``ReRoll(0)``.
    prefix
        Start from a cache that holds the first tokens already: a `Prefix`, a cache, or ``(tokens, cache)``. Prompts are
        given whole, and are refused where they do not begin with its tokens. Runs start from a copy. In another
        arithmetic than the path's own (the re-rolls of a floor, the arms of a diagnosis) it is computed anew.
    call
        The manner of calling the model: ``"explicit"`` (position ids, logits of the last position only: what every
        verb does by default), ``"all-logits"`` (position ids alone), ``"default"`` (``model(ids)``, with the
        positions that the model takes by itself) or ``"mask"`` (``model(ids, attention_mask=…)``).

    Examples
    --------
    >>> import kvdrift as kd
    >>> model = kd.load(kd.models.tiny("llama"), quiet=True)
    >>> run = kd.CacheOn().start(model, [1, 2, 3])
    >>> run.step().position, run.step(4).position
    (2, 3)
    """

    model: Model | None = None
    attn: str | None = None
    prefill_chunk: int | Sequence[int] | None = None
    cache: Callable[[], Cache] | None = None
    left_padding: int = 0
    lossy: Declared | None = None
    controls: tuple[Control, ...] = ()
    prefix: Prefix | Cache | tuple[Sequence[int], Cache] | None = field(default=None, kw_only=True)
    call: str = field(default="explicit", kw_only=True)
    label: str = field(default="cache-ON", kw_only=True)

    def __post_init__(self) -> None:
        check_manner(self.call)
        object.__setattr__(self, "prefill_chunk", chunk_lengths(self.prefill_chunk))
        object.__setattr__(self, "lossy", as_losses(self.lossy))
        if self.left_padding < 0:
            raise InputError(f"left_padding={self.left_padding}: give a number of tokens, 0 for none.")
        if self.prefix is not None:
            object.__setattr__(self, "prefix", Prefix.of(self.prefix))
        if self.prefix is not None and self.left_padding:
            raise InputError("left_padding= and prefix= exclude each other: a saved prefix begins at position 0.")
        if self.cache is not None and not callable(self.cache):
            raise InputError(
                f"cache={type(self.cache).__name__}: give a function that makes an empty cache, such as "
                "lambda: DynamicCache(), since every run needs its own."
            )
        if self.model is not None:
            object.__setattr__(self, "model", load(self.model, quiet=True))

    @property
    def links(self) -> Sequence[Link]:
        """Links of the attention seam in every pass of its runs; a subclass gives its own, which keep no state."""
        return ()

    def start(self, model: Model, ids: Sequence[int], controls: tuple[Control, ...] | None = None) -> CacheOnRun:
        """Begin a run over a prompt."""
        model = self.model or model
        chosen = self.controls if controls is None else controls
        cache = self.new_cache(model)
        prefix = self.prefix if isinstance(self.prefix, Prefix) else None
        if self.cache is not None:
            refuse_used(self.cache, cache)
            if holds_state(cache):
                raise InputError(
                    "cache= makes a cache that holds the state of tokens, and it does not tell of how many: give "
                    "prefix=kd.Prefix(tokens, cache)."
                )
        if self.cache is not None and (held := length(cache)):
            if prefix is not None or self.left_padding:
                other = "left_padding=" if prefix is None else "prefix="
                raise InputError(f"cache= makes a cache that holds {held} tokens; give {other} with an empty one.")
            prefix = Prefix(None, cache)
        if prefix is None:
            return CacheOnRun(self, model, list(ids), cache, chosen)
        prefix.begins(ids)
        if prefix.cache is None or chosen != self.controls:
            empty = cache if not length(cache) else emptied(cache, model.backend.new_cache)
            return CacheOnRun(self, model, list(ids), empty, chosen, first_pass=len(prefix))
        if prefix.cache is cache:
            check_fits(model, cache)
            return CacheOnRun(self, model, list(ids), cache, chosen, held=len(prefix))
        return CacheOnRun(self, model, list(ids), prefix.start(model), chosen, held=len(prefix))

    def new_cache(self, model: Model) -> Cache:
        """The cache of a new run, as ``cache`` makes it.

        Raises
        ------
        InputError
            If it cannot be made, or offloads to the device on which the model is.
        """
        if self.cache is None:
            return model.backend.new_cache()
        try:
            cache = self.cache()
        except Exception as error:  # whatever a function of somebody's own raises
            said = " ".join(str(error).split())
            raise InputError(f"cache= makes no cache ({type(error).__name__}: {said}).") from error
        refuse_offloading(cache, model.device)
        return cache

    @property
    def begins_filled(self) -> bool:
        """Whether a run begins with tokens in its cache."""
        return self.prefix is not None or (self.cache is not None and length(self.cache()) > 0)

    @property
    def begins_saved(self) -> bool:
        """Whether these tokens come from a cache that was filled before, rather than being computed by each run."""
        return self.begins_filled and not (isinstance(self.prefix, Prefix) and self.prefix.cache is None)

    def holds(self, ids: Sequence[int] = ()) -> tuple[int, ...]:
        """The tokens that the cache holds when a run begins: those of ``prefix``, or else the first of ``ids``."""
        prefix = self.prefix if isinstance(self.prefix, Prefix) else None
        if prefix is not None and prefix.tokens is not None:
            return prefix.tokens
        held = len(prefix) if prefix is not None else 0 if self.cache is None else length(self.cache())
        if held >= len(ids) and held:
            raise InputError(
                f"The cache of {self.label} holds {held} tokens already, and which they are is not known: give prompts "
                "that begin with them and go on, or prefix=kd.Prefix(tokens, cache)."
            )
        return tuple(ids[:held])

    def anew(self, tokens: Sequence[int]) -> CacheOn:
        """This path for another model or dtype: each run computes the prefix, ``tokens``, in a pass of its own."""
        if not tokens:
            return self
        filled = self.cache is not None and length(self.cache()) > 0
        return replace(self, prefix=Prefix(tuple(tokens), None), cache=None if filled else self.cache)

    def rewinds(self, model: Model) -> bool:
        """Whether an empty cache of this path says that it can go back; one that says nothing can."""
        prefix = self.prefix.cache if isinstance(self.prefix, Prefix) else None
        cache = prefix if prefix is not None else self.cache() if self.cache is not None else model.backend.new_cache()
        losses = as_losses(self.lossy)
        lost = () if losses is None or isinstance(losses, str) else losses
        gone = any(isinstance(loss, Dropped) for loss in lost)  # entries that going back would need again
        return bool(getattr(cache, "is_croppable", True)) and not gone


class _Event(NamedTuple):
    """Tokens that were consumed in one pass under some controls, or how many were taken back."""

    controls: tuple[Control, ...]
    tokens: tuple[int, ...] = ()
    n_taken_back: int = 0
    n_rows: int = 1


class CacheOnRun:
    """A cache-ON run under way; see `kvdrift.paths.path.Run`.

    Attributes
    ----------
    left_padding
        Tokens of padding before the prompt.
    cache
        Its cache.
    overwritten
        Whether values were written into it.
    written
        The entries handed to it, where it may lose some: it is not transformers' own, or declares a loss. None
        elsewhere, and where it began with tokens.
    """

    def __init__(
        self,
        path: CacheOn,
        model: Model,
        prompt: list[int],
        cache: Cache,
        controls: tuple[Control, ...],
        held: int = 0,
        first_pass: int = 0,
    ) -> None:
        self.path, self.model, self.controls = path, model, controls
        self.attn, self.left_padding = path.attn, path.left_padding
        self.cache = cache
        self._prompt = prompt
        self._consumed = held - path.left_padding  # counted in real tokens
        self._first_pass = first_pass  # tokens of a prefix, consumed in a pass of their own
        self._begun, self._begun_under = False, controls
        self._key_offsets: dict[int, int] = {}
        self._length = length(cache)  # as the run begins
        self._end = 0  # slots in use after the latest pass
        self._n_passes = 0
        self._keeps_past = False
        self.overwritten = False
        self._since: list[_Event] = []  # what followed the prompt
        loses = path.lossy is not None or not keeps_all(cache)
        self.written = Written(-path.left_padding) if loses and not held and hasattr(cache, "update") else None
        self._execution = Execution(model, path.attn, controls, path.call, path.links)

    @property
    def begun(self) -> bool:
        """Whether the prompt was consumed."""
        return self._begun

    def step(self, token: int | None = None) -> Step:
        """Prefill (``token=None``, once) or decode one token."""
        if (token is None) == self._begun:
            raise InputError("The first step takes no token, every later one takes the token to consume.")
        if token is None and (now := length(self.cache)) != self._length:  # another run that has begun shares it
            raise stale(now)
        return self._consume(self._chunks())[-1] if token is None else self._go_on([token])[-1]

    def extend(self, tokens: Sequence[int]) -> Step:
        """Consume several tokens in one pass, as a continued chat does, and predict what follows the last.

        Raises
        ------
        InputError
            If there are none, or the prompt was not consumed yet.
        """
        return self.extend_rows(tokens, 1)[-1]

    def extend_rows(self, tokens: Sequence[int], n_rows: int | None = None) -> tuple[Step, ...]:
        """Consume several tokens in one pass, and predict what follows each of the last ``n_rows`` (all by default).

        The check of drafted tokens does so. The LM head at several rows can give other bits than at one.

        Raises
        ------
        InputError
            If there are no tokens, fewer than rows, or the prompt was not consumed yet.
        """
        n_rows = len(tokens) if n_rows is None else n_rows
        if not tokens or not self._begun:
            raise InputError(
                f"extend({list(tokens)}): give at least one token, after the first step has consumed the prompt."
            )
        if not 1 <= n_rows <= len(tokens):
            raise InputError(f"extend_rows(…, {n_rows}): give 1 to {len(tokens)} rows, one for each token at most.")
        return self._go_on(tokens, n_rows)

    def _go_on(self, tokens: Sequence[int], n_rows: int = 1) -> tuple[Step, ...]:
        """One pass over tokens that follow the prompt."""
        steps = self._consume([list(tokens)], n_rows)
        self._since.append(_Event(self.controls, tuple(tokens), n_rows=n_rows))
        return steps

    def _consume(self, chunks: list[list[int]], n_rows: int = 1) -> tuple[Step, ...]:
        for chunk in chunks:
            self._end = self._consumed + self.left_padding + len(chunk)
            refuse_full(self.cache, self._end)
            self._key_offsets = first_positions(self.cache, self.model.architecture.n_layers, len(chunk))
            watched = nullcontext() if self.written is None else self.written.watching(self.cache, self._consumed)
            with watched:
                logits = self._execution.forward(chunk, self._consumed, self.cache, self.left_padding, n_rows)
            self._consumed += len(chunk)
            self._n_passes += 1
            if not self._begun:
                mark_used(self.cache)
                self._begun = True
        first = self._consumed - n_rows
        return tuple(Step(row, first + i, i, n_rows, self._n_passes - 1) for i, row in enumerate(logits))

    def keep_past(self) -> None:
        """From the start on, keep what a sliding window evicts, so that `rewind` can go back past its edge."""
        if hasattr(self.cache, "activate_past_recording"):
            self.cache.activate_past_recording()
        self._keeps_past = True

    def rewind(self, n_tokens: int) -> None:
        """Forget the last ``n_tokens`` consumed, as assisted generation does with tokens that it rejects.

        Raises
        ------
        InputError
            If so many decoded tokens were not consumed, or the cache cannot go back so far.
        """
        if not 0 < n_tokens <= self._consumed - len(self._prompt):
            after = max(self._consumed - len(self._prompt), 0)
            raise InputError(f"rewind({n_tokens}): {after} tokens were consumed after the prompt.")
        if not getattr(self.cache, "is_croppable", True):
            raise InputError("This cache cannot be cropped: it has let go of entries that it would need again.")
        if not hasattr(self.cache, "crop"):
            raise InputError(f"This cache cannot be cropped: {type(self.cache).__name__} has no crop.")
        try:
            self.cache.crop(-n_tokens)
        except NotImplementedError as error:
            raise InputError(f"This cache cannot be cropped: {error}") from error
        except RuntimeError as error:
            if self._keeps_past:  # a fault of the cache, which was told in time
                raise
            raise InputError(f"This cache cannot be cropped: {error}") from error
        self._consumed -= n_tokens
        self._since.append(_Event(self.controls, n_taken_back=n_tokens))

    crop = rewind

    def skip(self, token: int) -> None:
        """Consume a token: the cache needs it, so this is a step."""
        self.step(token)

    def fork(self, controls: tuple[Control, ...] | None = None) -> CacheOnRun:
        """An independent continuation with a cache of its own.

        Raises
        ------
        InputError
            If there is no way to make one; see `kvdrift.paths.forking.forked`.
        """
        return self.around(forked(self), controls)

    def around(self, cache: Cache, controls: tuple[Control, ...] | None = None) -> CacheOnRun:
        """This run going on with another cache in the same state."""
        other = CacheOnRun(self.path, self.model, self._prompt, cache, self.controls if controls is None else controls)
        other._since, other.overwritten = list(self._since), self.overwritten
        other._consumed, other._keeps_past, other._begun = self._consumed, self._keeps_past, self._begun
        other._first_pass, other._begun_under = self._first_pass, self._begun_under
        other._key_offsets, other._end, other._n_passes = self._key_offsets, self._end, self._n_passes
        other.written = None if self.written is None else self.written.copy()
        return other

    def close(self) -> None:
        """Let go of the controls."""
        self._execution.close()

    def held(self, layer: int) -> range:
        """Absolute positions of the entries that the cache holds in ``layer``, for the next pass to read.

        Raises
        ------
        SiteError
            If the layer has no cache of its own, or one whose entries cannot be told apart by position.
        """
        return stored(self.cache, layer, self._consumed, self.left_padding, self._begun)

    def overwrite(self, layer: int, name: str, heads: Index, positions: Sequence[int], value: Tensor) -> None:
        """Put other values into the cache, where they stay.

        Parameters
        ----------
        layer
            Which layer.
        name
            ``"k"`` or ``"v"``.
        heads
            KV heads, as an index.
        positions
            Absolute positions, all `held`.
        value
            ``[1, kv_head, position, feature]``.

        Raises
        ------
        SiteError
            If the layer's entries cannot be overwritten, or are stored in another shape than the kernel reads.
        """
        slots = shifted(positions, -self.held(layer).start)
        overwrite(self.cache, layer, name, heads, slots, value)
        self.overwritten = True

    def again(self) -> CacheOnRun:
        """A second run over the same tokens, as far as this one is; what was overwritten is not."""
        other = self.path.start(self.model, self._prompt, self._begun_under)
        if self._keeps_past:
            other.keep_past()
        if self._begun:
            other.step()
        for event in self._since:
            other._under(event.controls)
            if event.tokens:
                other._go_on(event.tokens, event.n_rows)
            else:
                other.rewind(event.n_taken_back)
        other._under(self.controls)
        return other

    def _under(self, controls: tuple[Control, ...]) -> None:
        """Go on under these controls."""
        if controls != self.controls:
            self._execution.close()
            self.controls = controls
            self._execution = Execution(self.model, self.attn, controls, self.path.call, self.path.links)

    def _chunks(self) -> list[list[int]]:
        padding = [getattr(self.model.hf.config, "pad_token_id", None) or 0] * self.left_padding
        tokens = [*padding, *self._prompt[max(self._consumed, 0) :]]
        return chunks(tokens, self.path.prefill_chunk, self._first_pass)

    def key_positions(self, layer: int, n_keys: int) -> Sequence[int]:
        """Consecutive positions from the offset that the cache gave the mask before the latest pass.

        Padding sits at negative ones. A layer that reads another layer's entries has no offset of its own: its keys
        end with the pass, or fill all slots of a static cache.

        A cache that evicts is asked, if it has a method ``positions(layer)`` (those of the keys that the latest pass
        reads, as a list); otherwise they are found among the entries that it was given. Where they cannot be told,
        all are negative, and `evicted` says why.
        """
        found = self._told_or_matched(layer, n_keys)
        if found is not None:
            return range(-n_keys, 0) if isinstance(found, str) else found
        offset = self._key_offsets.get(layer, max(self._end - n_keys, 0))
        start = offset - self.left_padding
        return range(start, start + n_keys)

    def evicted(self, layer: int, n_keys: int) -> str | None:
        """Why the positions of the keys that ``layer`` reads in the latest pass cannot be told; None if they can."""
        found = self._told_or_matched(layer, n_keys)
        return found if isinstance(found, str) else None

    def _told_or_matched(self, layer: int, n_keys: int) -> Sequence[int] | str | None:
        consecutive = self._key_offsets.get(layer, 0) + n_keys == self._end
        return told_or_matched(self.cache, self.written, layer, n_keys, consecutive)
