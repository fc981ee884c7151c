"""Storage for a recording: allocated when the first step has shown the shapes, filled step by step."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Literal

import torch
from torch import Tensor
from tqdm.auto import tqdm

from kvdrift import provenance
from kvdrift.errors import MemoryBudgetError, SiteError
from kvdrift.models.labels import Prompt
from kvdrift.models.model import Model
from kvdrift.models.sites import GLOBAL_SITES, LOGITS, PATTERN
from kvdrift.paths.path import Path, path_info, path_settings
from kvdrift.paths.sampling import following, greedy
from kvdrift.paths.stepper import Shown, rows_where, started
from kvdrift.paths.text import write
from kvdrift.tracing.activation_cache import Axes
from kvdrift.tracing.tap import Tap, Values, Where
from kvdrift.tracing.trace import Trace, free_memory

Positions = Literal["current", "all"] | Sequence[int]
SHARE_OF_FREE_MEMORY = 0.5
"""A recording may take so much of the free memory, unless ``memory_budget`` says otherwise."""


class Recording:
    """One prompt's recording.

    Parameters
    ----------
    model, path
        What runs, and how.
    wanted
        Site → layers, or None for all.
    heads, positions, offload, memory_budget, progress
        As `kvdrift.record` takes them.
    weights
        The model's fingerprint, taken once for all prompts.
    stop
        Tokens that end a text which the path writes itself.
    """

    def __init__(
        self,
        model: Model,
        path: Path,
        wanted: dict[str, frozenset[int] | None],
        heads: Sequence[int] | None,
        positions: Positions,
        offload: bool,
        memory_budget: int | None,
        progress: bool,
        weights: str,
        stop: frozenset[int],
    ) -> None:
        self.model, self.path, self.offload = model, path, offload
        self.memory_budget, self.progress, self.weights, self.stop = memory_budget, progress, weights, stop
        self.positions = positions
        where: Where = rows_where(path) if positions == "current" else "all"
        self.tap = Tap(model, wanted, where=where, kv_where=where, heads=heads, keep=True)
        self.whole: dict[str, Tensor] = {}
        self.slots: dict[str, dict[int, Tensor]] = {}
        self.masks: dict[str, Tensor] = {}
        self._places: dict[Sequence[int], tuple[Tensor, Tensor]] = {}  # of one step: kept positions, their rows
        self.coordinates: dict[str, Axes] = {}

    def run(self, prompt: Prompt, follow: list[int] | None, n_steps: int, bar: tqdm) -> Trace:
        """Run the path over the prompt and ``n_steps`` predictions, following the tokens given if any."""
        choose, stop = (greedy, self.stop) if follow is None else (following(follow), frozenset[int]())
        fed: list[int] = []
        with self.tap, started(self.path, self.model, prompt.ids, self.tap) as stepper:
            for shown, token in islice(write(stepper, choose, stop), n_steps):
                if not fed:
                    self._allocate(shown.values, n_steps, len(prompt.ids) + n_steps - 1)
                self._fill(len(fed), shown)
                del shown
                fed.append(token)
                bar.update()
        return self._finish(prompt, fed)

    # --- storage

    def _axes(self, site: str, value: Tensor, n_steps: int, n_positions: int) -> Axes:
        """Axes of a site, given one layer's value ``[1, …]`` of the first step."""
        axes: Axes = {"step": tuple(range(n_steps))}
        if site not in (*GLOBAL_SITES, LOGITS):
            axes["layer"] = self.tap.layers[site]
        kept = self.tap.heads
        if site in ("q", "z", PATTERN):
            axes["head"] = tuple(kept) if kept is not None else tuple(range(value.shape[1]))
        if site in ("k", "v"):
            axes["kv_head"] = self._kv_heads(value.shape[1])
        if self.positions != "current" and site != LOGITS:
            axes["position"] = tuple(range(n_positions)) if isinstance(self.positions, str) else tuple(self.positions)
        if site == PATTERN:
            axes["key"] = tuple(range(n_positions))
        else:
            axes["vocab" if site == LOGITS else "feature"] = tuple(range(value.shape[-1]))
        return axes

    def _kv_heads(self, n_kept: int) -> tuple[int, ...]:
        if self.tap.heads is None:
            return tuple(range(n_kept))
        group = self.model.architecture.n_heads // self.model.architecture.n_kv_heads
        return tuple(sorted({head // group for head in self.tap.heads}))

    def _allocate(self, values: Values, n_steps: int, n_positions: int) -> None:
        silent = [site for site in self.tap.layers if site not in values]
        if silent:
            attn = self.path.attn or self.model.attn
            raise SiteError(
                f"{', '.join(silent)} never fired with attn={attn!r} on {self.path.label}; leave it out, or load the "
                "model with the attention implementation of the path."
            )
        shapes: dict[str, dict[int, tuple[int, ...]]] = {}
        for site, of_layers in values.items():
            shapes[site] = {}
            for layer, value in of_layers.items():
                axes = self._axes(site, value, n_steps, n_positions)
                self.coordinates.setdefault(site, axes)
                shapes[site][layer] = tuple(len(axes[name]) for name in axes if name != "layer")
        self._check_budget(values, shapes)
        for site, layers in shapes.items():
            of_layers = values[site]
            first = next(iter(of_layers.values()))
            device = torch.device("cpu") if self.offload else first.device
            alike = len({(shape, of_layers[layer].dtype) for layer, shape in layers.items()}) == 1
            if alike and "layer" in self.coordinates[site]:
                shape = next(iter(layers.values()))
                whole = torch.zeros((shape[0], len(layers), *shape[1:]), dtype=first.dtype, device=device)
                self.slots[site] = {layer: whole[:, place] for place, layer in enumerate(layers)}
                self.whole[site] = whole
            else:
                self.slots[site] = {
                    layer: torch.zeros(shape, dtype=of_layers[layer].dtype, device=device)
                    for layer, shape in layers.items()
                }
            sizes = [len(numbers) for numbers in self.coordinates[site].values()]
            self.masks[site] = torch.zeros(sizes[:-1], dtype=torch.bool)

    def _check_budget(self, values: Values, shapes: dict[str, dict[int, tuple[int, ...]]]) -> None:
        needed = 0
        for site, by_layer in shapes.items():
            for layer, shape in by_layer.items():
                needed += torch.Size(shape).numel() * values[site][layer].element_size()
        device = torch.device("cpu") if self.offload else self.model.device
        budget = self.memory_budget
        if budget is None:
            budget = int(SHARE_OF_FREE_MEMORY * free_memory(device))
        if needed > budget:
            raise MemoryBudgetError(
                f"This recording needs {needed / 1e9:.3g} GB on {device}, and {budget / 1e9:.3g} GB are allowed: "
                "record fewer sites, layers, positions or steps, set offload=True (keep it on the CPU), or raise "
                "memory_budget."
            )
        if self.progress:
            print(f"kvdrift: recording about {needed / 1e6:.3g} MB on {device}", file=sys.stderr)

    def _fill(self, number: int, shown: Shown) -> None:
        values = shown.values
        self._places.clear()
        for site, slots in self.slots.items():
            if self.positions == "current" and site in self.whole and site != PATTERN:
                whole = self.whole[site][number]
                whole.copy_(torch.cat(list(values[site].values())))
                self.masks[site][number] = True
                continue
            for place, layer in enumerate(slots):
                index = (number,) if site in (*GLOBAL_SITES, LOGITS) else (number, place)
                if site in ("k", "v"):
                    keys = shown.keys.get(layer, ())
                    self._write(site, slots[layer][number], self.masks[site][index], values[site][layer][0], keys)
                    continue
                parts = [of_pass[site][layer] for of_pass in shown.passes]
                if site == PATTERN:
                    parts = [self._spread(parts[-1], shown.keys[layer], shown.position)]
                if self.positions == "current" or site == LOGITS:
                    slots[layer][number].copy_(parts[-1][0])
                    self.masks[site][index] = True
                    continue
                rows = torch.cat([part[0] for part in parts], dim=-2)
                at = [*_rows_at(parts, shown)]
                self._write(site, slots[layer][number], self.masks[site][index], rows, at)

    def _write(self, site: str, slot: Tensor, mask: Tensor, rows: Tensor, at: Sequence[int]) -> None:
        """Write rows ``[…, position, feature]`` that sit at absolute positions ``at``."""
        if self.positions == "current":
            slot.copy_(rows)
            mask[...] = True
            return
        to, source = self._matched(site, at)
        if not len(to):
            return
        slot.index_copy_(
            slot.ndim - 2, to.to(slot.device), rows.index_select(-2, source.to(rows.device)).to(slot.device)
        )
        mask[..., to] = True

    def _matched(self, site: str, at: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Places in storage of the positions among ``at`` that are kept, and their rows; once a step for all alike."""
        key = at if isinstance(at, range) else tuple(at)
        if key not in self._places:
            place = {p: i for i, p in enumerate(self.coordinates[site]["position"])}
            pairs = [(place[p], row) for row, p in enumerate(at) if p in place]
            to, source = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).T
            self._places[key] = to, source
        return self._places[key]

    def _spread(self, pattern: Tensor, keys: Sequence[int], position: int) -> Tensor:
        """A pattern with its key axis at absolute positions."""
        wide = pattern.new_zeros((*pattern.shape[:-1], len(self.coordinates[PATTERN]["key"])))
        read = [(slot, p) for slot, p in enumerate(keys) if 0 <= p <= position]
        slots, places = (torch.tensor(x, device=pattern.device) for x in zip(*read, strict=True))
        return wide.index_copy_(-1, places, pattern.index_select(-1, slots))

    def _ended(self, site: str, seen: int) -> list[str]:
        """The axes over all positions that a text which ended early leaves too long."""
        whole = {"position": isinstance(self.positions, str), "key": True}
        axes = self.coordinates[site]
        return [name for name, cut in whole.items() if cut and name in axes and len(axes[name]) > seen]

    def _finish(self, prompt: Prompt, fed: list[int]) -> Trace:
        n, seen = len(fed), len(prompt.ids) + len(fed) - 1
        tensors: dict[str, Tensor | dict[int, Tensor]] = {}
        for site, slots in self.slots.items():
            if site in self.whole:
                tensors[site] = self.whole[site][:n]
            elif site in (*GLOBAL_SITES, LOGITS):
                tensors[site] = slots[0][:n]
            else:
                tensors[site] = {layer: tensor[:n] for layer, tensor in slots.items()}
        coordinates, masks = {}, {}
        for site, axes in self.coordinates.items():
            ended = self._ended(site, seen)
            coordinates[site] = axes | {"step": tuple(range(n))} | {name: axes[name][:seen] for name in ended}
            cut = partial(_cut, names=list(axes), ended=ended, seen=seen)
            value = tensors[site]
            tensors[site] = (
                {layer: cut(x, without="layer") for layer, x in value.items()}
                if isinstance(value, dict)
                else cut(value)
            )
            masks[site] = cut(self.masks[site][:n])
        return Trace(
            tensors=tensors,
            coordinates=coordinates,
            masks=masks,
            path=path_info(self.path, self.model),
            prompt=prompt,
            fed=tuple(fed),
            architecture=self.model.architecture,
            provenance=provenance.collect(self.model)
            | {"weights": self.weights, "settings": {"path": path_settings(self.path, self.model)}},
        )


def _rows_at(parts: list[Tensor], shown: Shown) -> Iterator[int]:
    """Absolute positions of the rows of one or several passes: each has those of the last tokens of its pass."""
    consumed = shown.consumed[-len(parts) :]
    end = shown.position + 1 - sum(consumed)
    for part, n_tokens in zip(parts, consumed, strict=True):
        end += n_tokens
        yield from range(end - part.shape[-2], end)


def _cut(value: Tensor, names: Sequence[str], ended: Sequence[str], seen: int, without: str = "") -> Tensor:
    """A tensor (or a mask, which lacks the last axis) with the axes that ended early cut to the positions seen."""
    order = [name for name in names if name != without]
    for name in ended:
        if order.index(name) < value.ndim:
            value = value.narrow(order.index(name), 0, seen)
    return value
