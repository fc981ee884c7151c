"""Row-wise operators on tiles of one fixed shape, whatever the number of rows that stand beside each other.

A kernel chooses its order of summation, and where its vector body ends, by the shape it is given: the same row
comes out with other bits in company of another number of rows. Here every operator that works row by row is
handed tiles of a fixed number of rows, the last one filled up with zeros, so that there is one shape only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn.functional import pad

from kvdrift.controls.dispatch import OperatorMode
from kvdrift.controls.groups import Groups
from kvdrift.controls.operators import GROUPED, PLACES, Kind, Use, axes_of, by_kind, elementwise

CHUNK = 16384
"""Entries per call of an elementwise operator: a multiple of every vector width, too few to be split over threads."""

NARROW = 16
"""Fewer columns than this are filled up before a matrix product."""

RowFunction = Callable[..., Any]
"""``(tile, …)`` → a tensor or a tuple of tensors with as many rows as the tiles it is given."""
Watch = Callable[[OpOverload, RowFunction, list[Tensor], Sequence[Any]], None]
"""Is shown each operator: it, what it does to tiles, the first tiles, and its other arguments."""

_Handler = Callable[["RowTiles", OpOverload, tuple[Any, ...], dict[str, Any]], Any]


class RowTiles(OperatorMode):
    """Runs row-wise operators on tiles of ``tile`` rows, and lets every other operator through.

    Row-wise are matrix products (rows of the left factor), reductions, softmax and norms (rows are what stands
    before the first reduced dimension) and elementwise functions (each entry is a row), apart from those that
    round a single exact operation and so cannot depend on their place.

    Attributes
    ----------
    watch
        Is shown every operator that is run on tiles, or None.
    """

    def __init__(self, tile: int) -> None:
        super().__init__()
        self.tile = tile
        self.watch: Watch | None = None
        self._paused = False

    def treat(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hand a call to its operator's handler."""
        handler = None if self._paused else handler_of(op)
        return NotImplemented if handler is None else handler(self, op, args, kwargs)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let everything through for a while."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def rows(
        self, op: OpOverload, function: RowFunction, tensors: Sequence[Tensor], beside: Sequence[Any], size: int = 0
    ) -> Any:
        """Call ``function`` on ``size`` rows of ``tensors`` at a time and put the results together.

        Parameters
        ----------
        op
            The operator behind it.
        function
            What is called on tiles.
        tensors
            Tensors with equally many rows.
        beside
            The operator's other arguments, which ``function`` holds.
        size
            Rows per tile, by default those of the mode.
        """
        size = size or self.tile
        n_rows = tensors[0].shape[0]
        if n_rows == 0:
            return function(*tensors)
        results = []
        for start in range(0, n_rows, size):
            tiles = [_padded(tensor[start : start + size], size) for tensor in tensors]
            if self.watch is not None and start == 0:
                self.watch(op, function, tiles, beside)
            results.append(function(*tiles))
        if isinstance(results[0], Tensor):
            return _joined(results, n_rows)
        return tuple(_joined(parts, n_rows) for parts in zip(*results, strict=True))


def _padded(rows: Tensor, size: int) -> Tensor:
    """``rows`` in memory of their own, filled up with zeros to ``size`` rows."""
    if rows.shape[0] == size:
        return rows.clone(memory_format=torch.contiguous_format)
    tile = rows.new_zeros((size, *rows.shape[1:]))
    tile[: rows.shape[0]] = rows
    return tile


def _joined(parts: Sequence[Tensor], n_rows: int) -> Tensor:
    return parts[0][:n_rows] if len(parts) == 1 else torch.cat(list(parts))[:n_rows]


# --- handlers


