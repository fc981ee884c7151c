"""Kvdrift's sites and TransformerLens's hook names, and a trace as an ``ActivationCache`` and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvdrift.errors import InputError, SiteError
from kvdrift.models.architecture import Architecture
from kvdrift.models.labels import PathInfo, Prompt
from kvdrift.models.model import Model
from kvdrift.models.sites import BLOCK_SITES, GLOBAL_SITES, HEAD_SITES, LOGITS, PATTERN

Axes = dict[str, tuple[int, ...]]
"""Axis name → the coordinate of each entry: step numbers, layer numbers, heads, absolute positions."""
_GLOBAL = {"embed": "hook_embed", "final_norm": "ln_final.hook_out", LOGITS: "unembed.hook_out"}


def hook_name(site: str, layer: int, architecture: Architecture) -> str:
    """The hook of TransformerLens that holds a site.

    ``q`` and ``k`` are what the kernel reads: ``hook_rot_q`` and ``hook_rot_k`` in a model with RoPE (``hook_q`` and
    ``hook_k`` hold them before it).

    Examples
    --------
    >>> import kvdrift as kd
    >>> architecture = kd.load(kd.models.tiny("llama"), quiet=True).architecture
    >>> hook_name("resid_post", 3, architecture), hook_name("k", 3, architecture)
    ('blocks.3.hook_resid_post', 'blocks.3.attn.hook_rot_k')
    """
    if site in _GLOBAL:
        return _GLOBAL[site]
    if site in BLOCK_SITES:
        return f"blocks.{layer}.hook_{site}"
    rotated = site in ("q", "k") and architecture.positional.startswith("rope")
    return f"blocks.{layer}.attn.hook_{'rot_' if rotated else ''}{site}"


def _names(architecture: Architecture) -> dict[str, tuple[str, int]]:
    inside = (*BLOCK_SITES, *HEAD_SITES, PATTERN)
    found = {hook_name(site, n, architecture): (site, n) for site in inside for n in range(architecture.n_layers)}
    return found | {name: (site, 0) for site, name in _GLOBAL.items()}


# --- a trace as a cache


def to_cache(
    tensors: Mapping[str, Tensor | dict[int, Tensor]],
    coordinates: Mapping[str, Axes],
    masks: Mapping[str, Tensor],
    fed: Sequence[int],
    architecture: Architecture,
    step: int | None,
    model: Any,
) -> Any:
    """The fields of a `Trace` as a cache; see `Trace.to_activation_cache`."""
    try:
        from transformer_lens import ActivationCache
    except ImportError as error:
        raise InputError("An ActivationCache needs TransformerLens; install kvdrift with transformer-lens.") from error
    last = len(fed) - 1 if step is None else step
    entries: dict[str, Tensor] = {}
    spread = any("position" in axes for axes in coordinates.values())
    for site, axes in coordinates.items():
        value, mask = tensors[site], masks[site]
        if site == LOGITS and spread:
            continue  # they are known at one position of each step only
        n_steps = len(axes["step"])
        if not -n_steps <= last < n_steps:
            raise InputError(f"step={step}: this trace has steps 0 to {n_steps - 1}.")
        stop = last % n_steps + 1
        for place, layer in enumerate(axes.get("layer", (0,))):
            tensor = value[layer] if isinstance(value, dict) else value[:, place] if "layer" in axes else value
            computed = mask[:, place] if "layer" in axes else mask
            rest = [name for name in axes if name not in ("step", "layer")]
            if "position" in axes:
                tensor = _latest(tensor[:stop], computed[:stop], rest.index("position") + 1)
            elif spread or step is None:
                tensor = tensor.movedim(0, -2)
            else:
                raise InputError("step= chooses among passes over several positions; this trace has one of each step.")
            by_position = site not in HEAD_SITES
            entries[hook_name(site, layer, architecture)] = (
                tensor if by_position else tensor.movedim(-2, 0)
            ).unsqueeze(0)
    if model is not None:
        entries = _derived(entries, architecture, model) | entries
    return ActivationCache(entries, model)


def _derived(entries: Mapping[str, Tensor], architecture: Architecture, bridge: Any) -> dict[str, Tensor]:
    """What the bridge's norms divide by, where what they read was recorded, and what else follows from the entries.

    A layer reads what the one before it hands on, so ``hook_resid_pre`` from layer 1 on is there as soon as
    ``resid_post`` was recorded; learned positions are what the first layer reads beside the token's embedding.
    """
    n_layers = architecture.n_layers
    found: dict[str, Tensor] = {}
    norms = [("ln_final", getattr(bridge, "ln_final", None), f"blocks.{n_layers - 1}.hook_resid_post")]
    for layer, block in enumerate(bridge.blocks):
        name, before = f"blocks.{layer}", f"blocks.{layer - 1}.hook_resid_post"
        if layer and before in entries:
            found[f"{name}.hook_resid_pre"] = entries[before]
        norms += [
            (f"{name}.{norm}", getattr(block, norm, None), f"{name}.hook_resid_{read}")
            for norm, read in (("ln1", "pre"), ("ln2", "mid"))
        ]
    given = {**found, **entries}
    first = "blocks.0.hook_resid_pre"
    if architecture.positional == "learned" and {"hook_embed", first} <= set(given):
        found["hook_pos_embed"] = given[first] - given["hook_embed"]
    for name, norm, source in norms:
        if source in given and hasattr(norm, "hook_scale"):
            found[f"{name}.hook_scale"] = _norm_scale(norm, given[source])
    return found


def _norm_scale(norm: Any, value: Tensor) -> Tensor:
    """The root mean square (about the mean in a LayerNorm) as the bridge's norm computes it, without its hooks."""
    wide = value if value.dtype in (torch.float32, torch.float64) else value.float()
    centred = wide if norm.uses_rms_norm else wide - wide.mean(-1, keepdim=True)
    own = norm.original_component
    eps = next((getattr(own, name) for name in ("eps", "variance_epsilon") if hasattr(own, name)), None)
    return (centred.pow(2).mean(-1, keepdim=True) + (norm.config.eps if eps is None else eps)).sqrt()


