"""How drift begins and grows over the layers: growth, onset, and the statistics they rest on.

Pure functions of numpy arrays. Prompts are the sampling unit: tokens are clustered in them, so every interval
and p-value comes from resampling prompts. NaN means "not measured" and is left out, never counted as zero;
infinity is a measured value. Step 0 (where both paths do the same work) is for the caller to leave out.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvdrift.errors import InputError

MIN_PROMPTS = 5
"""Fewest prompts from which `onset` infers an excess over the floor."""

_CHUNK = 2_000_000  # numbers resampled at a time: 16 MB


@dataclass(frozen=True)
class Estimate:
    """A number and its bootstrap interval over prompts (None for one prompt, or where it is undefined)."""

    value: float
    interval: tuple[float, float] | None = None


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

    Returns
    -------
    Growth

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

    def statistic(data: NDArray[np.float64]) -> NDArray[np.float64]:
        medians = _median(data, axis=-3)
        return _growth_numbers(medians[..., 0, :], medians[..., 1, :], numbers)

    point = statistic(both)
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

    Returns
    -------
    Onset

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
    _check_bootstrap(confidence, n_boot)
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


def holm(p_values: ArrayLike) -> NDArray[np.float64]:
    """Return Holm's step-down adjusted p-values.

    The i-th smallest of m (i from 1) becomes the largest of (m − j + 1) · p₍ⱼ₎ over j ≤ i, at most 1. NaN (not
    tested) stays NaN and is not counted in m.

    Raises
    ------
    InputError
        A p-value lies outside 0 to 1, or the array is not one-dimensional.

    Examples
    --------
    >>> holm([0.01, 0.04, 0.03]).round(6).tolist()
    [0.03, 0.06, 0.06]
    """
    p = np.asarray(p_values, dtype=np.float64)
    if p.ndim != 1 or np.any((p < 0) | (p > 1)):
        raise InputError(f"p-values {p_values!r} given; a flat list of numbers from 0 to 1 is needed.")
    order = np.argsort(p, kind="stable")[: int((~np.isnan(p)).sum())]  # NaN sorts last
    adjusted = np.full(p.shape, np.nan)
    steps = np.arange(len(order), 0, -1) * p[order]
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return adjusted


def bootstrap_interval(
    statistic: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    data: ArrayLike,
    *,
    confidence: float = 0.95,
    n_boot: int = 2000,
    seed: int = 0,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the percentile bootstrap interval of a statistic, resampling the first axis (prompts).

    The ends are order statistics (no interpolation, so infinity is a legal end). A statistic that is undefined
    (NaN) in more resamples than one tail holds has no interval.

    Parameters
    ----------
    statistic
        Maps stacked resamples `[resample, prompt, ...]` to `[resample, *out]` with `*out` of at most one axis.
    data
        `[prompt, ...]`.
    confidence, n_boot, seed
        Coverage, number of resamples, seed of the generator.

    Returns
    -------
    (low, high), each of shape `[*out]`; NaN where there is no interval, as with a single prompt.

    Raises
    ------
    InputError
        There is no prompt, or a bootstrap option is out of range.

    Examples
    --------
    >>> low, high = bootstrap_interval(lambda x: x.mean(axis=1), [1.0, 1.0, 1.0])
    >>> float(low), float(high)
    (1.0, 1.0)
    """
    _check_bootstrap(confidence, n_boot)
    x = np.asarray(data, dtype=np.float64)
    if x.ndim == 0 or len(x) == 0:
        raise InputError(f"Data of shape {x.shape} given; the first axis must hold one prompt or more.")
    if len(x) == 1:
        undefined = np.full(np.shape(statistic(x[None]))[1:], np.nan)
        return undefined, undefined.copy()
    draws = np.concatenate([statistic(x[rows]) for rows in _resamples(x.shape, n_boot, seed)])
    tail = (1 - confidence) / 2
    enough = np.isnan(draws).mean(axis=0) <= tail
    filled = np.where(np.isnan(draws), -np.inf, draws), np.where(np.isnan(draws), np.inf, draws)
    low = np.quantile(filled[0], tail, axis=0, method="lower")
    high = np.quantile(filled[1], 1 - tail, axis=0, method="higher")
    return np.where(enough, low, np.nan), np.where(enough, high, np.nan)


