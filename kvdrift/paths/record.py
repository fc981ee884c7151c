"""`record`: run one path and keep the tensors of chosen sites."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm.auto import tqdm

from kvdrift import provenance
from kvdrift.errors import InputError, MemoryBudgetError, SiteError
from kvdrift.models.load import load
from kvdrift.models.model import Model, as_prompts
from kvdrift.paths.cache_on import CacheOn
from kvdrift.paths.path import Path, Run
from kvdrift.paths.sampling import greedy
from kvdrift.tracing.finite import explain_nonfinite
from kvdrift.tracing.labels import PathInfo, Prompt
from kvdrift.tracing.sites import GLOBAL_SITES, LOGITS, PATTERN, choose_layers, parse_sites
from kvdrift.tracing.tap import Tap, Values
from kvdrift.tracing.trace import Axes, Trace, free_memory

Positions = Literal["current", "all"] | Sequence[int]
SHARE_OF_FREE_MEMORY = 0.5
"""A recording may take so much of the free memory, unless ``memory_budget`` says otherwise."""


def record(
    model: Any,
    prompts: Any,
    *,
    path: Path | None = None,
    sites: Iterable[str] | str = ("resid_post", "k", "v", "logits"),
    layers: Iterable[int] | None = None,
    heads: Sequence[int] | None = None,
    positions: Positions = "current",
    max_new_tokens: int = 32,
    tokens: Any = None,
    offload: bool = False,
    memory_budget: int | None = None,
    chat: bool = False,
    progress: bool = True,
) -> Trace | list[Trace]:
    """Run one path and keep what it computes at chosen sites.

    Parameters
    ----------
    model
        Anything `kvdrift.load` takes.
    prompts
        One prompt (text, ids, a tensor), or a list of prompts.
    path
        How to run; ``CacheOn()`` by default.
    sites
        Site names, short (``"k"``) or full (``"blocks.5.attn.hook_k"``).
    layers, heads
        Layers and query heads to keep (``k`` and ``v`` keep the KV heads that these read); all by default.
    positions
        ``"current"``: the position that each step predicts from, without a position axis. ``"all"`` or a list of
        absolute positions: what each step's pass computed there (for ``k`` and ``v``: what its kernel read).
    max_new_tokens
        Steps; a prompt ends earlier at an end-of-sequence token.
    tokens
        Token ids to follow (one list per prompt); by default the path feeds itself greedily.
    offload
        Keep the tensors on the CPU.
    memory_budget
        Bytes that the recording may take; by default half of what is free.
    chat
        Put text prompts into the chat template.
    progress
        Show the estimated size and a progress bar.

    Returns
    -------
    Trace or list of Trace
        One for one prompt, a list for a list of prompts.

    Raises
    ------
    SiteError
        If the model does not give a site, or a layer, head or position is out of range.
    MemoryBudgetError
        If the recording would not fit.

    Examples
    --------
    >>> import kvdrift as kd
    >>> trace = kd.record(kd.models.tiny("llama"), [1, 2, 3], sites=["k"], max_new_tokens=4, progress=False)
    >>> list(trace.axes("k")), tuple(trace["k"].shape)
    (['step', 'layer', 'kv_head', 'feature'], (4, 4, 2, 32))
    """
    model = load(model, quiet=not progress)
    path = path or CacheOn()
    given, many = as_prompts(prompts)
    encoded = [model.encode(prompt, chat) for prompt in given]
    followed = _followed(model, tokens, len(encoded))
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens={max_new_tokens}: give at least 1.")
    used = path.model or model
    n_layers, n_heads = used.architecture.n_layers, used.architecture.n_heads
    wanted = choose_layers(parse_sites(sites), layers, n_layers)
    if heads is not None and any(not 0 <= head < n_heads for head in heads):
        raise SiteError(f"heads={list(heads)}: {used.name} has query heads 0 to {n_heads - 1}.")
    lengths = [max_new_tokens if ids is None else len(ids) for ids in followed]
    for ids, length in zip(encoded, lengths, strict=True):
        used.check_length(len(ids), length)
        _check_positions(positions, len(ids) + length - 1)
    traces = []
    with tqdm(total=sum(lengths), desc="record", unit="step", disable=not progress) as bar:
        for prompt, ids, follow, length in zip(given, encoded, followed, lengths, strict=True):
            recording = _Recording(used, path, wanted, heads, positions, offload, memory_budget, progress)
            label = Prompt(
                tuple(ids), tuple(used.token_text(x) for x in ids), prompt if isinstance(prompt, str) else None
            )
            traces.append(recording.run(label, follow, length, bar))
    return traces if many else traces[0]


def _followed(model: Model, tokens: Any, n_prompts: int) -> list[list[int] | None]:
    if tokens is None:
        return [None] * n_prompts
    lists, _ = as_prompts(tokens)
    if len(lists) != n_prompts:
        raise InputError(f"tokens: give one list of token ids per prompt ({n_prompts}), not {len(lists)}.")
    return [model.encode(ids) for ids in lists]


def _check_positions(positions: Positions, n_positions: int) -> None:
    if isinstance(positions, str):
        if positions not in ("current", "all"):
            raise InputError(f"positions={positions!r}: choose 'current', 'all' or a list of absolute positions.")
        return
    outside = [p for p in positions if not 0 <= p < n_positions]
    if outside or not positions:
        raise SiteError(f"positions={list(positions)}: this run has positions 0 to {n_positions - 1}.")


class _Recording:
    """One prompt's recording: allocates when the first step has shown the shapes, then fills step by step."""

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
    ) -> None:
        self.model, self.path, self.offload = model, path, offload
        self.memory_budget, self.progress = memory_budget, progress
        self.positions = positions
        where: Literal["current", "all"] = "current" if positions == "current" else "all"
        self.tap = Tap(model, wanted, where=where, kv_where=where, heads=heads, keep=True)
        self.slots: dict[str, dict[int, Tensor]] = {}
        self.masks: dict[str, Tensor] = {}
        self.coordinates: dict[str, Axes] = {}

    def run(self, prompt: Prompt, follow: list[int] | None, n_steps: int, bar: tqdm) -> Trace:
        stop = self.model.eos_ids if follow is None else frozenset()
        tokens, n_prompt = list(prompt.ids), len(prompt.ids)
        run = self.path.start(self.model, prompt.ids)
        try:
            with self.tap:
                for number in range(n_steps):
                    self.tap.steps.clear()
                    step = run.step(tokens[-1] if number else None)
                    if step.logits.isnan().any():
                        raise explain_nonfinite(self.model, tokens, run.attn)
                    if number == 0:
                        self._allocate(self.tap.steps, n_steps, n_prompt + n_steps - 1)
                    self._fill(number, self.tap.steps, run, step.position)
                    tokens.append(greedy(step.logits, number) if follow is None else follow[number])
                    bar.update()
                    if tokens[-1] in stop:
                        break
        finally:
            run.close()
        return self._finish(prompt, tokens[n_prompt:])

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
            axes["position"] = tuple(range(n_positions)) if self.positions == "all" else tuple(self.positions)  # type: ignore[arg-type]
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

    def _allocate(self, passes: list[Values], n_steps: int, n_positions: int) -> None:
        shapes: dict[str, dict[int, tuple[int, ...]]] = {}
        for site, by_layer in passes[-1].items():
            shapes[site] = {}
            for layer, value in by_layer.items():
                axes = self._axes(site, value, n_steps, n_positions)
                self.coordinates.setdefault(site, axes)
                shapes[site][layer] = tuple(len(axes[name]) for name in axes if name != "layer")
        self._check_budget(passes[-1], shapes)
        for site, by_layer in shapes.items():
            first = next(iter(passes[-1][site].values()))
            device = torch.device("cpu") if self.offload else first.device
            if len(set(by_layer.values())) == 1 and "layer" in self.coordinates[site]:
                shape = next(iter(by_layer.values()))
                whole = torch.zeros((shape[0], len(by_layer), *shape[1:]), dtype=first.dtype, device=device)
                self.slots[site] = {layer: whole[:, place] for place, layer in enumerate(by_layer)}
                self.slots[site][-1] = whole
            else:
                self.slots[site] = {
                    layer: torch.zeros(shape, dtype=first.dtype, device=device) for layer, shape in by_layer.items()
                }
            sizes = [len(values) for name, values in self.coordinates[site].items()]
            self.masks[site] = torch.zeros(sizes[:-1], dtype=torch.bool)

    def _check_budget(self, values: Values, shapes: dict[str, dict[int, tuple[int, ...]]]) -> None:
        needed = 0
        for site, by_layer in shapes.items():
            for layer, shape in by_layer.items():
                needed += torch.Size(shape).numel() * values[site][layer].element_size()
        device = torch.device("cpu") if self.offload else self.model.device
        budget = self.memory_budget or int(SHARE_OF_FREE_MEMORY * free_memory(device))
        if needed > budget:
            raise MemoryBudgetError(
                f"This recording needs {needed / 1e9:.3g} GB on {device}, and {budget / 1e9:.3g} GB are allowed: "
                "record fewer sites, layers, positions or steps, offload to the CPU (offload=True), or raise memory_budget."
            )
        if self.progress:
            print(f"kvdrift: recording about {needed / 1e6:.3g} MB on {device}", file=sys.stderr)

    def _fill(self, number: int, passes: list[Values], run: Run, position: int) -> None:
        for site, slots in self.slots.items():
            for place, layer in enumerate(x for x in slots if x >= 0):
                index = (number,) if site in (*GLOBAL_SITES, LOGITS) else (number, place)
                if site in ("k", "v"):
                    value = passes[-1][site][layer]
                    keys = run.key_positions(layer, value.shape[2]) if value.ndim == 4 else [position]
                    self._write(site, slots[layer][number], self.masks[site][index], value[0], keys)
                    continue
                parts = [values[site][layer] for values in passes]
                if site == PATTERN:
                    parts = [self._spread(x, run, layer, position) for x in parts[-1:]]
                if self.positions == "current" or site == LOGITS:
                    slots[layer][number].copy_(parts[-1][0])
                    self.masks[site][index] = True
                    continue
                rows = torch.cat([part[0] for part in parts], dim=-2)
                start = position + 1 - rows.shape[-2]
                self._write(site, slots[layer][number], self.masks[site][index], rows, range(start, position + 1))

    def _write(self, site: str, slot: Tensor, mask: Tensor, rows: Tensor, at: Sequence[int]) -> None:
        """Write rows ``[…, position, feature]`` that sit at absolute positions ``at``."""
        if self.positions == "current":
            slot.copy_(rows)
            mask[...] = True
            return
        place = {p: i for i, p in enumerate(self.coordinates[site]["position"])}
        pairs = [(place[p], row) for row, p in enumerate(at) if p in place]
        if not pairs:
            return
        to, source = (torch.tensor(x) for x in zip(*pairs, strict=True))
        slot.index_copy_(
            slot.ndim - 2, to.to(slot.device), rows.index_select(-2, source.to(rows.device)).to(slot.device)
        )
        mask[..., to] = True

    def _spread(self, pattern: Tensor, run: Run, layer: int, position: int) -> Tensor:
        """A pattern with its key axis at absolute positions."""
        keys = run.key_positions(layer, pattern.shape[-1])
        wide = pattern.new_zeros((*pattern.shape[:-1], len(self.coordinates[PATTERN]["key"])))
        read = [(slot, p) for slot, p in enumerate(keys) if p <= position]
        slots, places = (torch.tensor(x, device=pattern.device) for x in zip(*read, strict=True))
        return wide.index_copy_(-1, places, pattern.index_select(-1, slots))

    def _finish(self, prompt: Prompt, fed: list[int]) -> Trace:
        n = len(fed)
        tensors: dict[str, Tensor | dict[int, Tensor]] = {}
        for site, slots in self.slots.items():
            if -1 in slots:
                tensors[site] = slots[-1][:n]
            elif site in (*GLOBAL_SITES, LOGITS):
                tensors[site] = slots[0][:n]
            else:
                tensors[site] = {layer: tensor[:n] for layer, tensor in slots.items()}
        return Trace(
            tensors=tensors,
            coordinates={site: axes | {"step": tuple(range(n))} for site, axes in self.coordinates.items()},
            masks={site: mask[:n] for site, mask in self.masks.items()},
            path=PathInfo(
                self.path.label,
                self.model.name,
                self.model.dtype_name,
                self.path.attn or self.model.attn,
                str(self.model.device),
                tuple(control.label for control in self.path.controls),
            ),
            prompt=prompt,
            fed=tuple(fed),
            architecture=self.model.architecture,
            provenance=provenance.collect(self.model) | {"weights": self.model.fingerprint},
        )
