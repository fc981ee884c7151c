"""Attention at one fixed shape: the model's own eager function on tiles of queries and keys at absolute positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import Cache

from kvdrift.backends.cache_state import length
from kvdrift.controls.row_tiles import RowTiles
from kvdrift.errors import InputError, ModelError
from kvdrift.models.model import Model
from kvdrift.tracing.seam import AttentionCall, Order, Output, eager_function
from kvdrift.tracing.tap import n_tokens


class FixedAttention:
    """Executes every attention call of a model's blocks at one shape.

    Queries are cut into tiles at multiples of ``tile`` of their absolute position. Keys and values are put at
    their absolute positions into ``max_length`` slots (rounded up to whole tiles), zeros elsewhere; positions count
    from the first token that is not left padding, if there is one sequence or all are padded alike. The mask is
    read as the model gives it, and hides every slot beside; a mask that is None is rebuilt from the positions. The
    function that runs is the model's own eager attention, with everything else that the model passes to it: scaling,
    soft-cap, sinks.

    Parameters
    ----------
    model
        The model whose calls are executed.
    max_length
        The longest sequence.
    tiles
        The mode that runs all other operators; inside an attention call it has nothing to do.
    """

    order = Order.KERNEL

    def __init__(self, model: Model, max_length: int, tiles: RowTiles) -> None:
        self.model, self.max_length, self.tiles = model, max_length, tiles
        self.consumed: int | None = None
        self.tokens = 0
        self.padding = 0
        self.layers = model.attention_layer_of

    def __str__(self) -> str:
        return f"FixedShape(max_length={self.max_length}, tile={self.tiles.tile})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FixedAttention) and self.model.hf is other.model.hf and str(self) == str(other)

    def before_pass(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remember the tokens of a pass, those before it, and its left padding: a forward pre-hook of the decoder."""
        caches = [value for value in (*args, *kwargs.values()) if isinstance(value, Cache)]
        self.consumed = length(caches[0]) if caches else 0
        self.tokens = n_tokens(args, kwargs)
        self.padding = left_padding(kwargs.get("attention_mask"))

    def after_pass(self, *_: Any) -> None:
        """Forget it: a forward hook of the decoder."""
        self.consumed, self.tokens, self.padding = None, 0, 0

    def __call__(self, call: AttentionCall, proceed: Callable[[AttentionCall], Output]) -> Output:
        """Execute one attention call."""
        layer = self.layers.get(id(call.module))
        if layer is None:  # not over the tokens of a decoder block
            return proceed(call)
        try:
            function = eager_function(call.module)
        except LookupError:  # `not_covered` names the layer
            return proceed(call)
        with self.tiles.paused():
            return self._execute(call, layer, function)

    def _execute(self, call: AttentionCall, layer: int, function: Callable[..., Output]) -> Output:
        tile, query = self.tiles.tile, call.query
        n_queries, n_keys = query.shape[2], call.key.shape[2]
        before = n_keys - n_queries if self.consumed is None else self.consumed
        start = before + max(self.tokens - n_queries, 0) - self.padding  # a layer may run the last tokens alone
        end = start + n_queries
        if end > self.max_length:
            raise InputError(
                f"This pass reaches {end} tokens, and fixed shape {self.max_length} holds {self.max_length}: give a "
                f"max_length of at least {end}, the same for everything that is compared."
            )
        first = max(end + self.padding - n_keys, 0) - self.padding  # keys end with the pass, or (static) begin at 0
        n_slots = -(-self.max_length // tile) * tile
        read = slice(max(-first, 0), min(n_keys, n_slots - first))  # neither padding nor slots never reached
        first = max(first, 0)
        n_read = read.stop - read.start
        keys = (first, n_slots - first - n_read)
        lead = start % tile
        n_tiles = -(-(lead + n_queries) // tile)
        rows = (lead, n_tiles * tile - lead - n_queries)

        mask = self._mask(call, layer, range(start, end), range(first, first + n_read), read)
        mask = pad(mask, (*keys, *rows), value=torch.finfo(mask.dtype).min)
        extra = {
            name: pad(given[..., read], (*keys, *rows)) if _has_keys(name, given, call) else pad(given, (0, 0, *rows))
            for name, given in call.kwargs.items()
            if isinstance(given, Tensor) and given.dim() == 4 and given.shape[2] == n_queries
        }
        query = pad(query, (0, 0, *rows))
        key = pad(call.key[:, :, read], (0, 0, *keys)).contiguous()
        value = pad(call.value[:, :, read], (0, 0, *keys)).contiguous()
        outputs, patterns = [], []
        for place in range(0, n_tiles * tile, tile):
            part, seen, *more = (x[:, :, place : place + tile].contiguous() for x in (query, mask, *extra.values()))
            given = call.kwargs | dict(zip(extra, more, strict=True))
            output, pattern = function(call.module, part, key, value, seen, **given)
            outputs.append(output)
            if pattern is not None and self.model.attn == "eager":
                patterns.append(pattern)
        output = torch.cat(outputs, dim=1)[:, lead : lead + n_queries]
        if not patterns:
            return output, None
        pattern = torch.cat(patterns, dim=2)[:, :, lead : lead + n_queries, first : first + n_read]
        return output, pad(pattern, (read.start, n_keys - read.stop))

    def _mask(self, call: AttentionCall, layer: int, queries: range, keys: range, read: slice) -> Tensor:
        """The mask of the keys ``read``, in numbers to be added: ``[batch, head, query, key]``."""
        given, device = call.mask, call.query.device
        if given is None:
            visible = self._visible(call, queries, keys).to(device)[None, None]
        elif not isinstance(given, Tensor) or given.dim() != 4:
            raise ModelError(
                f"Layer {layer} is given its mask as {type(given).__name__}, which fixed shape cannot read; run it "
                "with attn='sdpa' or attn='eager'."
            )
        elif given.is_floating_point():
            return given[..., read].expand(-1, -1, len(queries), -1)
        else:
            visible = given[..., read].bool().expand(-1, -1, len(queries), -1)
        hidden = torch.finfo(call.query.dtype).min
        return torch.zeros(visible.shape, dtype=call.query.dtype, device=device).masked_fill_(~visible, hidden)

    def _visible(self, call: AttentionCall, queries: range, keys: range) -> Tensor:
        """Which keys each query sees where no mask says so: bool ``[query, key]``.

        Those up to its own position. A window hides others only in flash attention, which is told of it; other
        kernels know no window but that of a mask.
        """
        at = torch.tensor(list(keys))
        causal = call.kwargs.get("is_causal")
        if not (getattr(call.module, "is_causal", True) if causal is None else causal):
            return (at < queries.stop).expand(len(queries), -1)
        last = torch.tensor(list(queries))[:, None]
        window = call.kwargs.get("sliding_window") if "flash" in self.model.attn else None
        return (at <= last) & (at > last - (window or queries.stop))


def _has_keys(name: str, given: Tensor, call: AttentionCall) -> bool:
    """Whether an argument ``[batch, head, query, …]`` ends in an axis of keys (a sink may have as many entries)."""
    return given.shape[3] == call.key.shape[2] and "sink" not in name


def left_padding(mask: object) -> int:
    """How many tokens a mask ``[batch, token]`` hides at the start of every sequence, or 0 if they differ.

    Examples
    --------
    >>> left_padding(torch.tensor([[0, 0, 1, 1]])), left_padding(torch.tensor([[0, 1], [1, 1]])), left_padding(None)
    (2, 0, 0)
    """
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return 0
    hidden = {int(row.argmax()) for row in mask.bool().int()}
    return hidden.pop() if len(hidden) == 1 else 0
