"""From a patch and two states to the blocks that are written at one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvdrift.errors import InputError, SiteError
from kvdrift.models.model import Model
from kvdrift.models.sites import GLOBAL_SITES
from kvdrift.patching.spec import Patch
from kvdrift.patching.state import State
from kvdrift.tracing.writer import Block, Index, as_index, slots

Held = Callable[[int], Sequence[int]]
"""Layer → absolute positions of the entries in the recipient's cache."""


@dataclass(frozen=True)
class Absent:
    """Positions that were asked for by name and cannot be written.

    Attributes
    ----------
    step
        When.
    reason
        ``"outside the window"``, or, with the recipient or the donor named, ``"not computed by …"`` and ``"evicted by
        …'s cache"``.
    """

    site: str
    layer: int
    positions: tuple[int, ...]
    step: int
    reason: str


@dataclass(frozen=True)
class Replacement:
    """A block with the recipient's own values beside the donor's.

    Attributes
    ----------
    block
        Holds the donor's values.
    before
        The unpatched recipient's values there, of the same shape.
    into_cache
        Whether it overwrites the cache (else it is written in the pass).
    """

    block: Block
    before: Tensor
    into_cache: bool


def layers_of(model: Model, patch: Patch, site: str) -> tuple[int, ...]:
    """The layers that a patch writes at one of its sites.

    Raises
    ------
    SiteError
        If a layer is out of range, or the model does not give the site there.
    """
    n_layers = model.architecture.n_layers
    if patch.layers is None or site in GLOBAL_SITES:
        return model.coverage.resolve(site, None)
    for layer in patch.layers:
        if not -n_layers <= layer < n_layers:
            raise SiteError(f"There is no layer {layer}: this model has layers 0 to {n_layers - 1}.")
    wanted = tuple(dict.fromkeys(layer % n_layers for layer in patch.layers))
    have = model.coverage.resolve(site, frozenset(wanted))
    missing = [layer for layer in wanted if layer not in have]
    if missing:
        raise SiteError(f"This model does not give {site!r} in layer {', '.join(map(str, missing))}; leave it out.")
    return tuple(wanted)


def check(patch: Patch, model: Model, n_positions: int, n_steps: int) -> None:
    """Refuse a patch that this model and run do not have room for.

    Raises
    ------
    SiteError
        For a layer, head or position out of range, or a missing site.
    """
    architecture = model.architecture
    for site in patch.sites:
        layers = layers_of(model, patch, site)
        for layer in layers if patch.heads is not None else ():
            n = architecture.n_heads if site in ("q", "z") else architecture.layers[layer].n_kv_heads
            kind = "heads" if site in ("q", "z") else "KV heads"
            unknown = [head for head in patch.heads or () if not 0 <= head < n]
            if unknown:
                raise SiteError(f"There is no head {unknown[0]}: layer {layer} has {kind} 0 to {n - 1} at {site!r}.")
    outside = [p for p in patch.positions if p >= n_positions] if isinstance(patch.positions, tuple) else []
    if outside:
        raise SiteError(f"There is no position {outside[0]}: this run has 0 to {n_positions - 1}, prompt included.")
    if patch.schedule.first >= n_steps or (patch.schedule.last or 0) >= n_steps:
        raise SiteError(f"{patch.schedule}: the donor has steps 0 to {n_steps - 1} here; ask for more new tokens.")


