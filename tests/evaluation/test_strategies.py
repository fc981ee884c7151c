"""Sampling: draws follow the softmax and depend on seed, item and step alone; logits are processed by transformers."""

import itertools

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import kvdrift as kd
from kvdrift.errors import InputError
from kvdrift.evaluation.strategies import parse

N_DRAWS = 1500
LOGITS = torch.tensor([0.3, 2.0, -1.0, 1.4, 0.9, -0.2, 1.9, 0.0, 0.6, -2.5])
SAMPLING = [  # with what transformers' generate would use
    (kd.Temperature(), []),
    (kd.Temperature(0.7), [TemperatureLogitsWarper(0.7)]),
    (kd.TopK(4), [TopKLogitsWarper(4)]),
    (kd.TopK(6, temperature=1.5), [TemperatureLogitsWarper(1.5), TopKLogitsWarper(6)]),
    (kd.TopP(0.8), [TopPLogitsWarper(0.8)]),
    (kd.TopP(0.9, temperature=0.7), [TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.9)]),
]
BY_LABEL = {"ids": [strategy.label for strategy, _ in SAMPLING]}


def processed(processors, logits=LOGITS):
    return LogitsProcessorList(processors)(None, logits.float()[None])[0]


def keys(over):
    """(seed, item, step) of many draws that differ in one of the three."""
    seeds, items, steps = [3], ["item 7"], [5]
    if over == "items":
        items = [f"item {i}" for i in range(N_DRAWS)]
    if over == "steps":
        steps = range(N_DRAWS)
    if over == "seeds":
        seeds = range(N_DRAWS)
    return itertools.product(seeds, items, steps)


def draws(strategy, over, logits=LOGITS, n=N_DRAWS):
    chosen = itertools.islice(keys(over), n)
    return np.array([strategy.sampler(seed, item)(logits, step) for seed, item, step in chosen])


# --- the distribution


@pytest.mark.parametrize("over", ["items", "steps"])
@pytest.mark.parametrize(("strategy", "processors"), SAMPLING, **BY_LABEL)
def test_draws_follow_the_softmax_of_the_processed_logits(strategy, processors, over):
    expected = processed(processors).double().softmax(-1).numpy()
    counts = np.bincount(draws(strategy, over), minlength=len(LOGITS))
    allowed = expected > 0
    assert counts[~allowed].sum() == 0  # what is ruled out is never drawn
    assert stats.chisquare(counts[allowed], expected[allowed] * N_DRAWS).pvalue > 1e-3  # fixed seeds: no luck in it


def test_the_chi_square_test_would_see_another_temperature():
    expected = processed([TemperatureLogitsWarper(0.9)]).double().softmax(-1).numpy()
    counts = np.bincount(draws(kd.Temperature(), "items"), minlength=len(LOGITS))
    assert stats.chisquare(counts, expected * N_DRAWS).pvalue < 1e-3


def test_tokens_that_the_model_rules_out_are_never_drawn():
    logits = LOGITS.clone()
    logits[[1, 6]] = -torch.inf  # the two most likely
    for strategy, _ in SAMPLING:
        assert not np.isin(draws(strategy, "items", logits, 200), (1, 6)).any()


# --- what the noise depends on


@pytest.mark.parametrize("over", ["items", "steps", "seeds"])
def test_noise_of_another_key_is_independent(over):
    noise = np.stack(
        [
            kd.Temperature().sampler(seed, item).noise(step, 2000)
            for seed, item, step in itertools.islice(keys(over), 12)
        ]
    )
    correlation = np.corrcoef(noise)[~np.eye(12, dtype=bool)]
    assert np.abs(correlation).max() < 4.5 / np.sqrt(2000)  # 66 pairs of independent rows stay well below
    assert len(np.unique(noise)) == noise.size  # no stretch of one row lies in another
    assert stats.kstest(noise.ravel(), "gumbel_r").pvalue > 1e-3


def test_seed_and_item_are_not_run_together():
    assert (
        kd.Temperature().sampler(1, "1").noise(0, 3).tolist() != kd.Temperature().sampler(11, "").noise(0, 3).tolist()
    )


@pytest.mark.parametrize(("strategy", "processors"), SAMPLING, **BY_LABEL)
def test_the_same_key_draws_the_same(strategy, processors):
    again = [draws(strategy, "steps", n=100) for _ in range(2)]
    assert np.array_equal(*again)
    one = strategy.sampler(0, "a")
    backwards = [one(LOGITS, step) for step in reversed(range(20))]
    assert backwards[::-1] == [strategy.sampler(0, "a")(LOGITS, step) for step in range(20)]


def test_the_global_random_states_are_neither_read_nor_moved():
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    first = kd.Temperature().sampler(0, "a")(LOGITS, 0)
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])
    torch.manual_seed(99)
    np.random.seed(99)
    assert kd.Temperature().sampler(0, "a")(LOGITS, 0) == first


def test_strategies_share_the_noise_so_that_a_looser_one_only_adds_choices():
    for step in range(200):
        scores = [s.sampler(0, "a").scores(LOGITS, step) for s in (kd.TopK(4), kd.Temperature())]
        allowed = scores[0].isfinite()
        assert torch.equal(scores[0][allowed], scores[1][allowed])


