"""Where a drift is largest: the cell of a maximum, and the layer that makes most by itself. Pure, without words."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvdrift.drift.result import Drift
from kvdrift.statistics.measured import mean_measured

SITE = "resid_post"
MODULES = {"attn": "attn_out", "mlp": "mlp_out"}


@dataclass(frozen=True)
class Peak:
    """The largest value among the counted cells, and where it is.

    `token` is what both paths were fed after `step`: the token that was predicted there. `layer`, `head` (a KV head)
    and `position` (absolute) are None where the value has no such axis. A NaN counts as largest.
    """

    value: float
    prompt: int
    step: int
    token: int
    layer: int | None = None
    head: int | None = None
    position: int | None = None


@dataclass(frozen=True)
class LocalDrift:
    """The drift that one layer makes by itself at ``resid_post``: relative L2, mean over steps, then over prompts.

    `floor` is the same mean of its local re-roll floor and `ratio` their quotient (infinite over a floor of exactly
    zero); None where no floor was measured. `module` is the one of attention ("attn") and MLP ("mlp") whose output
    stands higher over its own floor; None where the block does not offer both, or without a floor.
    """

    layer: int
    module: str | None
    rel_l2: float
    floor: float | None
    ratio: float | None


def logit_peak(drift: Drift, metric: str) -> Peak | None:
    """The step at which a logit metric is largest; None if no counted cell has it.

    Examples
    --------
    >>> import kvdrift as kd
    >>> drift = kd.compare(kd.models.tiny("llama"), [1, 2, 3], max_new_tokens=4, floor=0, progress=False)
    >>> bool(logit_peak(drift, "kl").value == drift.values("logits", "kl")[drift.counted].max())
    True
    """
    if not drift.has("logits", metric):
        return None
    return _peak(drift, np.asarray(drift.values("logits", metric), dtype=float), drift.steps)


def kv_peak(drift: Drift, site: str) -> Peak | None:
    """Where relative L2 of ``"k"`` or ``"v"`` is largest: among positions at the kept steps, else among heads."""
    layers = drift.layers(site)
    if drift.has(site, of="positions"):
        found = _peak(drift, drift.values(site, of="positions"), drift.position_steps, layers)
        if found is not None:
            return found
    return _peak(drift, drift.values(site), drift.steps, layers) if drift.has(site) else None


def _peak(drift: Drift, values: np.ndarray, steps: np.ndarray, layers: np.ndarray | None = None) -> Peak | None:
    """The largest of ``values [prompt, step, …]`` at counted cells, NaN (not measured) elsewhere left out.

    A NaN of K/V is a position that not both see, so only logits (two axes) can show one.
    """
    counted = drift.counted[:, np.searchsorted(drift.steps, steps)]
    cells = counted.reshape(*counted.shape, *(1,) * (values.ndim - 2))
    ordered = np.where(np.isnan(values), np.inf if values.ndim == 2 else -np.inf, values)
    ordered = np.where(np.broadcast_to(cells, values.shape), ordered, -np.inf)
    if ordered.size == 0 or ordered.max() == -np.inf:
        return None
    prompt, step, *inner = (int(i) for i in np.unravel_index(int(ordered.argmax()), ordered.shape))
    number = int(steps[step])
    axes: list[int | None] = [*inner, None, None, None]
    layer, head, position = axes[:3]
    return Peak(
        value=float(values[(prompt, step, *inner)]),
        prompt=prompt,
        step=number,
        token=int(drift.fed[prompt, number]),
        layer=None if layer is None or layers is None else int(layers[layer]),
        head=head,
        position=position,
    )


def local_peak(drift: Drift) -> LocalDrift | None:
    """The layer whose local drift stands highest over its own floor; without floors, the one with most local drift.

    A layer with a floor of exactly zero is ranked by the smallest floor of another layer, so that one bit in a layer
    that no re-roll reached does not hide a fault elsewhere. None if no layer makes any drift.
    """
    found = _over_floors(drift, SITE)
    if found is None:
        return None
    own, _, rank = found
    best = int(np.argmax(rank))
    return None if not own[best] > 0 else _local(drift, best)


def local_at(drift: Drift, layer: int) -> LocalDrift | None:
    """The local drift of one layer; None if it was not measured."""
    places = np.flatnonzero(drift.layers(SITE, "local") == layer)
    return _local(drift, int(places[0])) if places.size and _over_floors(drift, SITE) is not None else None


def _local(drift: Drift, place: int) -> LocalDrift:
    found = _over_floors(drift, SITE)
    assert found is not None, "asked for only where local drift was measured"
    own, floors, _ = found
    floor = None if floors is None else float(floors[place])
    value = float(own[place])
    ratio = None
    if floor is not None:
        ratio = value / floor if floor > 0 else (np.inf if value > 0 else None)
    ranks: dict[str, float] = {}
    for name, site in MODULES.items():
        inside = _over_floors(drift, site)
        if inside is not None and inside[1] is not None:
            ranks[name] = float(inside[2][place])
    module = max(ranks, key=lambda each: ranks[each]) if len(ranks) == 2 and max(ranks.values()) > 0 else None
    return LocalDrift(int(drift.layers(SITE, "local")[place]), module, value, floor, ratio)


def _over_floors(drift: Drift, site: str) -> tuple[np.ndarray, np.ndarray | None, np.ndarray] | None:
    """Mean local drift ``[layer]``, its floor's (or None), and by what layers are ranked; None if not measured."""
    if not drift.has(site, of="local"):
        return None
    own = _mean(drift, drift.values(site, of="local"))
    seeds = drift.floor(site, "local")
    if seeds is None:
        return own, None, own
    floors = _mean(drift, seeds.mean(axis=0))
    positive = floors[floors > 0]
    if not positive.size:
        return own, floors, own
    return own, floors, own / np.where(floors > 0, floors, positive.min())


def _mean(drift: Drift, values: np.ndarray) -> np.ndarray:
    """Mean over the counted steps, then over prompts, ``[layer]``; 0 where nothing was measured."""
    counted = np.where(drift.counted[..., None], values, np.nan)
    return np.nan_to_num(mean_measured(mean_measured(counted, axis=1), axis=0), nan=0.0, posinf=np.inf)
