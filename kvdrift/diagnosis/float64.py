"""The float64 witness: both paths in a copy with float64 arithmetic, where rounding can no longer hide anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor
from transformers import Cache

from kvdrift.bits import same_bits
from kvdrift.controls.float64_copy import float64_copy
from kvdrift.controls.true_float64 import TrueFloat64
from kvdrift.diagnosis.cases import Case
from kvdrift.diagnosis.locate import Where, first_difference, place, within
from kvdrift.diagnosis.lockstep import Moment, lockstep
from kvdrift.paths.cache_off import CacheOff
from kvdrift.paths.cache_on import CacheOn
from kvdrift.paths.path import Path

if TYPE_CHECKING:
    from kvdrift.models.model import Model

TOLERANCE = 1e-9
"""Relative to the largest entry: equivalent paths agree to 1e-12 or better, and 1e-9 is far below any fault."""


@dataclass(frozen=True)
class Float64:
    """What the float64 copy says about one case.

    Attributes
    ----------
    case
        The case.
    error
        Largest difference of the logits, relative to the largest logit.
    moment, where
        The first step and place that differ beyond `TOLERANCE`; None if none does.
    wrong
        Which path left the function that both ought to compute, by a third computation (the whole sequence in one
        pass, with a cache that nothing is read from); None if that cannot be told.
    """

    case: Case
    error: float
    moment: Moment | None
    where: Where | None
    wrong: Literal["a", "b"] | None

    @property
    def agrees(self) -> bool:
        """Whether the paths compute the same function."""
        return self.moment is None


def float64_witness(copy: Model, case: Case, b: Path) -> Float64:
    """Run a case in float64.

    Parameters
    ----------
    copy
        What `float64_copy` made.
    case, b
        The case with its path a, and the reference, from `in_float64`.
    """
    controls, equal = (TrueFloat64(),), within(TOLERANCE)
    error, first = 0.0, None
    for moment, x, y in lockstep(copy, case, b, controls):
        scale = float(y.logits.abs().max()) or 1.0
        error = max(error, float((x.logits - y.logits).abs().max()) / scale)
        if case.between_manners and equal(x.logits, y.logits):
            continue  # rotary positions that are all moved alike change keys, and not the function
        key = first_difference(x, y, equal)
        if key is not None and first is None:
            first = moment, place(copy, *key), x.logits, y.logits
    if first is None:
        return Float64(case, error, None, None, None)
    moment, where, logits_a, logits_b = first
    if type(b) is not CacheOff or type(case.a) is not CacheOn or case.a.model is not b.model:
        return Float64(case, error, moment, where, None)
    return Float64(case, error, moment, where, _wrong(copy, case.a, moment.tokens, logits_a, logits_b))


def _wrong(
    copy: Model, a: CacheOn, tokens: Sequence[int], logits_a: Tensor, logits_b: Tensor
) -> Literal["a", "b"] | None:
    """Which path is wrong: the other one agrees with the whole sequence in one pass that fills an empty cache.

    A cache that does not hand back what such a pass gives it is wrong by that alone.
    """
    run = CacheOn(attn=a.attn, call=a.call).start(copy, tokens, (TrueFloat64(),))
    faithful = _hands_back(run.cache)
    try:
        whole = run.step().logits
    except Exception:  # whatever the model raises
        if _runs(copy, a, tokens):
            raise
        return None
    finally:
        run.close()
    if not all(faithful):
        return "a"
    equal = within(TOLERANCE)
    if equal(whole, logits_a) == equal(whole, logits_b):
        return None
    return "b" if equal(whole, logits_a) else "a"


def _runs(copy: Model, a: CacheOn, tokens: Sequence[int]) -> bool:
    """Whether the whole sequence runs in one pass with an empty cache and nothing else."""
    run = CacheOn(attn=a.attn, call=a.call).start(copy, tokens)
    try:
        run.step()
    except Exception:  # whatever the model raises
        return False
    finally:
        run.close()
    return True


def _hands_back(cache: Cache) -> list[bool]:
    """Watch an empty cache: for each update to come, whether it returns the keys and values that it is given."""
    found: list[bool] = []
    update = cache.update

    def watched(key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        given = key.clone(), value.clone()
        result = update(key, value, *args, **kwargs)
        found.append(all(same_bits(x, y) for x, y in zip(given, result, strict=False)))
        return result

    cache.update = watched  # type: ignore[method-assign, assignment] # this run's own cache, thrown away after it
    return found


def in_float64(case: Case, b: Path) -> tuple[Case, Path]:
    """A case and the reference with a float64 copy of the model that one of them has of its own."""
    b = _copied(case.reference(b))
    return replace(case, a=_copied(case.a), b=b), b


def _copied(path: Path) -> Path:
    if path.model is None or not isinstance(path, (CacheOn, CacheOff)):
        return path
    return replace(path, model=float64_copy(path.model))
