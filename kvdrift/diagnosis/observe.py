"""What one step of a run shows: every site at every row of the pass, the keys and values read, the attention calls."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvdrift.models.model import Model
from kvdrift.models.sites import HEAD_SITES, LOGITS, PATTERN
from kvdrift.paths.capabilities import left_padding, unplaced, written
from kvdrift.paths.path import Run
from kvdrift.paths.stepper import Shown, Stepper
from kvdrift.paths.written import Written
from kvdrift.shapes import Logits
from kvdrift.tracing.seam import AttentionCall, Order, Output, seam
from kvdrift.tracing.tap import Tap, n_tokens

Key = tuple[int, str]
"""Layer and site."""


@dataclass(frozen=True)
class Call:
    """One attention call of a step, kept to be examined after it.

    Attributes
    ----------
    layer
        Its block.
    call
        The call as the model made it.
    queries, keys
        Absolute positions of its queries and of its keys; left padding has negative ones.
    written
        What the run handed to its cache so far, where the cache may lose some.
    unplaced
        Why the positions of the keys cannot be told; None if they can.
    seen
        Whether the attention function was seen to be called; otherwise ``call`` holds what the cache handed back, and
        nothing else that is true.
    """

    layer: int
    call: AttentionCall
    queries: Sequence[int]
    keys: Sequence[int]
    written: Written | None = None
    unplaced: str | None = None
    seen: bool = True


@dataclass
class Snapshot:
    """One step of one run.

    Attributes
    ----------
    position
        The current position.
    rows
        Site values ``[row, …]``; the last row is the current position.
    kv
        Keys and values as the last pass of the step read them, ``[kv_head, key, feature]``, with the absolute
        position of each key.
    logits
        ``[vocab]``.
    calls
        The attention calls, in order.
    rotary
        The position id that reached the rotary embedding for the current position; None where there is none.
    """

    position: int
    rows: dict[Key, Tensor]
    kv: dict[Key, tuple[Tensor, Sequence[int]]]
    logits: Logits
    calls: list[Call] = field(default_factory=list)
    rotary: int | None = None


def by_uncached_pass(model: Model) -> Model:
    """The model with the sites inside attention that a pass without a cache shows.

    ``model.coverage`` leaves a layer out whose decoding pass reads other keys than one per token. Where the cache
    keeps one entry per token this is the very fault that is looked for, so such layers are taken from an uncached
    pass alone.
    """
    calls = _Calls(model)
    with seam(model.hf, calls), model.evaluating():
        model.backend.forward(torch.zeros((1, 3), dtype=torch.long, device=model.device), 0)
    lengths: dict[int, list[int]] = {}
    for _, call in calls.take()[1]:
        lengths.setdefault(model.layer_of[id(call.module)], []).append(call.key.shape[2])
    plain = (DynamicLayer, DynamicSlidingWindowLayer)
    kept = {layer for layer, kind in enumerate(model.backend.new_cache().layers) if type(kind) in plain}
    found = {layer for layer, seen in lengths.items() if seen == [3] and layer in kept}
    coverage = model.coverage
    view = copy.copy(model)
    view.coverage = replace(
        coverage,
        attention_layers=tuple(sorted({*coverage.attention_layers, *found})),
        table_layers={**coverage.table_layers, **dict.fromkeys(found, True)},
    )
    return view


class Observer:
    """Steps a run and takes a `Snapshot` of every step.

    Parameters
    ----------
    run
        The run, not begun yet.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        model = run.model
        sites = dict.fromkeys(site for site in model.coverage.sites if site != PATTERN)
        self._tap = Tap(model, sites, where="all", kv_where="all", keep=True)
        self._stepper = Stepper(run, (), self._tap)
        self._calls = _Calls(model, self._tap)
        self._rotary = _RotaryPosition(model)

    def step(self, tokens: Sequence[int] | None = None) -> Snapshot:
        """One step of the run, observed; see `Stepper.step`."""
        hf = self.run.model.hf
        with ExitStack() as stack:
            stack.callback(hf.register_forward_pre_hook(self._calls.begin, with_kwargs=True).remove)
            stack.callback(hf.register_forward_pre_hook(self._rotary.begin).remove)
            for context in (self._tap, seam(hf, self._calls), self._rotary.watching()):
                stack.enter_context(context)
            shown = self._stepper.step(tokens, finite=False)
        n_tokens, calls = self._calls.take()
        kv = {
            (layer, site): (value[0], shown.keys[layer])
            for site in ("k", "v")
            for layer, value in shown.values.get(site, {}).items()
        }
        placed = self._placed(shown.position + shown.step.rows_after, n_tokens, calls) if n_tokens else []
        return Snapshot(shown.position, _rows(shown), kv, shown.logits, placed, self._rotary.take())

    def _placed(self, position: int, tokens: list[int], calls: list[tuple[int, AttentionCall]]) -> list[Call]:
        """The calls of a step with the positions of their queries and keys; its last pass ends at ``position``."""
        found, noted, padding = [], written(self.run), left_padding(self.run)
        for number, call in calls:
            layer = self.run.model.layer_of[id(call.module)]
            end = position + 1 - sum(tokens[number + 1 :])
            n_keys = call.key.shape[2]
            last = number == len(tokens) - 1
            if last:
                keys = self.run.key_positions(layer, n_keys)
            else:  # an earlier chunk of the prompt
                keys = range(end - n_keys, end) if n_keys <= end + padding else range(n_keys)
            queries = range(end - call.query.shape[2], end)
            info = self.run.model.architecture.layers[layer]
            slides = info.first_seen(max(queries[0], 0)) >= keys[0]
            placed = None if noted is None or slides or last else _evicted(noted, layer, end, call)
            if placed is None and last:
                placed = unplaced(self.run, {layer: n_keys}).get(layer)
            why = placed if isinstance(placed, str) else None
            keys = keys if placed is None or isinstance(placed, str) else placed
            found.append(Call(layer, call, queries, keys, noted, why))
        return [*found, *self._unseen(position + 1, tokens[-1], {one.layer for one in found})]

    def _unseen(self, end: int, n_tokens: int, seen: set[int]) -> list[Call]:
        """What the cache handed, in the last pass, to layers whose attention does not go through the table."""
        run, noted = self.run, written(self.run)
        if noted is None:
            return []
        found = []
        for layer, (key, value) in noted.back.items():
            module = run.model.tree.attention_modules[layer]
            if layer in seen or module is None:
                continue
            queries, n_keys = range(end - n_tokens, end), key.shape[2]
            call = AttentionCall(module, key[:, :, -n_tokens:], key, value, None, {}, module.forward)
            keys, why = run.key_positions(layer, n_keys), unplaced(run, {layer: n_keys}).get(layer)
            found.append(Call(layer, call, queries, keys, noted, why, seen=False))
        return found