def ratio_above_one(
    numerator: ArrayLike, denominator: ArrayLike, *, confidence: float = 0.95, n_boot: int = 2000, seed: int = 0
) -> tuple[Estimate, float]:
    """Test mean(numerator) / mean(denominator) over prompts against 1.

    A studentised bootstrap over prompts of the log ratio, with its delta-method standard error. (A plain percentile
    bootstrap is too sure of itself at few prompts.)

    Parameters
    ----------
    numerator, denominator
        Numbers that are not negative, ``[prompt]``.
    confidence, n_boot, seed
        Coverage, number of resamples, seed of the generator.

    Returns
    -------
    estimate, p_value
        The ratio with its interval (None where it is undefined), and the one-sided p-value of a ratio of 1 or less.

    Examples
    --------
    >>> estimate, p_value = ratio_above_one([2.0, 2.2, 1.9, 2.1, 2.0], [1.0, 1.0, 1.0, 1.1, 1.0])
    >>> round(estimate.value, 2), p_value < 0.05
    (2.0, True)
    """
    pairs = np.stack([np.asarray(x, dtype=np.float64) for x in (numerator, denominator)], axis=1)  # [prompt, 2]
    log_ratio, error = _log_ratio(pairs[None])
    draws = [_log_ratio(pairs[rows]) for rows in _resamples(pairs.shape, n_boot, seed)]
    logs, errors = (np.concatenate(x) for x in zip(*draws, strict=True))
    means = pairs.mean(axis=0)
    ratio = float(_ratio(means[:1], means[1:])[0])
    if not np.isfinite(log_ratio[0]):  # a side or both of exactly zero, or infinite
        if not log_ratio[0] > 0:
            return Estimate(ratio), 1.0
        return Estimate(ratio, (ratio, ratio)), float((1 + (~(logs > 0)).sum()) / (n_boot + 1))
    if error[0] == 0:  # every prompt has the same ratio
        return Estimate(ratio, (ratio, ratio)), 1.0 if ratio <= 1 else 1 / (n_boot + 1)
    shift = logs - log_ratio[0]
    with np.errstate(divide="ignore", invalid="ignore"):
        t = shift / errors
    high_t, low_t = np.where(np.isnan(t), np.inf, t), np.where(np.isnan(t), -np.inf, t)
    p_value = float((1 + (high_t >= log_ratio[0] / error[0]).sum()) / (n_boot + 1))
    tail = (1 - confidence) / 2
    with np.errstate(over="ignore"):
        low = np.exp(log_ratio[0] - error[0] * np.quantile(high_t, 1 - tail, method="higher"))
        high = np.exp(log_ratio[0] - error[0] * np.quantile(low_t, tail, method="lower"))
    return Estimate(ratio, (float(low), float(high))), p_value


def rule_of_three(n: int) -> float:
    """Return the upper 95 % confidence bound of a rate after zero events in `n` trials.

    The exact bound 1 − 0.05^(1/n), which is about 3/n for large n (and a little below it).

    Raises
    ------
    InputError
        `n` is below 1.

    Examples
    --------
    >>> round(rule_of_three(100), 4)
    0.0295
    """
    if n < 1:
        raise InputError(f"n={n} trials given; a bound needs at least one.")
    return float(-np.expm1(np.log(0.05) / n))


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


def _check_bootstrap(confidence: float, n_boot: int) -> None:
    """Refuse bootstrap options out of range."""
    if not 0 < confidence < 1 or n_boot < 1:
        raise InputError(
            f"confidence={confidence}, n_boot={n_boot} given; a confidence between 0 and 1 and at least one "
            "resample are needed."
        )


def _resamples(shape: tuple[int, ...], n_boot: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Yield row numbers `[resample, prompt]` in chunks that keep resampled data of `shape` small."""
    rng = np.random.default_rng(seed)
    size = max(1, _CHUNK // max(1, int(np.prod(shape))))
    for start in range(0, n_boot, size):
        yield rng.integers(0, shape[0], size=(min(size, n_boot - start), shape[0]))


def _median(x: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    """Return the median along an axis without its NaNs, NaN where nothing else is there; infinities count."""
    ordered = np.moveaxis(np.sort(x, axis=axis), axis, 0)  # NaN sorts last
    count = (~np.isnan(ordered)).sum(axis=0)
    lower, upper = np.maximum(count - 1, 0) // 2, np.minimum(count // 2, len(ordered) - 1)
    low, high = (np.take_along_axis(ordered, i[None], axis=0)[0] for i in (lower, upper))
    return np.where(lower == upper, low, low / 2 + high / 2)


def _ratio(numerator: NDArray[np.float64], denominator: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a quotient of drifts: x/0 is inf, 0/0 and inf/inf are NaN."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.asarray(numerator / denominator)


def _growth_numbers(
    drift: NDArray[np.float64], floor: NDArray[np.float64], numbers: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Compute the numbers of `Growth`, in its order, from median profiles `[*resample, layer]`."""
    depth = (numbers + 1) / (numbers[-1] + 1)
    quarter = max(int((depth <= 0.25).sum()) - 1, 0)
    last_quarter = depth > 0.75
    first, final = drift[..., 0], drift[..., -1]
    plateau = _median(drift[..., last_quarter], axis=-1)
    level = np.where((plateau > 0) & np.isfinite(plateau), plateau, np.nan)[..., None]
    near = (drift >= level / 2) & (drift <= level * 2)
    reached = np.argmax(near, axis=-1)
    found = near.any(axis=-1)
    return np.stack(
        [
            _ratio(first, final),
            _ratio(drift[..., quarter], final),
            np.where(found, depth[reached], np.nan),
            np.where(found, numbers[reached], np.nan),
            plateau,
            final,
            _ratio(plateau, _median(floor[..., last_quarter], axis=-1)),
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


def mean_measured(x: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    """Return the mean along an axis without its NaNs, NaN where nothing else is there."""
    present = ~np.isnan(x)
    return _ratio(np.where(present, x, 0.0).sum(axis=axis), present.sum(axis=axis).astype(np.float64))


def _log_ratio(pairs: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return log(mean local / mean floor) and its delta-method standard error for `[resample, prompt, 2]`."""
    means, n = pairs.mean(axis=1), pairs.shape[1]
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = pairs / means[:, None]
        influence = relative[..., 0] - relative[..., 1]
        logs = np.log(means[:, 0]) - np.log(means[:, 1])
    return logs, np.sqrt((influence**2).sum(axis=1) / (n * (n - 1)))
