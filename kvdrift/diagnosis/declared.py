"""A cache held to the loss that it declares: what a kernel reads against what was handed to the cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvdrift.bits import same_bits
from kvdrift.diagnosis.observe import Call
from kvdrift.models.architecture import LayerInfo
from kvdrift.paths.loss import Declared, Dropped, Rounded, as_losses, said
from kvdrift.paths.written import match

NEARER = 0.5
"""An entry is another one's if it lies at less than this share of the distance from it that it has from its own."""
NOTHING_LEFT = 1.5
"""An entry further from its own than so many times the own one's length is not a loss of it."""


def covers_eviction(declared: Declared | None) -> bool:
    """Whether entries may be missing at all."""
    losses = as_losses(declared)
    return isinstance(losses, str) or any(isinstance(loss, Dropped) for loss in losses or ())


def judged(declared: Declared, n_calls: int, lost: bool) -> str:
    """How a declaration was held against what so many calls read, in a sentence."""
    losses = as_losses(declared)
    if n_calls and not lost:
        return f"A loss is declared ({said(declared)}), and none was seen: all that was read is what was written."
    if isinstance(losses, str):
        return (
            f"The loss ({losses}) was taken on trust: of a sentence only this was checked, that what is read is the "
            "layer's, head's and position's own."
        )
    return f"What {n_calls} attention calls read was held against what is declared: {said(declared)}."


def evicted(made: Call, info: LayerInfo) -> str | None:
    """What a cache has evicted that the layer should read, in words; None if nothing."""
    if made.unplaced is not None:
        return made.unplaced
    first = max(info.first_seen(max(int(made.queries[0]), 0)), 0)
    gone = sorted(set(range(first, made.queries[-1] + 1)) - set(made.keys))
    return f"the cache has evicted {_list(gone)}, which the layer should read" if gone else None


def loses(made: Call, info: LayerInfo) -> bool:
    """Whether a call reads anything else than what was written, bit for bit; True where that cannot be told."""
    written = None if made.written is None else made.written.entries(made.layer, made.queries[-1] + 1)
    read = (made.call.key, made.call.value)
    if made.written is None or written is None or any(_alike(x, y) for x, y in zip(written, read, strict=True)):
        return True
    if evicted(made, info) is not None:
        return True
    places = [int(at) - made.written.start for at in made.keys]
    slots = [slot for slot, place in enumerate(places) if 0 <= place < written[0].shape[2]]
    at = [places[slot] for slot in slots]
    return not all(same_bits(x[:, :, at], y[:, :, slots]) for x, y in zip(written, read, strict=True))


def breach(made: Call, info: LayerInfo, declared: Declared) -> str | None:
    """What a call reads that its path's declaration does not cover, in words; None if all is covered."""
    end = made.queries[-1] + 1
    written = None if made.written is None else made.written.entries(made.layer, end)
    read = (made.call.key, made.call.value)
    if written is None or made.written is None or any(_alike(x, y) for x, y in zip(written, read, strict=True)):
        return None
    losses = as_losses(declared)
    if losses is None or isinstance(losses, str):
        slots = _by_distance(made, written, read)
        return slots if isinstance(slots, str) else _lacks_pass(made, made.written.start, slots)
    dropped = next((loss for loss in losses if isinstance(loss, Dropped)), None)
    rounded = next((loss for loss in losses if isinstance(loss, Rounded)), None)
    if dropped is None:
        claimed = [int(at) - made.written.start for at in made.keys]
        slots = [[slot if 0 <= slot < written[0].shape[2] else -1 for slot in claimed]] * written[0].shape[1]
    elif rounded is None:
        found = [match(*(x[0, h] for x in (*written, *read))) for h in range(read[0].shape[1])]
        if any(slots is None for slots in found):
            head = found.index(None)
            story = _by_distance(made, written, read)
            return (
                story
                if isinstance(story, str)
                else (f"KV head {head} reads entries that are not, bit for bit, what it was given")
            )
        slots = [slots for slots in found if slots is not None]
    else:
        nearest = _by_distance(made, written, read)
        if isinstance(nearest, str):
            return nearest
        slots = nearest
    said_own = _lacks_pass(made, made.written.start, slots)
    if said_own is not None:
        return said_own
    if dropped is not None and (fault := _kept(made, info, dropped, slots)) is not None:
        return fault
    return None if rounded is None else _within(written, read, slots, rounded, made.written.start)


def _alike(written: Tensor, read: Tensor) -> bool:
    """Whether entries cannot be held against each other, having other shapes."""
    return written.shape[1] != read.shape[1] or written.shape[3] != read.shape[3]


def _lacks_pass(made: Call, start: int, slots: Sequence[Sequence[int]]) -> str | None:
    """The tokens of a pass itself are always there."""
    for head, places in enumerate(slots):
        missing = sorted({at - start for at in made.queries} - set(places))
        if missing:
            at = [place + start for place in missing]
            return f"KV head {head} does not read {_list(at)}, which the pass itself has just written"
    return None


