"""Distances between two tensors, computed in float64 from the stored values; ``kd.metrics`` for short.

- `site_metrics`: everything about one site's tensors, as `SITE_METRICS` names it.
- `relative_l2`: ``rel_l2`` alone, over any one dimension.
- `logit_metrics`: everything about next-token logits, as `LOGIT_METRICS` names it.
- `kl_divergence`: ``kl`` alone.
- `logit_l2`: ``logit_l2`` alone.

The reference is b, as in `kvdrift.compare`, and comes second, but for one: `kl_divergence` takes it first, in the order
in which KL is written. ``logit_metrics(a, b)["kl"]`` is ``kl_divergence(b, a)``: KL(b‖a).

Pure functions without any knowledge of models: tensors in, float64 tensors out, on the device they came on.
Everything before the reduced dimensions is batch. Bit equality is tested first, so two paths that agree pay
for one integer comparison only.

What is not a plain number has an outcome of its own, and none of them is a silent zero:

- *a and b equal by value*: `rel_l2`, `max_abs`, `cosine` are 0 (also when both are zero vectors, and with
  equal infinities at the same places).
- *b is zero and a is not*: `rel_l2` is inf, `cosine` is 1.
- *a is zero and b is not*: `rel_l2` and `cosine` are 1.
- *An infinity on one side, or of other sign*: `max_abs` is inf; `rel_l2` is inf if b is finite, else NaN;
  `cosine` is NaN.
- *Equal infinities, other entries differ*: `max_abs` is the largest finite difference; `rel_l2` and `cosine`
  are NaN.
- *NaN anywhere in a or b*: `rel_l2`, `max_abs`, `max_ulp`, `cosine` are NaN, even where both hold the same
  NaN; `identical` compares its bits.
- *+0 against -0*: differs in `identical` only (`max_ulp` is 0).
- *Nothing to compare (an empty axis)*: every metric is NaN.
"""

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from kvdrift.errors import InputError

SITE_METRICS = ("rel_l2", "max_abs", "max_ulp", "cosine", "identical")
"""Keys of `site_metrics`."""

LOGIT_METRICS = (
    "kl",
    "js",
    "flip",
    "tie_a",
    "tie_b",
    "margin_a",
    "margin_b",
    "topk_overlap",
    "logit_l2",
    "logit_max",
)
"""Keys of `logit_metrics`."""

_INTEGERS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
_NO_PROBABILITY = 1e-290  # below it p − q − q·log(p/q) is p to the last digit
_LARGEST_EXPONENT = 700.0  # exp() of it is finite, and above any log(p/q) with q > _NO_PROBABILITY


def site_metrics(
    a: Float[Tensor, "..."], b: Float[Tensor, "..."], *, dims: int = 1
) -> dict[str, Float64[Tensor, "*batch"]]:
    """Measure how far `a` is from `b` over the last `dims` dimensions.

    - `rel_l2`: ‖a − b‖₂ / ‖b‖₂.
    - `max_abs`: the largest |a − b|.
    - `max_ulp`: the largest number of representable values between two entries, on the sign-ordered integers
      of the tensors' own dtype (+0 and −0 are the same point, infinity follows the largest finite value).
      Exact, except that float64 distances above 2**53 are rounded to float64. Left out when dtypes differ.
    - `cosine`: 1 − cos(a, b), computed as half the squared distance of the unit vectors, so that it keeps its
      digits when the two are close.
    - `identical`: the share of entries equal in every bit (NaNs as bit patterns, +0 ≠ −0); when dtypes differ
      the share of entries equal by value (NaN never, +0 = −0).

    Zeros, NaN and infinity: see the list at the top of this module.

    Parameters
    ----------
    a, b
        `[*batch, *reduced]`, same shape; float16, bfloat16, float32 or float64, on one device.
    dims
        How many trailing dimensions are reduced: 1 for a residual, 2 for keys over position × feature.

    Returns
    -------
    dict of float64 tensors `[*batch]`.

    Raises
    ------
    InputError
        Shapes differ, a dtype is not a float of 16 to 64 bits, or `dims` does not fit the shape.

    Examples
    --------
    >>> m = site_metrics(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 5.0]))
    >>> float(m["max_abs"]), float(m["identical"])
    (1.0, 0.5)
    """
    _check(a, b)
    if not 1 <= dims <= a.ndim:
        raise InputError(f"dims={dims} given for tensors of {a.ndim} dimensions; use 1 to {a.ndim}.")
    a, b = a.flatten(-dims), b.flatten(-dims)
    batch, same_dtype = a.shape[:-1], a.dtype == b.dtype
    keys = [key for key in SITE_METRICS if same_dtype or key != "max_ulp"]
    if a.shape[-1] == 0:
        return {key: _full(a, batch, torch.nan) for key in keys}
    if _equal_without_nan(a, b):
        return {key: _full(a, batch, 1.0 if key == "identical" else 0.0) for key in keys}

    x, y = a.double(), b.double()
    delta = _difference(x, y)
    wide = torch.float64 in (a.dtype, b.dtype)
    max_abs = delta.abs().amax(-1)
    result = {
        "rel_l2": _relative_norm(delta, y, wide),
        "max_abs": max_abs,
        "cosine": torch.where(max_abs == 0, 0.0, _cosine_distance(x, y, wide)),
    }
    if same_dtype:
        bits_a, bits_b = _bits(a), _bits(b)
        steps = _ulp_distance(bits_a, bits_b).amax(-1).double()
        result["max_ulp"] = torch.where(max_abs.isnan(), torch.nan, steps)
        same = bits_a == bits_b
    else:
        same = x == y
    result["identical"] = same.sum(-1).double() / a.shape[-1]
    return {key: result[key] for key in keys}


