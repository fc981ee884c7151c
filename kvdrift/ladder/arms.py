"""The arms of a ladder: one kind of arithmetic each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvdrift.controls.attention_backend import BACKENDS, SdpaBackend
from kvdrift.controls.attention_float32 import AttentionFloat32
from kvdrift.controls.control import Control
from kvdrift.controls.fixed_shape import FixedShape
from kvdrift.controls.head_float32 import HeadFloat32
from kvdrift.controls.layer_cast import LayerCast
from kvdrift.controls.matmul_float32 import MatmulFloat32
from kvdrift.controls.reroll import ReRoll
from kvdrift.controls.true_float32 import TrueFloat32
from kvdrift.controls.true_float64 import TrueFloat64
from kvdrift.controls.wide_sums import WideSums
from kvdrift.errors import InputError

UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""The largest relative error of rounding one number, by dtype."""
BASE, HALF = "base", "half"
FLOOR = "rounding-floor"

Controls = Callable[[int, int], tuple[Control, ...]]
"""From the ladder's seed and its longest sequence to controls."""


@dataclass(frozen=True)
class Arithmetic:
    """One kind of arithmetic in which cache-ON is compared with cache-OFF.

    Attributes
    ----------
    name
        What ``arms=`` takes.
    what
        What is done, in words.
    dtype
        The dtype of the weights: its name, ``"base"`` (the model's own) or ``"half"`` (the model's own if it has 16
        bits, else bfloat16).
    stored
        The dtype in which numbers are kept between two operations, if not that of the weights.
    attn
        Attention implementation, or None for the model's own.
    controls
        Makes the controls of both paths.
    against_itself
        Compare re-rolled cache-ON with plain cache-ON instead: no cache-OFF in it.
    """

    name: str
    what: str
    dtype: str = BASE
    stored: str | None = None
    attn: str | None = None
    controls: Controls = lambda seed, length: ()
    against_itself: bool = False


def _always(*controls: Control) -> Controls:
    return lambda seed, length: controls


ARMS: dict[str, Arithmetic] = {
    arm.name: arm
    for arm in (
        Arithmetic("float64", "float64, hard-coded float32 casts promoted", "float64", controls=_always(TrueFloat64())),
        Arithmetic("float32", "true float32: no TensorFloat-32", "float32", controls=_always(TrueFloat32())),
        Arithmetic("bfloat16", "weights and arithmetic in bfloat16", "bfloat16"),
        Arithmetic("float16", "weights and arithmetic in float16", "float16"),
        Arithmetic("layercast", "16-bit weights, float32 arithmetic", HALF, "float32", controls=_always(LayerCast())),
        Arithmetic(
            "attention-float32", "16 bits, attention alone in float32", HALF, controls=_always(AttentionFloat32())
        ),
        Arithmetic(
            "matmul-float32", "16 bits, matrix products alone in float32", HALF, controls=_always(MatmulFloat32())
        ),
        Arithmetic("head-float32", "16 bits, LM head alone in float32", HALF, controls=_always(HeadFloat32())),
        Arithmetic("eager", "eager attention", attn="eager"),
        *(
            Arithmetic(
                f"sdpa-{name}", f"sdpa attention, {name} kernel", attn="sdpa", controls=_always(SdpaBackend(name))
            )
            for name in BACKENDS
        ),
        Arithmetic("re-roll", "both paths' sums in another order, alike", controls=lambda seed, _: (ReRoll(seed),)),
        Arithmetic(
            FLOOR,
            "cache-ON against itself with its sums in another order: no cache-OFF in it",
            controls=lambda seed, _: (ReRoll(seed),),
            against_itself=True,
        ),
        Arithmetic("wide-sums", "every sum in float64, stored as before", controls=_always(WideSums())),
        Arithmetic(
            "fixed-shape", "every row computed at one fixed shape", controls=lambda _, length: (FixedShape(length),)
        ),
    )
}
"""Every arm, in the order of a ladder."""


def chosen(names: Iterable[str] | None) -> list[Arithmetic]:
    """The arms by name, in the order of the ladder; all for None.

    Raises
    ------
    InputError
        If a name is none, or there is no name.

    Examples
    --------
    >>> [arm.name for arm in chosen(["float16", "float32"])]
    ['float32', 'float16']
    """
    if names is None:
        return list(ARMS.values())
    wanted = [names] if isinstance(names, str) else list(names)
    unknown = [name for name in wanted if name not in ARMS]
    if unknown or not wanted:
        raise InputError(f"arms={wanted}: choose from {', '.join(ARMS)}.")
    return [arm for name, arm in ARMS.items() if name in wanted]
