"""The local witness of operators: are native matrix products, sums, norms and functions as exact as they can be?

Fixed shape runs every row-wise operator on tiles of its own, so a kernel that is wrong at a native shape (one row,
say) does not show there. Here the native operators themselves are looked at while the model runs: at each shape
once, on the tensors that the model handed over, against float64 within a bound that follows from how many terms are
added and how often they are rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache, partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from kvdrift.controls.dispatch import OperatorMode, arrives_whole
from kvdrift.controls.groups import Groups
from kvdrift.controls.operators import GROUPED, Kind, Use, axes_of, by_kind, elementwise, name_of, row_wise
from kvdrift.diagnosis.attention_witness import EXP_ULPS, accumulation_unit, smallest, unit

COLUMNS = 1 << 22
"""Entries of a matrix in float64 at a time."""
ULPS = 4
"""What elementwise functions are allowed: SLEEF, which PyTorch's CPU kernels use, documents 1 ulp and for some 3.5."""
TINY = 1e-35
"""Below it float32 exponentials may be flushed to zero."""

_W = 2.0**-24
Checked = tuple[Tensor, Tensor, Tensor]
"""A result, the same in float64, and how far they may be apart."""
Rule = Callable[[OpOverload, tuple[Any, ...], dict[str, Any], Any], Iterator[Checked]]


@dataclass(frozen=True)
class Excess:
    """An operator whose result is further from the exact one than rounding explains.

    Attributes
    ----------
    op
        Its name, such as ``"mm"``.
    module
        The innermost module in which it ran; empty if the witness was not given the model.
    shapes
        Shapes and dtype of its tensors.
    ratio
        Its largest error over the bound; infinite if it is not finite where it should be.
    """

    op: str
    module: str
    shapes: str
    ratio: float

    @property
    def where(self) -> str:
        """Module and shapes."""
        return f"{self.module}, {self.shapes}" if self.module else self.shapes

    def __str__(self) -> str:
        place = f" in {self.module}" if self.module else ""
        return f"{self.op} of {self.shapes}{place} is off by {self.ratio:.3g} times what rounding explains."


