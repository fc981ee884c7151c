"""A part of the confusion table; benchmarks/confusion.py prints the whole."""

import pytest
from faults.judge import CLEAN, judge

FAULTY = [
    ("positions-one-too-high-at-decode", "gpt2", "float32"),
    ("one-bit-of-one-key", "llama", "float32"),
    ("cache-off-ignores-the-window", "mistral", "float32"),
    ("left-padding-seen-at-decode", "llama-mqa", "float32"),
    ("crop-leaves-a-token", "qwen2", "bfloat16"),
    ("positions-of-drafts-repeat", "gpt2", "float32"),
    ("router-off-at-one-row", "mixtral", "float32"),
    ("hook-steers-the-first-position", "gemma2", "bfloat16"),
    ("native-wrong-at-multiples-of-16", "qwen3", "float32"),
    ("sinks-missing-at-decode", "gpt-oss", "float32"),
    ("heads-swapped", "bloom", "float32"),
    ("stale-key-under-a-declaration", "bloom", "float32"),
    ("recurrent-state-lost-at-decode", "mamba", "float32"),
]
FAULTY_TOO = [
    ("one-kept-fewer-than-declared", "gpt2", "bfloat16"),
    ("four-bits-where-eight-are-declared", "mistral", "float32"),
    ("embedding-off-at-one-row", "llama", "float32"),
    ("norm-off-at-one-row", "qwen3", "bfloat16"),
    ("stale-last-key", "llama", "bfloat16"),
    ("layers-share-storage", "gpt-neox", "float32"),
    ("cache-keeps-one-too-few", "mistral", "bfloat16"),
    ("crop-of-drafts-leaves-a-token", "llama", "float32"),
    ("mask-of-drafts-one-off", "mistral", "float32"),
    ("output-projection-off-at-one-row", "falcon", "float32"),
    ("mlp-off-in-passes-of-many-rows", "llama", "bfloat16"),
    ("final-norm-off-at-one-row", "gpt2", "float32"),
    ("pre-hook-steers-the-last-position", "gpt-neox", "float32"),
    ("native-drops-the-newest-key", "llama", "bfloat16"),
    ("heads-swapped-under-a-declaration", "llama", "float32"),
    ("stale-key-under-a-declaration", "gemma2", "float32"),
    ("positions-too-high-under-a-declaration", "llama", "bfloat16"),
]
"""Like one of the others each: run when diagnosis changes."""
RIGHT = [
    ("mistral", "bfloat16"),
    pytest.param("bloom", "float32", marks=pytest.mark.slow),
    ("mamba", "float32"),
]


@pytest.mark.parametrize(
    ("fault", "family", "dtype"), [*FAULTY, *(pytest.param(*case, marks=pytest.mark.slow) for case in FAULTY_TOO)]
)
def test_a_fault_is_called_one_and_placed(fault, family, dtype):
    case = judge(fault, family, dtype, brief=True)
    assert case.counts
    assert case.right, case.reasons
    assert case.layer_right in (None, True), (case.layer, case.named, case.reasons)
    assert case.signature_right in (None, True), case.signature


@pytest.mark.parametrize(("family", "dtype"), RIGHT)
def test_a_clean_model_is_not_called_a_bug(family, dtype):
    case = judge(CLEAN, family, dtype)
    assert case.right, case.reasons
