"""Growth, onset and their statistics against hand computations, closed forms and simulations with known truth."""

import itertools
import json
import math
import warnings
from dataclasses import fields

import numpy as np
import pytest

from kvdrift.drift.profile import (
    Estimate,
    Growth,
    Onset,
    growth,
    onset,
)
from kvdrift.errors import InputError

NAN, INF = math.nan, math.inf
NUMBERS = [f.name for f in fields(Growth) if f.name not in ("n_prompts", "note")]


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def value(estimate: Estimate | None) -> float:
    assert estimate is not None
    return estimate.value


# --- growth


def test_growth_numbers_by_hand() -> None:
    # depths 1/8 … 1; quarter = layer 1; last quarter = layers 6, 7
    profile = [0.001, 0.01, 0.02, 0.04, 0.06, 0.1, 0.08, 0.12]
    g = growth([profile], [[0.05] * 8], range(8))
    assert value(g.final) == 0.12
    assert value(g.first_layer_share) == 0.001 / 0.12
    assert value(g.first_quarter_share) == 0.01 / 0.12
    assert value(g.plateau) == pytest.approx(0.1)
    assert value(g.plateau_layer) == 4  # 0.06 is the first of at least 0.05
    assert value(g.plateau_depth) == 5 / 8
    assert value(g.plateau_over_floor) == pytest.approx(2.0)
    assert g.n_prompts == 1
    assert all(getattr(g, name).interval is None for name in NUMBERS)


def test_growth_reads_the_median_over_prompts_not_the_mean() -> None:
    g = growth([[1, 2, 4, 8], [1, 2, 4, 10], [900, 900, 900, 900]], None, range(4))
    assert value(g.final) == 10
    assert value(g.first_layer_share) == 0.1
    assert g.plateau_over_floor is None


def test_growth_of_a_site_absent_in_some_layers() -> None:
    g = growth([[1.0, 2.0, 3.0, 6.0, 8.0]], None, [2, 5, 8, 10, 11])
    assert value(g.first_quarter_share) == 1 / 8  # layer 2 has depth 3/12
    assert value(g.plateau) == 7.0  # layers 10 and 11; layer 8 has depth 9/12
    assert value(g.plateau_layer) == 10
    assert value(g.plateau_depth) == 11 / 12
    late = growth([[1.0, 4.0]], None, [6, 7])
    assert value(late.first_quarter_share) == value(late.first_layer_share) == 0.25


def test_plateau_is_not_claimed_far_above_its_level() -> None:
    g = growth([[50.0, 9.0, 2.1, 1.9, 1.0, 1.0, 1.0, 1.0]], None, range(8))
    assert value(g.plateau_layer) == 3  # a factor 2 to either side
    assert value(g.first_layer_share) == 50.0


def test_growth_skips_what_was_not_measured() -> None:
    whole = growth([[1, 2, 4, 8], [2, 4, 8, 16]], None, range(4), seed=3)
    padded = growth([[1, 2, 4, 8], [NAN] * 4, [2, 4, 8, 16]], None, range(4), seed=3)
    assert whole == padded
    assert padded.n_prompts == 2
    holes = growth([[1, NAN, 4, 8], [2, 4, NAN, 16]], None, range(4))
    assert value(holes.final) == 12
    none = growth([[NAN, NAN]], None, range(2))
    assert none.n_prompts == 0
    assert none.note == "no layer was measured"


def test_bit_identical_profiles_have_no_growth() -> None:
    g = growth(np.zeros((3, 6)), np.ones((3, 6)), range(6))
    assert all(getattr(g, name) is None for name in NUMBERS)
    assert g.n_prompts == 3
    assert "zero at every layer" in g.note


def test_zeros_within_a_profile() -> None:
    quiet_start = growth([[0.0, 0.0, 1.0, 1.0]], [[0.0] * 4], range(4))
    assert value(quiet_start.first_layer_share) == 0.0
    assert value(quiet_start.plateau_over_floor) == INF
    healed = growth([[1.0, 1.0, 1.0, 0.0]], [[0.0] * 4], range(4))
    assert value(healed.first_layer_share) == INF
    assert healed.plateau_layer is None
    assert healed.plateau_depth is None
    assert healed.plateau_over_floor is None
    assert "plateau is zero" in healed.note


def test_infinite_drift_is_shown_and_not_averaged_away() -> None:
    g = growth([[1.0, 2.0, 4.0, INF]], None, range(4))
    assert value(g.final) == INF
    assert value(g.first_layer_share) == 0.0
    assert g.plateau_layer is None