def gather(
    patch: Patch, model: Model, own: State, donor: State, held: Held | None, step: int
) -> tuple[list[Replacement], list[Absent]]:
    """The blocks that ``patch`` writes at one step, and the named positions that it cannot.

    Parameters
    ----------
    patch, model
        What is written, and into which model.
    own, donor
        The unpatched recipient and the donor at this step.
    held
        What the recipient's cache holds before this step; None if it has none, or the patch only changes reads.
    step
        The step number, for the report of what is absent.

    Raises
    ------
    InputError
        If a cache shall be overwritten and there is none.
    SiteError
        If donor and recipient differ in shape, or positions in a cache that evicts cannot be told.
    """
    if patch.write == "cache" and held is None:
        raise InputError("write='cache' needs a recipient with a cache, such as kd.CacheOn(); use write='read'.")
    blocks: list[Replacement] = []
    absent: list[Absent] = []
    into_cache = patch.is_kv and patch.write != "read" and patch.positions != "all" and held is not None
    for site in patch.sites:
        for layer in layers_of(model, patch, site):
            donor_rows, own_rows = donor.rows(site, layer), own.rows(site, layer)
            if patch.is_kv:
                _refuse_untold(site, layer, {"recipient": own_rows, "donor": donor_rows})
                first = model.architecture.layers[layer].first_seen(own.position)
                stored = held(layer) if into_cache and held is not None else None
                wanted, outside = _kv_positions(patch, own.position, first, stored)
                if outside:
                    absent.append(Absent(site, layer, outside, step, "outside the window"))
            else:
                wanted = _row_positions(patch, own.position, own_rows)
            have = _shared(wanted, own_rows)
            both = _shared(have, donor_rows)
            for wider, narrower, who in ((wanted, have, "recipient"), (have, both, "donor")):
                if isinstance(patch.positions, tuple) and len(narrower) < len(wider):
                    lost = tuple(p for p in wider if p not in narrower)
                    why = f"evicted by the {who}'s cache" if patch.is_kv else f"not computed by the {who}"
                    absent.append(Absent(site, layer, lost, step, why))
            if not both:
                continue
            mine, theirs = own.values[site][layer], donor.values[site][layer]
            if (mine.shape[:-2], mine.shape[-1]) != (theirs.shape[:-2], theirs.shape[-1]):
                raise SiteError(
                    f"{site!r} of layer {layer} has shape {list(theirs.shape)} in the donor, {list(mine.shape)} in the "
                    "recipient; patch between models of one shape."
                )
            heads: Index = slice(None) if patch.heads is None else as_index(patch.heads)
            mine, theirs = _at(mine, heads, slots(both, own_rows)), _at(theirs, heads, slots(both, donor_rows))
            block = Block(site, layer, heads, both, theirs.to(mine.device, mine.dtype))
            blocks.append(Replacement(block, mine, into_cache))
    return blocks, absent


def _refuse_untold(site: str, layer: int, read: Mapping[str, Sequence[int]]) -> None:
    """Refuse keys and values whose positions nobody tells: a cache has evicted entries, and all are negative.

    Raises
    ------
    SiteError
        With whose they are.
    """
    for who, positions in read.items():
        if len(positions) and max(positions) < 0:
            raise SiteError(
                f"The {who}'s cache has evicted entries of layer {layer}, and at which positions those that are left "
                f"stand cannot be told, so {site!r} cannot be patched there: give the cache a method positions(layer), "
                "or patch residual sites."
            )


def _kv_positions(
    patch: Patch, current: int, first: int, stored: Sequence[int] | None
) -> tuple[Sequence[int], tuple[int, ...]]:
    """Positions to write among those that the kernel of a layer sees, and the named ones that it does not see.

    ``first`` is the first position that the current one sees, ``stored`` what the cache holds (None: reads change).
    """
    until = current if stored is not None or patch.positions in (None, "past") else current + 1
    if not isinstance(patch.positions, tuple):
        return _shared(range(first, until), range(until) if stored is None else stored), ()
    outside = tuple(p for p in patch.positions if p < first or (stored is not None and p < current and p not in stored))
    return [p for p in sorted(patch.positions) if p < until and p not in outside], outside


def _shared(wanted: Sequence[int], rows: Sequence[int]) -> Sequence[int]:
    """The positions of ``wanted`` that are among ``rows``, in order; a range where both are ranges."""
    if isinstance(wanted, range) and isinstance(rows, range):
        return range(max(wanted.start, rows.start), max(min(wanted.stop, rows.stop), max(wanted.start, rows.start)))
    known = rows if isinstance(rows, range) else set(rows)
    return [p for p in wanted if p in known]


def _row_positions(patch: Patch, current: int, rows: Sequence[int]) -> Sequence[int]:
    if patch.positions in (None, "current"):
        return [current]
    if patch.positions == "all":
        return rows
    assert isinstance(patch.positions, tuple), "a patch checks its positions"
    return [p for p in sorted(patch.positions) if p <= current]


def _at(value: Tensor, heads: Index, rows: Index) -> Tensor:
    """Heads and rows of ``[1, (head,) row, feature]``."""
    if value.ndim == 3:
        return value[:, rows]
    return value[:, heads][:, :, rows]


def moved(written: Sequence[Tensor], own: Sequence[Tensor]) -> float:
    """L2 norm of everything that was written, minus the recipient's own values."""
    squares = [((w.double() - o.double()) ** 2).sum() for w, o in zip(written, own, strict=True)]
    return float(torch.stack([square.to(squares[0].device) for square in squares]).sum().sqrt())
