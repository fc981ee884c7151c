"""The course of drift through the layers of one arm, and how two arms differ over the same prompts. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvdrift.drift.result import Drift
from kvdrift.drift.tables import local_on_layers
from kvdrift.statistics.multiplicity import holm
from kvdrift.statistics.paired import sign_flip
from kvdrift.statistics.resampling import MIN_PROMPTS, bootstrap_interval

SITE = "resid_post"
KINDS = ("drift", "local")
"""Accumulated drift, and what each layer makes by itself."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Course:
    """Drift of one kind by layer.

    Attributes
    ----------
    of
        ``"drift"`` (each prompt counts with its median over the steps from 1 on) or ``"local"`` (with its mean: in half
        precision a layer makes no drift by itself at most steps, so that a median would be zero).
    layers
        Layer numbers, int ``[layer]``.
    prompts
        ``[prompt, layer]``; NaN where nothing was measured.
    floor
        The same of every re-roll, ``[seed * prompt, layer]``; no rows without a floor.
    """

    of: str
    layers: NDArray[np.int64]
    prompts: Floats
    floor: Floats

    @property
    def mean(self) -> Floats:
        """Mean over prompts, ``[layer]``."""
        return _mean(self.prompts)

    @property
    def interval(self) -> tuple[Floats, Floats]:
        """95 % bootstrap interval of the mean over prompts, ``[layer]`` each; NaN below `MIN_PROMPTS` prompts."""
        known = self.prompts[~np.isnan(self.prompts).all(axis=1)]
        if len(known) < MIN_PROMPTS:
            undefined = np.full(self.prompts.shape[1], np.nan)
            return undefined, undefined
        return bootstrap_interval(np.mean, known)

    @property
    def floor_band(self) -> tuple[Floats, Floats, Floats]:
        """Lowest, mean and highest re-roll, ``[layer]`` each; NaN without a floor."""
        if not len(self.floor):
            undefined = np.full(self.prompts.shape[1], np.nan)
            return undefined, undefined, undefined
        return self.floor.min(axis=0), self.floor.mean(axis=0), self.floor.max(axis=0)

    @property
    def contributions(self) -> Floats:
        """What each layer adds, ``[prompt, layer]``: the rise over the layer below, or the local drift itself."""
        return self.prompts if self.of == "local" else np.diff(self.prompts, axis=1, prepend=0.0)

    @property
    def shares(self) -> Floats:
        """`contributions` over their sum (for accumulated drift that is the last layer's), ``[prompt, layer]``.

        An even course has 1 / layers everywhere. NaN where the sum is zero; layers that were not measured are left out.
        """
        total = np.nansum(self.contributions, axis=1, keepdims=True)
        with np.errstate(divide="ignore", invalid="ignore"):
            shares = self.contributions / total
        return np.where(np.isfinite(shares), shares, np.nan)

    @property
    def first(self) -> Floats:
        """Drift of the first layer, ``[prompt]``."""
        return self.prompts[:, 0]

    @property
    def first_share(self) -> Floats:
        """Share of the first layer, ``[prompt]``."""
        return self.shares[:, 0]

    @property
    def largest_share(self) -> Floats:
        """Share of the layer that adds most, ``[prompt]``; 1 / layers of an even course, 1 if one layer does it all."""
        largest = np.max(self.shares, axis=1, initial=-np.inf, where=~np.isnan(self.shares))
        return np.where(np.isfinite(largest), largest, np.nan)

    @property
    def largest_layer(self) -> int | None:
        """The layer with the largest mean share; None where no share is known."""
        known = self.shares[~np.isnan(self.shares).all(axis=1)]
        return int(self.layers[np.nanargmax(known.mean(axis=0))]) if len(known) else None

    @property
    def jumps(self) -> bool:
        """Whether the first layer adds more than any other, and more than twice what it would in an even course."""
        share = self.first_share[~np.isnan(self.first_share)]
        return bool(self.largest_layer == self.layers[0] and share.size and float(share.mean()) > 2 / len(self.layers))


def course(drift: Drift, of: str) -> Course:
    """Reduce one kind of drift (`KINDS`) to its course through the layers."""
    layers = drift.layers(SITE)
    values = drift.values(SITE, of=of)
    floors = drift.floor(SITE, of)
    if of == "local":
        values = local_on_layers(drift, SITE, values)
        floors = None if floors is None else local_on_layers(drift, SITE, floors)
    reduce = np.median if of == "drift" else np.mean

    def rows(x: NDArray[np.float64]) -> list[Floats]:
        nothing = np.full(len(layers), np.nan)
        return [
            np.asarray(reduce(row[keep], axis=0), dtype=np.float64) if keep.any() else nothing
            for row, keep in zip(x, drift.counted, strict=True)
        ]

    every = [] if floors is None else [row for seed in floors for row in rows(seed) if not np.isnan(row).all()]
    return Course(of, layers, np.array(rows(values)), np.array(every).reshape(len(every), len(layers)))


@dataclass(frozen=True)
class Change:
    """A paired difference over prompts, copy − original.

    Attributes
    ----------
    mean
        Its mean over the prompts where both are known; NaN where none is.
    low, high
        95 % bootstrap interval over prompts; NaN below `MIN_PROMPTS` prompts.
    p
        Of the two-sided sign-flip test over prompts (`kvdrift.statistics.paired.sign_flip`); with n prompts it cannot
        fall below 2^(1 − n).
    higher, lower, n
        In how many prompts the copy is higher, lower, and how many there are.
    """

    mean: float
    low: float
    high: float
    p: float
    higher: int
    lower: int
    n: int


def change(copy: Floats, original: Floats) -> Change:
    """Compare two arms over the same prompts, ``[prompt]`` each.

    Examples
    --------
    >>> found = change(np.array([2.0, 3.0, 4.0]), np.array([1.0, 1.0, 1.0]))
    >>> found.mean, found.higher, found.p
    (2.0, 3, 0.25)
    """
    difference = copy - original
    difference = difference[~np.isnan(difference)]
    n = len(difference)
    if not n:
        return Change(math.nan, math.nan, math.nan, math.nan, 0, 0, 0)
    low = high = math.nan
    if n >= MIN_PROMPTS:
        low, high = (float(end) for end in bootstrap_interval(np.mean, difference))
    higher, lower = int((difference > 0).sum()), int((difference < 0).sum())
    p = sign_flip(difference) if np.isfinite(difference).all() else 1.0  # infinite, with whatever signs
    return Change(float(difference.mean()), low, high, p, higher, lower, n)


def layer_changes(copy: Course, original: Course) -> tuple[list[Change], Floats]:
    """The change at every layer, and its p-values after Holm's correction over layers, ``[layer]``."""
    changes = [change(copy.prompts[:, i], original.prompts[:, i]) for i in range(len(original.layers))]
    return changes, holm([found.p for found in changes])


def same_numbers(one: Drift, two: Drift) -> bool:
    """Whether two drifts hold the same numbers, bit for bit: accumulated, local, and at the logits."""
    return all(
        set(one.pairs(of)) == set(two.pairs(of))
        and all(
            np.array_equal(one.values(*pair, of), two.values(*pair, of), equal_nan=True)
            for pair in one.pairs(of)
            if one.values(*pair, of).dtype.kind == "f"
        )
        for of in KINDS
    )


def _mean(x: Floats) -> Floats:
    known = ~np.isnan(x).all(axis=1)
    return x[known].mean(axis=0) if known.any() else np.full(x.shape[1], np.nan)