def test_growth_intervals_cover_the_exact_resampling_distribution() -> None:
    profiles = np.array([[1.0, 2, 4, 8], [2.0, 3, 5, 9], [1.0, 1, 8, 16]])
    g = growth(profiles, None, range(4), n_boot=4000)
    finals = sorted(np.median(profiles[list(i), -1]) for i in itertools.product(range(3), repeat=3))
    assert g.final.interval == (finals[0], finals[-1])  # 1/27 of the resamples are the smallest thrice
    g = growth(profiles, None, range(4), n_boot=4000, confidence=0.5)
    assert g.final.interval == (finals[6], finals[20]) == (8.0, 16.0)


def test_growth_resamples_the_floor_with_its_prompts() -> None:
    scale = np.array([[1.0], [10.0], [100.0], [1000.0], [10000.0]])
    g = growth(scale * [1, 2, 3, 3], scale * [1, 1, 1, 1], range(4))
    assert value(g.plateau_over_floor) == 3
    assert g.plateau_over_floor.interval == (3.0, 3.0)
    assert g.plateau.interval[1] > g.plateau.interval[0]


def test_growth_is_reproducible_and_depends_on_the_seed_only() -> None:
    profiles = np.random.default_rng(0).lognormal(size=(9, 12))
    assert growth(profiles, None, range(12)) == growth(profiles, None, range(12))
    assert growth(profiles, None, range(12), n_boot=50) != growth(profiles, None, range(12), n_boot=50, seed=1)


def test_growth_to_dict_is_json() -> None:
    d = growth([[1, 2, 4, 8], [2, 4, 8, 16]], None, range(4)).to_dict()
    assert json.loads(json.dumps(d)) == d
    assert set(d) == {*NUMBERS, *(f"{n}_interval" for n in NUMBERS), "n_prompts", "note"}
    assert d["plateau_layer"] == 2  # median profile 1.5, 3, 6, 12
    assert isinstance(d["plateau_layer"], int)
    assert d["final_interval"] == [8.0, 16.0]
    assert d["plateau_over_floor"] is d["plateau_over_floor_interval"] is None


def test_growth_input_errors() -> None:
    with pytest.raises(InputError, match="2 dimensions"):
        growth([1.0, 2.0], None, range(2))
    with pytest.raises(InputError, match="one column per layer"):
        growth([[1.0, 2.0]], None, range(3))
    with pytest.raises(InputError, match="floor"):
        growth([[1.0, 2.0]], [[1.0]], range(2))
    with pytest.raises(InputError, match="increasing"):
        growth([[1.0, 2.0]], None, [1, 0])
    with pytest.raises(InputError, match="negative"):
        growth([[1.0, -2.0]], None, range(2))
    with pytest.raises(InputError, match=r"confidence=1\.5"):
        growth([[1.0, 2.0]], None, range(2), confidence=1.5)


# --- onset: source


def local(*cells: tuple[int, int, int], shape: tuple[int, int, int] = (2, 3, 5), size: float = 1e-9) -> np.ndarray:
    x = np.zeros(shape)
    for cell in cells:
        x[cell] = size
    return x


def test_a_path_compared_with_itself_has_no_onset() -> None:
    zero = local()
    got = onset({"resid_post": zero, "attn_out": zero, "mlp_out": zero}, zero[None], range(5))
    assert got == Onset(None, None, None, 6, None, None, None, 2, got.reason)
    assert "bit-identical" in got.reason


def test_source_is_the_first_layer_with_any_drift_however_small() -> None:
    got = onset({"resid_post": local((1, 2, 3), (0, 0, 4), size=5e-324)}, None, [0, 2, 4, 6, 8])
    assert (got.source_layer, got.source_module, got.source_share, got.n_pairs) == (6, "block", 1 / 6, 6)
    assert (got.excess_layer, got.excess_ratio, got.excess_p) == (None, None, None)
    assert "no floor" in got.reason


def test_source_module() -> None:
    post, attn, zero = local((0, 1, 2), (1, 1, 2), (0, 0, 3)), local((0, 1, 2)), local()
    assert onset({"resid_post": post, "attn_out": attn, "mlp_out": post}, None, range(5)).source_module == "attn"
    assert onset({"resid_post": post, "attn_out": zero, "mlp_out": post}, None, range(5)).source_module == "mlp"
    assert onset({"resid_post": post, "attn_out": zero}, None, range(5)).source_module == "mlp"
    absent = zero.copy()
    absent[:, :, 2] = NAN  # this layer offers no attn_out
    assert onset({"resid_post": post, "attn_out": absent}, None, range(5)).source_module == "block"