class OperatorWitness(OperatorMode):
    """Checks the operators that fixed shape replaces while native forward passes run; changes none of their bits.

    Each operator is checked at its first call in every combination of shapes, strides and dtypes; those in float64, and
    those that take or give no floating-point numbers, not at all. Errors are held against, with w the unit roundoff of
    float32, u that of the result and n the number of terms,

    - matrix products: (n + 4) w ‖a‖‖b‖ and u of the result (of a sum with a bias: of both summands too);
    - sums: n w Σ|x| and u; variances alike with the squares; products: n u, norms: n w and u, relatively;
    - softmax: w (n + 48 + 4 |x − max|) and u, relatively; its logarithm so much absolutely;
    - fused norms: what the errors of mean and variance come to, each a sum as above, and u;
    - elementwise functions: `ULPS` ulp of float32, also of the terms that a formula adds up, and two roundings to
      half precision.

    Parameters
    ----------
    model
        Its modules give their names to what is found; optional.

    Attributes
    ----------
    worst
        The largest error over its bound of every operator that was checked, by name.
    unchecked
        Operators that fixed shape replaces and for which no bound is known here.

    Examples
    --------
    >>> import torch
    >>> import kvdrift as kd
    >>> from kvdrift.diagnosis.operator_witness import OperatorWitness
    >>> model = kd.models.tiny("llama")
    >>> with torch.no_grad(), OperatorWitness(model) as witness:
    ...     _ = model(torch.tensor([[1, 2, 3]]))
    >>> witness.excesses, sorted(witness.worst)[:3], max(witness.worst.values()) < 1
    ([], ['cos', 'mean', 'mm'], True)
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        self.worst: dict[str, float] = {}
        self.unchecked: set[str] = set()
        self._excesses: list[Excess] = []
        self._seen: set[Any] = set()
        self._names = {module: name for name, module in model.named_modules()} if model is not None else {}
        self._inside: list[str] = []
        self._hooks = ExitStack()

    @property
    def excesses(self) -> list[Excess]:
        """What exceeds its bound, worst first."""
        return sorted(self._excesses, key=lambda excess: -excess.ratio)

    def __enter__(self) -> Self:
        for module in self._names:
            self._hooks.callback(module.register_forward_pre_hook(self._enters).remove)
            self._hooks.callback(module.register_forward_hook(self._leaves, always_call=True).remove)
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._hooks.close()
        self._inside.clear()

    def _enters(self, module: nn.Module, _: Any) -> None:
        self._inside.append(self._names[module])

    def _leaves(self, *_: Any) -> None:
        self._inside.pop()

    def treat(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call and check what it returns, unless one like it was checked."""
        if arrives_whole(op) or not _has_floats(args):
            return NotImplemented
        rule = _rule(op)
        if rule is None:
            if row_wise(op):
                self.unchecked.add(name_of(op))
            return NotImplemented
        signature = (op, *map(_signature, args), *map(_signature, kwargs.items()))
        if signature in self._seen:
            return NotImplemented
        self._seen.add(signature)
        mutable = op._schema.is_mutable
        given = tuple(arg.clone() if isinstance(arg, Tensor) else arg for arg in args) if mutable else args
        result = op(*args, **kwargs)
        if not _has_floats(result if isinstance(result, (tuple, list)) else (result,)):
            return result  # counts, indices, truth values
        with _disable_current_modes(), torch.no_grad():
            ratio = max((_ratio(*checked) for checked in rule(op, given, kwargs, result)), default=None)
        if ratio is not None:
            self._record(op, given, ratio)
        return result

    def _record(self, op: OpOverload, args: tuple[Any, ...], ratio: float) -> None:
        name = name_of(op)
        self.worst[name] = max(self.worst.get(name, 0.0), ratio)
        if ratio > 1:
            tensors = [arg for arg in args if isinstance(arg, Tensor)]
            shapes = " and ".join(str(list(tensor.shape)) for tensor in tensors)
            dtype = str(tensors[-1].dtype).removeprefix("torch.")
            module = self._inside[-1] if self._inside else ""
            self._excesses.append(Excess(name, module, f"{shapes} in {dtype}", ratio))


def _ratio(result: Tensor, exact: Tensor, bound: Tensor) -> float:
    """The largest error over its bound, where the exact result is a number that the dtype holds."""
    if not result.numel():
        return 0.0
    error = (result.double() - exact).abs()
    held = exact.abs() <= 0.99 * torch.finfo(result.dtype).max  # False for NaN
    bound = bound * (1 + unit(result.dtype))  # what rounding makes of the other errors
    ratios = (error / bound).where(error != 0, 0.0).where(result.isfinite(), math.inf)
    return float(ratios.where(held & ~bound.isnan(), 0.0).max())


# --- one rule for every class of operators: what is exact, and how far off a result may be


