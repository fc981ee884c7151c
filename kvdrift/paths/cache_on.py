"""Cache-ON: prefill once, then one token at a time with a KV cache."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from kvdrift.backends.manner import check_manner
from kvdrift.controls import Control
from kvdrift.errors import InputError, SiteError, StaleCacheError
from kvdrift.models.load import load
from kvdrift.paths.execution import Execution
from kvdrift.paths.path import Step
from kvdrift.tracing.writer import Index, as_index, shifted, write_at

if TYPE_CHECKING:
    from kvdrift.models.model import Model


@dataclass(frozen=True)
class CacheOn:
    """The path with a KV cache.

    Parameters
    ----------
    model
        Run this model (anything `kvdrift.load` takes) instead of the one given to the verb.
    attn
        Attention implementation; the model's own by default.
    prefill_chunk
        Consume the prompt in chunks of so many tokens; at once by default.
    cache
        Makes an empty cache, a new one at every call; by default ``DynamicCache(config=model.config)``.
    left_padding
        Tokens of padding before the prompt, hidden by an attention mask, as in a batch with a longer prompt.
        Positions count from the first real token.
    lossy
        What the cache gives up by design (``"keys in 8 bits"``, ``"drops all but 64 keys"``), so that
        `kvdrift.diagnose` does not take it for a fault; None if nothing.
    controls
        Changes of arithmetic, for example ``ReRoll(0)``.
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
    prefill_chunk: int | None = None
    cache: Callable[[], Cache] | None = None
    left_padding: int = 0
    lossy: str | None = None
    controls: tuple[Control, ...] = ()
    call: str = field(default="explicit", kw_only=True)
    label: str = field(default="cache-ON", kw_only=True)

    def __post_init__(self) -> None:
        check_manner(self.call)
        if self.prefill_chunk is not None and self.prefill_chunk < 1:
            raise InputError(f"prefill_chunk={self.prefill_chunk}: chunks hold at least one token.")
        if self.left_padding < 0:
            raise InputError(f"left_padding={self.left_padding}: give a number of tokens, 0 for none.")
        if self.cache is not None and not callable(self.cache):
            raise InputError(
                f"cache={type(self.cache).__name__}: give a function that makes an empty cache, such as "
                "lambda: DynamicCache(), since every run needs its own."
            )
        if self.model is not None:
            object.__setattr__(self, "model", load(self.model, quiet=True))

    def start(self, model: Model, ids: Sequence[int], controls: tuple[Control, ...] | None = None) -> CacheOnRun:
        """Begin a run over a prompt."""
        model = self.model or model
        chosen = self.controls if controls is None else controls
        cache = self.cache() if self.cache is not None else model.backend.new_cache()
        return CacheOnRun(self, model, list(ids), cache, chosen)


