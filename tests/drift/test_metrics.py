"""Metrics against references that share no code with them: exact fractions, 60-digit decimals, bit walking."""

import inspect
import math
import struct
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import kvdrift as kd
from kvdrift.drift.metrics import (
    LOGIT_METRICS,
    SITE_METRICS,
    kl_divergence,
    logit_l2,
    logit_metrics,
    relative_l2,
    site_metrics,
)
from kvdrift.errors import InputError

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INF, NAN = math.inf, math.nan
few = settings(max_examples=60, deadline=None)


# --- the module


def test_the_module_is_public_and_lists_its_functions() -> None:
    assert "metrics" in kd.__all__
    public = {
        name for name, f in inspect.getmembers(kd.metrics, inspect.isfunction) if f.__module__ == kd.metrics.__name__
    }
    public = {name for name in public if not name.startswith("_")}
    assert public == {"site_metrics", "relative_l2", "logit_metrics", "kl_divergence", "logit_l2"}
    assert all(f"- `{name}`" in kd.metrics.__doc__ for name in public)


def test_the_reference_is_the_second_argument_except_of_kl_divergence() -> None:
    a, b = torch.tensor([3.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 0.0])
    q = 1 / 3  # softmax of b
    log_p = a.double().log_softmax(-1)
    kl = float(sum(q * (math.log(q) - float(x)) for x in log_p))
    assert float(kd.metrics.logit_metrics(a, b)["kl"]) == pytest.approx(kl)
    assert float(kd.metrics.kl_divergence(b, a)) == pytest.approx(kl)
    assert float(kd.metrics.kl_divergence(a, b)) != pytest.approx(kl)
    assert float(kd.metrics.relative_l2(a, b + 1)) == pytest.approx(math.sqrt(6) / math.sqrt(3))


# --- references


def exact_root(x: Fraction) -> Decimal:
    with localcontext() as context:
        context.prec = 60
        return (Decimal(x.numerator) / Decimal(x.denominator)).sqrt()


def exact_site(a: torch.Tensor, b: torch.Tensor) -> dict[str, float]:
    """rel_l2, max_abs and cosine from exact sums of the stored values."""
    xs, ys = ([Fraction(float(v)) for v in t.flatten().double()] for t in (a, b))
    aa, bb = sum(x * x for x in xs), sum(y * y for y in ys)
    ab = sum(x * y for x, y in zip(xs, ys, strict=True))
    dd = sum((x - y) ** 2 for x, y in zip(xs, ys, strict=True))
    with localcontext() as context:
        context.prec = 60
        cosine = 1 - Decimal(ab.numerator) / Decimal(ab.denominator) / (exact_root(aa) * exact_root(bb))
    return {
        "rel_l2": float(exact_root(dd / bb)),
        "max_abs": float(max(abs(x - y) for x, y in zip(xs, ys, strict=True))),
        "cosine": float(cosine),
    }


def rank(value: float, dtype: torch.dtype) -> int:
    """Signed number of representable values between 0 and `value`, from the bits that struct packs."""
    if dtype == torch.bfloat16:
        bits, top = struct.unpack("<I", struct.pack("<f", value))[0] >> 16, 1 << 15
    else:
        code, integer, width = {
            torch.float16: ("<e", "<H", 16),
            torch.float32: ("<f", "<I", 32),
            torch.float64: ("<d", "<Q", 64),
        }[dtype]
        bits, top = struct.unpack(integer, struct.pack(code, value))[0], 1 << (width - 1)
    return bits if bits < top else -(bits - top)


