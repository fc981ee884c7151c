"""The local witness of attention: is a native call as exact as its own arithmetic allows?

Fixed shape replaces the native attention function, so a fault inside that function has to be found on the call
itself: on the very tensors that the model handed over, against the same attention in float64. The bound is
derived from the operations that implementations carry out; nothing in it is fitted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvdrift.diagnosis.visibility import hidden, is_causal
from kvdrift.shapes import Visible
from kvdrift.tracing.seam import AttentionCall

BLOCK = 1 << 20
"""Scores per block of queries: what bounds the memory of the float64 computation."""
EXP_ULPS = 48
"""Relative error of an exponential in units of float32 roundoff: PyTorch's flash kernel on CPUs uses one of 20 ulp."""
_FLOAT32_SCORES = ("sdpa", "flex", "flash", "paged|sdpa", "paged|flash")
_IRRELEVANT = frozenset({"s_aux", "position_ids", "cache_position"})


def excess(call: AttentionCall, visible: Visible | None = None, attn: str | None = None) -> float:
    """The largest error of a call's output, as a multiple of what rounding can account for.

    Parameters
    ----------
    call
        The call as the model made it, for which `readable` has nothing to say.
    visible
        What each query should read where the call has no mask (`kvdrift.diagnosis.visibility.expected`); by default
        the keys up to the query, the last query being at the last key. A mask is always read verbatim: whether it
        is right is the visibility probe's matter.
    attn
        The attention implementation that the call used; by default what the module's config names now.

    Returns
    -------
    float
        At most 1 if nothing but rounding is at work; infinite if the output is not finite where it should be.

    Notes
    -----
    Let s be the exact scores of a query, p their softmax (an attention sink is one more key whose value is 0), and
    z = Σ p v. Let u be the unit roundoff of the tensors' dtype, w that of float32, in which implementations
    accumulate, n the number of keys and d the size of a head.

    *Scores.* Each computed score is off by at most δ, the sum of

    - w (d + 8) ‖q‖‖k‖ scaling: d products accumulated (Σ|q||k| ≤ ‖q‖‖k‖), scaling applied to the score or, by its
      square root, to query and key;
    - where scores are kept in the tensors' dtype (eager attention): u |s| for the product and u |s| for the scaling,
      unless that is a power of two; with a soft-cap c, u |s| for the quotient and 3 u |c tanh(s/c)| for the
      hyperbolic tangent and the product; u |s + mask| where a bias is added; and with a sink, u |s − max s|, the
      sink's own score being moved by 2 u (|sink| + |max s| + ln n) where it enters through a log-sum-exp;
    - w (4 |s| + 4 |max s| + 48 + n): the exponential, its argument in base 2 or e, and the running sum.

    The computed weights are then p e^ε / Σ p e^ε with |ε| ≤ δ, and z moves by Σ p (e^ε − 1)(v − z) / Σ p e^ε, which
    by Cauchy and Schwarz is at most √(Σ p (e^δ − 1)²) √(Σ p v² − z²) Σ p e^δ (since 1 / Σ p e^−δ ≤ Σ p e^δ).

    *Weights and values.* Weights are rounded to the dtype and n products accumulated, which moves z by
    (u + w (n + 16)) √(Σ p e^2δ) √(Σ p v²) Σ p e^δ; the output is rounded, by u |z| and u times the above, twice more
    where a sink is applied to the output. Entries below the dtype's range are off by its smallest number.

    In half precision a bound of many roundings would hide a fault of a percent or two. So the native function also
    runs on the same numbers in float32, where it has to keep the bound of float32.

    Examples
    --------
    >>> import torch
    >>> from kvdrift.tracing.seam import AttentionCall
    >>> def attend(module, query, key, value, mask, scaling, **kwargs):
    ...     return ((query @ key.mT * scaling).softmax(-1) @ value).transpose(1, 2), None
    >>> q, k, v = torch.randn(3, 1, 2, 9, 16, generator=torch.Generator().manual_seed(0))
    >>> call = AttentionCall(torch.nn.Module(), q[:, :, -1:], k, v, None, {"scaling": 0.25}, attend)
    >>> excess(call) < 1
    True
    >>> call.native = lambda *args, scaling: attend(*args, scaling=1.02 * scaling)
    >>> excess(call) > 100
    True
    """
    with torch.no_grad():
        exact = _Exact.of(call, visible, attn)
        dtype = max((call.query.dtype, call.value.dtype), key=unit)
        outputs = [(dtype, call.execute()[0].transpose(1, 2))]
        if dtype != torch.float32:
            with suppress(RuntimeError):  # a kernel for half precision alone
                outputs.append((torch.float32, _in_float32(call).execute()[0].transpose(1, 2)))
        size = call.query.shape[0] * call.query.shape[1] * call.key.shape[2]
        step = max(BLOCK // max(size, 1), 1)
        blocks = [slice(start, start + step) for start in range(0, call.query.shape[2], step)]
        return max((exact.excess(outputs, rows) for rows in blocks), default=0.0)


def readable(call: AttentionCall) -> str | None:
    """Why the witness has nothing to say about a call, or None if it has.

    Examples
    --------
    >>> import torch
    >>> from kvdrift.tracing.seam import AttentionCall
    >>> one = torch.ones(1, 1, 1, 4)
    >>> readable(AttentionCall(torch.nn.Module(), one, one, one, None, {"block_indices": one}, print))
    'it takes block_indices, whose meaning is not known'
    """
    unknown = sorted(
        name for name, given in call.kwargs.items() if isinstance(given, Tensor) and name not in _IRRELEVANT
    )
    if unknown:
        return f"it takes {', '.join(unknown)}, whose meaning is not known"
    if call.mask is not None and (not isinstance(call.mask, Tensor) or call.mask.dim() != 4):
        return f"its mask is a {type(call.mask).__name__} that cannot be read"
    if call.kwargs.get("dropout"):
        return "it drops keys at random (dropout)"
    if call.value.dtype == torch.float64:
        return "it is in float64, and nothing here is more exact"
    if call.query.shape[0] != call.key.shape[0] or call.key.shape[2] != call.value.shape[2]:
        return "its queries, keys and values do not belong together one to one"
    if not all(tensor.isfinite().all() for tensor in (call.query, call.key, call.value)):
        return "its inputs are not finite"
    return None


def unit(dtype: torch.dtype) -> float:
    """Unit roundoff: the largest relative error of rounding to ``dtype``.

    Examples
    --------
    >>> unit(torch.float32) == 2**-24, unit(torch.bfloat16) == 2**-8
    (True, True)
    """
    return torch.finfo(dtype).eps / 2


def smallest(dtype: torch.dtype) -> float:
    """The smallest positive number of ``dtype``: what an underflow loses at most."""
    info = torch.finfo(dtype)
    return float(info.smallest_normal * info.eps)


def accumulation_unit(dtype: torch.dtype) -> float:
    """Unit roundoff of the sums inside matrix products: float32's, or less where PyTorch may round their factors."""
    if dtype != torch.float32:
        return 2.0**-24
    return {"highest": 2.0**-24, "high": 2.0**-10, "medium": 2.0**-7}[torch.get_float32_matmul_precision()]


def _in_float32(call: AttentionCall) -> AttentionCall:
    """The same call with the same numbers in float32, masks and sinks included."""
    mask = call.mask.float() if call.mask is not None and call.mask.is_floating_point() else call.mask
    kwargs = {
        name: given.float() if isinstance(given, Tensor) and given.is_floating_point() else given
        for name, given in call.kwargs.items()
    }
    query, key, value = (tensor.float() for tensor in (call.query, call.key, call.value))
    return replace(call, query=query, key=key, value=value, mask=mask, kwargs=kwargs)


@dataclass(frozen=True)
class _Exact:
    """A call in float64, and what its implementation is known to round."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    visible: Visible | None
    sinks: Tensor | None
    scaling: float
    softcap: float | None
    rounds_scores: bool

    @classmethod
    def of(cls, call: AttentionCall, visible: Visible | None, attn: str | None) -> _Exact:
        n_queries, n_keys = call.query.shape[2], call.key.shape[2]
        if visible is None:
            visible = torch.ones(n_queries, n_keys, dtype=torch.bool)
            visible = visible.tril(n_keys - n_queries) if is_causal(call) else visible
        groups = call.query.shape[1] // call.key.shape[1]
        scaling, softcap = call.kwargs.get("scaling"), call.kwargs.get("softcap")
        sinks: Any = call.kwargs.get("s_aux", getattr(call.module, "sinks", None))
        attn = attn or getattr(getattr(call.module, "config", None), "_attn_implementation", None) or "eager"
        return cls(
            query=call.query.double(),
            key=call.key.double().repeat_interleave(groups, 1),
            value=call.value.double().repeat_interleave(groups, 1),
            mask=call.mask,
            visible=visible.to(call.query.device) if call.mask is None else None,
            sinks=None if sinks is None else sinks.double().reshape(1, -1, 1, 1),
            scaling=call.query.shape[3] ** -0.5 if scaling is None else float(scaling),
            softcap=None if softcap is None else float(softcap),
            rounds_scores=not attn.startswith(_FLOAT32_SCORES),
        )

    def excess(self, outputs: Sequence[tuple[torch.dtype, Tensor]], rows: slice) -> float:
        """The largest |output − z| over its bound, at some of the queries."""
        n_keys = self.key.shape[2]
        scores, accumulated, rounded, visible = self._scores(rows)
        weights = scores.softmax(-1)
        z, size = weights[..., :n_keys] @ self.value, (weights[..., :n_keys] @ self.value.square()).sqrt()
        spread = (size.square() - z.square()).clamp(min=0).sqrt()
        judged = visible.any(-1, keepdim=True) & z.isfinite()
        roundings = 1 if self.sinks is None else 3
        largest = 0.0
        for dtype, output in outputs:
            u, w, tiny = unit(dtype), accumulation_unit(dtype), smallest(dtype)
            growth = (w * accumulated + (u * rounded + 4 * tiny if self.rounds_scores else 0)).expm1()
            mean = (weights * growth).sum(-1, keepdim=True)
            square = (weights * growth.square()).sum(-1, keepdim=True)
            moved = square.sqrt() * spread + (u + w * (n_keys + 16)) * (1 + 2 * mean + square).sqrt() * size
            bound = (1 + roundings * u) * (1 + mean) * moved + roundings * u * z.abs()
            bound = bound + tiny * (1 + n_keys * self.value.abs().amax(2, keepdim=True))
            ratios = (output[:, :, rows].double() - z).abs() / bound.nan_to_num(nan=math.inf)
            ratios = ratios.where(output[:, :, rows].isfinite(), math.inf)
            largest = max(largest, float(ratios.where(judged, 0.0).max()))
        return largest

    def _scores(self, rows: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Exact scores, what they are off by in units of float32 and of the dtype, and which keys are visible.

        The first three are ``[batch, head, query, key]``, with one more key for a sink.
        """
        query, n_keys = self.query[:, :, rows], self.key.shape[2]
        norms = query.norm(dim=-1, keepdim=True) * self.key.norm(dim=-1)[..., None, :]
        accumulated = (query.shape[3] + 8) * abs(self.scaling) * norms
        scores = query @ self.key.mT * self.scaling
        rounded = scores.abs() * (1 if math.frexp(self.scaling)[0] == 0.5 else 2)
        if self.softcap is not None:
            rounded = rounded + scores.abs()
            scores = self.softcap * torch.tanh(scores / self.softcap)
            rounded, accumulated = rounded + 3 * scores.abs(), accumulated + 16 * scores.abs()
        if self.mask is None:
            assert self.visible is not None
            visible = self.visible[rows].expand_as(scores)
        else:
            mask = self.mask[:, :, rows] if self.mask.shape[2] > 1 else self.mask
            visible = ~hidden(mask).expand_as(scores)
            if mask.is_floating_point():
                scores = scores + mask
                rounded = rounded + scores.abs().where(mask != 0, 0.0)
        scores = scores.masked_fill(~visible, -math.inf)
        if self.sinks is None:
            top = scores.amax(-1, keepdim=True)
        else:
            sinks = self.sinks.expand(scores.shape[0], -1, scores.shape[2], 1)
            scores = torch.cat([scores, sinks], -1)
            top = scores.amax(-1, keepdim=True)
            of_sinks = 2 * (sinks.abs() + top.abs() + math.log(n_keys + 1))
            rounded = torch.cat([rounded, of_sinks], -1) + (scores - top).abs()
            accumulated = torch.cat([accumulated, torch.zeros_like(sinks)], -1)
        accumulated = accumulated + 4 * (scores.abs() + top.abs()) + EXP_ULPS + n_keys
        unseen = scores.isinf()
        return scores, accumulated.masked_fill(unseen, 0.0), rounded.masked_fill(unseen, 0.0), visible


def _norm(weights: Tensor, factors: Tensor) -> Tensor:
    """√(Σ weights · factors²) over the keys, ``[…, 1]``."""
    return (weights * factors.square()).sum(-1, keepdim=True).sqrt()
