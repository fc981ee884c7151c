"""The visibility probe: which keys does a native attention call really read?

Two paths that agree under fixed shape may still differ in the native attention function, which that control
replaces. Here the native function is called again exactly as the model called it, with queries of zero and values
that are one-hot: whatever comes out nonzero is a key that it reads. No tolerance is involved. The set must be the
one that positions and the layer's window imply.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool
from torch import Tensor

from kvdrift.models.architecture import LayerInfo
from kvdrift.shapes import Visible
from kvdrift.tracing.seam import AttentionCall

MARK = 1024.0
"""The one entry of a one-hot value: divided by a thousand keys or by ten million, every dtype still holds it."""
HIDDEN = -1e4
"""Additive masks hide a key at this value and below; above it they are biases, which hide nothing."""
_KINDS = ("full", "sliding", "chunked")


@dataclass(frozen=True)
class Misread:
    """An attention call that reads other keys than positions and window imply.

    Attributes
    ----------
    layer
        The decoder layer.
    position
        Absolute position of the first query that is wrong.
    missing, extra
        Positions that it should read and does not, and those that it should not and does. A negative position is
        left padding.
    n_queries, n_keys
        Size of the call.
    """

    layer: int
    position: int
    missing: tuple[int, ...]
    extra: tuple[int, ...]
    n_queries: int
    n_keys: int

    def __str__(self) -> str:
        faults = []
        if self.missing:
            faults.append(f"does not read {_positions(self.missing)}")
        if self.extra:
            faults.append(f"reads {_positions(self.extra)}, which it should not")
        return (
            f"In layer {self.layer} the query at position {self.position} {' and '.join(faults)} "
            f"(native attention, queries × keys: {self.n_queries} × {self.n_keys})."
        )


def seen(call: AttentionCall) -> Bool[Tensor, "batch head query key"]:
    """Which keys each query of a call reads.

    The native function runs on the call as it stands, with queries of zero (so that all scores are equal) and
    one-hot values, as many keys at a time as a value has features. Shapes, strides, dtypes, keys, mask and all
    other arguments stay as they are, apart from finite biases in an additive mask, which are set to zero.

    Returns
    -------
    Tensor
        ``[batch, head, query, key]``. A query from which the mask hides every key reads nothing.

    Examples
    --------
    >>> import torch
    >>> import kvdrift as kd
    >>> from kvdrift.tracing.seam import Order, seam
    >>> class Keep:
    ...     order, calls = Order.OBSERVE, []
    ...     def __call__(self, call, proceed):
    ...         self.calls.append(call)
    ...         return proceed(call)
    >>> model, keep = kd.models.tiny("llama"), Keep()
    >>> with seam(model, keep):
    ...     _ = model(torch.tensor([[1, 2, 3]]))
    >>> seen(keep.calls[0])[0, 0].int()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [1, 1, 1]], dtype=torch.int32)
    """
    n_keys, size = call.key.shape[2], call.value.shape[3]
    value = _zeros_like(call.value)
    probe = replace(call, query=_zeros_like(call.query), value=value, mask=_without_biases(call.mask))
    blocks = []
    with torch.no_grad():
        for start in range(0, n_keys, size):
            entries = value[:, :, start : start + size].diagonal(dim1=2, dim2=3)
            entries.fill_(MARK)
            output = probe.execute()[0].transpose(1, 2)[..., : entries.shape[2]]
            blocks.append((output != 0) & ~output.isnan())
            entries.zero_()
    return torch.cat(blocks, dim=3) & ~_hidden_rows(call)


def expected(
    info: LayerInfo, query_positions: Sequence[int], key_positions: Sequence[int], causal: bool = True
) -> Visible:
    """Which keys each query should read, by positions and the layer's window alone.

    Parameters
    ----------
    info
        The layer.
    query_positions, key_positions
        Absolute positions, counted from the first token that is not left padding; padding has negative ones. It is
        seen by nobody and sees nothing.
    causal
        False for a layer that reads later positions too, as far as its queries reach.

    Examples
    --------
    >>> from kvdrift.models.architecture import LayerInfo
    >>> expected(LayerInfo(0, "sliding", 2, 1, 8), [2, 3], range(-1, 4)).int()
    tensor([[0, 0, 1, 1, 0],
            [0, 0, 0, 1, 1]], dtype=torch.int32)
    """
    queries = torch.tensor(list(query_positions), dtype=torch.long)[:, None]
    keys = torch.tensor(list(key_positions), dtype=torch.long)
    first = torch.tensor([info.first_seen(max(int(at), 0)) for at in query_positions], dtype=torch.long)[:, None]
    if not causal:
        return (keys >= 0) & (queries >= 0) & (keys <= queries.max())
    return (keys >= 0) & (queries >= 0) & (keys <= queries) & (keys >= first)


def misread(
    call: AttentionCall, info: LayerInfo, query_positions: Sequence[int], key_positions: Sequence[int]
) -> Misread | None:
    """The first query of a call that reads other keys than it should, or None.

    The measure is causal attention inside the layer's window. A bidirectional layer comes out as reading later
    positions; `is_causal` tells that it is meant to.

    Parameters
    ----------
    call
        The call as the model made it.
    info
        Its layer, for which `readable` has nothing to say.
    query_positions, key_positions
        Absolute positions of its queries and keys, as in `expected`.

    Examples
    --------
    >>> import torch
    >>> import kvdrift as kd
    >>> from kvdrift.tracing.seam import AttentionCall
    >>> def forgetful(module, query, key, value, mask, **kwargs):
    ...     scores = (query @ key.transpose(2, 3)).softmax(-1)
    ...     return (scores[..., 1:] @ value[:, :, 1:]).transpose(1, 2), None
    >>> q, k = torch.ones(1, 1, 1, 4), torch.ones(1, 1, 3, 4)
    >>> call = AttentionCall(torch.nn.Module(), q, k, k, None, {}, forgetful)
    >>> print(misread(call, kd.models.architecture.LayerInfo(0, "full", None, 1, 4), [2], range(3)))
    In layer 0 the query at position 2 does not read position 0 (native attention, queries × keys: 1 × 3).
    """
    should = expected(info, query_positions, key_positions).to(call.query.device)
    real = torch.tensor([at >= 0 for at in query_positions], device=call.query.device)[:, None]
    wrong = (seen(call) ^ should) & real
    if not wrong.any():
        return None
    wrong = wrong.flatten(0, 1).any(0)
    query = int(wrong.any(1).nonzero()[0])
    keys = wrong[query]
    at = [int(position) for position in key_positions]
    missing, extra = (keys & should[query]).nonzero()[:, 0], (keys & ~should[query]).nonzero()[:, 0]
    return Misread(
        info.index,
        int(query_positions[query]),
        tuple(at[slot] for slot in missing.tolist()),
        tuple(at[slot] for slot in extra.tolist()),
        call.query.shape[2],
        call.key.shape[2],
    )


def readable(info: LayerInfo, call: AttentionCall) -> str | None:
    """Why positions and window do not say which keys a call reads, or why the probe cannot; None if all is well.

    Examples
    --------
    >>> import torch
    >>> from kvdrift.models.architecture import LayerInfo
    >>> from kvdrift.tracing.seam import AttentionCall
    >>> one = torch.ones(1, 1, 1, 4)
    >>> readable(LayerInfo(0, "indexed", None, 1, 4), AttentionCall(torch.nn.Module(), one, one, one, None, {}, print))
    'which keys indexed attention reads depends on the data'
    """
    if info.attention not in _KINDS:
        return f"which keys {info.attention} attention reads depends on the data"
    chosen = sorted(name for name, given in call.kwargs.items() if "indices" in name and given is not None)
    if chosen:
        return f"which keys it reads depends on the data ({', '.join(chosen)})"
    if call.kwargs.get("dropout"):
        return "it drops keys at random (dropout)"
    if call.query.shape[0] != call.key.shape[0] or call.key.shape[2] != call.value.shape[2]:
        return "its queries, keys and values do not belong together one to one"
    if not call.key.isfinite().all():
        return "its keys are not finite"
    return None


def is_causal(call: AttentionCall) -> bool:
    """Whether a call is meant not to read later positions: its ``is_causal`` argument, else the module's."""
    given = call.kwargs.get("is_causal")
    return bool(getattr(call.module, "is_causal", True) if given is None else given)


