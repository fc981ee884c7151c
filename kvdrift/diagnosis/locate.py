"""Where two observed steps first differ, in the order in which a pass computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from kvdrift.bits import same_bits
from kvdrift.diagnosis.observe import Key, Snapshot
from kvdrift.models.model import Model
from kvdrift.models.sites import LOGITS
from kvdrift.tracing.borrow import shared_positions

Equal = Callable[[Tensor, Tensor], bool]

PAST = {"k": "past k", "v": "past v"}
_ORDER = ("resid_pre", "q", "k", "v", "past k", "past v", "z", "attn_out", "resid_mid", "mlp_out", "resid_post")
_LAST = 1_000_000  # what comes after every block


@dataclass(frozen=True)
class Where:
    """A place in a model.

    Attributes
    ----------
    layer
        Block number; None outside the blocks.
    module
        The module whose inputs agree while its outputs differ, by its name in the module tree.
    site
        The first site that differs: a name of `kvdrift.models.sites`, or ``"past k"``, ``"past v"`` (entries of
        earlier positions as the kernel reads them). Empty where a module is meant as a whole.
    """

    layer: int | None
    module: str
    site: str

    def __str__(self) -> str:
        place = self.module if self.layer is None else f"layer {self.layer}, {self.module}"
        return f"{place}, site {self.site}" if self.site else place


def place(model: Model, layer: int, site: str) -> Where:
    """The module that makes ``site`` of ``layer``.

    Examples
    --------
    >>> import kvdrift as kd
    >>> print(place(kd.load(kd.models.tiny("llama"), quiet=True), 2, "past k"))
    layer 2, the KV cache, site past k
    """
    tree = model.tree
    if site in ("embed", "final_norm", LOGITS):
        module = {"embed": tree.embed, "final_norm": tree.final_norm, LOGITS: tree.head}[site]
        return Where(None, _name(model, module) or site, site)
    if site in PAST.values():
        return Where(layer, "the KV cache", site)
    block = f"{tree.prefix}.{layer}"
    attention = _name(model, tree.attention_modules[layer]) or block
    if site in ("q", "k", "v"):
        return Where(layer, f"{attention} (projection, norm or rotary embedding)", site)
    if site == "z":
        return Where(layer, f"{attention} (attention over the keys)", site)
    if site == "attn_out":
        return Where(layer, attention if attention == block else f"{attention} (output projection)", site)
    return Where(layer, f"{block} (after attention)" if site in ("mlp_out", "resid_post") else block, site)


def cache_update(model: Model, layer: int) -> Where:
    """The place in a layer's attention where its keys and values go to the cache."""
    attention = _name(model, model.tree.attention_modules[layer]) or f"{model.tree.prefix}.{layer}"
    return Where(layer, f"{attention} (cache update)", PAST["k"])


def _name(model: Model, module: object) -> str:
    name = next((name for name, other in model.hf.named_modules() if other is module), "")
    return model.backend.plain_name(name)


def first_difference(a: Snapshot, b: Snapshot, equal: Equal = same_bits) -> tuple[int, str] | None:
    """The first layer and site, in the order of computation, at which two runs differ in a step.

    Sites are compared at the rows that both computed, keys and values at the positions that both read. Rows of earlier
    positions alone, which differ after the last keys and values were made of them, reach nothing and do not count.

    Returns
    -------
    tuple or None
        ``(layer, site)``, or None if nothing differs.
    """
    differing = {key: (x, y) for key, x, y in pairs(a, b) if not equal(x, y)}
    if not any(_reaches(key, x, y, equal) for key, (x, y) in differing.items()):
        return None
    return min(differing, key=in_order)


def _reaches(key: tuple[int, str], x: Tensor, y: Tensor, equal: Equal) -> bool:
    """Whether a difference is one of logits, of keys or values, or of the current row, which all else comes from."""
    whole = key[1] == LOGITS or key[1] in (*PAST, *PAST.values())
    return whole or not equal(x[-1:], y[-1:])


def changed_past(before: Snapshot, now: Snapshot, kept: int) -> tuple[int, str] | None:
    """The first layer in which keys or values of earlier positions are no longer what they were a step before.

    Of these positions the first ``kept`` are looked at: their tokens were not taken back since.
    """
    for key in sorted(now.kv, key=in_order):
        if key not in before.kv:
            continue
        (value, at), (old, at_old) = now.kv[key], before.kv[key]
        here, there = shared_positions(at, at_old, before=kept)
        if not same_bits(value[:, here], old[:, there]):
            return key[0], PAST[key[1]]
    return None


def pairs(a: Snapshot, b: Snapshot) -> Iterator[tuple[Key, Tensor, Tensor]]:
    """Whatever two runs both computed or read in a step, by layer and site."""
    for key in a.rows.keys() & b.rows.keys():
        x, y = a.rows[key], b.rows[key]
        n = min(len(x), len(y), a.position + 1)
        yield _after(key), x[-n:], y[-n:]
    for layer, site in a.kv.keys() & b.kv.keys():
        (x, at_a), (y, at_b) = a.kv[layer, site], b.kv[layer, site]
        here, there = shared_positions(at_a, at_b, before=a.position)
        yield (layer, PAST[site]), x[:, here], y[:, there]
        here, there = shared_positions(at_a, at_b, before=a.position + 1, since=a.position)
        yield (layer, site), x[:, here], y[:, there]
    yield (_LAST, LOGITS), a.logits, b.logits


def _after(key: tuple[int, str]) -> tuple[int, str]:
    layer, site = key
    return (-1 if site == "embed" else _LAST if site == "final_norm" else layer, site)


def in_order(key: tuple[int, str]) -> tuple[int, int]:
    """A place by which layers and sites sort in the order in which a pass computes them."""
    layer, site = key
    return layer, _ORDER.index(site) if site in _ORDER else len(_ORDER) + (site == LOGITS)


def within(tolerance: float) -> Equal:
    """Equality up to ``tolerance`` times the largest entry of the second tensor; NaN equals nothing."""

    def equal(x: Tensor, y: Tensor) -> bool:
        if x.shape != y.shape:
            return False
        if not x.numel():
            return True
        return bool((x - y).abs().max() <= tolerance * y.abs().max())

    return equal