def _product(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Iterator[Checked]:
    """``mm``, ``bmm``, ``mv``: a few columns at a time."""
    a, b = args[:2]
    yield from _columns(a, b if b.dim() > 1 else b[:, None], None, 1.0, 1.0, result if b.dim() > 1 else result[:, None])


def _biased_product(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Iterator[Checked]:
    """``addmm``, ``baddbmm``, ``addmv``: ``beta * bias + alpha * a @ b``."""
    bias, a, b = args[:3]
    beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
    if b.dim() == 1:
        b, bias, result = b[:, None], bias[..., None], result[:, None]
    yield from _columns(a, b, bias.expand_as(result), float(alpha), float(beta), result)


def _grouped_product(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> Iterator[Checked]:
    """Products of groups of rows; see `Groups`."""
    for start, end, factor in Groups.of(op, args, kwargs) or ():
        yield from _columns(args[0][start:end], factor, None, 1.0, 1.0, result[start:end])


def _columns(a: Tensor, b: Tensor, bias: Tensor | None, alpha: float, beta: float, result: Tensor) -> Iterator[Checked]:
    a, n = a.double(), a.shape[-1]
    size = max(COLUMNS // max(b.shape[:-1].numel(), 1), 1)
    u, w = unit(result.dtype), accumulation_unit(b.dtype)
    for start in range(0, b.shape[-1], size):
        here = (..., slice(start, start + size))
        part = b[here].double()
        product = alpha * (a @ part)
        magnitude = abs(alpha) * a.norm(dim=-1, keepdim=True) * part.norm(dim=-2, keepdim=True)  # at least Σ|a||b|
        bound = (n + 4) * w * magnitude + n * smallest(result.dtype)
        if bias is None:
            exact = product
        else:
            added = beta * bias[here].double()
            exact = product + added
            bound = bound + (u + 4 * _W) * (product.abs() + added.abs())
        yield result[here], exact, bound + u * exact.abs()


def _sum(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Iterator[Checked]:
    x, n = args[0].double(), _terms(args[0], axes_of(op, args))
    given, named = _in_float64(args[1:]), _in_float64(kwargs)
    exact, magnitude = op(x, *given, **named), op(x.abs(), *given, **named)
    u = unit(result.dtype)
    w = u if op._schema.name == "aten::cumsum" else _W  # its running value is the result itself
    yield result, exact, n * w * magnitude + u * exact.abs() + n * TINY


def _power(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Iterator[Checked]:
    """``prod`` and ``cumprod``: every factor is one more rounding, and may carry an underflow on."""
    x, n = args[0].double(), _terms(args[0], axes_of(op, args))
    given, named = _in_float64(args[1:]), _in_float64(kwargs)
    exact, carried = op(x, *given, **named), op(x.abs().clamp(min=1), *given, **named)
    yield result, exact, (n + ULPS) * (unit(result.dtype) * exact.abs() + smallest(result.dtype) * carried) + TINY


def _length(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Iterator[Checked]:
    """Vector norms, whose squares may fall below float32's range."""
    n = _terms(args[0], axes_of(op, args))
    exact = op(args[0].double(), *_in_float64(args[1:]), **_in_float64(kwargs))
    yield result, exact, ((n + 8) * _W + unit(result.dtype)) * exact.abs() + n * math.sqrt(TINY)


def _variance(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Iterator[Checked]:
    """``var``, ``std`` and their pairs with the mean."""
    if len(args) < 2 or args[1] is None:
        return
    n = _terms(args[0], axes_of(op, args))
    results = (result,) if isinstance(result, Tensor) else result
    exact = op(args[0].double(), *args[1:], **kwargs)
    exacts = (exact,) if isinstance(exact, Tensor) else exact
    keepdim = bool(kwargs.get("keepdim", False))
    correction = kwargs.get("correction")
    freedom = n - (1 if correction is None else float(correction))
    u = unit(results[0].dtype)
    off = (n + 8) * _W * args[0].double().square().sum(args[1], keepdim) / freedom
    if "std" in op._schema.name:
        off = torch.minimum(off / exacts[0], off.sqrt())
    yield results[0], exacts[0], off + u * exacts[0].abs() + TINY
    for mean, value in zip(results[1:], exacts[1:], strict=True):
        size = args[0].double().abs().mean(args[1], keepdim)
        yield mean, value, n * _W * size + u * value.abs() + TINY


def _softmax(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Iterator[Checked]:
    x, dim = args[0].double(), args[1]
    n, u = x.shape[dim] if x.dim() else 1, unit(result.dtype)
    below = x.amax(dim, keepdim=True) - x
    if "log" in op._schema.name:
        exact = x.log_softmax(dim)
        yield result, exact, _W * (n + EXP_ULPS + 4 * x.abs() + 4 * below) + 2 * u * (exact.abs() + below)
    else:
        exact = x.softmax(dim).nan_to_num(nan=0.0) if "safe" in op._schema.name else x.softmax(dim)
        off = _W * (n + EXP_ULPS + 4 * below.clamp(max=200)) + u
        yield result, exact, off * exact + smallest(result.dtype) + TINY


def _log_sum(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Iterator[Checked]:
    x, n = args[0].double(), _terms(args[0], axes_of(op, args))
    exact = op(x, *args[1:], **kwargs)
    largest = x.abs().where(x.isfinite(), 0.0).max()
    yield result, exact, _W * (n + EXP_ULPS + 4 * largest) + (n + 1) * unit(result.dtype) * exact.abs()


def _layer_norm(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Iterator[Checked]:
    """``native_layer_norm(x, shape, weight, bias, eps) -> (y, mean, 1 / deviation)``."""
    given, shape, weight, bias, eps = args
    x, axes, n = given.double(), tuple(range(-len(shape), 0)), math.prod(shape)
    mean = x.mean(axes, keepdim=True)
    variance = x.var(axes, keepdim=True, correction=0)
    scale = (variance + eps).rsqrt()
    normed = (x - mean) * scale
    gain = torch.ones_like(normed[0]) if weight is None else weight.double()
    shift = torch.zeros_like(gain) if bias is None else bias.double()
    off = n * _W * x.abs().mean(axes, keepdim=True) + ULPS * _W * (x.abs() + mean.abs())
    stretch = _stretch(n, x, variance + eps, axes)
    y = result[0]
    bound = gain.abs() * (scale * off + normed.abs() * stretch) * (1 + stretch) + ULPS * _W * shift.abs()
    exact = normed * gain + shift
    yield y, exact, bound + unit(y.dtype) * exact.abs() + TINY


def _rms_norm(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Iterator[Checked]:
    """``_fused_rms_norm(x, shape, weight, eps) -> (y, 1 / size)``."""
    given, shape, weight, eps = args
    x, axes, n = given.double(), tuple(range(-len(shape), 0)), math.prod(shape)
    square = x.square().mean(axes, keepdim=True) + (torch.finfo(given.dtype).eps if eps is None else eps)
    exact = x * square.rsqrt() * (1.0 if weight is None else weight.double())
    y = result[0]
    yield y, exact, (_stretch(n, x, square, axes) + 2 * unit(y.dtype)) * exact.abs() + TINY


def _stretch(n: int, x: Tensor, variance: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Relative error of one over the root of a variance that was summed up from squares; infinite if it cancels."""
    relative = (n + 8) * _W * x.square().mean(axes, keepdim=True) / variance
    return (relative / 2 / (1 - relative)).where(relative < 0.5, math.inf) + 8 * _W


def _elementwise(
    op: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Tensor,
    terms: Callable[..., Any] | None = None,
    in_float32: bool = True,
) -> Iterator[Checked]:
    """A function of each entry; ``terms`` is the size of what its formula adds up or is sensitive to.

    Kernels compute functions of half precision in float32, but round scalars and terms of sums to it.
    """
    given = _in_float64(args)
    size = 0.0 if terms is None else terms(*given, **kwargs)
    exact = op(*given, **kwargs)  # in place, if it is one, of what is in float64
    bound = 2 * ULPS * _W * (exact.abs() + size) + smallest(result.dtype) + TINY
    if result.dtype.itemsize < torch.float32.itemsize:
        bound = bound + 2 * unit(result.dtype) * (exact.abs() + (0.0 if in_float32 else size))
    yield result, exact, bound


def _scaled_addition(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> Iterator[Checked]:
    """``a ± alpha * b``; exact up to one rounding if alpha is 1, so that fixed shape leaves it alone."""
    if kwargs.get("alpha", 1) != 1:
        yield from _elementwise(op, args, kwargs, result, _of_scaled, in_float32=False)


def _of_scaled(a: Any, b: Any, alpha: float) -> Any:
    return _size(a) + abs(alpha) * _size(b)


def _size(value: Any) -> Any:
    return value.abs() if isinstance(value, Tensor) else abs(value)


def _of_argument(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x.abs() + 1


def _of_one(*_: Any, **__: Any) -> float:
    return 1.0


def _of_exponent(base: Any, exponent: Any) -> Any:
    """``base ** exponent`` multiplies relative errors by the size of its logarithm."""
    base = base if isinstance(base, Tensor) else torch.tensor(float(base), dtype=torch.float64)
    logarithm = (exponent * base.abs().log()).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return base.pow(exponent).abs().nan_to_num(nan=0.0, posinf=0.0) * logarithm.abs()


def _of_terms(a: Tensor, b: Any, c: Any, value: float = 1) -> Tensor:
    return a.abs() + abs(value) * _size(b) * _size(c)


def _of_quotient(a: Tensor, b: Any, c: Any, value: float = 1) -> Tensor:
    return a.abs() + abs(value) * _size(b) / _size(c)


def _of_ends(a: Tensor, b: Tensor, weight: Any) -> Tensor:
    return a.abs() + _size(weight) * (a.abs() + b.abs())


# --- which operator follows which rule

_FUNCTIONS: dict[str, Rule] = {
    **dict.fromkeys(("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "rsqrt", "erf", "erfc"), _elementwise),
    **dict.fromkeys(("tanh", "sigmoid", "silu", "softplus", "sinh", "cosh", "atan"), _elementwise),
    **dict.fromkeys(("sin", "cos"), partial(_elementwise, terms=_of_one)),
    **dict.fromkeys(("gelu", "hardswish", "hardsigmoid", "mish", "elu"), partial(_elementwise, terms=_of_argument)),
    "pow": partial(_elementwise, terms=_of_exponent, in_float32=False),
    "addcmul": partial(_elementwise, terms=_of_terms, in_float32=False),
    "addcdiv": partial(_elementwise, terms=_of_quotient, in_float32=False),
    "lerp": partial(_elementwise, terms=_of_ends, in_float32=False),
}


_RULES: dict[Any, Rule] = by_kind(
    Use.WITNESS,
    {
        **dict.fromkeys(("mm", "bmm", "mv"), _product),
        **dict.fromkeys(("addmm", "baddbmm", "addmv"), _biased_product),
        **dict.fromkeys(GROUPED, _grouped_product),
        **dict.fromkeys(("sum.dim_IntList", "mean.dim", "cumsum"), _sum),
        **dict.fromkeys(("prod.dim_int", "cumprod"), _power),
        **dict.fromkeys(("linalg_vector_norm", "norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype"), _length),
        **dict.fromkeys(("var.correction", "std.correction", "var_mean.correction", "std_mean.correction"), _variance),
        **dict.fromkeys(("logsumexp", "logcumsumexp"), _log_sum),
        "native_layer_norm": _layer_norm,
        "_fused_rms_norm": _rms_norm,
        Kind.SOFTMAX: _softmax,
        Kind.SCALED: _scaled_addition,
    },
)


@lru_cache(maxsize=4096)
def _rule(op: Any) -> Rule | None:
    known = _RULES.get(op)
    if known is not None or not elementwise(op):
        return known
    return _FUNCTIONS.get(name_of(op).removesuffix("_"))


def _has_floats(args: Sequence[Any]) -> bool:
    """Whether there is a tensor of floating-point numbers, none of them in float64."""
    dtypes = {arg.dtype for arg in args if isinstance(arg, Tensor) and arg.is_floating_point()}
    return bool(dtypes) and torch.float64 not in dtypes


def _in_float64(given: Any) -> Any:
    if isinstance(given, Tensor):
        return given.double() if given.is_floating_point() else given
    if isinstance(given, torch.dtype):
        return torch.float64 if given.is_floating_point else given
    if isinstance(given, dict):
        return {name: _in_float64(value) for name, value in given.items()}
    return type(given)(map(_in_float64, given)) if isinstance(given, (tuple, list)) else given


def _terms(x: Tensor, axes: Any) -> int:
    """How many entries are reduced along ``axes``, all if there are none."""
    if axes is None or not x.dim():
        return x.numel()
    return math.prod(x.shape[axis] for axis in (axes if isinstance(axes, Sequence) else [axes]))


def _signature(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return tuple(argument.shape), argument.stride(), argument.dtype, argument.device
    if isinstance(argument, (tuple, list)):
        return tuple(map(_signature, argument))
    return repr(argument)
