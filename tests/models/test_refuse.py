"""What is no decoder language model is refused in a sentence that says what to give instead."""

import pytest
import torch
import transformers
from torch import nn

import kvdrift as kd
from kvdrift.errors import InputError, ModelError
from kvdrift.models.tiny import tiny

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
T5 = transformers.T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=64)
BART = transformers.BartConfig(
    d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
    encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=64,
)  # fmt: skip


def refused(x, *words):
    with pytest.raises(ModelError) as caught:
        kd.load(x, quiet=True)
    said = str(caught.value)
    assert "\n" not in said
    for word in words:
        assert word in said


MODULES = {
    "encoder-decoder": (lambda: transformers.T5ForConditionalGeneration(T5), "encoder-decoder", "decoder-only"),
    "another one": (lambda: transformers.BartForConditionalGeneration(BART), "encoder-decoder", "decoder-only"),
    "body": (lambda: tiny("llama").model, "LlamaModel has no language-model head", "LlamaForCausalLM"),
    "another body": (lambda: tiny("gpt2").transformer, "GPT2Model has no language-model head", "GPT2LMHeadModel"),
    "embeddings": (lambda: transformers.BertModel(transformers.BertConfig(**SMALL)), "give a decoder language model"),
    "classes": (lambda: transformers.LlamaForSequenceClassification(tiny("llama").config), "give a LlamaForCausalLM"),
    "pictures": (lambda: transformers.ViTModel(transformers.ViTConfig(**SMALL)), "give a decoder language model"),
    "parallel": (lambda: nn.DataParallel(tiny("llama")), "LlamaForCausalLM inside it (its .module)"),
    "held": (lambda: nn.ModuleDict({"lm": tiny("llama")}), "LlamaForCausalLM inside it (its .lm)"),
}


@pytest.mark.parametrize("case", MODULES)
def test_modules(case):
    make, *words = MODULES[case]
    refused(make(), *words)


def test_compiled_ones():
    refused(torch.compile(tiny("llama")), "model._orig_mod")
    whole = tiny("llama")
    whole.compile()
    refused(whole, "compiled in place", "model._compiled_call_impl = None")
    whole._compiled_call_impl = None
    kd.load(whole, quiet=True)
    part = tiny("llama")
    part.model.layers[1].compile()
    refused(part, "model.model.layers.1 was compiled in place")
    part = tiny("llama")
    part.model.layers[1] = torch.compile(part.model.layers[1])
    refused(part, "model.model.layers.1._orig_mod")
    forward = tiny("llama")
    forward.forward = torch.compile(forward.forward)
    refused(forward, "del model.forward")
    del forward.forward
    kd.load(forward, quiet=True)


def test_a_head_of_another_name_is_one():
    class Own(transformers.LlamaForCausalLM):
        def get_output_embeddings(self):
            return None

    assert kd.load(Own(tiny("llama").config), quiet=True).architecture.n_layers == 4


def test_what_holds_a_model():
    pipeline = type("Pipeline", (), {"model": tiny("llama")})()
    with pytest.raises(InputError, match=r"not Pipeline; give the LlamaForCausalLM in it \(its .model\)"):
        kd.load(pipeline)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("weights.gguf", "GGUF", ("is a GGUF file", "gguf_file='weights.gguf'")),
        ("adapter_config.json", '{"base_model_name_or_path": "some/base"}', ("PEFT adapter", "load some/base")),
        ("model_index.json", "{}", ("diffusers pipeline", "causal language model")),
        ("modules.json", "[]", ("sentence-transformers", "causal language model")),
        ("readme.md", "", ("without a config.json", "save_pretrained")),
    ],
)
def test_folders(file, content, words, tmp_path):
    (tmp_path / file).write_text(content)
    refused(tmp_path, str(tmp_path), *words)


def test_files(tmp_path):
    for name in ("llama.gguf", "renamed.bin"):
        (tmp_path / name).write_bytes(b"GGUF\x03\x00\x00\x00")
        refused(tmp_path / name, str(tmp_path), "is a GGUF file", "safetensors")
    (tmp_path / "model.safetensors").write_bytes(b"")
    refused(tmp_path / "model.safetensors", "is a file; give the folder")


def test_checkpoints(tmp_path):
    tiny("llama", num_hidden_layers=1).model.save_pretrained(tmp_path / "body")
    refused(tmp_path / "body", "(LlamaModel) has no language-model head", "LlamaForCausalLM")
    transformers.BertConfig(**SMALL, architectures=["BertModel"]).save_pretrained(tmp_path / "bert")
    refused(tmp_path / "bert", "(BertModel) has no language-model head", "decoder language model")
    transformers.ViTConfig(**SMALL).save_pretrained(tmp_path / "vit")
    refused(tmp_path / "vit", "is a vit model", "AutoModelForCausalLM")
    BART.save_pretrained(tmp_path / "bart")
    refused(tmp_path / "bart", "encoder-decoder", "decoder-only")
