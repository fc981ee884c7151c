"""What one step of a run shows: every site at every row of the pass, the keys and values read, the attention calls."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvdrift.paths.path import Run
from kvdrift.tracing.seam import AttentionCall, Order, Output, seam
from kvdrift.tracing.sites import LOGITS, PATTERN
from kvdrift.tracing.tap import Tap, Values

if TYPE_CHECKING:
    from kvdrift.models.model import Model

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
    """

    layer: int
    call: AttentionCall
    queries: Sequence[int]
    keys: Sequence[int]


@dataclass
class Snapshot:
    """One step of one run.

    Attributes
    ----------
    position
        The current position.
    rows
        Site values ``[…, row, feature]``; the last row is the current position.
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
    logits: Tensor
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
    for call in calls.take():
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
        self._calls = _Calls(model)
        self._rotary = _RotaryPosition(model)

    def step(self, token: int | None = None) -> Snapshot:
        """One step of the run, observed."""
        self._tap.steps.clear()
        with self._tap, seam(self.run.model.hf, self._calls), self._rotary.watching():
            step = self.run.step(token)
        passes, self._tap.steps = self._tap.steps, []
        last = passes[-1]
        kv: dict[Key, tuple[Tensor, Sequence[int]]] = {
            (layer, site): (value[0], self.run.key_positions(layer, value.shape[2]))
            for site in ("k", "v")
            for layer, value in last.get(site, {}).items()
        }
        return Snapshot(step.position, _rows(passes), kv, step.logits, self._placed(step.position), self._rotary.take())

    def _placed(self, position: int) -> list[Call]:
        """The calls of a step with the positions of their queries, which end at the current one, and keys."""
        found: list[Call] = []
        later: dict[int, int] = {}
        for call in reversed(self._calls.take()):
            layer = self.run.model.layer_of[id(call.module)]
            end = position + 1 - later.get(layer, 0)
            n_queries, n_keys = call.query.shape[2], call.key.shape[2]
            later[layer] = later.get(layer, 0) + n_queries
            if end == position + 1:
                keys = self.run.key_positions(layer, n_keys)
            else:  # an earlier chunk of the prompt
                keys = range(end - n_keys, end) if n_keys <= end + self._padding else range(n_keys)
            found.append(Call(layer, call, range(end - n_queries, end), keys))
        return found[::-1]

    @property
    def _padding(self) -> int:
        return int(getattr(getattr(self.run, "path", None), "left_padding", 0))


def _rows(passes: list[Values]) -> dict[Key, Tensor]:
    """Row-wise sites of a step, the passes of a chunked prefill one after the other."""
    found: dict[Key, Tensor] = {}
    for site, layers in passes[-1].items():
        if site in ("k", "v", LOGITS):
            continue
        for layer in layers:
            parts = [values[site][layer][0] for values in passes]
            found[layer, site] = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)
    return found


class _Calls:
    """Keeps the attention calls of a model's blocks."""

    order = Order.OBSERVE

    def __init__(self, model: Model) -> None:
        self._layer_of = model.layer_of
        self._found: list[AttentionCall] = []

    def __call__(self, call: AttentionCall, proceed: Callable[[AttentionCall], Output]) -> Output:
        if id(call.module) in self._layer_of:
            self._found.append(replace(call))
        return proceed(call)

    def take(self) -> list[AttentionCall]:
        found, self._found = self._found, []
        return found


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
        if isinstance(ids, Tensor) and ids.ndim == 2:
            self._found = int(ids[0, -1])

    def take(self) -> int | None:
        found, self._found = self._found, None
        return found