def _kept(made: Call, info: LayerInfo, loss: Dropped, slots: Sequence[Sequence[int]]) -> str | None:
    assert made.written is not None
    start = made.written.start
    before = range(start, made.queries[0])  # padding takes its place in a cache like any token
    first = info.first_seen(max(int(made.queries[0]), 0))
    for head, places in enumerate(slots):
        held = {place + start for place in places} & set(before)
        if loss.exact:
            remain = loss.remain(before)
            missing = sorted(at for at in remain - held if at >= first)
            extra = sorted(at for at in held - remain if at >= 0)  # all padding is alike
            if missing:
                return f"KV head {head} has lost {_list(missing)}, beyond what is declared ({loss})"
            if extra:
                return f"KV head {head} reads {_list(extra)}, declared to be gone ({loss})"
        elif loss.at_least is not None:
            due = min(loss.at_least, len(before) - max(first, 0))
            if len(held) < due:
                return f"KV head {head} keeps {len(held)} entries where {due} are declared to be kept"
    return None


def _within(
    written: tuple[Tensor, Tensor],
    read: tuple[Tensor, Tensor],
    slots: Sequence[Sequence[int]],
    loss: Rounded,
    start: int,
) -> str | None:
    for name, given, got in zip(("keys", "values"), written, read, strict=True):
        for head, places in enumerate(slots):
            here = [slot for slot, place in enumerate(places) if place >= 0]
            own = given[0, head, [places[slot] for slot in here]]
            off = (got[0, head, here].double() - loss.stored(own).double()).abs()
            excess = (off - loss.allowed(own)).amax(-1)
            if len(here) and not float(excess.max()) <= 0:
                worst = int(excess.argmax())
                limit = float(loss.allowed(own)[worst])
                return (
                    f"{name} of KV head {head} at position {places[here[worst]] + start} are off by "
                    f"{float(off[worst].max()):.3g} where {limit:.3g} is declared ({loss})"
                )
    return None


def _by_distance(made: Call, written: tuple[Tensor, Tensor], read: tuple[Tensor, Tensor]) -> list[list[int]] | str:
    """Which entry each one read is nearest to, head by head; in words what is nearer to another head's or layer's.

    Where as many are read as were written each one's own is known: the one in its place.
    """
    assert made.written is not None
    n_heads, n_read, n_written = read[0].shape[1], read[0].shape[2], written[0].shape[2]
    distances = []  # [kv_head, slot, kv_head, position] of keys and of values
    for given, got in zip(written, read, strict=True):
        flat = given[0].double().flatten(0, 1)
        distances.append(torch.cdist(got[0].double(), flat[None], compute_mode="donot_use_mm_for_euclid_dist"))
    apart = [d.reshape(n_heads, n_read, n_heads, n_written) for d in distances]
    sizes = [given[0].double().norm(dim=-1) for given in written]
    scale = [size.mean().clamp(min=1e-30) for size in sizes]
    slots = []
    for head in range(n_heads):
        together = sum(d[head, :, head] / s for d, s in zip(apart, scale, strict=True))
        assert isinstance(together, Tensor)
        places = list(range(n_written)) if n_read == n_written else together.argmin(-1).tolist()
        slots.append(places)
        for name, d, size in zip(("keys", "values"), apart, sizes, strict=True):
            own = d[head, torch.arange(n_read), head, places]
            nearest, which = d[head].flatten(1).min(-1)
            wrong = (nearest < NEARER * own).nonzero()[:, 0].tolist()
            if wrong:
                other, place = divmod(int(which[wrong[0]]), n_written)
                at, other_at = places[wrong[0]] + made.written.start, place + made.written.start
                whose = f"of KV head {other}" if other != head else f"of position {other_at}"
                return f"{name} of KV head {head} at position {at} are those {whose}: they are swapped, not lost"
            layer = _other_layer(made, name, head, places, own)
            if layer is not None:
                return f"{name} of KV head {head} are those of layer {layer}: they are swapped, not lost"
            far = (own > NOTHING_LEFT * size[head, places]).nonzero()[:, 0].tolist()
            if far:
                at = places[far[0]] + made.written.start
                return f"{name} of KV head {head} at position {at} have nothing to do with what was written there"
    return slots


def _other_layer(made: Call, name: str, head: int, places: list[int], own: Tensor) -> int | None:
    """A layer whose entries are much nearer to those read than the layer's own are."""
    assert made.written is not None
    got = (made.call.key if name == "keys" else made.call.value)[0, head].double()
    for layer in made.written.layers:
        if layer == made.layer:
            continue
        entries = made.written.entries(layer)
        given = None if entries is None else entries[0 if name == "keys" else 1]
        if given is None or given.shape[1] <= head or given.shape[3] != got.shape[1] or given.shape[2] <= max(places):
            continue
        if bool(((got - given[0, head, places].double()).norm(dim=-1) < NEARER * own).any()):
            return layer
    return None


def _list(positions: Sequence[int]) -> str:
    """``position 3``; ``positions 4 to 15``; ``positions 1, 5 and 3 more``."""
    if len(positions) == 1:
        return f"position {positions[0]}"
    if positions[-1] - positions[0] == len(positions) - 1:
        return f"positions {positions[0]} to {positions[-1]}"
    rest = len(positions) - 4
    shown = ", ".join(map(str, positions[:4]))
    return f"positions {shown}{f' and {rest} more' if rest > 0 else ''}"
