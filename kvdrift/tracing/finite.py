"""Where NaN or infinity began in a forward pass, in one sentence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvdrift.models.model import Model
from kvdrift.models.sites import BLOCK_SITES, HEAD_SITES
from kvdrift.tracing.tap import Tap, Values

_ORDER = ("resid_pre", "q", "k", "v", "z", "attn_out", "resid_mid", "mlp_out", "resid_post")


def is_nonfinite(logits: Tensor) -> bool:
    """Whether logits hold NaN or +inf; −inf rules a token out and is legal.

    One pass over them: the largest is NaN if any is.

    Examples
    --------
    >>> is_nonfinite(torch.tensor([0.5, -torch.inf])), is_nonfinite(torch.tensor([0.5, torch.nan]))
    (False, True)
    """
    return not bool(logits.max() < torch.inf)


def broken_weight(model: Model) -> str | None:
    """A sentence on the first weight that holds NaN or infinity; None if all are finite."""
    name = next((name for name, weight in model.hf.named_parameters() if not weight.isfinite().all()), None)
    if name is None:
        return None
    return (
        f"The weights of {model.name} are broken: {model.backend.plain_name(name)} holds NaN or infinity; load them "
        "again, or in another dtype if they were cast."
    )


class Watch:
    """All sites of some passes, and the largest finite value that each module inside a block gives.

    Attributes
    ----------
    passes
        The sites, pass by pass.
    """

    def __init__(self, tap: Tap) -> None:
        self.passes: list[Values] = tap.steps
        self._peaks: dict[tuple[int, int], tuple[float, str]] = {}

    def see(self, layer: int, name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        """A forward hook on a module of a block."""
        if isinstance(output, Tensor) and output.is_floating_point():
            here = len(self.passes), layer
            self._peaks[here] = max(self._peaks.get(here, (0.0, "")), (_peak(output), f"{name} of layer {layer}"))

    def clear(self) -> None:
        """Forget the passes."""
        self.passes.clear()
        self._peaks.clear()

    def first_nonfinite(self) -> NonFinite | None:
        """The first value that is not finite; what is inside its block (the factors of a gated MLP) counts too."""
        found = first_nonfinite(self.passes)
        if found is None:
            return None
        largest, at = max((found.largest, found.at), self._peaks.get((found.number, found.layer), (0.0, "")))
        return replace(found, largest=largest, at=at)


@contextmanager
def watch_all(model: Model) -> Iterator[Watch]:
    """Watch every pass for where it leaves the finite numbers."""
    sites = dict.fromkeys(site for site in (*BLOCK_SITES, "q", "k", "v", "z") if site in model.coverage.sites)
    with Tap(model, sites, where="all", kv_where="all", keep=True) as tap, ExitStack() as stack:
        watch = Watch(tap)
        for layer, block in enumerate(model.tree.blocks):
            for name, module in block.named_modules():
                if name and next(module.children(), None) is None:
                    hook = partial(watch.see, layer, model.backend.plain_name(name))
                    stack.callback(module.register_forward_hook(hook).remove)
        yield watch


@dataclass(frozen=True)
class NonFinite:
    """The first value that is not finite.

    Attributes
    ----------
    number
        In which pass, counted from 0.
    layer, site
        Where in it.
    row
        Its row among those of the pass (of ``k`` and ``v``: among the keys read), counted from 0.
    largest, at
        The largest finite value up to there, and where that is.
    """

    number: int
    layer: int
    site: str
    row: int
    largest: float
    at: str

    def padded(self, padding: int) -> bool:
        """Whether it is in a row of left padding of so many tokens, which the first pass holds."""
        return self.row < padding and (self.number == 0 or self.site in ("k", "v"))

    def told(self, model: Model, padding: int = 0) -> str:
        """A clause on where it is."""
        row = " in the rows of left padding" if self.padded(padding) else ""
        return (
            f"{model.name} in {model.dtype_name} leaves the finite numbers at {self.site} of layer {self.layer}{row}: "
            f"the largest finite value up to there is {self.largest:.4g} ({self.at}), and {model.dtype_name} ends at "
            f"{torch.finfo(model.dtype).max:.4g}"
        )

    def advice(self, model: Model, padding: int = 0) -> str:
        """What to do, in a clause: another dtype helps only where the values come near the end of this one."""
        if self.overflows(model):
            narrow = model.dtype == torch.float16
            return f"use {'dtype=bfloat16 or float32' if narrow else 'dtype=float64'}"
        stored = "the path's own cache and at " if self.site in ("k", "v") else ""
        what = f"look at {stored}what makes {self.site} in layer {self.layer}"
        if self.padded(padding):
            what += " of rows that the mask hides whole"
        return f"{what}, since no value before it comes near that end: another dtype will not help"

    def overflows(self, model: Model) -> bool:
        """Whether a product of two values of this size leaves the dtype's range."""
        return self.largest**2 > torch.finfo(model.dtype).max


def first_nonfinite(passes: Iterable[Values]) -> NonFinite | None:
    """The first value that is not finite, pass by pass in the order of computation, in any row."""
    largest, at = 0.0, "the embeddings"
    for number, values in enumerate(passes):
        for layer, site, value in _in_order(values):
            finite, peak = value.isfinite(), _peak(value)
            if peak > largest:
                largest, at = peak, f"{site} of layer {layer}"
            if not finite.all():
                axis = value.dim() - 2 if site in HEAD_SITES else 1
                others = [other for other in range(value.dim()) if other != axis]
                row = int((~finite).sum(others).bool().int().argmax())
                return NonFinite(number, layer, site, row, largest, at)
    return None


def largest_finite(passes: Iterable[Values]) -> tuple[float, str]:
    """The largest finite value of some passes, and where it is."""
    found = [
        (_peak(value), f"{site} of layer {layer}")
        for values in passes
        for layer, site, value in _in_order(values)
        if value.isfinite().any()
    ]
    return max(found, default=(0.0, "the embeddings"))


def _peak(value: Tensor) -> float:
    """The largest finite size in a tensor; 0 if it holds no finite value."""
    finite = value[value.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _in_order(values: Values) -> list[tuple[int, str, Tensor]]:
    layers = sorted({layer for of_site in values.values() for layer in of_site})
    return [(layer, site, values[site][layer]) for layer in layers for site in _ORDER if layer in values.get(site, {})]