def test_drift_of_a_module_counts_even_where_the_residual_absorbs_it() -> None:
    got = onset({"resid_post": local((0, 0, 4)), "attn_out": local((0, 0, 1), (0, 1, 1))}, None, range(5))
    assert (got.source_layer, got.source_module, got.source_share) == (1, "attn", 2 / 6)


def test_source_skips_cells_that_were_not_measured() -> None:
    x = local((1, 0, 1))
    x[0, :, 1] = NAN
    got = onset({"resid_post": x}, None, range(5))
    assert (got.source_layer, got.source_share, got.n_pairs) == (1, 1 / 3, 3)
    x[0] = NAN
    assert onset({"resid_post": x}, None, range(5)).n_prompts == 1
    assert onset({"resid_post": x * NAN}, None, range(5)).reason == "no local drift was measured"


def test_infinite_local_drift_is_a_source() -> None:
    assert onset({"resid_post": local((0, 0, 2), size=INF)}, None, range(5)).source_layer == 2


def test_onset_of_another_site() -> None:
    x = local((0, 0, 3))
    got = onset({"attn_out": x, "mlp_out": local((0, 0, 2))}, None, range(5), site="mlp_out")
    assert (got.source_layer, got.source_module) == (2, "mlp")
    with pytest.raises(InputError, match="'resid_post'"):
        onset({"attn_out": x}, None, range(5))


# --- onset: excess


def measured(n: int, layers: int, ratios: dict[int, float], seed: int, sigma: float = 0.5):
    rng = np.random.default_rng(seed)
    floor = rng.lognormal(sigma=sigma, size=(3, n, 4, layers)) * 1e-3
    drift = rng.lognormal(sigma=sigma, size=(n, 4, layers)) * 1e-3
    for layer, ratio in ratios.items():
        drift[..., layer] *= ratio
    return drift, floor


def test_excess_finds_the_first_layer_above_its_floor() -> None:
    drift, floor = measured(8, 12, {5: 4.0, 9: 50.0}, seed=1)
    got = onset({"resid_post": drift}, floor, range(10, 22))
    assert got.source_layer == 10
    assert got.excess_layer == 15
    by_hand = drift[..., 5].mean() / floor[..., 5].mean()
    assert value(got.excess_ratio) == pytest.approx(by_hand, rel=1e-12)
    low, high = got.excess_ratio.interval
    assert 1 < low < by_hand < high
    assert 0 < got.excess_p < 0.05
    assert got.reason is None
    assert got.n_prompts == 8


