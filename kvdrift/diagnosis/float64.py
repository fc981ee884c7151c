"""The float64 witness: both paths in a copy with float64 arithmetic, where rounding can no longer hide anything."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import Cache

from kvdrift.bits import same_bits
from kvdrift.controls.float64_copy import float64_copy
from kvdrift.controls.true_float64 import TrueFloat64
from kvdrift.diagnosis.cases import Case
from kvdrift.diagnosis.constants import LARGEST, is_unstable, nudged_constants
from kvdrift.diagnosis.locate import Equal, Where, first_difference, in_order, place, within
from kvdrift.diagnosis.lockstep import Moment, lockstep
from kvdrift.diagnosis.observe import Key, Snapshot
from kvdrift.diagnosis.pinpoint import pinpoint
from kvdrift.models.model import Model
from kvdrift.paths.cache_on import CacheOn
from kvdrift.paths.capabilities import stateless
from kvdrift.paths.path import Path, on_copy
from kvdrift.paths.path_capabilities import has_cache, manner
from kvdrift.shapes import Logits

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
    rows_move
        Whether the rows of one position depend there on the tokens that follow it: path a computed them before these
        came. Neither path is the wrong one then.
    constants
        Whether the difference is the rounding of constants that the model holds in float32; the paths agree then.
    """

    case: Case
    error: float
    moment: Moment | None
    where: Where | None
    wrong: Literal["a", "b"] | None
    rows_move: bool = False
    constants: bool = False

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
    controls, equal, rows = (TrueFloat64(),), within(TOLERANCE), _Rows()
    error, first = 0.0, None
    for moment, x, y in lockstep(copy, case, b, controls, rows):
        scale = float(y.logits.abs().max()) or 1.0
        error = max(error, float((x.logits - y.logits).abs().max()) / scale)
        if case.between_manners and equal(x.logits, y.logits):
            continue  # rotary positions that are all moved alike change keys, and not the function
        key = first_difference(x, y, equal)
        if key is not None and first is None:
            key, computed = rows.behind(key, moment, x, y, equal)
            first = moment, computed, place(copy, *key), x.logits, y.logits
    if first is None:
        return Float64(case, error, None, None, None)
    moment, computed, where, logits_a, logits_b = first
    if error <= LARGEST and _by_constants(copy, case, b, moment, logits_a - logits_b):
        return Float64(case, error, None, None, None, constants=True)
    where = pinpoint(copy, case.reference(b), computed, moment, where, equal, controls)
    if computed is not moment:
        return Float64(case, error, moment, where, None, rows_move=True)
    call = manner(case.a)
    if not stateless(b) or call is None or not has_cache(case.a) or case.a.model is not b.model:
        return Float64(case, error, moment, where, None)
    plain = CacheOn(attn=case.a.attn, call=call)
    return Float64(case, error, moment, where, _wrong(copy, plain, moment.tokens, logits_a, logits_b))


class _Rows:
    """Every row of path a as it computed it, once; shown to it by `lockstep`."""

    def __init__(self) -> None:
        self._rows: dict[Key, Tensor] = {}
        self._moments: list[Moment] = []

    def __call__(self, moment: Moment, _: Path, snapshot: Snapshot) -> None:
        """Keep the rows of a step; the first snapshot of a step is path a's."""
        if self._moments and self._moments[-1].step == moment.step:
            return
        self._moments.append(moment)
        for key, value in snapshot.rows.items():
            start = max(moment.position + 1 - len(value), 0)
            new = value[len(value) - (moment.position + 1 - start) :]
            self._rows[key] = torch.cat([self._rows[key][:start], new]) if key in self._rows else new

    def behind(self, key: Key, moment: Moment, x: Snapshot, y: Snapshot, equal: Equal) -> tuple[Key, Moment]:
        """What lies behind a difference: rows of earlier positions that were computed otherwise, and when.

        Returns
        -------
        key, moment
            The first place at which a row of an earlier position differs, and the step in which path a computed it;
            what was given if no such row differs, so that it is the cache or this very pass.
        """
        found = first_difference(replace(x, rows=self._rows, kv={}), replace(y, kv={}), equal)
        if found is None or found not in self._rows or in_order(found) >= in_order(key):
            return key, moment
        ours, theirs = self._rows[found], y.rows[found]
        n = min(len(ours), len(theirs))
        rows = [not equal(a, b) for a, b in zip(ours[-n:], theirs[-n:], strict=True)]
        position = moment.position + 1 - n + rows.index(True)
        kept = [one for one in self._moments if one.position >= position and one.step <= moment.step]
        return found, next((one for one in kept if one.tokens == moment.tokens[: one.position + 1]), moment)


def _by_constants(copy: Model, case: Case, b: Path, moment: Moment, difference: Tensor) -> bool:
    """Whether the difference at ``moment`` becomes another one with constants moved by less than their rounding."""
    modules = {id(model.hf): model.hf for model in (copy, case.a.model, b.model) if model is not None}
    with ExitStack() as stack:
        moved = [stack.enter_context(nudged_constants(module)) for module in modules.values()]
        if not any(moved):
            return False
        for again, x, y in lockstep(copy, case, b, (TrueFloat64(),)):
            if again.step == moment.step:
                return is_unstable(difference, x.logits - y.logits)
    return False


def _wrong(
    copy: Model, plain: CacheOn, tokens: Sequence[int], logits_a: Logits, logits_b: Logits
) -> Literal["a", "b"] | None:
    """Which path is wrong: the other one agrees with the whole sequence in one pass that fills an empty cache.

    A cache that does not hand back what such a pass gives it is wrong by that alone.
    """
    run = plain.start(copy, tokens, (TrueFloat64(),))
    faithful = _hands_back(run.cache)
    try:
        whole = run.step().logits
    except Exception:  # whatever the model raises
        if _runs(copy, plain, tokens):
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


def _runs(copy: Model, plain: CacheOn, tokens: Sequence[int]) -> bool:
    """Whether the whole sequence runs in one pass with an empty cache and nothing else."""
    run = plain.start(copy, tokens)
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

    vars(cache)["update"] = watched  # this run's own cache, thrown away after it
    return found


def in_float64(case: Case, b: Path) -> tuple[Case, Path]:
    """A case and the reference with a float64 copy of the model that one of them has of its own."""
    b = on_copy(case.reference(b), float64_copy)
    return replace(case, a=on_copy(case.a, float64_copy), b=b), b