def _product(mode: RowTiles, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """``mm(a, b)``: rows of ``a``."""
    a, b = args
    n, wide = b.shape[1], _widened(b)
    return mode.rows(op, lambda tile: _narrowed(op(tile, wide, **kwargs), n), [a], [wide])


def _biased_product(mode: RowTiles, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """``addmm(bias, a, b)``: rows of ``a``, and of a bias that has as many."""
    bias, a, b = args[:3]
    n, wide = b.shape[1], _widened(b)
    bias = _widened(bias) if bias.dim() and bias.shape[-1] == n else bias

    def function(tile: Tensor, own: Tensor = bias) -> Tensor:
        return _narrowed(op(own, tile, wide, *args[3:], **kwargs), n)

    if bias.dim() == 2 and bias.shape[0] == a.shape[0] > 1:
        return mode.rows(op, function, [a, bias], [wide])
    return mode.rows(op, function, [a], [wide, bias])


def _widened(factor: Tensor) -> Tensor:
    """A factor with fewer than `NARROW` columns, filled up with zeros: kernels for narrow ones tell rows apart."""
    return factor if factor.shape[-1] >= NARROW else pad(factor, (0, NARROW - factor.shape[-1]))


def _narrowed(product: Tensor, n: int) -> Tensor:
    """The first ``n`` columns: those that were there before `_widened`."""
    return product[:, :n].contiguous()


def _product_with_vector(mode: RowTiles, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """``mv(a, b)``: a product with one column."""
    return _product(mode, torch.ops.aten.mm.default, (args[0], args[1][:, None]), kwargs)[:, 0]


def _biased_product_with_vector(
    mode: RowTiles, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """``addmv(bias, a, b)``: a product with one column."""
    bias, a, b = args[:3]
    given = (bias.expand(a.shape[0])[:, None], a, b[:, None], *args[3:])
    return _biased_product(mode, torch.ops.aten.addmm.default, given, kwargs)[:, 0]


def _batched_product(mode: RowTiles, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """``bmm(a, b)``, one product after the other: how many there are may be a number of tokens."""
    single = torch.ops.aten.mm.default
    products = [_product(mode, single, pair, {}) for pair in zip(*args[:2], strict=True)]
    return torch.stack(products) if products else op(*args, **kwargs)


def _biased_batched_product(mode: RowTiles, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """``baddbmm(bias, a, b)``, one product after the other."""
    bias, a, b = args[:3]
    if not a.shape[0]:
        return op(*args, **kwargs)
    biases = bias.expand(a.shape[0], a.shape[1], b.shape[2])
    single = torch.ops.aten.addmm.default
    return torch.stack(
        [_biased_product(mode, single, (*parts, *args[3:]), kwargs) for parts in zip(biases, a, b, strict=True)]
    )


def _grouped_product(mode: RowTiles, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Products of groups of rows, one after the other; see `Groups`."""
    groups = Groups.of(op, args, kwargs)
    if groups is None:
        return op(*args, **kwargs)
    return groups.product(lambda rows, factor: _product(mode, torch.ops.aten.mm.default, (rows, factor), {}))


def _reduction(mode: RowTiles, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function along some axes: rows are what stands before the first of them."""
    tensor, axes, place = args[0], axes_of(op, args), PLACES[op]
    if axes is None or place is None or not tensor.is_floating_point():
        return op(*args, **kwargs)
    many = isinstance(axes, Sequence)
    reduced = [axis % tensor.dim() for axis in (axes if many else [axes])]
    first = min(reduced)
    if first == 0:
        return op(*args, **kwargs)
    shifted = [axis - first + 1 for axis in reduced]
    given = (*args[1:place], shifted if many else shifted[0], *args[place + 1 :])
    return _along_rows(mode, op, lambda tile: op(tile, *given, **kwargs), tensor, first, given)


def _norm(mode: RowTiles, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A fused norm ``(input, shape, weight, bias…) -> (output, statistics…)``."""
    tensor, shape = args[:2]
    first = tensor.dim() - len(shape)
    if first == 0:
        return op(*args, **kwargs)
    return _along_rows(mode, op, lambda tile: op(tile, *args[1:], **kwargs), tensor, first, args[1:])


def _along_rows(
    mode: RowTiles, op: OpOverload, function: RowFunction, tensor: Tensor, first: int, beside: Sequence[Any]
) -> Any:
    """``function`` of rows that are the axes of ``tensor`` from ``first`` on; of short rows, many at a time."""
    shape, row = tensor.shape[:first], max(tensor.shape[first:].numel(), 1)
    size = max(CHUNK // row // mode.tile, 1) * mode.tile
    result = mode.rows(op, function, [tensor.flatten(0, first - 1)], beside, size)
    if isinstance(result, Tensor):
        return result.unflatten(0, shape)
    return tuple(part.unflatten(0, shape) for part in result)


def _elementwise(mode: RowTiles, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of each entry by itself: `CHUNK` entries at a time."""
    places = [place for place, arg in enumerate(args) if isinstance(arg, Tensor) and arg.dim() > 0]
    if not places or not any(args[place].is_floating_point() for place in places):
        return op(*args, **kwargs)
    tensors = torch.broadcast_tensors(*(args[place] for place in places))

    def function(*chunks: Tensor) -> Tensor:
        given = list(args)
        for place, chunk in zip(places, chunks, strict=True):
            given[place] = chunk
        return op(*given, **kwargs)

    others = [arg for place, arg in enumerate(args) if place not in places]
    flat = mode.rows(op, function, [tensor.reshape(-1) for tensor in tensors], others, CHUNK)
    result = flat.view(tensors[0].shape)
    if op._schema.is_mutable:
        return args[0].copy_(result)
    if tensors[0].is_contiguous():
        return result
    return torch.empty_like(tensors[0], dtype=result.dtype).copy_(result)


def _scaled_addition(mode: RowTiles, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``a + alpha * b``, which kernels may fuse: elementwise unless alpha is 1."""
    if kwargs.get("alpha", 1) == 1:
        return op(*args, **kwargs)
    return _elementwise(mode, op, args, kwargs)


_HANDLERS: dict[Any, _Handler] = by_kind(
    Use.TILES,
    {
        "mm": _product,
        **dict.fromkeys(("addmm", "_addmm_activation"), _biased_product),
        "mv": _product_with_vector,
        "addmv": _biased_product_with_vector,
        "bmm": _batched_product,
        "baddbmm": _biased_batched_product,
        **dict.fromkeys(GROUPED, _grouped_product),
        **dict.fromkeys((Kind.REDUCTION, Kind.RUNNING, Kind.SOFTMAX), _reduction),
        Kind.NORM: _norm,
        Kind.SCALED: _scaled_addition,
    },
)


@lru_cache(maxsize=4096)
def handler_of(op: Any) -> _Handler | None:
    """What runs an operator on tiles; None for one that cannot depend on its shape, or is no row-wise one."""
    return _HANDLERS.get(op) or (_elementwise if elementwise(op) else None)
