"""Sliding windows that one path does not keep to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from faults.fault import fault, has_window
from faults.passes import Pass, during, watched
from torch import Tensor, nn
from transformers import masking_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

NO_WINDOW = 1 << 20


@fault(has_window, signature="at the window")
def cache_keeps_one_too_few(hf: Any) -> Iterator[None]:
    """The cache evicts one entry too many, so that a decoded token sees a window shorter by one."""
    original = DynamicSlidingWindowLayer.__init__

    def init(self: DynamicSlidingWindowLayer, sliding_window: int, **kwargs: Any) -> None:
        original(self, sliding_window - 1, **kwargs)

    with patch.object(DynamicSlidingWindowLayer, "__init__", init):
        yield


@fault(has_window)
def mask_one_too_wide(hf: Any) -> Iterator[None]:
    """The mask lets a token see one position before its window, which the cache has evicted at decode."""
    original = masking_utils.sliding_window_causal_mask_function
    with patch.object(masking_utils, original.__name__, lambda window: original(window + 1)):
        yield


@fault(has_window, signature="at the window")
def window_ignored_by_the_cache(hf: Any) -> Iterator[None]:
    """The cache evicts nothing and a decoded token sees it all."""

    def update(self: DynamicSlidingWindowLayer, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        read = DynamicLayer.update(self, key, value)
        self.cumulative_length = self.keys.shape[-2]
        return read

    def crop(self: DynamicSlidingWindowLayer, tokens: int) -> None:
        DynamicLayer.crop(self, tokens)
        self.cumulative_length = self.keys.shape[-2]

    methods = {"update": update, "crop": crop, "get_mask_sizes": DynamicLayer.get_mask_sizes}
    with (
        _window_ignored(hf, lambda now: now.decoding),
        patch.multiple(DynamicSlidingWindowLayer, **methods),
    ):
        yield


@fault(has_window)
def cache_off_ignores_the_window(hf: Any) -> Iterator[None]:
    """Without a cache the window is ignored: the reference arm is the wrong one."""
    with _window_ignored(hf, lambda now: not now.cached):
        yield


@fault(has_window, signature="at the window")
def wrong_on_reaching_the_window(hf: Any) -> Iterator[None]:
    """The decoded token that fills the window is not stored: the entry before it is kept twice."""
    original = DynamicSlidingWindowLayer.update

    def update(self: DynamicSlidingWindowLayer, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        reaches = self.cumulative_length + 1 == self.sliding_window and key.shape[-2] == 1
        read = original(self, key, value, *args, **kwargs)
        if reaches and self.keys.shape[-2] > 1:
            self.keys, self.values = (torch.cat([x[:, :, :-1], x[:, :, -2:-1]], 2) for x in (self.keys, self.values))
        return read

    with patch.object(DynamicSlidingWindowLayer, "update", update):
        yield


@contextmanager
def _window_ignored(hf: Any, when: Callable[[Pass], bool]) -> Iterator[None]:
    """Passes of a kind run with a window in the body's config that is never reached."""

    with watched(hf.base_model) as now:

        def no_window(body: nn.Module) -> Callable[[], None] | None:
            if not when(now):
                return None
            window, body.config.sliding_window = body.config.sliding_window, NO_WINDOW
            return lambda: setattr(body.config, "sliding_window", window)

        with during([hf.base_model], no_window):
            yield
