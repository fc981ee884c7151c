"""Placebos: noise of the patch's size, and one entry by one ulp."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdrift.drift.metrics import site_metrics
from kvdrift.patching.noise import CLOSE_ENOUGH, generator, noisy, nudged

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("relative", [1.0, 0.1, 0.02])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_noise_that_is_left_has_the_norm_of_the_difference(dtype, relative):
    own = random(1, 2, 12, 32).to(dtype)
    other = (own.double() + relative * random(1, 2, 12, 32, seed=1)).to(dtype)
    written = noisy(own, other, generator(3))
    assert written.dtype == dtype
    assert written.shape == own.shape
    target = (other.double() - own.double()).norm()
    realised = (written.double() - own.double()).norm()
    assert abs(realised / target - 1) <= CLOSE_ENOUGH
    cosine = ((written - own).double() * (other - own).double()).sum() / (target * realised)
    assert abs(cosine) < 0.15, "noise has none of the donor's content"


@pytest.mark.parametrize("entries", [2, 64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_differences_of_a_few_ulps_are_matched_too(dtype, entries):
    """Spread over a row, noise far below one ulp would be swallowed by rounding; one scale for all makes up for it."""
    own = random(1, 2, 16, 64).to(dtype)
    other = own.clone()
    for _ in range(3):
        other[..., :entries] = torch.nextafter(other, torch.full_like(other, math.inf))[..., :entries]
    realised = (noisy(own, other, generator(0)).double() - own.double()).norm()
    assert abs(realised / (other.double() - own.double()).norm() - 1) <= CLOSE_ENOUGH


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_a_difference_get_no_noise(dtype, same_bits):
    own = random(1, 2, 12, 32).to(dtype)
    other = own.clone()
    other[:, 1, 3:7] += random(1, 4, 32, seed=2).to(dtype)
    written = noisy(own, other, generator(0))
    changed = (written != own).any(dim=-1)
    expected = torch.zeros(1, 2, 12, dtype=torch.bool)
    expected[:, 1, 3:7] = True
    assert torch.equal(changed, expected)
    assert same_bits(noisy(own, own, generator(0)), own)


def test_inputs_are_left_alone_and_the_key_decides(same_bits):
    own, other = random(3, 32).float(), random(3, 32, seed=1).float()
    kept = own.clone(), other.clone()
    first = noisy(own, other, generator(1, 2, "k", 0))
    assert same_bits(own, kept[0])
    assert same_bits(other, kept[1])
    assert same_bits(noisy(own, other, generator(1, 2, "k", 0)), first)
    for key in ((2, 2, "k", 0), (1, 3, "k", 0), (1, 2, "v", 0), (1, 2, "k", 1)):
        assert not same_bits(noisy(own, other, generator(*key)), first)
    state = torch.random.get_rng_state()
    noisy(own, other, generator(0))
    nudged(own, generator(0))
    assert torch.equal(torch.random.get_rng_state(), state), "the global random state is not moved"


def test_a_returned_placebo_is_a_tensor_of_its_own():
    own = random(3, 32).float()
    noisy(own, own, generator(0)).zero_()
    assert own.any()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from(DTYPES), st.integers(1, 40))
def test_exactly_one_entry_moves_by_exactly_one_ulp(seed, dtype, n):
    own = random(2, n, seed=seed).to(dtype)
    own[0, : n // 3] = 0.0
    changed = nudged(own, generator(seed))
    assert ((own - changed) != 0).sum() == 1
    metrics = site_metrics(changed.flatten(), own.flatten())
    assert float(metrics["max_ulp"]) == 1
    assert (changed.abs() >= own.abs()).all(), "away from zero"


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -1.0, 2.0, -4.0, 1e-3, -1e-3, 100.0, -0.5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_ulp_of_any_number(dtype, value):
    own = torch.full((3, 4), value, dtype=dtype)
    changed = nudged(own, generator(0))
    moved = (changed != own).nonzero()
    assert len(moved) == 1
    assert float(site_metrics(changed.flatten(), own.flatten())["max_ulp"]) == 1
    entry = changed[tuple(moved[0])]
    assert entry.abs() > abs(own[0, 0])
    assert value == 0 or math.copysign(1, entry) == math.copysign(1, value)
    assert (own == value).all(), "the input is left alone"


def test_a_strided_value_is_nudged_in_one_place():
    own = random(1, 6, 4, 8).float().transpose(1, 2)
    changed = nudged(own, generator(5))
    assert changed.shape == own.shape
    assert (changed != own).sum() == 1
