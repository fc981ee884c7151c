"""Writing values into a forward pass: the counterpart of `Tap`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor, nn

from kvdrift.models.model import Model
from kvdrift.models.sites import HEAD_SITES
from kvdrift.tracing.aside import IN_PLACE
from kvdrift.tracing.seam import AttentionCall, Order, Output, seam
from kvdrift.tracing.tap import first_tensor, hidden

Index = slice | list[int]


@dataclass(frozen=True)
class Block:
    """Values for a rectangle of one site in one layer.

    Attributes
    ----------
    site, layer
        Where.
    heads
        Heads along the head axis (KV heads at ``k``, ``v``); all of them at residual sites.
    positions
        Absolute positions.
    value
        ``[1, position, d_model]`` at residual sites, ``[1, head, position, feature]`` inside attention.
    """

    site: str
    layer: int
    heads: Index
    positions: Sequence[int]
    value: Tensor


def as_index(numbers: Sequence[int]) -> Index:
    """Indices as a slice where they are consecutive: views instead of copies.

    Examples
    --------
    >>> as_index([3, 4, 5]), as_index([3, 5])
    (slice(3, 6, None), [3, 5])
    """
    if not numbers:
        return slice(0, 0)
    if isinstance(numbers, range) and numbers.step == 1:
        return slice(numbers.start, numbers.stop)
    first, n = numbers[0], len(numbers)
    if numbers[-1] - first == n - 1 and all(number == first + i for i, number in enumerate(numbers)):
        return slice(first, first + n)
    return list(numbers)


def write_at(target: Tensor, heads: Index, rows: Index, value: Tensor) -> None:
    """``target[:, heads, rows] = value`` in place, for ``target [1, head, row, feature]``."""
    value = value.to(target.device, target.dtype)
    if isinstance(heads, list) and isinstance(rows, list):
        for place, head in enumerate(heads):
            target[:, head, rows] = value[:, place]
    else:
        target[:, heads, rows] = value


class SiteEditor:
    """Hooks that hand the value at each of some sites to `edit`, and put what it returns in its place.

    A context manager: the hooks are in place inside it. They run before the hooks of a `Tap`, whichever came first,
    so that a tap sees what was written.

    Parameters
    ----------
    model
        The model to write into.
    sites
        Site → the layers that may be written.
    """

    order = Order.WRITE

    def __init__(self, model: Model, sites: Mapping[str, Iterable[int]]) -> None:
        self.model = model
        self.sites = {site: tuple(layers) for site, layers in sites.items()}
        self.enabled = True
        self._stack = ExitStack()

    def edit(self, site: str, layer: int, own: Tensor) -> Tensor:
        """What the value at a site becomes; ``own`` itself where nothing is to change.

        ``own`` is ``[batch, row, d_model]`` at residual sites (where it may be changed in place), else
        ``[batch, head, row, feature]``.
        """
        raise NotImplementedError

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for site, layers in self.sites.items():
                for layer in layers if site not in HEAD_SITES else ():
                    self._place(stack, site, layer)
            if any(site in ("q", "k", "v") for site in self.sites):
                stack.enter_context(seam(self.model.hf, self))
            if "z" in self.sites:
                stack.enter_context(seam(self.model.hf, _OutputWriter(self)))
            self._stack = stack.pop_all()
        IN_PLACE.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        IN_PLACE[:] = [other for other in IN_PLACE if other is not self]
        self._stack.close()

    def _place(self, stack: ExitStack, site: str, layer: int) -> None:
        place = self.model.coverage.places[site][layer]

        def write(own: Tensor) -> None:
            rows = place.rows(own)
            changed = self.edit(site, layer, rows)
            viewed = rows.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()
            if changed is not rows or not viewed:
                own.copy_(place.unrows(changed, own))  # the stream itself: it has readers that no hook hands a copy

        def before(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
            own = hidden(args, kwargs)
            if not self.enabled:
                return None
            if 0 not in own.stride():
                write(own)
                return None
            apart = own.clone()  # entries of the stream share memory, as in copies that are only expanded
            write(apart)
            given = {name: apart if value is own else value for name, value in kwargs.items()}
            return tuple(apart if value is own else value for value in args), given

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            if self.enabled:
                write(first_tensor(output))

        if place.kind == "input":
            handle = place.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        else:
            handle = place.module.register_forward_hook(after, prepend=True)
        stack.callback(handle.remove)

    def __call__(self, call: AttentionCall, proceed: Callable[[AttentionCall], Output]) -> Output:
        """The link in the attention seam: write what the kernel is about to read."""
        layer = self.model.layer_of[id(call.module)]
        for site, name in (("q", "query"), ("k", "key"), ("v", "value")):
            if self.enabled and layer in self.sites.get(site, ()):
                setattr(call, name, self.edit(site, layer, getattr(call, name)))
        return proceed(call)


class Writer(SiteEditor):
    """A site editor that writes blocks; without blocks it touches nothing. They may be changed between two passes.

    Attributes
    ----------
    position
        Absolute position of the last token of the pass that runs.
    keys
        ``(layer, n_keys)`` → the absolute position of each key that its kernel reads.
    """

    def __init__(self, model: Model, sites: Mapping[str, Iterable[int]]) -> None:
        super().__init__(model, sites)
        self.position = 0
        self.keys: Callable[[int, int], Sequence[int]] = lambda layer, n_keys: range(n_keys)
        self._blocks: dict[tuple[str, int], list[Block]] = {}

    def load(self, blocks: Iterable[Block]) -> None:
        """Write these blocks, and nothing else, in the passes that follow."""
        self._blocks = {}
        for block in blocks:
            self._blocks.setdefault((block.site, block.layer), []).append(block)

    def edit(self, site: str, layer: int, own: Tensor) -> Tensor:
        """The blocks of this site, written into the residual stream itself or into a copy of what attention reads."""
        blocks = self._blocks.get((site, layer))
        if not blocks:
            return own
        n_rows = own.shape[-2] if site in HEAD_SITES else own.shape[1]
        first = self.position + 1 - n_rows
        if site not in HEAD_SITES:
            for block in blocks:
                rows = as_index(shifted(block.positions, -first))
                own[:, rows] = block.value.to(own.device, own.dtype)
            return own
        at = self.keys(layer, n_rows) if site in ("k", "v") else range(first, self.position + 1)
        changed = own.clone()
        for block in blocks:
            write_at(changed, block.heads, slots(block.positions, at), block.value)
        return changed


def shifted(positions: Sequence[int], by: int) -> Sequence[int]:
    """Positions counted from elsewhere; a range stays one."""
    if isinstance(positions, range) and positions.step == 1:
        return range(positions.start + by, positions.stop + by)
    return [position + by for position in positions]


def slots(positions: Sequence[int], at: Sequence[int]) -> Index:
    """Where ``positions`` sit along an axis whose absolute positions are ``at``.

    Examples
    --------
    >>> slots([5, 6], range(4, 8)), slots([9, 5], [5, 7, 9])
    (slice(1, 3, None), [2, 0])
    """
    if isinstance(at, range):
        return as_index(shifted(positions, -at.start))
    place = {position: slot for slot, position in enumerate(at)}
    return as_index([place[position] for position in positions])


class _OutputWriter:
    """The link that writes ``z``, inside every link that observes it."""

    order = Order.WRITE_OUTPUT

    def __init__(self, editor: SiteEditor) -> None:
        self.editor = editor

    def __call__(self, call: AttentionCall, proceed: Callable[[AttentionCall], Output]) -> Output:
        output, pattern = proceed(call)
        layer = self.editor.model.layer_of[id(call.module)]
        if not self.editor.enabled or layer not in self.editor.sites["z"]:
            return output, pattern
        own = output.transpose(1, 2)
        changed = self.editor.edit("z", layer, own)
        return (output if changed is own else changed.transpose(1, 2)), pattern