class CacheOnRun:
    """A cache-ON run under way; see `kvdrift.paths.path.Run`."""

    def __init__(
        self, path: CacheOn, model: Model, prompt: list[int], cache: Cache, controls: tuple[Control, ...]
    ) -> None:
        self.path, self.model, self.controls = path, model, controls
        self.attn = path.attn
        self.cache = cache
        self._prompt = prompt
        self._consumed = -path.left_padding  # counted in real tokens
        self._key_offsets: dict[int, int] = {}
        self._end = 0  # slots in use after the latest pass
        self._keeps_past = False
        self._execution = Execution(model, path.attn, controls, path.call)

    def step(self, token: int | None = None) -> Step:
        """Prefill (``token=None``, once) or decode one token."""
        if (token is None) != (self._consumed == -self.path.left_padding):
            raise InputError("The first step takes no token, every later one takes the token to consume.")
        if token is None and self._holds_tokens():
            raise StaleCacheError(
                "A new run's cache holds tokens already: cache= must make an empty one at every call."
            )
        return self._consume(self._chunks() if token is None else [[token]])

    def extend(self, tokens: Sequence[int]) -> Step:
        """Consume several tokens in one pass, as a continued chat and the check of drafted tokens do.

        Raises
        ------
        InputError
            If there are none, or the prompt was not consumed yet.
        """
        if not tokens or self._consumed == -self.path.left_padding:
            raise InputError(
                f"extend({list(tokens)}): give at least one token, after the first step has consumed the prompt."
            )
        return self._consume([list(tokens)])

    def _consume(self, chunks: list[list[int]]) -> Step:
        for chunk in chunks:
            self._key_offsets = self._offsets(len(chunk))
            self._end = self._consumed + self.path.left_padding + len(chunk)
            logits = self._execution.forward(chunk, self._consumed, self.cache, self.path.left_padding)
            self._consumed += len(chunk)
        return Step(logits, self._consumed - 1)

    def keep_past(self) -> None:
        """From the start on, keep what a sliding window evicts, so that `crop` can go back past its edge."""
        if hasattr(self.cache, "activate_past_recording"):
            self.cache.activate_past_recording()
        self._keeps_past = True

    def crop(self, n_tokens: int) -> None:
        """Forget the last ``n_tokens`` consumed, as assisted generation does with tokens that it rejects.

        Raises
        ------
        InputError
            If so many decoded tokens were not consumed, or the cache cannot go back so far.
        """
        if not 0 < n_tokens <= self._consumed - len(self._prompt):
            raise InputError(
                f"crop({n_tokens}): {max(self._consumed - len(self._prompt), 0)} tokens were consumed after the prompt."
            )
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

    def skip(self, token: int) -> None:
        """Consume a token: the cache needs it, so this is a step."""
        self.step(token)

    def fork(self, controls: tuple[Control, ...] | None = None) -> CacheOnRun:
        """An independent continuation with its own copy of the cache."""
        other = CacheOnRun(
            self.path,
            self.model,
            self._prompt,
            _copy_cache(self.cache),
            self.controls if controls is None else controls,
        )
        other._consumed, other._keeps_past = self._consumed, self._keeps_past
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
        kinds = self.cache.layers
        if layer >= len(kinds) or type(kinds[layer]) not in (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer):
            kind = type(kinds[layer]).__name__ if layer < len(kinds) else "no cache of its own"
            raise SiteError(f"The entries of layer {layer} ({kind}) cannot be overwritten; use write='read'.")
        start = int(self.cache.get_mask_sizes(1, layer)[1]) - self.path.left_padding
        return range(start, self._consumed)

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
        start, kind = self.held(layer).start, self.cache.layers[layer]
        attribute = "keys" if name == "k" else "values"
        before: Tensor = getattr(kind, attribute)
        slots = as_index(shifted(positions, -start))
        target = before if isinstance(kind, StaticLayer) else before.clone()  # a fork may share the others' memory
        if target[:, heads][:, :, slots].shape != value.shape:
            raise SiteError(
                f"The cache of layer {layer} stores {name!r} in another shape than the kernel reads; use write='read'."
            )
        write_at(target, heads, slots, value)
        setattr(kind, attribute, target)

    def _holds_tokens(self) -> bool:
        attention = [layer for layer in self.cache.layers if isinstance(layer, CacheLayerMixin)]
        return any(int(layer.get_seq_length()) > 0 for layer in attention)

    def _chunks(self) -> list[list[int]]:
        tokens = [*self._padding(), *self._prompt]
        size = self.path.prefill_chunk or len(tokens)
        return [tokens[i : i + size] for i in range(0, len(tokens), size)]

    def _padding(self) -> list[int]:
        token = getattr(self.model.hf.config, "pad_token_id", None)
        return [token or 0] * self.path.left_padding

    def key_positions(self, layer: int, n_keys: int) -> Sequence[int]:
        """Consecutive positions from the offset that the cache gave the mask before the latest pass.

        Padding sits at negative ones. A layer that reads another layer's entries has no offset of its own: its keys
        end with the pass, or fill all slots of a static cache.
        """
        offset = self._key_offsets.get(layer, max(self._end - n_keys, 0))
        start = offset - self.path.left_padding
        return range(start, start + n_keys)

    def _offsets(self, queries: int) -> dict[int, int]:
        """Absolute position of the first key in each layer, for a pass over ``queries`` more tokens."""
        return {
            layer: int(self.cache.get_mask_sizes(queries, layer)[1])
            for layer, kind in enumerate(self.cache.layers)
            if isinstance(kind, CacheLayerMixin)
        }


def _copy_cache(cache: Cache) -> Cache:
    """A copy that can be extended on its own.

    Layers that grow by concatenation never write into their tensors, so these can be shared; any other kind of
    layer is copied deeply.
    """
    if any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers):
        return copy.deepcopy(cache)
    other = copy.copy(cache)
    other.layers = [copy.copy(layer) for layer in cache.layers]
    return other