def blocks_ahead(call: AttentionCall, query_positions: Sequence[int], key_positions: Sequence[int]) -> bool:
    """Whether the mask itself lets tokens see later ones, in blocks that are read both ways: a prefix, an image.

    The last position that a query sees must be the last one of every query up to there. A mask that is shifted by one
    is no such thing.

    Examples
    --------
    >>> import torch
    >>> from kvdrift.tracing.seam import AttentionCall
    >>> q = torch.zeros(1, 1, 3, 4)
    >>> prefix = torch.tensor([[1, 1, 0], [1, 1, 0], [1, 1, 1]]).bool()[None, None]
    >>> shifted = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 1]]).bool()[None, None]
    >>> [blocks_ahead(AttentionCall(None, q, q, q, mask, {}, None), range(3), range(3)) for mask in (prefix, shifted)]
    [True, False]
    """
    if not isinstance(call.mask, Tensor) or call.mask.dim() != 4:
        return False
    seen = ~hidden(call.mask)[0, 0].cpu()
    at = torch.tensor(list(key_positions), dtype=torch.long)[: seen.shape[1]]
    last = [int(at[row].max()) if row.any() else None for row in seen.expand(len(query_positions), -1)]
    ends = dict(zip(query_positions, last, strict=True))
    ahead = {position: end for position, end in ends.items() if position >= 0 and end is not None and end > position}
    return bool(ahead) and all(
        ends.get(other) == end for position, end in ahead.items() for other in range(position + 1, end + 1)
    )