def _evicted(written: Written, layer: int, end: int, call: AttentionCall) -> Sequence[int] | str | None:
    """Where the keys of an earlier pass sit, if there are fewer than were written; a sentence if it cannot be told."""
    entries = written.entries(layer, end)
    if entries is None or call.key.shape[2] >= entries[0].shape[2]:
        return None
    return written.place(entries, (call.key, call.value))


def _rows(shown: Shown) -> dict[Key, Tensor]:
    """Sites with a row per token, rows first, the passes of a chunked prefill one after the other.

    A layer that computes the last tokens of a pass only (where it writes no keys that others read) has rows of the
    last chunk alone.
    """
    found: dict[Key, Tensor] = {}
    for site, layers in shown.values.items():
        if site in ("k", "v", LOGITS):
            continue
        for layer in layers:
            parts = [_rows_first(values[site][layer][0], site in HEAD_SITES) for values in shown.passes]
            whole = all(len(rows) == n for rows, n in zip(parts, shown.consumed, strict=True))
            found[layer, site] = torch.cat(parts) if whole and len(parts) > 1 else parts[-1]
    return found


def _rows_first(value: Tensor, heads: bool) -> Tensor:
    """Move the axis of tokens to the front: it is the second one of ``q`` and ``z``, the first one elsewhere."""
    return value.movedim(1, 0) if heads else value


class _Calls:
    """Keeps the attention calls of a model's blocks, and how many tokens each pass consumed, while a tap is enabled."""

    order = Order.OBSERVE

    def __init__(self, model: Model, tap: Tap | None = None) -> None:
        self._parts, self._tap = model.attention_layer_of, tap or Tap(model, {})
        self._tokens: list[int] = []
        self._found: list[tuple[int, AttentionCall]] = []

    def __call__(self, call: AttentionCall, proceed: Callable[[AttentionCall], Output]) -> Output:
        if self._tap.enabled and id(call.module) in self._parts:
            self._found.append((len(self._tokens) - 1, replace(call)))
        return proceed(call)

    def begin(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that a pass begins: a forward pre-hook of the model."""
        if self._tap.enabled:
            self._tokens.append(n_tokens(args, kwargs))

    def take(self) -> tuple[list[int], list[tuple[int, AttentionCall]]]:
        """Tokens of each pass, and the calls with the number of their pass; both are handed over."""
        tokens, found, self._tokens, self._found = self._tokens, self._found, [], []
        return tokens, found


class _RotaryPosition:
    """Reads the last position id that a model hands to its rotary embedding."""

    def __init__(self, model: Model) -> None:
        self._modules = [
            module
            for module in model.hf.modules()
            if "rotary" in type(module).__name__.lower()
            and "position_ids" in inspect.signature(module.forward).parameters
        ][:1]
        self._found: int | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as stack:
            for module in self._modules:
                stack.callback(module.register_forward_pre_hook(self._read, with_kwargs=True).remove)
            yield

    def _read(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = list(inspect.signature(module.forward).parameters)
        given = dict(zip(names, args, strict=False)) | kwargs
        ids = given.get("position_ids")
        if self._found is None and isinstance(ids, Tensor) and ids.ndim == 2:  # later ones may be for compressed keys
            self._found = int(ids[0, -1])

    def begin(self, *_: Any) -> None:
        """Forget what an earlier pass was given: a forward pre-hook of the model."""
        self._found = None

    def take(self) -> int | None:
        """The last position id of the latest pass, handed over."""
        found, self._found = self._found, None
        return found
