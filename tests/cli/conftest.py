"""A tiny model in a folder, with a tokenizer, so that the whole command line runs in seconds."""

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from kvdrift.models.tiny import tiny

WORDS = ("<unk>", "the", "a", "of", "to", "one", "two", "three", "how", "many", "is", "are", "plus", "b", "?", ".")


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A tiny Llama that reads words."""
    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    tiny("llama", dtype=torch.float32).save_pretrained(path)
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of this test's own."""
    monkeypatch.setenv("KVDRIFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
