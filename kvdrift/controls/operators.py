"""Which operators are row-wise, add terms or multiply matrices, and who treats them: one table for all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Any, TypeVar

import torch
import transformers.integrations.moe  # noqa: F401 - registers the operator that stands in for grouped products
from torch._ops import OpOverload

T = TypeVar("T")


class Kind(Enum):
    """What an operator does with the terms along an axis."""

    PRODUCT = "matrix product"
    REDUCTION = "reduction"
    RUNNING = "reduction that keeps what it has so far"
    SOFTMAX = "softmax"
    NORM = "fused norm"
    ATTENTION = "fused attention"
    SCALED = "addition of a multiple"


class Use(Enum):
    """Who treats operators by their kind."""

    RE_ROLL = "adds terms in another order"
    WIDE = "adds terms in a wider dtype; its products alone are what `MatmulFloat32` widens"
    TILES = "runs rows on tiles of one shape"
    WITNESS = "checks what tiles would replace"


_ROW_WISE = (Kind.PRODUCT, Kind.REDUCTION, Kind.RUNNING, Kind.SOFTMAX, Kind.NORM, Kind.SCALED)
KINDS: Mapping[Use, tuple[Kind, ...]] = {
    Use.RE_ROLL: (Kind.PRODUCT, Kind.REDUCTION, Kind.SOFTMAX, Kind.NORM, Kind.ATTENTION),
    Use.WIDE: (Kind.PRODUCT, Kind.REDUCTION, Kind.RUNNING, Kind.SOFTMAX, Kind.NORM),
    Use.TILES: _ROW_WISE,
    Use.WITNESS: _ROW_WISE,
}
"""Kinds that each treats.