def relative_l2(a: Float[Tensor, "..."], b: Float[Tensor, "..."], dim: int = -1) -> Float64[Tensor, "..."]:
    """Return ‖a − b‖₂ / ‖b‖₂ over one dimension, as `site_metrics` defines it.

    Parameters
    ----------
    a, b
        Same shape, for keys or values `[..., position, feature]`.
    dim
        The dimension reduced.

    Returns
    -------
    float64 tensor of the shape without `dim`, e.g. `[..., position]`.

    Raises
    ------
    InputError
        Shapes differ, a dtype is not a float of 16 to 64 bits, or there is no dimension `dim`.

    Examples
    --------
    >>> relative_l2(torch.tensor([[0.0, 2.0], [1.0, 1.0]]), torch.tensor([[0.0, 1.0], [1.0, 1.0]])).tolist()
    [1.0, 0.0]
    """
    _check(a, b)
    if not -a.ndim <= dim < a.ndim:
        raise InputError(f"dim={dim} given for tensors of {a.ndim} dimensions; use {-a.ndim} to {a.ndim - 1}.")
    a, b = a.movedim(dim, -1), b.movedim(dim, -1)
    if a.shape[-1] == 0:
        return _full(a, a.shape[:-1], torch.nan)
    if _equal_without_nan(a, b):
        return _full(a, a.shape[:-1], 0.0)
    x, y = a.double(), b.double()
    return _relative_norm(_difference(x, y), y, wide=torch.float64 in (a.dtype, b.dtype))


