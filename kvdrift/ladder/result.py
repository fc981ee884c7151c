"""The result of `kvdrift.falsify`: one comparison in many arithmetics, on the same tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from kvdrift.errors import InputError
from kvdrift.ladder.rung import Rung
from kvdrift.models.architecture import Architecture
from kvdrift.models.labels import PathInfo, Prompt
from kvdrift.result import Result, Steps, say
from kvdrift.statistics.means import Mean, mean, ratio
from kvdrift.statistics.rates import upper_bound

METRICS = ("kl", "kl_float32_head", "logit_l2", "logit_max", "drift", "flip", "tie")
"""What is kept of every arm, prompt and step."""


@dataclass(frozen=True, repr=False)
class Ladder(Steps, Result):
    """Cache-ON against cache-OFF in one arithmetic after another, all on the base arm's tokens.

    Attributes
    ----------
    model
        The path that gave the tokens: cache-ON of the base arm.
    base
        The name of the base arm: the model as it was given.
    rungs
        The arms, in order; ``arm`` is the first axis of every metric.
    architecture, prompts, token_texts, notes, provenance
        As in `kvdrift.Drift`.
    arrays
        Each of `METRICS` is ``[arm, prompt, step]`` float64, NaN where there is no value: ``kl`` (nats, KL(b‖a)),
        ``kl_float32_head`` (the same with the LM head in float32 on the same 16-bit states), ``logit_l2`` (centred over
        the vocabulary), ``logit_max``, ``drift`` (relative L2 of the residual stream after the last layer),
        ``flip``, ``tie`` (either path has an exact tie of its best two logits). ``fed [prompt, step]`` are the
        tokens; ``n_steps [prompt]``.

    Examples
    --------
    >>> import kvdrift as kd
    >>> ladder = kd.falsify(kd.models.tiny("llama"), [1, 2, 3], arms=["float64"], max_new_tokens=4, progress=False)
    >>> list(ladder.to_dataframe()["arm"])
    ['float64', 'float32']
    """

    saved_as: ClassVar[str] = "ladder"
    axes: ClassVar[tuple[str, ...]] = ("arm", "prompt", "step")

    model: PathInfo
    base: str
    rungs: tuple[Rung, ...]
    architecture: Architecture
    prompts: tuple[Prompt, ...]
    arrays: dict[str, np.ndarray]
    token_texts: dict[int, str]
    notes: tuple[str, ...] = ()
    provenance: dict[str, Any] = field(default_factory=dict)

    # --- what is in here

    def _lengths(self) -> dict[str, int]:
        return super()._lengths() | {"arm": len(self.rungs)}

    @property
    def names(self) -> tuple[str, ...]:
        """The arms' names, in order."""
        return tuple(rung.name for rung in self.rungs)

    def rung(self, arm: str) -> Rung:
        """What became of an arm.

        Raises
        ------
        InputError
            If this ladder has no such arm.
        """
        return self.rungs[self._place(arm)]

    def has(self, arm: str) -> bool:
        """Whether there is such an arm, with numbers."""
        return arm in self.names and self.rung(arm).ran

    @property
    def counted(self) -> NDArray[np.bool_]:
        """Steps that count: those from 1 on that a prompt has, bool ``[prompt, step]``."""
        return self.ran & (self.steps >= 1)

    def values(self, arm: str, metric: str = "kl") -> NDArray[np.float64]:
        """One metric of one arm, ``[prompt, step]``.

        Raises
        ------
        InputError
            If there is no such arm or metric.
        """
        if metric not in METRICS:
            raise InputError(f"There is no metric {metric!r}; choose one of {', '.join(METRICS)}.")
        return self.arrays[metric][self._place(arm)]

    def _place(self, arm: str) -> int:
        if arm not in self.names:
            raise InputError(f"This ladder has no arm {arm!r}; it has {', '.join(self.names)}.")
        return self.names.index(arm)

    # --- statistics: prompts are the sampling unit

    def per_prompt(self, arm: str, metric: str = "kl") -> NDArray[np.float64]:
        """Mean over a prompt's counted steps, ``[prompt]``; for ``drift`` the root of the mean square.

        The root of the mean square, because KL is a squared distance: means of KL go with means of drift squared.
        """
        values, counted = self.values(arm, metric), self.counted
        values = values**2 if metric == "drift" else values
        n = counted.sum(axis=1)
        total = np.where(counted, values, 0.0).sum(axis=1)
        found = np.divide(total, n, out=np.full(total.shape, np.nan), where=n > 0)
        return np.sqrt(found) if metric == "drift" else found

    def mean(self, arm: str, metric: str = "kl") -> Mean:
        """The mean over prompts of `per_prompt`, with standard error, bootstrap interval and median."""
        return mean(self.per_prompt(arm, metric))

    def rms_drift(self, arm: str) -> float:
        """Root mean square over prompts of the drift after the last layer; NaN without a value."""
        squares = self.per_prompt(arm, "drift") ** 2
        known = squares[~np.isnan(squares)]
        return math.sqrt(known.mean()) if known.size else math.nan

    def count(self, arm: str, metric: str = "flip") -> tuple[int, int, float]:
        """Flips or ties: counted steps with one, prompts with one, and the 95 % upper bound of the share of prompts."""
        if not self.rung(arm).ran or not self.counted.any():
            return 0, 0, math.nan
        events = (self.values(arm, metric) == 1) & self.counted
        prompts, n = int(events.any(axis=1).sum()), int(self.counted.any(axis=1).sum())
        return int(events.sum()), prompts, upper_bound(prompts, n)

    def first_flips(self, arm: str) -> tuple[int | None, ...]:
        """The first step at which the two paths choose different tokens, per prompt; None if there is none."""
        flips = self.values(arm, "flip") == 1
        return tuple(int(row.argmax()) if row.any() else None for row in flips)

    def identical(self, arm: str) -> float:
        """Share of the counted steps at which the two paths' logits are equal; NaN without a value."""
        values = self.values(arm, "logit_max")[self.counted]
        return float((values == 0).mean()) if values.size and self.rung(arm).ran else math.nan

    @cached_property
    def twins(self) -> dict[str, str]:
        """Arm → an earlier arm with the very same numbers at every step, where they are not all zero."""
        found: dict[str, str] = {}
        shown = [rung.name for rung in self.rungs if rung.ran]
        for place, arm in enumerate(shown):
            for earlier in shown[:place]:
                pairs = [
                    (self.values(arm, m), self.values(earlier, m)) for m in ("kl", "logit_l2", "logit_max", "drift")
                ]
                if self.identical(arm) < 1 and all(np.array_equal(x, y, equal_nan=True) for x, y in pairs):
                    found.setdefault(arm, earlier)
        return found

    # --- tables and words

    def to_dataframe(self) -> Any:
        """One row per arm; a `pandas.DataFrame`.

        ``kl`` is the mean over prompts of the mean over counted steps (nats), ``kl_se`` its standard error over
        prompts, ``kl_low`` and ``kl_high`` a 95 % bootstrap interval over prompts, ``kl_median`` the median over
        prompts; mean and error also of ``kl_float32_head`` and ``logit_l2``. ``drift`` is the root mean square of the
        relative L2 drift after the last layer. ``flips`` and ``ties`` count steps, ``flip_prompts`` and
        ``tie_prompts`` prompts, ``…_bound`` is the 95 % upper bound of the share of prompts. ``first_flips`` holds a
        step or None per prompt, ``identical`` the share of steps with equal logits, ``same_as`` an earlier arm with
        the very same numbers.
        """
        import pandas as pd

        return pd.DataFrame([self._row(rung) for rung in self.rungs])

    def _row(self, rung: Rung) -> dict[str, Any]:
        kl, head, l2 = (self.mean(rung.name, metric) for metric in ("kl", "kl_float32_head", "logit_l2"))
        flips, flip_prompts, flip_bound = self.count(rung.name, "flip")
        ties, tie_prompts, tie_bound = self.count(rung.name, "tie")
        return {
            "arm": rung.name,
            "what": rung.what,
            "status": rung.status,
            "dtype": rung.dtype,
            "stored": rung.stored,
            "kl": kl.value,
            "kl_se": kl.error,
            "kl_low": kl.low,
            "kl_high": kl.high,
            "kl_median": kl.median,
            "kl_float32_head": head.value,
            "kl_float32_head_se": head.error,
            "logit_l2": l2.value,
            "logit_l2_se": l2.error,
            "drift": self.rms_drift(rung.name),
            "flips": flips,
            "flip_prompts": flip_prompts,
            "flip_bound": flip_bound,
            "ties": ties,
            "tie_prompts": tie_prompts,
            "tie_bound": tie_bound,
            "first_flips": self.first_flips(rung.name),
            "identical": self.identical(rung.name),
            "same_as": self.twins.get(rung.name),
            "kernels": "/".join(rung.kernels),
            "weights_changed": rung.weights_changed,
            "n": kl.n,
            "reason": rung.reason,
        }

    def ratios(self, reference: str | None = None) -> Any:
        """How KL changes from the reference arm to every other, measured and predicted; a `pandas.DataFrame`.

        With the reference's value in the denominator: ``kl`` is the measured ratio, ``drift_squared`` what the
        measured drift predicts (KL is quadratic in drift), ``roundoff_squared`` what the unit roundoff of the stored
        numbers predicts, ``kl_float32_head`` the measured ratio without the LM heads' own rounding. ``…_low`` and
        ``…_high`` are paired 95 % bootstrap intervals over prompts. ``over_drift`` and ``over_roundoff`` are measured
        over predicted: 1 where the law holds.

        Parameters
        ----------
        reference
            An arm that ran; the base arm by default.

        Raises
        ------
        InputError
            If there is no such arm, or it did not run.
        """
        import pandas as pd

        reference = reference or self.base
        if not self.rung(reference).ran:
            raise InputError(f"The arm {reference!r} did not run, so nothing can be held against it.")
        return pd.DataFrame([self._ratio(rung, reference) for rung in self.rungs if rung.ran])

    def _ratio(self, rung: Rung, reference: str) -> dict[str, Any]:
        arms = (rung.name, reference)
        kl, head = ([self.per_prompt(arm, metric) for arm in arms] for metric in ("kl", "kl_float32_head"))
        drift = [self.per_prompt(arm, "drift") ** 2 for arm in arms]
        law = (rung.unit_roundoff / self.rung(reference).unit_roundoff) ** 2
        row: dict[str, Any] = {"arm": rung.name, "reference": reference}
        for name, columns in (
            ("kl", kl),
            ("kl_float32_head", head),
            ("drift_squared", drift),
            ("over_drift", [*kl, *drift]),
        ):
            row[name], row[f"{name}_low"], row[f"{name}_high"] = ratio(*columns)
        return row | {"roundoff_squared": law, "over_roundoff": row["kl"] / law}

    def reading(self) -> list[str]:
        """What the ladder says, in sentences."""
        return say(self, "reading")
