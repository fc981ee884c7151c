"""The self-test of fixed shape: does it hold here what its verdicts rest on?

Fixed shape rests on two properties of the kernels of the machine in use. The result of a row does not depend on
its place in a tile, and not on the rows beside it. No standard promises either, so they are tested on every
operator that a pass of the model runs, before a disagreement may be called a bug. The cache has no part in it:
what is tested must not be what is judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from kvdrift.bits import same_bits
from kvdrift.controls.fixed_shape import BoundFixedShape, FixedShape
from kvdrift.controls.row_tiles import RowFunction
from kvdrift.models.load import load
from kvdrift.models.model import Model
from kvdrift.tracing.tap import first_tensor

PREFIXES = (1, 7, 24)
N_TOKENS = 41
"""A sequence over several tiles, and how many tokens of it are kept as the sequence that junk is appended to."""
_FAR = (1, 2, 3, 5, 8, 15, 16, 31, 33, 64, 4099)  # places that a row of a large tile is moved by


@dataclass(frozen=True)
class Failure:
    """One property that does not hold.

    Attributes
    ----------
    kind
        ``"operator"``: a row comes out with other bits at another place in its tile, or with other companions.
        ``"junk"``: tokens appended after a sequence change an earlier row, so rows are not computed each by
        itself, or the model is not causal.
    where
        The operator with its shapes, or the block.
    what
        A sentence about it.
    """

    kind: Literal["operator", "junk"]
    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


def self_test(model: Any, control: FixedShape | None = None, seed: int = 0) -> list[Failure]:
    """Test the properties that fixed shape rests on, for the operators that a pass of this model runs.

    Parameters
    ----------
    model
        Anything `kvdrift.load` takes; a loaded module or a `Model` is used as it is.
    control
        The control that is to be relied on; ``FixedShape(64)`` by default. Sequences of up to 41 tokens are run,
        or of as many as ``control.max_length`` and the model's context hold.
    seed
        Decides the tokens.

    Returns
    -------
    list of Failure
        Empty if all is well. In models with layers that `kvdrift.controls.fixed_shape.not_covered` names, junk may
        move rows there.

    Examples
    --------
    >>> import kvdrift as kd
    >>> from kvdrift.controls.self_test import self_test
    >>> self_test(kd.models.tiny("llama"))
    []
    """
    model = load(model, quiet=True)
    control = control or FixedShape(64)
    n_tokens = min(N_TOKENS, control.max_length, model.architecture.max_positions or N_TOKENS)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.vocab_size, (1, n_tokens), generator=generator)
    seen = _Seen()
    with torch.no_grad(), model.evaluating():
        with control.bind(model) as bound:
            with _watched(bound, seen):
                whole = _blocks(model, tokens)
            prefixes = {n: _blocks(model, tokens[:, :n]) for n in PREFIXES if n < n_tokens}
        moved = [failure for n, alone in prefixes.items() for failure in _moved(alone, whole, n, n_tokens - n)]
        return [*seen.failures(), *moved]


@dataclass
class _Seen:
    """The first call of every operator in each combination of shapes, strides and dtypes."""

    calls: dict[tuple[Any, ...], tuple[OpOverload, RowFunction, list[Tensor]]] = field(default_factory=dict)

    def __call__(self, op: OpOverload, function: RowFunction, tiles: list[Tensor], beside: Sequence[Any]) -> None:
        signature = (op, *map(_signature, tiles), *map(_signature, beside))
        self.calls.setdefault(signature, (op, function, [tile.clone() for tile in tiles]))

    def failures(self) -> Iterator[Failure]:
        for op, function, tiles in self.calls.values():
            what = rows_differ(function, tiles)
            if what:
                shapes = ", ".join(f"{list(tile.shape)} {str(tile.dtype).removeprefix('torch.')}" for tile in tiles)
                yield Failure("operator", f"{op._schema.name.partition('::')[2]} of {shapes}", what)


def _signature(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return tuple(argument.shape), argument.stride(), argument.dtype, argument.device
    return repr(argument)


def rows_differ(function: RowFunction, tiles: Sequence[Tensor]) -> str | None:
    """Whether rows come out with other bits at another place in their tile, or with other companions.

    Parameters
    ----------
    function
        Of tiles, row by row.
    tiles
        Tensors ``[row, …]`` with equally many rows.

    Returns
    -------
    str or None
        What differs, or None if nothing does.

    Examples
    --------
    >>> import torch
    >>> rows_differ(torch.exp, [torch.ones(16, 4)])
    >>> rows_differ(lambda rows: rows.cumsum(0), [torch.ones(16, 4)])
    'a row has other bits at another place in its tile'
    """
    size = tiles[0].shape[0]
    expected = _outputs(function, tiles)
    for shift in range(1, size) if size <= 64 else [shift for shift in _FAR if shift < size]:
        moved = _outputs(function, [tile.roll(shift, 0) for tile in tiles])
        if not all(same_bits(x, y.roll(shift, 0)) for x, y in zip(moved, expected, strict=True)):
            return "a row has other bits at another place in its tile"
    for kept in (0, 1):
        companions = torch.arange(size) % 2 != kept
        changed = [tile.clone() for tile in tiles]
        for tile in changed:
            others = tile[companions]
            tile[companions] = (others * -3 + 1).to(tile.dtype) if tile.is_floating_point() else others
        outputs = _outputs(function, changed)
        if not all(same_bits(x[~companions], y[~companions]) for x, y in zip(outputs, expected, strict=True)):
            return "a row has other bits with other rows beside it"
    return None


def _outputs(function: RowFunction, tiles: Sequence[Tensor]) -> list[Tensor]:
    result = function(*(tile.clone() for tile in tiles))  # functions may write into what they are given
    return [result] if isinstance(result, Tensor) else list(result)


@contextmanager
def _watched(bound: BoundFixedShape, seen: _Seen) -> Iterator[None]:
    bound.tiles.watch = seen
    try:
        yield
    finally:
        bound.tiles.watch = None


def _moved(alone: list[Tensor], beside: list[Tensor], n_tokens: int, n_junk: int) -> Iterator[Failure]:
    """The first block in which appended tokens change an earlier row."""
    for layer, (x, y) in enumerate(zip(alone, beside, strict=True)):
        tokens = [axis for axis, sizes in enumerate(zip(x.shape, y.shape, strict=True)) if sizes[0] < sizes[1]]
        if not tokens:  # nothing of it belongs to a token
            continue
        if not same_bits(x, y.narrow(tokens[0], 0, n_tokens)):
            where = f"block {layer}" if layer < len(alone) - 1 else "the logits"
            yield Failure("junk", where, f"{n_junk} tokens appended after {n_tokens} change an earlier row")
            return


def _blocks(model: Model, ids: Tensor) -> list[Tensor]:
    """What every block returns, and the logits, at every position; one axis of each is that of positions."""
    found: list[Tensor] = []

    def keep(_: nn.Module, __: Any, output: Any) -> None:
        found.append(first_tensor(output).clone())

    hook: Callable[..., Any] = keep
    with ExitStack() as stack:
        for block in model.tree.blocks:
            stack.callback(block.register_forward_hook(hook).remove)
        logits = model.hf(input_ids=ids.to(model.device), use_cache=False).logits
    return [*found, logits]