def logit_metrics(
    a: Float[Tensor, "*batch vocab"], b: Float[Tensor, "*batch vocab"], *, top_k: int = 5
) -> dict[str, Float64[Tensor, "*batch"]]:
    """Compare next-token logits of a path `a` with those of the reference `b`.

    - `kl`: KL(b‖a) = Σ q·log(q/p) in nats, with q = softmax(b), p = softmax(a) from float64 log-softmaxes. It
      is summed as Σ (p − q − q·log(p/q)), whose terms are never negative, so values near 1e-12 keep their
      digits.
    - `js`: the Jensen-Shannon divergence, ½KL(p‖m) + ½KL(q‖m) with m = (p + q)/2, in nats (at most log 2).
    - `flip`: 1 if the top tokens differ. A top token is `torch.argmax` of the stored values: among exact ties
      the lowest token id.
    - `tie_a`, `tie_b`: 1 if the two largest stored logits are equal.
    - `margin_a`, `margin_b`: the largest minus the second largest stored logit.
    - `topk_overlap`: share of common tokens among the `top_k` of each (of the vocabulary, if it is smaller).
      Which of several tokens tied at the last place are in is `torch.topk`'s choice.
    - `logit_l2`: ‖(a − b) − mean(a − b)‖₂, centred over the vocabulary: softmax ignores a common shift.
    - `logit_max`: the largest |a − b|, not centred.

    A token at −inf in both (a masked vocabulary) adds nothing to `kl`, `js` and `logit_max` and is left out
    of the centring. At −inf in one only, `logit_l2` and `logit_max` are inf, and `kl` is inf if it is `a`
    that excludes a token to which `b` gives some probability (above 1e-290). A row without a finite largest
    logit (NaN or +inf somewhere, or −inf everywhere) has no softmax: everything that depends on it is NaN,
    flips and ties too.

    Parameters
    ----------
    a, b
        `[*batch, vocab]`, same shape, at least two tokens; dtypes may differ.
    top_k
        Number of top tokens compared.

    Returns
    -------
    dict of float64 tensors `[*batch]`.

    Raises
    ------
    InputError
        Shapes differ, a dtype is not a float of 16 to 64 bits, fewer than two tokens, or `top_k` below 1.

    Examples
    --------
    >>> m = logit_metrics(torch.tensor([2.0, 1.0, 0.0]), torch.tensor([1.0, 2.0, 0.0]), top_k=2)
    >>> float(m["flip"]), float(m["margin_a"]), float(m["topk_overlap"])
    (1.0, 1.0, 1.0)
    """
    _check(a, b)
    if a.ndim == 0 or a.shape[-1] < 2:
        raise InputError(f"Logits of shape {tuple(a.shape)} given; a vocabulary of two or more is needed.")
    if top_k < 1:
        raise InputError(f"top_k={top_k} given; it counts tokens and must be at least 1.")
    top_k = min(top_k, a.shape[-1])
    x = a.double()
    values_a, tokens_a = x.topk(max(top_k, 2))
    valid_a = values_a[..., 0].isfinite()
    if _equal_without_nan(a, b):
        values_b, valid = values_a, valid_a
        zero = _full(a, a.shape[:-1], 0.0)
        result = {"kl": zero, "js": zero, "flip": zero, "logit_l2": zero, "logit_max": zero}
        result["topk_overlap"] = zero + 1
    else:
        y = b.double()
        values_b, tokens_b = y.topk(max(top_k, 2))
        valid = valid_a & values_b[..., 0].isfinite()
        common = tokens_a[..., :top_k, None] == tokens_b[..., None, :top_k]
        delta, masked = _logit_difference(x, y)
        result = _logit_distances(delta, masked) | _divergences(x, y, delta)
        result["flip"] = (x.argmax(-1) != y.argmax(-1)).double()
        result["topk_overlap"] = common.sum((-2, -1)).double() / top_k
    result = {key: torch.where(valid, value, torch.nan) for key, value in result.items()}
    for side, values in (("a", values_a), ("b", values_b)):
        finite, margin = values[..., 0].isfinite(), values[..., 0] - values[..., 1]
        result[f"margin_{side}"] = torch.where(finite, margin, torch.nan)
        result[f"tie_{side}"] = torch.where(finite, (margin == 0).double(), torch.nan)
    return {key: result[key] for key in LOGIT_METRICS}


def kl_divergence(b: Float[Tensor, "*batch vocab"], a: Float[Tensor, "*batch vocab"]) -> Float64[Tensor, "*batch"]:
    """Return KL(b‖a) in nats between the softmaxes of two logit tensors, the reference first.

    The same number as `logit_metrics(a, b)["kl"]`, without the rest.

    Parameters
    ----------
    b, a
        `[*batch, vocab]`, same shape; dtypes may differ.

    Returns
    -------
    float64 tensor `[*batch]`; NaN where a row has no softmax.

    Raises
    ------
    InputError
        Shapes differ, a dtype is not a float of 16 to 64 bits, or there is no vocabulary.

    Examples
    --------
    >>> float(kl_divergence(torch.tensor([0.0, 0.0]), torch.tensor([0.0, 0.0])))
    0.0
    """
    _check_logits(a, b)
    if _equal_without_nan(a, b):
        return torch.where(a.amax(-1).isfinite(), _full(a, a.shape[:-1], 0.0), torch.nan)
    x, y = a.double(), b.double()
    valid = x.amax(-1).isfinite() & y.amax(-1).isfinite()
    delta, _ = _logit_difference(x, y)
    return torch.where(valid, _divergences(x, y, delta, js=False)["kl"], torch.nan)