What a running reduction has so far depends on the order of its terms: a re-roll would change the function. Two terms
(`Kind.SCALED`) have no order and are no long sum. Attention is widened, tiled and checked as a whole, at the attention
seam. Tiles and the witness also treat what is `elementwise`.
"""


@dataclass(frozen=True)
class Row:
    """Operators that are treated alike.

    Attributes
    ----------
    names
        ``"mm"``, with an overload ``"mean.dim"``, or with another library than PyTorch's own ``"library::name"``.
    kind
        What they do.
    place
        Which argument is the first factor of a product, or names the axes of a reduction; None where all is reduced.
    but
        Who leaves them alone although it treats their kind, and why.
    """

    names: tuple[str, ...]
    kind: Kind
    place: int | None = None
    but: Mapping[Use, str] = field(default_factory=dict)


GROUPED = ("_grouped_mm", "transformers::grouped_mm_fallback")
"""Products of groups of rows; see `kvdrift.controls.groups`."""
_NO_ROWS = dict.fromkeys((Use.TILES, Use.WITNESS), "there are no rows: everything is added up")
_OVER_BATCH = dict.fromkeys((Use.TILES, Use.WITNESS), "its rows are added up over the batch")
_MULTIPLIES = "it multiplies, and adds nothing up"
TABLE = (
    Row(("mm", "bmm", "mv", *GROUPED), Kind.PRODUCT, 0),
    Row(("dot", "vdot"), Kind.PRODUCT, 0, _NO_ROWS),
    Row(("addmm", "addmv", "baddbmm"), Kind.PRODUCT, 1),
    Row(("addbmm",), Kind.PRODUCT, 1, _OVER_BATCH),
    Row(("_addmm_activation",), Kind.PRODUCT, 1, {Use.WITNESS: "no bound is known behind its activation"}),
    Row(("sum.default", "mean.default", "norm.Scalar"), Kind.REDUCTION, None, _NO_ROWS),
    Row(("sum.dim_IntList", "mean.dim", "logsumexp"), Kind.REDUCTION, 1),
    Row(("var.correction", "var_mean.correction", "std.correction", "std_mean.correction"), Kind.REDUCTION, 1),
    Row(("linalg_vector_norm", "norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype"), Kind.REDUCTION, 2),
    Row(("prod.dim_int",), Kind.REDUCTION, 1, dict.fromkeys((Use.RE_ROLL, Use.WIDE), _MULTIPLIES)),
    Row(("cumsum", "logcumsumexp"), Kind.RUNNING, 1),
    Row(("cumprod",), Kind.RUNNING, 1, {Use.WIDE: _MULTIPLIES}),
    Row(("_softmax", "_safe_softmax", "_log_softmax"), Kind.SOFTMAX, 1),
    Row(("native_layer_norm", "_fused_rms_norm"), Kind.NORM),
    Row(
        (
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_fused_attention_overrideable",
            "_scaled_dot_product_attention_math_for_mps",
        ),
        Kind.ATTENTION,
    ),
    Row(("add.Tensor", "add_.Tensor", "sub.Tensor", "sub_.Tensor"), Kind.SCALED),
)
EXACT = frozenset(
    (
        *("abs", "neg", "sgn", "sign", "copysign", "square", "sqrt", "reciprocal"),
        *("relu", "hardtanh", "clamp", "clamp_max", "clamp_min", "maximum", "minimum"),
        *("add", "sub", "mul", "div", "floor", "ceil", "round", "trunc", "nan_to_num"),
        *("eq", "ne", "ge", "gt", "le", "lt", "isfinite", "isinf", "isnan"),
        *("where", "masked_fill", "tril", "triu", "clone", "copy"),
        *("logical_and", "logical_not", "logical_or", "logical_xor"),
        *("bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor"),
    )
)
"""Elementwise operations that round at most once: the same bits wherever an entry stands."""


def treated(use: Use, *kinds: Kind) -> Iterator[tuple[str, Row]]:
    """The operators that ``use`` treats, of some kinds or of all that it treats, by name."""
    for row in TABLE:
        if row.kind in (kinds or KINDS[use]) and use not in row.but:
            yield from ((name, row) for name in row.names)


def by_kind(use: Use, choices: Mapping[Kind | str, T]) -> dict[Any, T]:
    """What each operator that ``use`` treats gets: the choice under its name, or else under its kind.

    Raises
    ------
    LookupError
        If one has no choice, or a choice no operator.
    """
    chosen = {name: choices[name if name in choices else row.kind] for name, row in treated(use)}
    idle = {key for key in choices if key not in chosen and key not in KINDS[use]}
    if idle:
        raise LookupError(f"{use.name} does not treat {idle}.")
    return by_operator(chosen)


def by_operator(named: Mapping[str, T]) -> dict[Any, T]:
    """Key a table by the operators that its names stand for, leaving out those that this PyTorch does not have.

    Examples
    --------
    >>> by_operator({"mm": 1, "mean.dim": 2, "no_such_operator": 3})[torch.ops.aten.mean.dim]
    2
    """
    found: dict[Any, T] = {}
    for name, value in named.items():
        library, _, plain = name.rpartition("::")
        packet, _, overload = plain.partition(".")
        operators = getattr(torch.ops, library or "aten")
        if hasattr(operators, packet):
            found[getattr(getattr(operators, packet), overload or "default")] = value
    return found


def arguments_of(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names in the operator's schema; those left at their defaults are not there.

    Examples
    --------
    >>> sorted(arguments_of(torch.ops.aten.mean.dim, (torch.ones(2), [0]), {"keepdim": True}))
    ['dim', 'keepdim', 'self']
    """
    names = [argument.name for argument in op._schema.arguments]
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def name_of(op: OpOverload) -> str:
    """The name of an operator without library and overload.

    Examples
    --------
    >>> name_of(torch.ops.aten.mean.dim)
    'mean'
    """
    return op._schema.name.partition("::")[2]


def axes_of(op: OpOverload, args: tuple[Any, ...]) -> Any:
    """The axes that a call reduces, as it names them; None for all.

    Examples
    --------
    >>> axes_of(torch.ops.aten.mean.dim, (torch.ones(2), [0])), axes_of(torch.ops.aten.sum.default, (torch.ones(2),))
    ([0], None)
    """
    place = PLACES[op]
    axes = args[place] if place is not None and len(args) > place else None
    return None if axes == [] else axes


@lru_cache(maxsize=4096)
def elementwise(op: Any) -> bool:
    """Whether an operator is a function of each entry by itself that may round more than once."""
    if not isinstance(op, OpOverload) or torch.Tag.pointwise not in op.tags or "out" in op._overloadname:
        return False
    single = [str(value.type) for value in op._schema.returns] == ["Tensor"]
    return single and name_of(op).removesuffix("_") not in EXACT


def row_wise(op: Any) -> bool:
    """Whether fixed shape runs an operator on tiles."""
    return op in _TILED or elementwise(op)


PLACES: dict[Any, int | None] = by_operator({name: row.place for row in TABLE for name in row.names})
"""`Row.place` of each operator."""
_TILED = frozenset(by_operator(dict.fromkeys(name for name, _ in treated(Use.TILES))))