def exact_divergences(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """KL(b‖a) and Jensen-Shannon with 60 digits."""
    with localcontext() as context:
        context.prec = 60
        p, q = ([Decimal(float(v)).exp() for v in t.double()] for t in (a, b))
        p, q = [v / sum(p) for v in p], [v / sum(q) for v in q]
        kl = sum(y * (y / x).ln() for x, y in zip(p, q, strict=True))
        js = sum(x * (2 * x / (x + y)).ln() + y * (2 * y / (x + y)).ln() for x, y in zip(p, q, strict=True)) / 2
        return float(kl), float(js)


def pair(dtype: torch.dtype, *shape: int, noise: float = 0.05, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(shape, generator=generator, dtype=torch.float64)
    return a.to(dtype), (a + noise * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)


def one(metrics: dict[str, torch.Tensor]) -> dict[str, float]:
    return {key: float(value) for key, value in metrics.items()}


def vectors(a: list[float], b: list[float], dtype: torch.dtype = torch.float32) -> dict[str, float]:
    return one(site_metrics(torch.tensor(a, dtype=dtype), torch.tensor(b, dtype=dtype)))


# --- site metrics


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("noise", [0.05, 1e-3])
def test_site_metrics_equal_exact_arithmetic(dtype: torch.dtype, noise: float) -> None:
    a, b = pair(dtype, 40, noise=noise)
    got, want = one(site_metrics(a, b)), exact_site(a, b)
    assert got["rel_l2"] == pytest.approx(want["rel_l2"], rel=1e-13)
    assert got["max_abs"] == want["max_abs"]
    assert got["cosine"] == pytest.approx(want["cosine"], rel=1e-9)
    steps = [abs(rank(float(x), dtype) - rank(float(y), dtype)) for x, y in zip(a, b, strict=True)]
    assert got["max_ulp"] == float(max(steps))
    assert got["identical"] == sum(s == 0 for s in steps) / 40


def test_cosine_keeps_its_digits_when_vectors_are_close() -> None:
    a, b = pair(torch.float64, 50, noise=1e-9)
    want = exact_site(a, b)["cosine"]
    assert 0 < want < 1e-15  # 1 − cos in plain float64 would be 0 or one ulp
    assert one(site_metrics(a, b))["cosine"] == pytest.approx(want, rel=1e-5)


def test_batch_dimensions_and_dims() -> None:
    a, b = pair(torch.bfloat16, 3, 2, 5, 7)
    by_vector, by_matrix = site_metrics(a, b), site_metrics(a, b, dims=2)
    assert set(by_vector) == set(SITE_METRICS)
    for key in SITE_METRICS:
        assert by_vector[key].shape == (3, 2, 5)
        assert by_matrix[key].shape == (3, 2)
        assert by_vector[key].dtype == by_matrix[key].dtype == torch.float64
        assert by_vector[key][1, 1, 3] == site_metrics(a[1, 1, 3], b[1, 1, 3])[key]
        assert by_matrix[key][2, 0] == site_metrics(a[2, 0].flatten(), b[2, 0].flatten())[key]
    assert float(by_matrix["rel_l2"][0, 1]) == pytest.approx(exact_site(a[0, 1], b[0, 1])["rel_l2"], rel=1e-13)


def test_strided_views_give_the_numbers_of_their_copies() -> None:
    a, b = pair(torch.float16, 6, 8)
    for key, value in site_metrics(a.T, b.T).items():
        want = site_metrics(a.T.contiguous(), b.T.contiguous())[key]
        torch.testing.assert_close(value, want, rtol=1e-12, atol=0)  # other strides, other order of the sums


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_bits_give_exact_zeros(dtype: torch.dtype) -> None:
    a, _ = pair(dtype, 4, 9)
    m = site_metrics(a, a.clone())
    for key in ("rel_l2", "max_abs", "max_ulp", "cosine"):
        assert torch.equal(m[key], torch.zeros(4, dtype=torch.float64))
    assert torch.equal(m["identical"], torch.ones(4, dtype=torch.float64))


def test_an_equal_row_beside_one_that_differs() -> None:
    a, b = pair(torch.float32, 2, 9)
    b[0] = a[0]
    m = site_metrics(a, b)
    assert [float(m[key][0]) for key in SITE_METRICS] == [0.0, 0.0, 0.0, 0.0, 1.0]
    assert float(m["rel_l2"][1]) > 0


def test_zero_vectors() -> None:
    assert vectors([0.0, 0.0], [0.0, 0.0])["rel_l2"] == 0
    gone = vectors([0.0, 0.0], [3.0, 4.0])
    assert (gone["rel_l2"], gone["cosine"], gone["max_abs"]) == (1.0, 1.0, 4.0)
    new = vectors([3.0, 4.0], [0.0, 0.0])
    assert (new["rel_l2"], new["cosine"]) == (INF, 1.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_signed_zeros_differ_in_bits_only(dtype: torch.dtype) -> None:
    m = vectors([0.0, -0.0, 1.0, -0.0], [-0.0, 0.0, 1.0, -0.0], dtype)
    assert m == {"rel_l2": 0.0, "max_abs": 0.0, "max_ulp": 0.0, "cosine": 0.0, "identical": 0.5}
    tiny = float(torch.finfo(dtype).smallest_normal) * torch.finfo(dtype).eps
    across = vectors([tiny], [-tiny], dtype)
    assert across["max_ulp"] == 2.0  # the two smallest subnormals, zero between them counted once


@pytest.mark.parametrize("dtype", DTYPES)
def test_subnormals_are_exact(dtype: torch.dtype) -> None:
    tiny = float(torch.finfo(dtype).smallest_normal) * torch.finfo(dtype).eps
    m = vectors([3 * tiny, 4 * tiny], [0.0, 4 * tiny], dtype)
    assert tiny > 0
    assert m["rel_l2"] == 0.75
    assert m["max_abs"] == 3 * tiny
    assert m["max_ulp"] == 3.0
    assert m["cosine"] == pytest.approx(0.2, rel=1e-14)  # cos = 16 / (5 · 4)


def test_float64_extremes_neither_overflow_nor_vanish() -> None:
    small = vectors([1e-200, 2e-200], [1e-200, 1e-200], torch.float64)
    large = vectors([1e200, 2e200], [1e200, 1e200], torch.float64)
    for m in (small, large):
        assert m["rel_l2"] == pytest.approx(math.sqrt(0.5), rel=1e-15)
        assert m["cosine"] == pytest.approx(1 - 3 / math.sqrt(10), rel=1e-14)
    mixed = vectors([1.0, 2e-200], [1.0, 1e-200], torch.float64)
    assert mixed["rel_l2"] == pytest.approx(1e-200, rel=1e-15)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ulp_counts_match_a_walk_along_the_floats(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    for start, count in ((1.0, 5), (-2.0, 7), (0.0, 3), (-largest, 1), (1.5e-5, 11)):
        value = torch.tensor([start], dtype=dtype)
        walked = value.clone()
        for _ in range(count):
            walked = torch.nextafter(walked, torch.tensor([INF], dtype=dtype))
        assert one(site_metrics(walked, value))["max_ulp"] == count


def test_ulp_across_the_whole_range_of_float64_and_float32() -> None:
    for dtype in (torch.float32, torch.float64):
        largest = torch.finfo(dtype).max
        assert vectors([largest], [-largest], dtype)["max_ulp"] == float(2 * rank(largest, dtype))
    assert vectors([INF], [torch.finfo(torch.float16).max], torch.float16)["max_ulp"] == 1.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_is_never_a_number(dtype: torch.dtype) -> None:
    for a in ([NAN, 1.0], [2.0, 1.0]):
        m = vectors(a, [NAN, 1.0], dtype)
        assert all(math.isnan(m[key]) for key in ("rel_l2", "max_abs", "max_ulp", "cosine"))
        assert m["identical"] == (1.0 if math.isnan(a[0]) else 0.5)
    assert math.isnan(vectors([0.0], [NAN], dtype)["cosine"])


def test_nans_of_other_bits_are_not_identical() -> None:
    bits = torch.tensor([0x7FC00000, 0x3F800000], dtype=torch.int32)
    a, b = bits.view(torch.float32), (bits + torch.tensor([1, 0], dtype=torch.int32)).view(torch.float32)
    assert float(site_metrics(a, b)["identical"]) == 0.5


def test_nan_stays_in_its_row() -> None:
    a, b = pair(torch.float32, 2, 5)
    a[0, 2] = NAN
    m = site_metrics(a, b)
    assert m["rel_l2"].isnan().tolist() == m["max_ulp"].isnan().tolist() == [True, False]


def test_infinities() -> None:
    same = vectors([INF, 1.0], [INF, 1.0])
    assert same == {"rel_l2": 0.0, "max_abs": 0.0, "max_ulp": 0.0, "cosine": 0.0, "identical": 1.0}
    signed = vectors([INF, 0.0], [INF, -0.0])  # equal by value, not by bits
    assert (signed["rel_l2"], signed["cosine"], signed["identical"]) == (0.0, 0.0, 0.5)
    other = vectors([INF, 3.0], [INF, 1.0])
    assert other["max_abs"] == 2.0
    assert math.isnan(other["rel_l2"])
    assert math.isnan(other["cosine"])
    new = vectors([INF, 1.0], [2.0, 1.0])
    assert (new["rel_l2"], new["max_abs"]) == (INF, INF)
    assert math.isnan(new["cosine"])
    lost = vectors([2.0, 1.0], [INF, 1.0])
    assert lost["max_abs"] == INF
    assert math.isnan(lost["rel_l2"])
    assert vectors([INF], [-INF])["max_abs"] == INF
    assert math.isnan(vectors([0.0], [INF])["cosine"])


def test_dtypes_that_differ_are_compared_by_value() -> None:
    a = torch.tensor([1.0, 0.1, -0.0], dtype=torch.float32)
    b = a.to(torch.bfloat16)
    m = site_metrics(a, b)
    assert "max_ulp" not in m
    assert float(m["identical"]) == pytest.approx(2 / 3)
    assert float(m["max_abs"]) == abs(float(a[1]) - float(b[1]))
    assert float(site_metrics(a, a.double())["identical"]) == 1.0


def test_nothing_to_compare_is_nan() -> None:
    empty = torch.zeros(2, 0, 4)
    assert all(value.isnan().all() and value.shape == (2,) for value in site_metrics(empty, empty, dims=2).values())
    assert relative_l2(torch.zeros(2, 0), torch.zeros(2, 0)).isnan().all()
    assert relative_l2(torch.zeros(0, 3), torch.zeros(0, 3)).shape == (0,)


def test_site_input_errors() -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(InputError, match=r"\(2, 3\) and \(3, 2\)"):
        site_metrics(x, x.T)
    with pytest.raises(InputError, match="float8"):
        site_metrics(x.to(torch.float8_e5m2), x.to(torch.float8_e5m2))
    for dims in (0, 3):
        with pytest.raises(InputError, match=f"dims={dims}"):
            site_metrics(x, x, dims=dims)
    with pytest.raises(InputError, match="dim=2"):
        relative_l2(x, x, dim=2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_relative_l2_by_position(dtype: torch.dtype) -> None:
    a, b = pair(dtype, 2, 6, 5)
    b[0, 3] = a[0, 3]
    got = relative_l2(a, b)
    assert got.shape == (2, 6)
    assert torch.equal(got, site_metrics(a, b)["rel_l2"])
    assert got[0, 3] == 0
    assert torch.equal(relative_l2(a, b, dim=1), site_metrics(a.mT, b.mT)["rel_l2"])
    assert torch.equal(relative_l2(a, a), torch.zeros(2, 6, dtype=torch.float64))


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
lists = st.lists(st.tuples(floats, floats), min_size=1, max_size=8)


@few
@given(lists)
def test_max_abs_and_max_ulp_are_symmetric(values: list[tuple[float, float]]) -> None:
    a, b = (torch.tensor(x, dtype=torch.float32) for x in zip(*values, strict=True))
    forward, backward = one(site_metrics(a, b)), one(site_metrics(b, a))
    assert forward["max_abs"] == backward["max_abs"]
    assert forward["max_ulp"] == backward["max_ulp"]
    assert forward["cosine"] == backward["cosine"]
    assert 0 <= forward["cosine"] <= 2


@few
@given(st.lists(st.tuples(*[st.integers(0, 2**16 - 1)] * 2), min_size=1, max_size=6), st.booleans())
def test_identical_is_one_only_for_equal_bits(values: list[tuple[int, int]], copy: bool) -> None:
    left, right = (np.array(x, dtype=np.uint16) for x in zip(*values, strict=True))
    right = left.copy() if copy else right
    for dtype in (torch.float16, torch.bfloat16):
        a, b = (torch.from_numpy(x.view(np.int16)).view(dtype) for x in (left, right))
        m = one(site_metrics(a, b))
        assert (m["identical"] == 1) == bool((left == right).all())
        assert m["identical"] == np.mean(left == right)
        if m["rel_l2"] == 0:
            assert bool((a == b).all())


@few
@given(
    st.lists(st.tuples(*[st.floats(-8, 8, width=16)] * 2), min_size=2, max_size=8),
    st.integers(-60, 60),
    st.integers(-60, 60),
)
def test_rel_l2_ignores_powers_of_two(values: list[tuple[float, float]], power: int, other: int) -> None:
    a, b = (torch.tensor(x, dtype=torch.float64) for x in zip(*values, strict=True))
    for dtype in (torch.float32, torch.float64):
        x, y = a.to(dtype), b.to(dtype)
        scaled = site_metrics(x * 2.0**power, y * 2.0**power)
        plain = site_metrics(x, y)
        assert float(scaled["rel_l2"]) == float(plain["rel_l2"])
        assert float(scaled["cosine"]) == float(plain["cosine"])
        cosine = site_metrics(x * 2.0**power, y * 2.0**other)["cosine"]
        assert float(cosine) == pytest.approx(float(plain["cosine"]), abs=1e-15)


# --- logit metrics


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("noise", [3.0, 0.05])
def test_divergences_equal_sixty_digits(dtype: torch.dtype, noise: float) -> None:
    a, b = pair(dtype, 60, noise=noise)
    a, b = a * 4, b * 4
    m = one(logit_metrics(a, b))
    kl, js = exact_divergences(a, b)
    assert m["kl"] == pytest.approx(kl, rel=1e-11)
    assert m["js"] == pytest.approx(js, rel=1e-11)
    assert float(kl_divergence(b, a)) == m["kl"]
    assert float(kl_divergence(a, b)) != m["kl"]


def test_tiny_divergences_keep_their_digits() -> None:
    a, b = pair(torch.float64, 60, noise=1e-8)
    a, b = a * 4 + 30, b * 4 + 30
    kl, js = exact_divergences(a, b)
    assert kl < 1e-14  # below the rounding of a plain Σ q (log q − log p)
    m = one(logit_metrics(a, b))
    assert m["kl"] == pytest.approx(kl, rel=1e-5)
    assert m["js"] == pytest.approx(js, rel=1e-5)


def test_divergences_of_far_apart_distributions() -> None:
    a, b = torch.tensor([0.0, 900.0, 0.0]).double(), torch.tensor([900.0, 0.0, 0.0]).double()
    m = one(logit_metrics(a, b))
    assert m["kl"] == pytest.approx(900.0, rel=1e-14)
    assert m["js"] == pytest.approx(math.log(2), rel=1e-14)


def test_the_rest_of_the_logit_metrics_by_hand() -> None:
    a = torch.tensor([[4.0, 1.0, 3.5, 0.0], [1.0, 2.0, 2.0, 0.0]])
    b = torch.tensor([[3.0, 1.0, 5.0, 1.0], [1.0, 2.0, 2.0, 1.0]])
    m = logit_metrics(a, b, top_k=2)
    assert tuple(m) == LOGIT_METRICS
    assert m["flip"].tolist() == [1.0, 0.0]
    assert m["tie_a"].tolist() == m["tie_b"].tolist() == [0.0, 1.0]
    assert m["margin_a"].tolist() == [0.5, 0.0]
    assert m["margin_b"].tolist() == [2.0, 0.0]
    assert m["topk_overlap"].tolist() == [1.0, 1.0]
    assert m["logit_max"].tolist() == [1.5, 1.0]
    # a − b = [1, 0, −1.5, −1], mean −0.375; and [0, 0, 0, −1], mean −0.25
    assert m["logit_l2"].tolist() == pytest.approx([math.sqrt(4.25 - 4 * 0.375**2), math.sqrt(0.75)], rel=1e-15)


def test_topk_overlap_counts_common_tokens() -> None:
    a, b = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0, 0.0]), torch.tensor([0.0, 4.0, 3.0, 2.0, 1.0, 5.0])
    for k, want in ((1, 0.0), (2, 0.5), (3, 2 / 3), (5, 0.8), (6, 1.0), (99, 1.0)):
        assert float(logit_metrics(a, b, top_k=k)["topk_overlap"]) == pytest.approx(want)
    c = torch.tensor([5.0, 0.0, 1.0, 2.0, 3.0, 4.0])
    for k, want in ((1, 1.0), (2, 0.5)):
        assert float(logit_metrics(a, c, top_k=k)["topk_overlap"]) == want


def test_a_tie_resolves_to_the_lowest_token_and_is_no_flip_by_itself() -> None:
    a = torch.tensor([1.0, 7.0, 7.0], dtype=torch.bfloat16)
    b = torch.tensor([1.0, 7.0, 6.5], dtype=torch.bfloat16)
    m = one(logit_metrics(a, b))
    assert (m["flip"], m["tie_a"], m["tie_b"]) == (0.0, 1.0, 0.0)
    c = torch.tensor([1.0, 6.5, 7.0], dtype=torch.bfloat16)
    assert one(logit_metrics(a, c))["flip"] == 1.0


def test_equal_logits_still_have_real_margins_and_ties() -> None:
    a = torch.tensor([[1.0, 3.0, 2.5], [3.0, 3.0, 0.0], [NAN, 1.0, 0.0]])
    m = logit_metrics(a[:2], a[:2].clone())
    for key in ("kl", "js", "flip", "logit_l2", "logit_max"):
        assert m[key].tolist() == [0.0, 0.0]
    assert m["topk_overlap"].tolist() == [1.0, 1.0]
    assert m["margin_a"].tolist() == m["margin_b"].tolist() == [0.5, 0.0]
    assert m["tie_a"].tolist() == m["tie_b"].tolist() == [0.0, 1.0]
    for value in logit_metrics(a, a.clone()).values():
        assert value.isnan().tolist() == [False, False, True]


def test_masked_vocabulary_counts_for_nothing() -> None:
    a, b = pair(torch.float32, 30, noise=0.3)
    keep = torch.arange(30) % 3 != 0
    masked = logit_metrics(a.masked_fill(~keep, -INF), b.masked_fill(~keep, -INF))
    for key, value in logit_metrics(a[keep], b[keep]).items():
        assert float(masked[key]) == pytest.approx(float(value), rel=1e-13), key


def test_a_token_masked_on_one_side_only() -> None:
    full, cut = torch.tensor([2.0, 1.0, 0.0]), torch.tensor([2.0, 1.0, -INF])
    m = one(logit_metrics(cut, full))
    assert (m["kl"], m["logit_l2"], m["logit_max"]) == (INF, INF, INF)
    assert 0 < m["js"] < math.log(2)
    m = one(logit_metrics(full, cut))
    assert (m["logit_l2"], m["logit_max"]) == (INF, INF)
    share = math.exp(0) / (math.exp(2) + math.exp(1) + math.exp(0))
    assert m["kl"] == pytest.approx(-math.log1p(-share), rel=1e-13)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_row_without_a_softmax_is_nan_throughout(bad: float) -> None:
    a, b = torch.tensor([[1.0, bad, 0.0], [1.0, 0.0, 2.0]]), torch.tensor([[1.0, 2.0, 0.0], [2.0, 0.0, 1.0]])
    m = logit_metrics(a, b)
    for key in set(LOGIT_METRICS) - {"margin_b", "tie_b"}:
        assert m[key].isnan().tolist() == [True, False], key
    assert m["margin_b"].tolist() == [1.0, 1.0]
    m = logit_metrics(b, a)
    for key in set(LOGIT_METRICS) - {"margin_a", "tie_a"}:
        assert m[key].isnan().tolist() == [True, False], key
    assert kl_divergence(a, b).isnan().tolist() == kl_divergence(b, a).isnan().tolist() == [True, False]
    nothing = torch.full((3,), -INF)
    assert math.isnan(kl_divergence(nothing, nothing.clone()))
    assert math.isnan(logit_metrics(nothing, b[0])["logit_max"])


def test_logits_of_other_dtypes() -> None:
    a, b = pair(torch.float32, 20)
    m = one(logit_metrics(a.bfloat16(), b))
    assert m["kl"] == pytest.approx(exact_divergences(a.bfloat16(), b)[0], rel=1e-11)


def test_logit_input_errors() -> None:
    with pytest.raises(InputError, match="two or more"):
        logit_metrics(torch.zeros(3, 1), torch.zeros(3, 1))
    with pytest.raises(InputError, match="top_k=0"):
        logit_metrics(torch.zeros(3), torch.zeros(3), top_k=0)
    with pytest.raises(InputError, match="vocabulary"):
        kl_divergence(torch.zeros(3, 0), torch.zeros(3, 0))


logits = st.lists(st.tuples(*[st.floats(-40, 40, width=16)] * 2), min_size=2, max_size=12)


@few
@given(logits, st.sampled_from(DTYPES))
def test_divergences_are_bounded(values: list[tuple[float, float]], dtype: torch.dtype) -> None:
    a, b = (torch.tensor(x, dtype=dtype) for x in zip(*values, strict=True))
    m, back = one(logit_metrics(a, b)), one(logit_metrics(b, a))
    assert m["kl"] >= 0
    assert 0 <= m["js"] <= math.log(2) * (1 + 1e-12)
    # each term is a difference of two numbers of the size of log(p/q), so it is known to that times the unit roundoff
    rounding = 8 * np.finfo(np.float64).eps * float((a.double() - b.double()).abs().max())
    assert m["js"] == pytest.approx(back["js"], rel=1e-9, abs=rounding)
    assert m["js"] <= (m["kl"] + back["kl"]) / 4 * (1 + 1e-9) + 1e-30
    assert (m["logit_l2"], m["logit_max"], m["flip"]) == (back["logit_l2"], back["logit_max"], back["flip"])


@few
@given(st.lists(st.tuples(*[st.integers(-64, 64)] * 2), min_size=8, max_size=8), st.integers(-32, 32))
def test_logit_l2_ignores_a_common_shift(values: list[tuple[int, int]], shift: int) -> None:
    a, b = (torch.tensor(x, dtype=torch.float32) / 4 for x in zip(*values, strict=True))
    assume(not torch.equal(a, b))
    m, moved = one(logit_metrics(a, b)), one(logit_metrics(a + shift, b))
    assert moved["logit_l2"] == m["logit_l2"]  # exact: eighths, and a mean over eight
    assert moved["kl"] == pytest.approx(m["kl"], rel=1e-9, abs=1e-28)
    assert one(logit_metrics(b + 4, b))["logit_l2"] == 0
    assert one(logit_metrics(b + 4, b))["logit_max"] == 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_logit_l2_alone_is_the_one_among_the_logit_metrics(dtype: torch.dtype) -> None:
    a, b = pair(dtype, 3, 20)
    a[1], b[2, :4], a[2, :4] = b[1], -INF, -INF
    assert torch.equal(logit_l2(a, b), logit_metrics(a, b)["logit_l2"])
    assert logit_l2(a, b)[1] == 0
    for row in (0, 2):
        xs, ys = ([Fraction(float(v)) for v in t[row].double() if v != -INF] for t in (a, b))
        deltas = [x - y for x, y in zip(xs, ys, strict=True)]
        mean = sum(deltas) / len(deltas)
        expected = float(exact_root(sum((d - mean) ** 2 for d in deltas)))
        assert float(logit_l2(a, b)[row]) == pytest.approx(expected, rel=1e-13)


def test_logit_l2_alone_of_rows_that_are_not_numbers() -> None:
    a = torch.tensor([[NAN, 1.0], [INF, 1.0], [-INF, -INF], [-INF, 1.0], [1.0, 2.0]])
    b = torch.tensor([[0.0, 1.0]] * 5)
    got = logit_l2(a, b)
    assert got[:3].isnan().all()
    assert got[3:].tolist() == [INF, 0.0]
    assert got.dtype == torch.float64
    assert float(logit_l2(a[4].half(), b[4])) == 0, "other dtypes are compared by value"
    assert float(logit_l2(a[4, :1], b[4, :1])) == 0, "a vocabulary of one token"


def test_logit_l2_alone_refuses() -> None:
    with pytest.raises(InputError, match="vocabulary"):
        logit_l2(torch.zeros(3, 0), torch.zeros(3, 0))
    with pytest.raises(InputError, match="float8"):
        logit_l2(torch.zeros(3).to(torch.float8_e5m2), torch.zeros(3).to(torch.float8_e5m2))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_results_stay_on_the_device() -> None:
    a, b = pair(torch.bfloat16, 2, 64)
    for here, there in ((site_metrics(a, b), site_metrics(a.cuda(), b.cuda())),
                        (logit_metrics(a, b), logit_metrics(a.cuda(), b.cuda()))):  # fmt: skip
        for key, value in there.items():
            assert value.is_cuda
            torch.testing.assert_close(value.cpu(), here[key], rtol=1e-12, atol=0)
