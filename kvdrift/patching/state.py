"""What a path holds at one step, and where it comes from: a live run, or a recorded trace."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from kvdrift.errors import InputError, SiteError
from kvdrift.models.model import Model
from kvdrift.models.sites import GLOBAL_SITES, HEAD_SITES
from kvdrift.patching.spec import Patch
from kvdrift.paths.stepper import Shown, Stepper
from kvdrift.shapes import Logits
from kvdrift.tracing.tap import Values
from kvdrift.tracing.trace import Trace


@dataclass(frozen=True)
class State:
    """One path at one step.

    Attributes
    ----------
    position
        The current position.
    logits
        ``[vocab]``.
    values
        Site → layer → ``[1, row, d_model]`` at residual sites, ``[1, head, row, feature]`` inside attention.
    at
        ``(site, layer)`` → absolute position of each row; rows of a site that is not in here end at the current one.
    """

    position: int
    logits: Logits
    values: Values
    at: dict[tuple[str, int], Sequence[int]]

    def rows(self, site: str, layer: int) -> Sequence[int]:
        """Absolute position of each row of a site's value."""
        if (site, layer) in self.at:
            return self.at[site, layer]
        return range(self.position + 1 - self.values[site][layer].shape[-2], self.position + 1)


def state(shown: Shown) -> State:
    """What a step of a run showed, as a state: a value of the current position alone gets a row axis."""
    values = {
        site: {
            layer: value if value.ndim == (4 if site in HEAD_SITES else 3) else value.unsqueeze(-2)
            for layer, value in by_layer.items()
        }
        for site, by_layer in shown.values.items()
    }
    at = {(site, layer): shown.keys[layer] for site in ("k", "v") for layer in values.get(site, {})}
    return State(shown.position, shown.logits, values, at)


States = Callable[[int, int | None, bool], State]
"""``(step number, token to consume, whether values are wanted)`` → the moment after it."""


def live(stepper: Stepper) -> States:
    """A run that is watched while it goes."""
    return lambda number, token, watch: state(stepper.step(token, watch=watch))


class Recorded:
    """A trace as a donor: what it recorded, step by step.

    Parameters
    ----------
    trace
        The trace.
    model, ids
        The recipient's model and prompt.
    sites
        Site → the layers to read.

    Raises
    ------
    InputError
        If the trace is of other weights, another dtype or another prompt, or holds no logits.
    """

    def __init__(self, trace: Trace, model: Model, ids: Sequence[int], sites: Mapping[str, Sequence[int]]) -> None:
        _refuse_stranger(trace, model, ids)
        self.trace, self.n_prompt, self.model, self.sites = trace, len(ids), model, sites

    def __call__(self, number: int, token: int | None, watch: bool) -> State:
        """What was recorded at one step; see `States`."""
        logits = self.trace["logits"]
        assert isinstance(logits, Tensor), "logits exist once"
        position = self.n_prompt - 1 + number
        values: Values = {}
        at: dict[tuple[str, int], Sequence[int]] = {}
        for site, layers in self.sites.items() if watch else ():
            for layer in layers:
                value, at[site, layer] = self._read(site, layer, number, position)
                values.setdefault(site, {})[layer] = value
        return State(position, logits[number].to(self.model.device), values, at)

    def _read(self, site: str, layer: int, number: int, position: int) -> tuple[Tensor, Sequence[int]]:
        """A site's value with a batch axis and a row axis, and the absolute position of each row."""
        place = self.model.coverage.places.get(site, {}).get(layer)
        if place is not None and place.scale != 1:
            raise SiteError(
                f"A trace holds {site!r} times the residual multiplier, which cannot be written back bit for bit; "
                "use the donor's path instead of its trace."
            )
        axes, whole, mask = self.trace.axes(site), self.trace[site], self.trace.valid(site)
        index: tuple[int, ...] = (number,)
        if site not in GLOBAL_SITES:
            if layer not in axes["layer"]:
                raise SiteError(f"The donor trace has no {site!r} of layer {layer}; record it.")
            index = (number, axes["layer"].index(layer))
        value = whole[layer][number] if isinstance(whole, dict) else whole[index]
        head_axis = axes.get("kv_head", axes.get("head"))
        if head_axis is not None and head_axis != tuple(range(self._n_heads(site, layer))):
            raise SiteError(f"The donor trace holds only some heads of {site!r}; record all of them.")
        if "position" not in axes:
            return value.unsqueeze(-2)[None].to(self.model.device), range(position, position + 1)
        valid = mask[index]
        valid = valid if valid.ndim == 1 else valid[0]
        kept = valid.nonzero().flatten()
        at = [axes["position"][int(i)] for i in kept]
        rows = value.index_select(-2, kept.to(value.device))
        return rows[None].to(self.model.device), at

    def _n_heads(self, site: str, layer: int) -> int:
        architecture = self.model.architecture
        return architecture.n_heads if site in ("q", "z") else architecture.layers[layer].n_kv_heads


def lacking(trace: Trace, patch: Patch, layers: dict[str, Sequence[int]]) -> str | None:
    """What a trace would have to hold beside what it does, to be the donor of a patch; None if it holds all.

    Parameters
    ----------
    trace, patch
        The donor and the patch.
    layers
        Site → the layers that the patch writes.
    """
    prompt, last = len(trace.prompt.ids), len(trace.prompt.ids) + len(trace.fed) - 1
    for site in patch.sites:
        if site not in trace.sites:
            return f"{site!r}"
        axes = trace.axes(site)
        missing = [layer for layer in layers[site] if layer not in axes.get("layer", (layer,))]
        if missing:
            return f"{site!r} of layer {', '.join(map(str, missing))}"
        if "position" not in axes and not patch.is_kv and not patch.beyond_current:
            continue
        if isinstance(patch.positions, tuple):
            wanted: Sequence[int] = patch.positions
        else:
            wanted = range(0 if patch.is_kv or patch.beyond_current else prompt, last)
        if not set(wanted) <= set(axes.get("position", ())):
            return f"{site!r} at some positions"
    return None


def _refuse_stranger(trace: Trace, model: Model, ids: Sequence[int]) -> None:
    if tuple(ids) != trace.prompt.ids:
        raise InputError(
            f"The donor trace is of another prompt ({len(trace.prompt.ids)} tokens, hash {_hash(trace.prompt.ids)}; "
            f"this one has {len(ids)}, {_hash(ids)}); record it on the same token ids."
        )
    if trace.path.dtype != model.dtype_name:
        raise InputError(
            f"The donor trace was recorded in {trace.path.dtype}, the model runs in {model.dtype_name}; use one dtype."
        )
    recorded = trace.provenance.get("weights")
    if recorded != model.fingerprint:
        raise InputError(
            f"The donor trace was recorded from other weights ({trace.path.model}, {recorded}; this is {model.name}, "
            f"{model.fingerprint}); record it from this model."
        )
    if "logits" not in trace.sites:
        raise InputError("The donor trace holds no logits, so nothing can be compared with it; add 'logits' to sites.")


def _hash(ids: Sequence[int]) -> str:
    return hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()[:8]