def logit_l2(a: Float[Tensor, "*batch vocab"], b: Float[Tensor, "*batch vocab"]) -> Float64[Tensor, "*batch"]:
    """Return ‖(a − b) − mean(a − b)‖₂, centred over the vocabulary.

    The same number as ``logit_metrics(a, b)["logit_l2"]``, without the rest.

    Parameters
    ----------
    a, b
        `[*batch, vocab]`, same shape; dtypes may differ.

    Returns
    -------
    float64 tensor `[*batch]`; NaN where a row has no softmax.

    Raises
    ------
    InputError
        Shapes differ, a dtype is not a float of 16 to 64 bits, or there is no vocabulary.

    Examples
    --------
    >>> float(logit_l2(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0])))
    0.0
    """
    _check_logits(a, b)
    x, y = a.double(), b.double()
    valid = x.amax(-1).isfinite() & y.amax(-1).isfinite()
    return torch.where(valid, _logit_distances(*_logit_difference(x, y))["logit_l2"], torch.nan)


def _check(a: Tensor, b: Tensor) -> None:
    """Refuse pairs that cannot be compared entry by entry."""
    if a.shape != b.shape:
        raise InputError(
            f"Tensors of shapes {tuple(a.shape)} and {tuple(b.shape)} given; they must have the same shape, "
            "so cut both to what they share first."
        )
    for tensor in (a, b):
        if tensor.dtype not in _INTEGERS:
            raise InputError(
                f"A tensor of dtype {tensor.dtype} given; float16, bfloat16, float32 or float64 is needed, "
                "so convert it first."
            )


def _check_logits(a: Tensor, b: Tensor) -> None:
    """Refuse pairs of logits that cannot be compared, or without a vocabulary."""
    _check(a, b)
    if a.ndim == 0 or a.shape[-1] == 0:
        raise InputError(f"Logits of shape {tuple(a.shape)} given; a vocabulary axis is needed.")


def _full(like: Tensor, shape: torch.Size, value: float) -> Float64[Tensor, "..."]:
    """Return a float64 tensor of one value on the device of `like`."""
    return torch.full(shape, value, dtype=torch.float64, device=like.device)


def _bits(x: Tensor) -> Tensor:
    """Return the stored bits as signed integers of the same width."""
    return x.view(_INTEGERS[x.dtype])


def _equal_without_nan(a: Tensor, b: Tensor) -> bool:
    """Tell whether both hold the same bits, and no NaN (which no distance may call zero)."""
    if a.dtype != b.dtype or not torch.equal(_bits(a), _bits(b)):
        return False
    return a.numel() == 0 or not bool(a.max().isnan())  # max() hands a NaN on


def _difference(x: Float64[Tensor, "..."], y: Float64[Tensor, "..."]) -> Float64[Tensor, "..."]:
    """Return x − y, where equal infinities differ by zero and NaN stays NaN."""
    return (x - y).masked_fill_(x == y, 0.0)


def _scaled(x: Float64[Tensor, "*batch n"], wide: bool) -> tuple[Float64[Tensor, "*batch n"], Float64[Tensor, "..."]]:
    """Return x divided by a scale, and the scale, so that squares neither overflow nor vanish.

    Only stored float64 values (`wide`) need it; the squares of all others are normal float64 numbers.
    """
    if not wide:
        return x, x.new_ones(())
    largest = x.abs().amax(-1, keepdim=True)
    scale = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
    return x / scale, scale


def _norm(x: Float64[Tensor, "*batch n"]) -> Float64[Tensor, "*batch 1"]:
    """Return the Euclidean norm over the last axis, which is kept."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def _relative_norm(
    delta: Float64[Tensor, "*batch n"], y: Float64[Tensor, "*batch n"], wide: bool
) -> Float64[Tensor, "*batch"]:
    """Return ‖delta‖ / ‖y‖ with the outcomes listed in the module's docstring."""
    (delta, scale_d), (y, scale_y) = _scaled(delta, wide), _scaled(y, wide)
    norm_d, norm_y = _norm(delta), _norm(y)
    ratio = torch.where(norm_y.isinf(), torch.nan, (norm_d / norm_y) * (scale_d / scale_y))
    return torch.where(norm_d == 0, 0.0, ratio).squeeze(-1)