def hidden(mask: Tensor) -> Bool[Tensor, "batch head query key"]:
    """What a mask hides: False in a bool mask, `HIDDEN` and below in an additive one."""
    return mask <= HIDDEN if mask.is_floating_point() else ~mask.bool()


def _zeros_like(tensor: Tensor) -> Tensor:
    """Zeros of the same shape and dtype, and of the same strides unless entries share memory."""
    return torch.zeros_like(tensor, memory_format=torch.preserve_format)


def _without_biases(mask: Tensor | None) -> Tensor | None:
    if not isinstance(mask, Tensor) or not mask.is_floating_point():
        return mask
    biased = (mask != 0) & ~hidden(mask)
    return torch.empty_like(mask).copy_(mask.masked_fill(biased, 0)) if biased.any() else mask


def _hidden_rows(call: AttentionCall) -> Tensor:
    """Queries from which the mask hides every key (left padding, which then reads all alike): ``[…, query, 1]``."""
    mask = call.mask
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        return torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=call.query.device)
    return hidden(mask).all(-1, keepdim=True)


def _positions(positions: Sequence[int]) -> str:
    """``"position 3"`` or ``"positions 3 to 5, 9 and left padding"``."""
    runs = list(_runs([at for at in positions if at >= 0]))
    words = [str(start) if start == end else f"{start} to {end}" for start, end in runs[:6]] + ["…"] * (len(runs) > 6)
    noun = "position" if len(positions) == 1 else "positions"
    found = [f"{noun} {', '.join(words)}"] if words else []
    return " and ".join([*found, "left padding"] if min(positions) < 0 else found)


def _runs(positions: Sequence[int]) -> Iterator[tuple[int, int]]:
    start = last = None
    for at in sorted(positions):
        if start is None or last is None:
            start = at
        elif at != last + 1:
            yield start, last
            start = at
        last = at
    if start is not None and last is not None:
        yield start, last
