"""Recovery against a computation by hand, and what it must do whatever the numbers are."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvdrift.patching.recovery import recovery
from kvdrift.statistics.resampling import ratio_above_one

RNG = np.random.default_rng(0)
few = settings(max_examples=50, deadline=None)


def example(n_prompts=6, n_steps=6, n_seeds=3, seed=0):
    rng = np.random.default_rng(seed)
    patched = rng.exponential(size=(n_prompts, n_steps))
    references = 1.5 * rng.exponential(size=(n_seeds, n_prompts, n_steps))
    counted = rng.random((n_prompts, n_steps)) < 0.7
    counted[:, 0] = True
    return patched, references, counted


def by_hand(patched, references, counted, prompts):
    top = bottom = 0.0
    for p in prompts:
        for t in range(patched.shape[1]):
            if counted[p, t]:
                top += patched[p, t]
                bottom += sum(references[s, p, t] for s in range(len(references))) / len(references)
    return 1 - top / bottom if bottom else math.nan


@pytest.mark.parametrize("seed", range(4))
def test_pooled_and_per_prompt_by_hand(seed):
    patched, references, counted = example(seed=seed)
    found = recovery(patched, references, counted, "placebo")
    assert found.value == pytest.approx(by_hand(patched, references, counted, range(6)), rel=1e-13)
    for p in range(6):
        assert found.per_prompt[p] == pytest.approx(by_hand(patched, references, counted, [p]), rel=1e-13)
    assert (found.n, found.reference) == (6, "placebo")
    assert found.low <= found.value <= found.high


def test_what_is_not_counted_may_be_anything():
    patched, references, counted = example()
    expected = recovery(patched, references, counted)
    patched[~counted], references[:, ~counted] = np.nan, np.inf
    assert recovery(patched, references, counted) == expected


def test_the_standard_error_by_leaving_out_one_prompt():
    patched, references, counted = example(n_prompts=5)
    n = 5
    left = [by_hand(patched, references, counted, [p for p in range(n) if p != out]) for out in range(n)]
    mean = sum(left) / n
    expected = math.sqrt((n - 1) / n * sum((x - mean) ** 2 for x in left))
    assert recovery(patched, references, counted).standard_error == pytest.approx(expected, rel=1e-10)


def test_the_spread_is_that_of_single_placebos_against_their_mean():
    patched, references, counted = example()
    mean = references.mean(axis=0)
    single = [1 - references[s][counted].sum() / mean[counted].sum() for s in range(3)]
    found = recovery(patched, references, counted)
    assert found.spread == pytest.approx((min(single), max(single)), rel=1e-12)
    assert found.spread[0] < 0 < found.spread[1]
    assert np.isnan(recovery(patched, references[:1], counted).spread).all()


def test_one_prompt_has_no_interval():
    patched, references, counted = example(n_prompts=1)
    found = recovery(patched, references, counted)
    assert math.isfinite(found.value)
    assert math.isnan(found.low)
    assert math.isnan(found.high)
    assert math.isnan(found.standard_error)


def test_the_interval_is_that_of_the_ratio_turned_round():
    patched, references, counted = example(n_prompts=8)
    own = np.where(counted, patched, 0).sum(axis=1)
    others = np.where(counted, references, 0).sum(axis=2).mean(axis=0)
    ratio, p_value = ratio_above_one(others, own)
    found = recovery(patched, references, counted)
    assert (found.low, found.high) == pytest.approx(tuple(1 - 1 / end for end in ratio.interval), rel=1e-12)
    assert found.p_value == p_value
    assert 0 < found.p_value < 1


def test_exact_recovery_is_certain_and_four_prompts_are_not_enough_for_an_interval():
    _, references, counted = example()
    found = recovery(np.zeros(counted.shape), references, counted)
    assert (found.value, found.low, found.high) == (1, 1, 1)
    assert found.p_value < 0.001
    few = recovery(np.zeros((4, 6)), references[:, :4], counted[:4])
    assert few.value == 1
    assert np.isnan([few.low, few.high, few.p_value]).all()
    assert few.standard_error == 0


def test_a_placebo_that_is_nearly_always_at_the_donor_leaves_the_interval_open_below():
    references = np.array([0.0, 0.0, 0.0, 0.0, 4.0]).reshape(1, 5, 1)
    found = recovery(np.ones((5, 1)), references, np.ones((5, 1), bool))
    assert found.value == -0.25
    assert found.low == -math.inf
    assert found.low < found.value <= found.high


def test_nothing_to_recover_is_nan():
    patched, references, counted = example()
    found = recovery(patched, 0 * references, counted)
    assert math.isnan(found.value)
    assert np.isnan(found.per_prompt).all()
    assert found.n == 0
    nothing = recovery(patched, references, np.zeros_like(counted))
    assert math.isnan(nothing.value)
    assert nothing.n == 0
    assert len(nothing.per_prompt) == 6


def test_a_prompt_with_nothing_to_recover_is_pooled_but_has_no_number_of_its_own():
    patched, references, counted = example()
    references[:, 2] = 0
    found = recovery(patched, references, counted)
    assert math.isnan(found.per_prompt[2])
    assert found.n == 5
    assert found.value == pytest.approx(by_hand(patched, references, counted, range(6)), rel=1e-13)


def test_a_prompt_without_counted_steps_is_left_out():
    patched, references, counted = example()
    counted[1] = False
    found, rest = recovery(patched, references, counted), [0, 2, 3, 4, 5]
    alone = recovery(patched[rest], references[:, rest], counted[rest])
    assert (found.value, found.low, found.high, found.standard_error, found.spread, found.n) == (
        alone.value, alone.low, alone.high, alone.standard_error, alone.spread, 5,
    )  # fmt: skip


numbers = st.lists(st.integers(0, 50), min_size=4, max_size=4)


@few
@given(numbers, numbers)
def test_as_far_as_the_placebo_is_zero_and_at_the_donor_is_one(one, two):
    assume(any(one))
    references = np.array([one, two], float)[:1].reshape(1, 2, 2)
    counted = np.ones((2, 2), bool)
    assert recovery(references[0], references, counted).value == 0
    assert recovery(0 * references[0], references, counted).value == 1


@few
@given(numbers, numbers, st.integers(-20, 20))
def test_the_unit_of_distance_does_not_matter(one, two, power):
    assume(any(two))
    patched, references = np.array(one, float).reshape(2, 2), np.array(two, float).reshape(1, 2, 2)
    counted, scale = np.ones((2, 2), bool), 2.0**power
    assert recovery(scale * patched, scale * references, counted).value == recovery(patched, references, counted).value


@few
@given(numbers, numbers, numbers)
def test_never_above_one_and_falls_with_distance(one, two, more):
    assume(any(two))
    patched, references = np.array(one, float).reshape(2, 2), np.array(two, float).reshape(1, 2, 2)
    counted = np.ones((2, 2), bool)
    near = recovery(patched, references, counted).value
    far = recovery(patched + np.array(more).reshape(2, 2), references, counted).value
    assert far <= near <= 1
