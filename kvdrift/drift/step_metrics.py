"""From the live tensors of two paths at one step to numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kvdrift.drift.layout import Arrays
from kvdrift.drift.metrics import relative_l2, site_metrics
from kvdrift.drift.stacking import pad_stack
from kvdrift.models.sites import GLOBAL_SITES
from kvdrift.tracing.borrow import shared_positions
from kvdrift.tracing.tap import Values

MAX_ELEMENTS = 2**22
"""Entries compared in float64 at a time, so that whole K/V tensors need no float64 copy."""


def residual_metrics(a: Values, b: Values, sites: Sequence[str], device: torch.device) -> Arrays:
    """Every metric at residual sites, ``{site}/{metric}`` → ``[layer]`` (a number for sites that exist once).

    Parameters
    ----------
    a, b
        Values of the two paths at the current position, ``[1, d_model]`` each.
    sites
        Which of them to compare.
    device
        Where to compare; layers may live on several devices.
    """
    rows = [(site, layer) for site in sites for layer in a[site] if layer in b[site]]
    found: dict[str, dict[str, dict[int, float]]] = {site: {} for site in sites}
    for group in _alike(rows, lambda row: tuple((v[row[0]][row[1]].dtype, v[row[0]][row[1]].shape) for v in (a, b))):
        x, y = (torch.stack([v[site][layer][0].to(device) for site, layer in group]) for v in (a, b))
        for metric, values in site_metrics(x, y).items():
            for (site, layer), value in zip(group, values.tolist(), strict=True):
                found[site].setdefault(metric, {})[layer] = value
    layers = {site: [layer for other, layer in rows if other == site] for site in sites}
    return {
        f"{site}/{metric}": np.array(
            values[0] if site in GLOBAL_SITES else [values.get(layer, np.nan) for layer in layers[site]]
        )
        for site, metrics in found.items()
        for metric, values in metrics.items()
    }


def _alike(rows: list[tuple[str, int]], key: Callable[[tuple[str, int]], object]) -> Iterator[list[tuple[str, int]]]:
    groups: dict[object, list[tuple[str, int]]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    yield from groups.values()


def head_metrics(a: Values, b: Values, sites: Sequence[str]) -> Arrays:
    """Every metric of ``q`` and ``z`` at the current position, ``{site}/{metric}`` → ``[layer, head]``."""
    result: Arrays = {}
    for site in sites:
        pairs = ((x[0], b[site][layer][0].to(x.device)) for layer, x in a[site].items() if layer in b[site])
        result |= _metrics(site, pairs, dims=1)
    return result


@dataclass(frozen=True)
class Reading:
    """The keys and values that the kernels of one path read at one step.

    Attributes
    ----------
    values
        ``k`` and ``v``, layer by layer, ``[1, kv_head, key, feature]``.
    positions
        Layer → the absolute position of each key, by slot.
    first_seen
        Layer → the first position that its window lets the current position see (0 where there is no window).
    current
        The current position; slots beyond it are hidden by the mask.
    """

    values: Values
    positions: Mapping[int, Sequence[int]]
    first_seen: Mapping[int, int]
    current: int

    def visible(self, layer: int) -> list[int]:
        """The positions that the kernel of ``layer`` sees: read, inside the window, not beyond the current one."""
        return [p for p in self.positions[layer] if self.first_seen.get(layer, 0) <= p <= self.current]


def kv_metrics(a: Reading, b: Reading, sites: Sequence[str]) -> Arrays:
    """Every metric of ``k`` and ``v`` over the positions that both kernels see, → ``[layer, kv_head]``."""
    result: Arrays = {}
    for site in sites:
        result |= _metrics(site, ((x, y) for x, y, _ in _aligned(site, a, b)), dims=2)
    return result


def kv_positions(a: Reading, b: Reading, sites: Sequence[str]) -> Arrays:
    """Relative L2 of every position, ``{site}/rel_l2 [layer, kv_head, position]`` (NaN where not both see it),
    and which positions each kernel sees, ``visible_a``, ``visible_b`` ``[layer, position]``."""
    result: Arrays = {}
    for site in sites:
        rows = []
        for x, y, positions in _aligned(site, a, b):
            row = np.full((x.shape[0], a.current + 1), np.nan, dtype=np.float32)
            row[:, positions] = torch.stack([relative_l2(h, g) for h, g in zip(x, y, strict=True)]).float().cpu()
            rows.append(row)
        result[f"{site}/rel_l2"] = pad_stack(rows)
        for name, reading in (("visible_a", a), ("visible_b", b)):
            layers = [layer for layer in a.values[site] if layer in b.values[site]]
            seen = np.zeros((len(layers), a.current + 1), dtype=bool)
            for row, layer in zip(seen, layers, strict=True):
                row[reading.visible(layer)] = True
            result[name] = seen
    return result


def _aligned(
    site: str, a: Reading, b: Reading
) -> Iterator[tuple[Float[Tensor, "kv_head key f"], Float[Tensor, "kv_head key f"], list[int]]]:
    """Layer by layer, the K (or V) of both paths at the positions both see, and those positions."""
    for layer in (layer for layer in a.values[site] if layer in b.values[site]):
        x, y = a.values[site][layer], b.values[site][layer]
        here = a.positions[layer]
        since = max(a.first_seen.get(layer, 0), b.first_seen.get(layer, 0))
        before = min(a.current, b.current) + 1
        in_a, in_b = shared_positions(here, b.positions[layer], since=since, before=before)
        positions = list(here[in_a]) if isinstance(in_a, slice) else [here[slot] for slot in in_a]
        yield x[0][:, in_a], y[0][:, in_b].to(x.device), positions


Pair = tuple[Tensor, Tensor]


def _metrics(site: str, pairs: Iterable[Pair], dims: int) -> Arrays:
    """`site_metrics` of each layer's pair, ``{site}/{metric} [layer, head]``, as many layers at a time as fit."""
    rows: dict[str, list[np.ndarray]] = {}
    for batch in _batches(pairs):
        x, y = (torch.stack(side) for side in zip(*batch, strict=True))
        if x.numel() <= MAX_ELEMENTS:
            found = site_metrics(x, y, dims=dims)
        else:  # one layer, head by head
            heads = [site_metrics(h, g, dims=dims) for h, g in zip(x[0], y[0], strict=True)]
            found = {metric: torch.stack([head[metric] for head in heads])[None] for metric in heads[0]}
        for metric, values in found.items():
            rows.setdefault(metric, []).extend(values.cpu().numpy())
    return {f"{site}/{metric}": pad_stack(values) for metric, values in rows.items()}


def _batches(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    """Neighbouring pairs of one shape, dtype and device, together within `MAX_ELEMENTS` (or one alone)."""
    batch: list[Pair] = []
    for pair in pairs:
        if batch and (_kind(pair) != _kind(batch[0]) or (len(batch) + 1) * pair[0].numel() > MAX_ELEMENTS):
            yield batch
            batch = []
        batch.append(pair)
    if batch:
        yield batch


def _kind(pair: Pair) -> list[object]:
    return [(x.shape, x.dtype, x.device) for x in pair]
