"""What a fault is: one realistic mistake, made for as long as a block runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from transformers import Cache, DynamicCache

from kvdrift.models.architecture import describe
from kvdrift.paths.loss import Declared


@dataclass(frozen=True)
class Fault:
    """One mistake.

    A fault acts on the model and on every deep copy of it, in the same way at every run of a path, and leaves the
    model, transformers' classes and its tables as they were when its block ends.

    Attributes
    ----------
    name
        What tables call it.
    doc
        What goes wrong, in a sentence.
    applies
        Whether a model has what the fault spoils.
    layer
        The one layer in which it sits, or None where it sits in many or in none.
    signature
        Under which circumstance it shows, as a verdict words it, or None where that depends on the model.
    prefix
        Makes the saved prefix in which the fault sits, from which path a starts; None where it sits in the model.
    lossy
        The loss that path a declares; None for none.
    """

    name: str
    doc: str
    make: Callable[..., AbstractContextManager[None]]
    applies: Callable[[Any], bool]
    layer: Callable[[Any], int | None]
    signature: str | None = None
    prefix: Callable[[Any], Cache] | None = None
    lossy: Declared | None = None

    def apply(self, hf: Any) -> AbstractContextManager[None]:
        """Make the mistake while the returned context is open."""
        layer = self.layer(hf)
        return self.make(hf) if layer is None else self.make(hf, layer)


def nowhere(hf: Any) -> int | None:
    """No single layer."""
    return None


def fault(
    applies: Callable[[Any], bool], layer: Callable[[Any], int | None] = nowhere, signature: str | None = None
) -> Callable[[Callable[..., Iterator[None]]], Fault]:
    """Turn a generator function into a `Fault` named and described by it; it is given the layer where there is one."""

    def wrap(make: Callable[..., Iterator[None]]) -> Fault:
        name = make.__name__.replace("_", "-")
        doc = " ".join((make.__doc__ or "").split())
        return Fault(name, doc, contextmanager(make), applies, layer, signature)

    return wrap


# --- what a model has


def attention_layers(hf: Any, kind: str | None = None) -> list[int]:
    """Layers with keys and values, all or those of one kind."""
    layers = describe(hf).layers
    return [layer.index for layer in layers if layer.n_kv_heads and kind in (None, layer.attention)]


def has_cache(hf: Any) -> bool:
    """Whether any layer has keys and values."""
    return bool(attention_layers(hf))


def can_crop(hf: Any) -> bool:
    """Whether the model's own cache can take back tokens."""
    return has_cache(hf) and DynamicCache(config=hf.config).is_croppable


def has_window(hf: Any) -> bool:
    """Whether any layer has a sliding window."""
    return bool(attention_layers(hf, "sliding"))


def second_attention_layer(hf: Any) -> int | None:
    """The second layer with keys and values, the first where there is one only."""
    layers = attention_layers(hf)
    return layers[min(1, len(layers) - 1)] if layers else None


def like_layers(hf: Any) -> tuple[int, int] | None:
    """The first two layers whose keys and values have the same shapes, or None."""
    layers = [layer for layer in describe(hf).layers if layer.n_kv_heads]
    pairs = [
        (one.index, two.index)
        for place, one in enumerate(layers)
        for two in layers[place + 1 :]
        if (one.attention, one.n_kv_heads, one.head_dim) == (two.attention, two.n_kv_heads, two.head_dim)
    ]
    return min(pairs, default=None)
