"""The wrapped model: prompts, tokens, identity, modes."""

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

import kvdrift as kd
from kvdrift.errors import InputError
from kvdrift.models.model import Model
from kvdrift.models.tiny import tiny


@pytest.fixture(scope="module")
def tokenizer():
    """Words ``w0`` to ``w99`` as ids 3 to 102, a start token 0 added by itself, ``<end>`` as 1."""
    words = {"<s>": 0, "<end>": 1, "<unk>": 2} | {f"w{i}": i + 3 for i in range(100)}
    inner = Tokenizer(WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = Whitespace()
    inner.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<s>",
        eos_token="<end>",
        chat_template="<s>{{ messages[0]['content'] }} <end>{% if add_generation_prompt %} w9{% endif %}",
    )


@pytest.fixture(scope="module")
def model(tokenizer):
    return Model(tiny("llama"), tokenizer, "words")


def test_text_gets_its_special_tokens_and_no_template(model):
    assert model.encode("w1 w2") == [0, 4, 5]
    assert model.encode("w1", chat=True) == [0, 4, 1, 12], "the template's own special tokens, and no second start"


def test_chat_without_a_template_or_text_without_a_tokenizer(tokenizer):
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(InputError, match="no chat template"):
        Model(tiny("llama"), bare).encode("w1", chat=True)
    with pytest.raises(InputError, match="cannot read text"):
        Model(tiny("llama")).encode("w1")


def test_ids_and_tensors_are_taken_as_they_are(model):
    for prompt in (
        [3, 4],
        (3, 4),
        torch.tensor([3, 4]),
        torch.tensor([[3, 4]]),
        torch.tensor([3, 4], dtype=torch.int32),
    ):
        ids = model.encode(prompt)
        assert ids == [3, 4]
        assert all(type(token) is int for token in ids)


def test_labels_carry_text_of_every_token(model):
    prompt = model.label("w1 w2", [0, 4, 5])
    assert (prompt.ids, prompt.tokens, prompt.text) == ((0, 4, 5), ("<s>", "w1", "w2"), "w1 w2")
    assert model.label([4], [4]).text is None
    assert Model(tiny("llama")).label([4], [4]).tokens == ("4",)


def test_results_carry_texts(model):
    drift = kd.compare(model, "w1 w2", max_new_tokens=2, floor=0, progress=False)
    assert drift.prompts[0].text == "w1 w2"
    assert all(drift.token_texts[token] == model.token_text(token) for token in drift.arrays["fed"][0].tolist())


def test_end_of_text_of_the_generation_config_or_the_tokenizer(tokenizer):
    hf = tiny("llama")
    assert Model(hf).eos_ids == frozenset()
    assert Model(hf, tokenizer).eos_ids == {1}
    hf.generation_config.eos_token_id = 7
    assert Model(hf, tokenizer).eos_ids == {7}
    hf.generation_config.eos_token_id = [7, 0]
    assert Model(hf, tokenizer).eos_ids == {7, 0}


def test_context_is_checked_to_the_token(model):
    model.check_length(250, 6)
    with pytest.raises(InputError, match="at most 6 new tokens"):
        model.check_length(250, 7)
    with pytest.raises(InputError, match="at most 0 new tokens"):
        model.check_length(300, 1)


def test_a_model_without_a_context_limit_takes_any_length(tiny_model):
    tiny_model("bloom").check_length(10**6, 1)


def test_the_fingerprint_follows_weights_dtype_and_configuration(tiny_model):
    base = tiny_model("llama").fingerprint
    assert Model(tiny("llama")).fingerprint == base
    changed = tiny("llama")
    changed.model.layers[3].mlp.down_proj.weight[0, 0] += 1
    others = [Model(tiny("llama", seed=1)), tiny_model("llama", torch.bfloat16), Model(changed)]
    assert len({base, *(other.fingerprint for other in others)}) == 4


def test_evaluating_puts_every_module_back_also_after_an_exception():
    hf = tiny("llama").train()
    hf.model.layers[1].eval()
    modes = [module.training for module in hf.modules()]

    def fail():
        assert not any(module.training for module in hf.modules())
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"), Model(hf).evaluating():
        fail()
    assert [module.training for module in hf.modules()] == modes


def test_repr_is_safe_in_html(model):
    named = Model(tiny("llama"), None, "<b>&")
    assert "&lt;b&gt;&amp;" in named._repr_html_()
    assert "GQA 8:2" in repr(named)
    assert (named.dtype_name, named.attn, str(named.device), named.vocab_size) == ("float32", "sdpa", "cpu", 384)


def test_the_module_is_wrapped_and_not_copied():
    hf = tiny("llama")
    model = kd.load(hf, quiet=True)
    assert model.hf is hf
    assert kd.load(model) is model


def test_fingerprint_of_a_weight_that_is_an_odd_slice_of_memory():
    from kvdrift.models.load import load
    from kvdrift.models.tiny import tiny

    hf = tiny("llama", dtype=torch.bfloat16)
    before = load(hf, quiet=True).fingerprint
    weight = hf.model.norm.weight
    memory = torch.zeros(weight.numel() + 1, dtype=weight.dtype)
    memory[1:] = weight
    weight.data = memory[1:]
    assert load(hf, quiet=True).fingerprint == before
