"""Tiny models that read and write words, and a task whose answers they can be asked for."""

import pytest
import torch
from evaluation.by_hand import first_text, quick_statistics, result, rights, text  # noqa: F401
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from kvdrift.models.load import load
from kvdrift.models.tiny import tiny

VOCABULARY = 384


@pytest.fixture(scope="session")
def tokenizer():
    """One word per id: ``w007`` is 7, and no word is part of another."""
    words = Tokenizer(WordLevel({f"w{i:03}": i for i in range(VOCABULARY)}, unk_token="w000"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w000")


@pytest.fixture(scope="session")
def word_model(tokenizer):
    """``word_model(dtype, seed, **overrides)``: a small model of one's own that reads words."""

    def build(dtype=torch.float32, seed=0, family="llama", **overrides):
        shape = {"tie_word_embeddings": False, "num_hidden_layers": 2, **overrides}
        return load(tiny(family, dtype=dtype, seed=seed, **shape), tokenizer=tokenizer, quiet=True)

    return build


@pytest.fixture(scope="session")
def half(word_model):
    """Bfloat16, whose rounding parts texts; shared: do not change it."""
    return word_model(torch.bfloat16)


@pytest.fixture(scope="session")
def single(word_model):
    """The same weights in float32; shared: do not change it."""
    return word_model(torch.float32)