def _latest(tensor: Tensor, computed: Tensor, axis: int) -> Tensor:
    """Each position of ``[step, …, position, feature]`` from the latest step that computed it; the step axis goes."""
    known = computed.movedim(axis, -1)
    known = known.flatten(1, -2).any(1) if known.ndim > 2 else known
    positions = known.any(0).nonzero()[:, 0]
    numbers = torch.arange(1, known.shape[0] + 1)[:, None] * known
    steps = numbers.argmax(0)[positions]
    picked = tensor.movedim(axis, 1)[steps.to(tensor.device), positions.to(tensor.device)]
    return picked.movedim(0, axis - 1)


# --- a cache as a trace


def from_cache(cache: Any, model: Model, prompt: Prompt, fed: tuple[int, ...] | None) -> dict[str, Any]:
    """The fields of a `Trace`; see `Trace.from_activation_cache`."""
    entries: Mapping[str, Tensor] = getattr(cache, "cache_dict", cache)
    names = _names(model.architecture)
    found: dict[str, dict[int, Tensor]] = {}
    for name, tensor in entries.items():
        if name in names:
            site, layer = names[name]
            found.setdefault(site, {})[layer] = tensor if getattr(cache, "has_batch_dim", True) else tensor[None]
    if not found:
        raise SiteError("This cache holds none of kvdrift's sites, such as blocks.0.hook_resid_post.")
    tensors: dict[str, Tensor | dict[int, Tensor]] = {}
    coordinates: dict[str, Axes] = {}
    masks: dict[str, Tensor] = {}
    for site, by_layer in found.items():
        layers = {n: _as_traced(site, by_layer[n], fed is None) for n in sorted(by_layer)}
        n_steps = len(fed) if fed is not None else 1
        first = next(iter(layers.values()))
        if first.shape[0] != n_steps:
            raise InputError(
                f"{site} has {first.shape[0]} positions in this cache, but fed= names {n_steps} steps; leave fed out "
                "for the cache of one pass over all positions."
            )
        coordinates[site] = _axes(site, tuple(layers), tuple(first.shape), fed is None)
        alike = len({(x.shape, x.dtype) for x in layers.values()}) == 1
        whole = torch.stack(list(layers.values()), 1) if alike and "layer" in coordinates[site] else None
        tensors[site] = first if "layer" not in coordinates[site] else layers if whole is None else whole
        sizes = [len(numbers) for numbers in coordinates[site].values()]
        masks[site] = torch.ones(sizes[:-1], dtype=torch.bool)
    path = PathInfo("TransformerLens cache", model.name, model.dtype_name, model.attn, str(model.device))
    return {
        "tensors": tensors,
        "coordinates": coordinates,
        "masks": masks,
        "path": path,
        "prompt": prompt,
        "fed": fed or (),
        "architecture": model.architecture,
    }


def _as_traced(site: str, tensor: Tensor, one_pass: bool) -> Tensor:
    """One layer's entry ``[1, …]`` with the axes of a trace: ``[step, (head), (position), feature]``."""
    if tensor.shape[0] != 1:
        raise InputError(
            f"{site} has a batch of {tensor.shape[0]} in this cache; kvdrift reads one sequence at a time."
        )
    value = tensor[0].movedim(0, -2) if site in HEAD_SITES else tensor[0]
    if not one_pass:
        return value.movedim(-2, 0)
    return value[-1:] if site == LOGITS else value[None]


def _axes(site: str, layers: tuple[int, ...], shape: tuple[int, ...], one_pass: bool) -> Axes:
    axes: Axes = {"step": tuple(range(shape[0]))}
    if site not in (*GLOBAL_SITES, LOGITS):
        axes["layer"] = layers
    rest = list(shape[1:])
    if site in (*HEAD_SITES, PATTERN):
        axes["kv_head" if site in ("k", "v") else "head"] = tuple(range(rest.pop(0)))
    if one_pass and site != LOGITS:
        axes["position"] = tuple(range(rest.pop(0)))
    last = "key" if site == PATTERN else "vocab" if site == LOGITS else "feature"
    axes[last] = tuple(range(rest.pop(0)))
    return axes