# --- equal to transformers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("strategy", "processors"), SAMPLING, **BY_LABEL)
def test_processed_scores_are_those_of_transformers(strategy, processors, dtype, same_bits):
    logits = (3 * torch.randn(384, generator=torch.Generator().manual_seed(0))).to(dtype)
    sampler = strategy.sampler(1, "x")
    noise = torch.from_numpy(sampler.noise(2, 384))
    assert same_bits(sampler.scores(logits, 2), processed(processors, logits).double() + noise)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_is_argmax(dtype):
    for seed in range(50):
        logits = torch.randn(384, generator=torch.Generator().manual_seed(seed)).to(dtype)
        assert kd.Greedy().sampler(seed, "x")(logits, seed) == int(logits.argmax())


def test_greedy_takes_the_first_of_equal_ones():
    logits = torch.zeros(500)
    logits[[13, 77, 499]] = 2.0
    assert kd.Greedy().sampler(0, "x")(logits, 0) == 13


def test_equal_logits_are_equal_tokens():
    """What two paths see; one bit less, and under noise, too, mostly nothing changes."""
    for strategy in (kd.Greedy(), *(strategy for strategy, _ in SAMPLING)):
        for step in range(50):
            logits = torch.randn(384, generator=torch.Generator().manual_seed(step))
            a, b = strategy.sampler(0, "x"), strategy.sampler(0, "x")
            assert a(logits, step) == b(logits.clone(), step)
            assert int(a.scores(logits, step).argmax()) == a(logits, step)


# --- edges


def test_more_choices_than_tokens_is_no_limit(same_bits):
    for k in (len(LOGITS), 500):
        assert same_bits(
            kd.TopK(k).sampler(0, "x").scores(LOGITS, 0), kd.Temperature().sampler(0, "x").scores(LOGITS, 0)
        )


def test_a_nucleus_of_one_is_no_limit(same_bits):
    assert same_bits(kd.TopP(1.0).sampler(0, "x").scores(LOGITS, 0), kd.Temperature().sampler(0, "x").scores(LOGITS, 0))


@pytest.mark.parametrize("strategy", [kd.TopK(1), kd.TopP(1e-6), kd.Temperature(1e-6)])
def test_the_tightest_choice_is_greedy(strategy):
    assert set(draws(strategy, "items", n=200)) == {int(LOGITS.argmax())}


def test_top_k_keeps_several_that_tie_for_the_last_place():
    logits = torch.tensor([1.0, 3.0, 1.0, 0.0])
    assert set(draws(kd.TopK(2), "items", logits, 200)) == {0, 1, 2}


# --- words


@pytest.mark.parametrize(
    "strategy",
    [
        kd.Greedy(), kd.Temperature(), kd.Temperature(0.7), kd.TopK(50), kd.TopK(1, 0.5), kd.TopP(0.9), kd.TopP(1.0),
        kd.TopP(0.95, 0.7), kd.TopP(0.1234567890123), kd.TopP(1e-9), kd.Temperature(1e-5), kd.TopK(10**6, 1e17),
        kd.TopP(np.float64(0.3)),
    ],
)  # fmt: skip
def test_a_label_reads_back_as_the_same_strategy(strategy):
    assert parse(strategy.label) == strategy


def test_strategies_that_differ_have_labels_that_differ():
    """Labels go into the settings of a store: two that are equal must mean the same numbers."""
    assert kd.TopP(0.9).label != kd.TopP(0.90000001).label
    assert kd.Temperature(0.7).label != kd.Temperature(0.70000001).label


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ("greedy", kd.Greedy()), ("temperature", kd.Temperature(0.7)), ("top-k", kd.TopK(50)), ("top-p", kd.TopP(0.9)),
        (" top-p=0.5 ", kd.TopP(0.5)), ("top-k:7@0.7", kd.TopK(7, 0.7)), ("top-k at 0.7", kd.TopK(50, 0.7)),
        ("top-p .5 @ 2", kd.TopP(0.5, 2.0)),
    ],
)  # fmt: skip
def test_words_are_read(text, strategy):
    assert parse(text) == strategy


@pytest.mark.parametrize(
    "text",
    [
        "", "nucleus", "greedy 1", "greedy at 0.7", "temperature 0.7 at 0.5", "top-k 2.5", "top-p 1.2.3",
        "temperature .", "top-k -1", "top-p 0.9 at", "top-k 50 0.7", "top-p nan",
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_sentence(text):
    with pytest.raises(InputError, match="There is no strategy") as caught:
        parse(text)
    assert repr(text) in str(caught.value)
    assert "top-p 0.9 at 0.7" in str(caught.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: kd.Temperature(0), "temperature=0"),
        (lambda: kd.Temperature(float("nan")), "temperature=nan"),
        (lambda: kd.TopK(0), r"TopK\(k=0\)"),
        (lambda: kd.Temperature(float("inf")), "temperature=inf"),
        (lambda: kd.Temperature(None), "temperature=None"),
        (lambda: parse("temperature 1e400"), "temperature=inf"),
        (lambda: kd.TopP("0.9"), r"TopP\(p='0\.9'\)"),
        (lambda: kd.TopK(True), r"TopK\(k=True\)"),
        (lambda: kd.TopK(2.5), r"TopK\(k=2\.5\)"),
        (lambda: kd.TopK(5, temperature=-1), "temperature=-1"),
        (lambda: kd.TopP(0), r"TopP\(p=0\)"),
        (lambda: kd.TopP(1.5), r"TopP\(p=1\.5\)"),
        (lambda: parse("top-k 0"), r"TopK\(k=0\)"),
        (lambda: parse("top-p 2"), r"TopP\(p=2"),
        (lambda: parse("temperature 0"), "temperature=0"),
    ],
)
def test_numbers_out_of_range_are_refused(make, words):
    with pytest.raises(InputError, match=words):
        make()
