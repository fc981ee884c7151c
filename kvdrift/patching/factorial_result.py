"""The result of `kvdrift.factorial`: KV state crossed with kernel, at every step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from kvdrift.errors import InputError
from kvdrift.models.architecture import Architecture
from kvdrift.models.labels import PathInfo, Prompt
from kvdrift.result import Result, Steps

EDGES = {
    "y10-y00": "one-token kernel instead of recompute, on cache-OFF's K/V",
    "y01-y00": "cache-ON's K/V instead of cache-OFF's, under recompute",
    "y10-y11": "cache-OFF's K/V instead of cache-ON's, in the one-token kernel",
    "y01-y11": "recompute instead of the one-token kernel, on cache-ON's K/V",
}
"""The four distances: each changes one factor."""
WHOLE = "y11-y00"
"""Cache-ON against cache-OFF: both factors change."""
PLACEBOS = {
    "ulp-y00": "one entry of the past K/V by one ulp, under recompute",
    "ulp-y11": "one entry of the past K/V by one ulp, in the one-token kernel",
}
"""The placebo factor: the smallest change there is that is not lost in rounding at once (see `kvdrift.factorial`)."""
PAIRS = (*EDGES, WHOLE, *PLACEBOS)
METRICS = ("logit_l2", "kl", "identical")


@dataclass(frozen=True, repr=False)
class Factorial(Steps, Result):
    """KV state × kernel at every step: y00 = cache-OFF, y11 = cache-ON, y10 = the one-token decode kernel on
    cache-OFF's past K/V, y01 = a full recompute that reads cache-ON's K/V for the past.

    There are no additive shares of the two factors here, on purpose: drift runs to a plateau whatever set it off,
    so a factor of one entry moved by one ulp can score as much as the whole path.

    Attributes
    ----------
    off, on
        How the two paths were executed.
    architecture, prompts, token_texts, notes, provenance
        As in `kvdrift.Drift`.
    arrays
        ``{metric}/{pair} [prompt, step]`` for the metrics ``logit_l2`` (centred over the vocabulary), ``kl`` (nats,
        KL(second‖first)) and ``identical`` (1 where all logits agree bit for bit), and the pairs of `EDGES`, `WHOLE`
        and `PLACEBOS`; ``fed [prompt, step]``; ``n_steps [prompt]``. Beyond ``n_steps`` floats are NaN.
    """

    saved_as: ClassVar[str] = "factorial"

    off: PathInfo
    on: PathInfo
    architecture: Architecture
    prompts: tuple[Prompt, ...]
    arrays: dict[str, np.ndarray]
    token_texts: dict[int, str]
    notes: tuple[str, ...] = ()
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def counted(self) -> NDArray[np.bool_]:
        """Steps that count: those from 1 on that a prompt has, bool ``[prompt, step]``."""
        return self.ran & (self.steps >= 1)

    def values(self, pair: str, metric: str = "logit_l2") -> np.ndarray:
        """One distance, ``[prompt, step]``.

        Raises
        ------
        InputError
            If there is no such pair or metric.
        """
        if f"{metric}/{pair}" not in self.arrays:
            raise InputError(
                f"There is no {metric!r} of {pair!r}; pairs are {', '.join(PAIRS)}, metrics {', '.join(METRICS)}."
            )
        return self.arrays[f"{metric}/{pair}"]

    def per_prompt(self, pair: str, metric: str = "logit_l2") -> np.ndarray:
        """Mean over the counted steps, ``[prompt]``; for ``identical`` the share of steps equal in every bit."""
        counted = self.counted
        n = counted.sum(axis=1)
        total = np.where(counted, self.values(pair, metric), 0.0).sum(axis=1)
        return np.divide(total, n, out=np.full(total.shape, np.nan), where=n > 0)

    def to_dataframe(self) -> Any:
        """One row per prompt, step and pair, with every metric; a `pandas.DataFrame`."""
        import pandas as pd

        rows = [
            {"prompt": prompt, "step": step, "pair": pair}
            | {metric: self.values(pair, metric)[prompt, step] for metric in METRICS}
            for prompt, n in enumerate(self.n_steps)
            for step in range(int(n))
            for pair in PAIRS
        ]
        return pd.DataFrame(rows)
