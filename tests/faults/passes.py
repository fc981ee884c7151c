"""Which kind of forward pass is under way, and hooks that change what a module is given for its time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

CACHE_NAMES = ("cache", "past_key_values", "cache_params")


@dataclass
class Pass:
    """The forward pass under way.

    Attributes
    ----------
    queries
        Tokens that it consumes.
    past
        Tokens that the cache held before it; a recurrent cache that holds any counts as one.
    cached
        Whether it has a cache.
    """

    queries: int = 0
    past: int = 0
    cached: bool = False

    @property
    def decoding(self) -> bool:
        """One token on top of a cache that holds some."""
        return self.past > 0 and self.queries == 1

    @property
    def later_chunk(self) -> bool:
        """Several tokens on top of a cache that holds some."""
        return self.past > 0 and self.queries > 1

    @property
    def drafted(self) -> bool:
        """2 to 4 tokens on top of a cache that holds some: fewer than a chunk of a prompt."""
        return self.past > 0 and 1 < self.queries < 5


@contextmanager
def before_pass(module: nn.Module, change: Callable[[Pass, dict[str, Any]], None]) -> Iterator[None]:
    """Call ``change`` with each pass of a model or its body and its keyword arguments, which it may change."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        kwargs = dict(kwargs)
        change(_read(args, kwargs), kwargs)
        return args, kwargs

    handle = module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def watched(module: nn.Module) -> Iterator[Pass]:
    """A `Pass` that always describes the latest one."""
    latest = Pass()

    def note(now: Pass, kwargs: dict[str, Any]) -> None:
        latest.queries, latest.past, latest.cached = now.queries, now.past, now.cached

    with before_pass(module, note):
        yield latest


@contextmanager
def during(modules: list[nn.Module], enter: Callable[[nn.Module], Callable[[], None] | None]) -> Iterator[None]:
    """Change each of these modules (or the copy of it that runs) while it computes.

    ``enter(module)`` makes the change and returns what undoes it, or None where it left the module alone.
    """
    undo: list[Callable[[], None] | None] = []

    def before(module: nn.Module, args: Any) -> None:
        undo.append(enter(module))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if (back := undo.pop()) is not None:
            back()

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_pre_hook(before).remove)
            stack.callback(module.register_forward_hook(after, always_call=True).remove)
        yield


def cache_of(kwargs: dict[str, Any]) -> Cache | None:
    """The cache among a body's arguments."""
    return next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)


def _read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pass:
    tokens = next(x for x in (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if x is not None)
    cache = cache_of(kwargs)
    past = 0 if cache is None else max((_held(layer) for layer in cache.layers), default=0)
    return Pass(int(tokens.shape[1]), past, cache is not None)


def _held(layer: Any) -> int:
    if isinstance(layer, CacheLayerMixin):
        return int(layer.get_seq_length())
    return int(any(getattr(layer, "has_previous_state", {}).values()))
