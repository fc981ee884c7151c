"""How drift begins and grows over the layers: onset and growth.

Pure functions of numpy arrays. Prompts are the sampling unit: tokens are clustered in them, so every interval
and p-value comes from resampling prompts. NaN means "not measured" and is left out, never counted as zero;
infinity is a measured value. Step 0 (where both paths do the same work) is for the caller to leave out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvdrift.errors import InputError
from kvdrift.statistics.measured import mean_measured, median_measured, quotient
from kvdrift.statistics.multiplicity import holm
from kvdrift.statistics.resampling import (
    MIN_PROMPTS,
    Estimate,
    bootstrap_interval,
    check_bootstrap,
    ratio_above_one,
)


@dataclass(frozen=True)
class Growth:
    """How drift changes from layer to layer, read from the median profile over prompts.

    With d(l) the drift at layer l, first and last the outer layers measured, and the relative depth of a layer
    (l + 1) / (last + 1), in (0, 1]. Each is None where undefined (see `note`), else an `Estimate`:

    - `first_layer_share` = d(first) / d(last): the share of the final drift already there after the first
      layer. Can exceed 1; inf where d(last) is zero and d(first) is not.
    - `first_quarter_share` = d(l) / d(last), l the last layer with relative depth ≤ 1/4 (the first layer, if
      no layer is that early).
    - `plateau` = median of d over the layers with relative depth > 3/4.
    - `plateau_layer`: the first layer with plateau / 2 ≤ d ≤ 2 · plateau, where the plateau is reached (None if
      the plateau is zero or infinite); `plateau_depth` is its relative depth.
    - `final` = d(last).
    - `plateau_over_floor` = plateau / (the same median of the floor's median profile); inf over a zero floor,
      None without a floor and when both are zero.

    `n_prompts` counts the prompts with any measured layer; `note` says in words what the numbers cannot.
    """

    first_layer_share: Estimate | None = None
    first_quarter_share: Estimate | None = None
    plateau_depth: Estimate | None = None
    plateau_layer: Estimate | None = None
    plateau: Estimate | None = None
    final: Estimate | None = None
    plateau_over_floor: Estimate | None = None
    n_prompts: int = 0
    note: str | None = None

    def to_dict(self) -> dict[str, float | int | str | list[float] | None]:
        """Return plain values for JSON: each number under its name, its interval under `NAME_interval`."""
        result: dict[str, float | int | str | list[float] | None] = {}
        for name in _GROWTH_NAMES:
            estimate: Estimate | None = getattr(self, name)
            result[name] = None if estimate is None else estimate.value
            interval = None if estimate is None else estimate.interval
            result[f"{name}_interval"] = None if interval is None else list(interval)
        if self.plateau_layer is not None:
            result["plateau_layer"] = int(self.plateau_layer.value)
        return result | {"n_prompts": self.n_prompts, "note": self.note}


_GROWTH_NAMES = tuple(f.name for f in fields(Growth) if f.name not in ("n_prompts", "note"))


@dataclass(frozen=True)
class Onset:
    """Where drift is made: the first layer that makes any, and the first that makes more than its floor.

    `source_layer` is None where no local drift was measured that is not zero, `excess_layer` where no layer
    stands above its floor with confidence; `reason` then says why in a sentence.

    `source_module` is "attn" if the attention output differs there, "mlp" if it was measured and never does,
    "block" if it was not measured. `source_share` is the share of the `n_pairs` measured (prompt, step) pairs
    with nonzero local drift at the source layer. `excess_ratio` is mean local drift over mean local floor at
    the excess layer with its interval, `excess_p` its one-sided p-value after Holm's correction over layers.
    """

    source_layer: int | None
    source_module: str | None
    source_share: float | None
    n_pairs: int
    excess_layer: int | None
    excess_ratio: Estimate | None
    excess_p: float | None
    n_prompts: int
    reason: str | None = None


def growth(
    profiles: ArrayLike,
    floor: ArrayLike | None,
    layers: Sequence[int] | NDArray[np.integer],
    *,
    confidence: float = 0.95,
    n_boot: int = 2000,
    seed: int = 0,
) -> Growth:
    """Describe how drift grows over the layers; the formulas are in `Growth`.

    Parameters
    ----------
    profiles
        `[prompt, layer]` drift, NaN where not measured.
    floor
        `[prompt, layer]` rounding floor of the same prompts, or None. It is resampled with its prompts.
    layers
        `[layer]` layer numbers, increasing.
    confidence, n_boot, seed
        Percentile bootstrap over prompts; with one prompt there is no interval.

    Raises
    ------
    InputError
        The shapes do not fit together, layers do not increase, a value is negative, or a bootstrap option is
        out of range.

    Examples
    --------
    >>> g = growth([[0.01, 0.5, 1.0, 1.0]], None, range(4))
    >>> g.first_layer_share.value, g.plateau_layer.value
    (0.01, 1.0)
    """
    values, numbers = _profiles("profiles", profiles, 2), _layers(layers)
    floors = np.full_like(values, np.nan) if floor is None else _profiles("floor", floor, 2)
    if floors.shape != values.shape or values.shape[1] != len(numbers):
        raise InputError(
            f"Profiles {values.shape}, floor {floors.shape} and {len(numbers)} layers given; profiles and floor "
            "must be [prompt, layer] with one column per layer."
        )
    measured = ~np.isnan(values).all(axis=1)
    both = np.stack([values, floors], axis=1)[measured]  # [prompt, 2, layer]
    n_prompts = len(both)
    if n_prompts == 0:
        return Growth(note="no layer was measured")
    if np.nanmax(both[:, 0]) == 0:
        return Growth(n_prompts=n_prompts, note="the drift is zero at every layer of every profile")

    def statistic(data: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
        medians = median_measured(data, axis=axis)
        return _growth_numbers(medians[..., 0, :], medians[..., 1, :], numbers)

    point = statistic(both, axis=0)
    low, high = bootstrap_interval(statistic, both, confidence=confidence, n_boot=n_boot, seed=seed)
    estimates = (
        None if np.isnan(v) else Estimate(float(v), None if np.isnan(lo) else (float(lo), float(hi)))
        for v, lo, hi in zip(point, low, high, strict=True)
    )
    first, quarter, depth, layer, plateau, final, over_floor = estimates
    note = None
    if plateau is not None and plateau.value == 0:
        note = "the plateau is zero: so is the drift of most prompts over the last quarter of the layers"
    elif n_prompts == 1:
        note = "one prompt: no interval"
    return Growth(first, quarter, depth, layer, plateau, final, over_floor, n_prompts, note)


def onset(
    local: Mapping[str, ArrayLike],
    local_floor: ArrayLike | None,
    layers: Sequence[int] | NDArray[np.integer],
    *,
    site: str = "resid_post",
    confidence: float = 0.95,
    n_boot: int = 10_000,
    seed: int = 0,
) -> Onset:
    """Find the first layer that makes drift by itself, and the first that makes more than its floor.

    *Source*, without any threshold: the first layer where local drift is nonzero at any site given, for any
    prompt and step. It may be zero at `site` itself: what differs in the attention or MLP output can round away in
    the residual stream.

    *Excess*: per prompt and layer, local drift and its floor are averaged over the steps measured in both
    (the floor over its seeds too). The ratio R of their means over prompts is tested against R ≤ 1 by a
    studentised bootstrap over prompts of log R: p is the share of resamples with (log R* − log R) / s* ≥ log
    R / s, s the delta-method standard error. (With 5 prompts and 30 independent layers of log-normal noise,
    sigma 0.8, a plain percentile bootstrap finds an excess in half of the runs that have none.) The excess
    layer is the first with a Holm-adjusted p below 1 − confidence and an interval of R above 1. Local drift
    over a floor of exactly zero is an infinite ratio, and p is the share of resamples without any local
    drift; zero over zero is no excess.

    Parameters
    ----------
    local
        Site to `[prompt, step, layer]` local drift (`rel_l2`), NaN where not measured: `site`, and "attn_out"
        and "mlp_out" where the block offers them, all on the same layer axis.
    local_floor
        `[seed, prompt, step, layer]` local re-roll floor at `site`, or None.
    layers
        `[layer]` layer numbers, increasing.
    site
        The site whose excess over its floor is tested.
    confidence, n_boot, seed
        Confidence of the interval, number and seed of the resamples.

    Raises
    ------
    InputError
        `site` is missing from `local`, the shapes do not fit together, layers do not increase, a value is
        negative, or a bootstrap option is out of range.

    Examples
    --------
    >>> onset({"resid_post": [[[0.0, 0.0, 1e-3]]]}, None, range(3)).source_layer
    2
    """
    check_bootstrap(confidence, n_boot)
    numbers, sites = _layers(layers), {name: _profiles(name, x, 3) for name, x in local.items()}
    if site not in sites:
        raise InputError(f"Local drift of {sorted(sites)} given; {site!r}, whose onset is asked for, must be among it.")
    shape = sites[site].shape
    if any(x.shape != shape for x in sites.values()) or shape[2] != len(numbers):
        raise InputError(
            f"Local drift of shapes {[x.shape for x in sites.values()]} and {len(numbers)} layers given; all must "
            "be [prompt, step, layer] with one column per layer."
        )
    n_prompts = int((~np.isnan(sites[site])).any(axis=(1, 2)).sum())
    source, module, share, n_pairs = _source(sites, numbers)
    index, ratio, p_value, reason = None, None, None, None
    if source is None:
        reason = "no local drift was measured" if n_pairs == 0 else "bit-identical: no layer makes any drift by itself"
    elif local_floor is None:
        reason = "no floor was measured, so no excess over it can be told"
    else:
        floors = _profiles("local_floor", local_floor, 4)
        if floors.shape[1:] != shape:
            raise InputError(
                f"A local floor of shape {floors.shape} given beside local drift of shape {shape}; it must be "
                "[seed, prompt, step, layer]."
            )
        index, ratio, p_value, reason = _excess(sites[site], floors, confidence, n_boot, seed)
    excess = None if index is None else int(numbers[index])
    return Onset(source, module, share, n_pairs, excess, ratio, p_value, n_prompts, reason)


def _profiles(name: str, values: ArrayLike, ndim: int) -> NDArray[np.float64]:
    """Return drift values as a float64 array of `ndim` dimensions."""
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != ndim:
        raise InputError(f"{name} of shape {x.shape} given; {ndim} dimensions are needed.")
    if np.any(x < 0):
        raise InputError(f"{name} holds negative values; a drift is never below zero.")
    return x


def _layers(layers: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int64]:
    """Return layer numbers as an increasing integer array."""
    numbers = np.asarray(layers, dtype=np.int64)
    if numbers.ndim != 1 or len(numbers) == 0 or numbers[0] < 0 or np.any(np.diff(numbers) <= 0):
        raise InputError(f"Layers {list(layers)} given; increasing layer numbers from 0 are needed.")
    return numbers


def _growth_numbers(
    drift: NDArray[np.float64], floor: NDArray[np.float64], numbers: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Compute the numbers of `Growth`, in its order, from median profiles `[*resample, layer]`."""
    depth = (numbers + 1) / (numbers[-1] + 1)
    quarter = max(int((depth <= 0.25).sum()) - 1, 0)
    last_quarter = depth > 0.75
    first, final = drift[..., 0], drift[..., -1]
    plateau = median_measured(drift[..., last_quarter], axis=-1)
    level = np.where((plateau > 0) & np.isfinite(plateau), plateau, np.nan)[..., None]
    near = (drift >= level / 2) & (drift <= level * 2)
    reached = np.argmax(near, axis=-1)
    found = near.any(axis=-1)
    return np.stack(
        [
            quotient(first, final),
            quotient(drift[..., quarter], final),
            np.where(found, depth[reached], np.nan),
            np.where(found, numbers[reached], np.nan),
            plateau,
            final,
            quotient(plateau, median_measured(floor[..., last_quarter], axis=-1)),
        ],
        axis=-1,
    )


def _source(
    sites: Mapping[str, NDArray[np.float64]], numbers: NDArray[np.int64]
) -> tuple[int | None, str | None, float | None, int]:
    """Return source layer, module, share of pairs, and number of pairs measured (there, or anywhere)."""
    stacked = np.stack(list(sites.values()))
    nonzero = np.any(stacked > 0, axis=0)  # NaN > 0 is False
    measured = np.any(~np.isnan(stacked), axis=0)
    hit = np.any(nonzero, axis=(0, 1))
    if not np.any(hit):
        return None, None, None, int(np.any(measured, axis=2).sum())
    layer = int(np.argmax(hit))
    n_pairs = int(measured[:, :, layer].sum())
    share = float(nonzero[:, :, layer].sum() / n_pairs)
    attn = sites["attn_out"][:, :, layer] if "attn_out" in sites else np.full(1, np.nan)
    if np.all(np.isnan(attn)):
        module = "block"
    else:
        module = "attn" if np.any(attn > 0) else "mlp"
    return int(numbers[layer]), module, share, n_pairs


def _excess(
    local: NDArray[np.float64], floors: NDArray[np.float64], confidence: float, n_boot: int, seed: int
) -> tuple[int | None, Estimate | None, float | None, str | None]:
    """Return index, ratio and adjusted p of the first layer above its floor, or the reason why none is."""
    floor = mean_measured(floors, axis=0)
    shared = ~np.isnan(local) & ~np.isnan(floor)
    local, floor = (mean_measured(np.where(shared, x, np.nan), axis=1) for x in (local, floor))  # [prompt, layer]
    counts = (~np.isnan(local)).sum(axis=0)
    most = int(counts.max())
    if most < MIN_PROMPTS:
        measured = "1 prompt was" if most == 1 else f"{most} prompts were"
        reason = f"excess over the floor is undetermined: {measured} measured, {MIN_PROMPTS} are needed"
        return None, None, None, reason
    ratios: list[Estimate | None] = [None] * len(counts)
    p_values = np.full(len(counts), np.nan)
    for layer in np.flatnonzero(counts >= MIN_PROMPTS).tolist():
        present = ~np.isnan(local[:, layer])
        ratios[layer], p_values[layer] = ratio_above_one(
            local[present, layer], floor[present, layer], confidence=confidence, n_boot=n_boot, seed=seed
        )
    adjusted = holm(p_values)
    for layer, ratio in enumerate(ratios):
        above = ratio is not None and ratio.interval is not None and ratio.interval[0] > 1
        if above and adjusted[layer] < 1 - confidence:
            return layer, ratio, float(adjusted[layer]), None
    reason = (
        "no layer makes more drift than its floor with confidence: the smallest adjusted p is "
        f"{np.nanmin(adjusted):.2g} over {most} prompts ({1 - confidence:.2g} and an interval above 1 are needed)"
    )
    return None, None, None, reason