def test_excess_matches_all_resamples_enumerated() -> None:
    rng = np.random.default_rng(11)
    drift, floor = rng.lognormal(0.9, 0.3, size=6), rng.lognormal(0, 0.3, size=6)

    def log_ratio(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
        spread = np.std(x / x.mean() - y / y.mean())  # any constant factor cancels from t
        return math.log(x.mean() / y.mean()), float(spread)

    center, error = log_ratio(drift, floor)
    t = []
    for rows in itertools.product(range(6), repeat=6):
        if len(set(rows)) > 1:
            value_, error_ = log_ratio(drift[list(rows)], floor[list(rows)])
            t.append((value_ - center) / error_)
        else:
            t.append(math.copysign(INF, log_ratio(drift[list(rows)], floor[list(rows)])[0] - center))
    t = np.array(t)
    got = onset({"resid_post": drift[:, None, None]}, floor[None, :, None, None], [0], n_boot=40_000)
    p_exact = float(np.mean(t >= center / error))
    assert 0 < p_exact < 0.025
    assert got.excess_p == pytest.approx(p_exact, abs=4 * math.sqrt(p_exact / 40_000))
    ends = np.exp(center - error * np.quantile(t, [0.975, 0.025]))
    assert got.excess_ratio.interval == pytest.approx(tuple(ends), rel=0.05)


def test_excess_needs_its_interval_above_one_too() -> None:
    rng = np.random.default_rng(2)
    drift, floor = rng.lognormal(0.16, 0.3, size=(12, 1, 1)), rng.lognormal(0, 0.3, size=(1, 12, 1, 1))
    got = onset({"resid_post": drift}, floor, [0])
    p_value = float(got.reason.split("adjusted p is ")[1].split()[0])
    assert 0.025 < p_value < 0.05  # one-sided: significant, while the two-sided interval still holds 1
    assert got.excess_layer is None


def test_a_floor_that_most_resamples_lack_gives_no_confidence() -> None:
    floor = np.zeros((1, 5, 1, 1))
    floor[0, 0] = 1.0  # a third of the resamples have no floor at all
    got = onset({"resid_post": np.linspace(0.9, 1.1, 5)[:, None, None]}, floor, [0])
    assert got.excess_layer is None
    assert float(got.reason.split("adjusted p is ")[1].split()[0]) > 0.8**5 - 0.03


def test_no_excess_without_an_effect_is_said_in_words() -> None:
    drift, floor = measured(8, 12, {}, seed=2)
    got = onset({"resid_post": drift}, floor, range(12))
    assert (got.excess_layer, got.excess_ratio, got.excess_p) == (None, None, None)
    assert "no layer makes more drift than its floor" in got.reason


def test_drift_below_its_floor_is_no_excess() -> None:
    drift, floor = measured(8, 4, dict.fromkeys(range(4), 0.1), seed=3)
    assert onset({"resid_post": drift}, floor, range(4)).excess_layer is None


def test_false_alarms_stay_rare_with_few_prompts_and_many_layers() -> None:
    alarms = 0
    for seed in range(60):
        drift, floor = measured(6, 30, {}, seed=100 + seed, sigma=0.8)
        alarms += onset({"resid_post": drift}, floor, range(30), n_boot=2000).excess_layer is not None
    assert alarms <= 9  # 5 % nominal: P(more than 9 of 60) < 0.1 %; a percentile bootstrap raises 23 here


def test_few_prompts_leave_the_excess_undetermined() -> None:
    drift, floor = measured(4, 3, {0: 1000.0}, seed=4)
    got = onset({"resid_post": drift}, floor, range(3))
    assert got.source_layer == 0
    assert got.excess_layer is None
    assert "undetermined: 4 prompts were measured, 5 are needed" in got.reason


def test_a_constant_ratio_needs_no_spread() -> None:
    floor = np.random.default_rng(0).lognormal(size=(1, 6, 2, 3))
    got = onset({"resid_post": floor[0] * [0.5, 1.0, 2.0]}, floor, range(3))
    assert got.excess_layer == 2
    assert got.excess_ratio.value == pytest.approx(2.0)
    assert got.excess_ratio.interval == pytest.approx((2.0, 2.0))


def test_zero_floors() -> None:
    drift, floor = np.zeros((6, 2, 3)), np.zeros((2, 6, 2, 3))
    drift[..., 1] = 1e-6  # every prompt drifts where the floor is exactly zero
    drift[0, 0, 0] = 1e-6  # one prompt alone is no evidence
    got = onset({"resid_post": drift}, floor, range(3), n_boot=2000)
    assert (got.source_layer, got.excess_layer) == (0, 1)
    assert got.excess_ratio == Estimate(INF, (INF, INF))
    # layer 0: p ≈ (5/6)^6 = 0.33; layer 1: 1/2001, times 3 by Holm; layer 2, zero over zero: 1
    assert got.excess_p == pytest.approx(3 / 2001)
    floor[..., 1] = 1.0
    assert onset({"resid_post": drift}, floor, range(3)).excess_layer is None


def test_excess_compares_the_same_cells() -> None:
    drift, floor = measured(7, 3, {1: 6.0}, seed=5)
    want = onset({"resid_post": drift[:, :3]}, floor[:, :, :3], range(3))
    drift[:, 3] = NAN  # not measured, while its floor is: must not enter the floor's mean
    floor[:, :, 3] = 1e9
    got = onset({"resid_post": drift}, floor, range(3))
    assert got.excess_ratio.value == pytest.approx(want.excess_ratio.value, rel=1e-12)
    floor[0, 0, 0] = NAN  # one seed missing in one cell: the others stand for it
    assert onset({"resid_post": drift}, floor, range(3)).excess_layer == 1
    floor[:, :3] = NAN
    assert "4 prompts" in onset({"resid_post": drift}, floor, range(3)).reason


def test_a_layer_measured_in_few_prompts_is_not_tested() -> None:
    drift, floor = measured(8, 3, {0: 100.0, 2: 100.0}, seed=6)
    drift[4:, :, 0] = NAN
    assert onset({"resid_post": drift}, floor, range(3)).excess_layer == 2


def test_onset_input_errors() -> None:
    x = local()
    with pytest.raises(InputError, match="one column per layer"):
        onset({"resid_post": x}, None, range(4))
    with pytest.raises(InputError, match="one column per layer"):
        onset({"resid_post": x, "attn_out": x[:1]}, None, range(5))
    with pytest.raises(InputError, match="local floor of shape"):
        onset({"resid_post": local((0, 0, 0))}, x[None, :1], range(5))
    with pytest.raises(InputError, match="3 dimensions"):
        onset({"resid_post": x[0]}, None, range(5))
    with pytest.raises(InputError, match="n_boot=0"):
        onset({"resid_post": x}, None, range(5), n_boot=0)
