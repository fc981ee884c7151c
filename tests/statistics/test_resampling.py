import itertools
import math

import numpy as np
import pytest

from kvdrift.errors import InputError
from kvdrift.statistics.resampling import bootstrap_interval, jackknife_error, ratio_above_one

INF = math.inf


def test_bootstrap_interval_of_a_mean_has_its_coverage() -> None:
    rng, hits = np.random.default_rng(7), 0
    for seed in range(200):
        low, high = bootstrap_interval(np.mean, rng.normal(size=40), n_boot=500, seed=seed)
        hits += bool(low <= 0 <= high)
    assert 178 <= hits <= 198  # 95 % nominal, about 94 % at n = 40


def test_bootstrap_interval_matches_the_exact_resampling_distribution() -> None:
    data = np.array([0.0, 1.0, 5.0])
    means = np.array(sorted(np.mean(x) for x in itertools.product(data, repeat=3)))
    low, high = bootstrap_interval(np.mean, data, confidence=0.8, n_boot=20000)
    assert (low, high) == pytest.approx((means[2], means[24]))


def partly(value):
    """A statistic that is ``value`` where the mean is above 3, else 1."""
    return lambda x, axis: np.where(x.mean(axis=axis) > 3, value, 1.0)


def test_bootstrap_interval_shapes_and_undefined_outcomes() -> None:
    data = np.arange(12.0).reshape(4, 3)
    low, high = bootstrap_interval(np.mean, data)
    assert low.shape == high.shape == (3,)
    assert (low < high).all()
    low, high = bootstrap_interval(np.mean, data[:1])
    assert np.isnan([low, high]).all()
    low, high = bootstrap_interval(partly(np.nan), data[:, 0])
    assert np.isnan([low, high]).all()  # undefined too often
    low, high = bootstrap_interval(partly(np.inf), data[:, 0])
    assert (low, high) == (1.0, INF)
    with pytest.raises(InputError, match="one prompt or more"):
        bootstrap_interval(np.mean, np.zeros((0, 3)))


def test_chunks_do_not_change_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.random.default_rng(0).normal(size=(6, 4))
    whole = bootstrap_interval(np.mean, data, n_boot=101)
    monkeypatch.setattr("kvdrift.statistics.resampling._CHUNK", 7 * data.size)
    parts = bootstrap_interval(np.mean, data, n_boot=101)
    assert np.array_equal(whole, parts)


def test_ratio_above_one_holds_its_level_and_covers() -> None:
    """Twelve prompts of log-normal noise around a true ratio of 1: one-sided 5 %, interval 95 %."""
    rng, rejected, covered = np.random.default_rng(1), 0, 0
    for seed in range(400):
        estimate, p_value = ratio_above_one(*rng.lognormal(sigma=0.5, size=(2, 12)), n_boot=400, seed=seed)
        low, high = estimate.interval
        rejected, covered = rejected + (p_value <= 0.05), covered + (low <= 1 <= high)
    assert rejected / 400 == pytest.approx(0.05, abs=0.03)
    assert covered / 400 == pytest.approx(0.95, abs=0.03)


def test_the_jackknife_of_a_mean_is_its_standard_error() -> None:
    x = np.random.default_rng(0).normal(size=9)
    assert jackknife_error((x.sum() - x) / 8) == pytest.approx(x.std(ddof=1) / 3)
    assert math.isnan(jackknife_error(x[:1]))