def _cosine_distance(
    x: Float64[Tensor, "*batch n"], y: Float64[Tensor, "*batch n"], wide: bool
) -> Float64[Tensor, "*batch"]:
    """Return 1 − cos of vectors that differ, with the outcomes listed in the module's docstring."""
    (x, _), (y, _) = _scaled(x, wide), _scaled(y, wide)
    norm_x, norm_y = _norm(x), _norm(y)
    half_square = _norm((x / norm_x).sub_(y / norm_y)).square() / 2
    distance = torch.where((norm_x == 0) | (norm_y == 0), 1.0, half_square.clamp(max=2.0))
    return torch.where(norm_x.isfinite() & norm_y.isfinite(), distance, torch.nan).squeeze(-1)


def _ulp_distance(bits_a: Tensor, bits_b: Tensor) -> Tensor:
    """Return the number of steps between two floats given as their bits: integers, or float64 for 64 bits."""
    a, b = _sign_ordered(bits_a), _sign_ordered(bits_b)
    if bits_a.dtype != torch.int64:
        return (a - b).abs_()
    same_sign = (a < 0) == (b < 0)  # otherwise the difference can leave int64
    return torch.where(same_sign, (a - b).abs().double(), a.abs().double() + b.abs().double())


def _sign_ordered(bits: Tensor) -> Int[Tensor, "..."]:
    """Map sign-and-magnitude bits to wider integers in the order of the floats; both zeros become 0."""
    ordered = bits.to(torch.int32 if bits.dtype == torch.int16 else torch.int64)
    magnitude = ordered & torch.iinfo(bits.dtype).max
    return torch.where(ordered < 0, -magnitude, magnitude)


def _logit_difference(
    x: Float64[Tensor, "*batch vocab"], y: Float64[Tensor, "*batch vocab"]
) -> tuple[Float64[Tensor, "*batch vocab"], Bool[Tensor, "*batch vocab"]]:
    """Return x − y with 0 for tokens that both exclude, and the mask of those."""
    masked = (x == -torch.inf) & (y == -torch.inf)
    return (x - y).masked_fill_(masked, 0.0), masked


def _logit_distances(
    delta: Float64[Tensor, "*batch vocab"], masked: Bool[Tensor, "*batch vocab"]
) -> dict[str, Float64[Tensor, "*batch"]]:
    """Return the centred L2 and the largest absolute difference of logits."""
    largest = delta.abs().amax(-1)
    mean = delta.sum(-1, keepdim=True) / (~masked).sum(-1, keepdim=True)
    centred = _norm((delta - mean).masked_fill_(masked, 0.0)).squeeze(-1)
    return {"logit_l2": torch.where(largest.isinf(), torch.inf, centred), "logit_max": largest}


def _softmax(
    x: Float64[Tensor, "*batch vocab"],
) -> tuple[Float64[Tensor, "*batch vocab"], Float64[Tensor, "*batch 1"]]:
    """Return probabilities and their log-normaliser."""
    largest = x.amax(-1, keepdim=True)
    weights = (x - largest).exp_()
    total = weights.sum(-1, keepdim=True)
    return weights.div_(total), largest + total.log()


def _divergences(
    x: Float64[Tensor, "*batch vocab"],
    y: Float64[Tensor, "*batch vocab"],
    delta: Float64[Tensor, "*batch vocab"],
    *,
    js: bool = True,
) -> dict[str, Float64[Tensor, "*batch"]]:
    """Return KL(softmax y ‖ softmax x) and, if asked for, the Jensen-Shannon divergence.

    Both are sums of terms that vanish to first order in d = log(p/q), so a rounding error common to all d
    (from the log-normalisers) enters in second order only.
    """
    (p, log_p), (q, log_q) = _softmax(x), _softmax(y)
    d = delta - (log_p - log_q)
    growth = d.clamp(max=_LARGEST_EXPONENT).expm1_()  # p/q − 1
    terms = (growth - d).mul_(q)
    result = {"kl": torch.where(q > _NO_PROBABILITY, terms, p).clamp_(min=0.0).sum(-1)}
    if js:
        # (1 + u) log(1 + u) + (1 − u) log(1 − u) = 2 log(1 + |u|) − (1 − |u|)|d| with u = (p − q) / (p + q)
        u = growth.div_(growth + 2).abs_()
        bracket = d.abs_().clamp_(max=_LARGEST_EXPONENT).mul_(u - 1).add_(u.log1p_(), alpha=2)
        result["js"] = bracket.clamp_(min=0.0).mul_(p.add_(q)).sum(-1) / 4
    return result
