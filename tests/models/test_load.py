"""From a name, a folder or a module to a model, and every way that fails."""

import json
import socket

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

import kvdrift as kd
from kvdrift.errors import InputError, ModelError
from kvdrift.models.load import _float16_if_finite, load
from kvdrift.models.model import Model
from kvdrift.models.tiny import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("good")
    tiny("llama").save_pretrained(path)
    return path


@pytest.fixture
def copy(folder, tmp_path):
    """``copy(config={...})``: the folder again, its config changed."""

    def make(**config):
        target = tmp_path / "copy"
        target.mkdir()
        for file in folder.iterdir():
            (target / file.name).write_bytes(file.read_bytes())
        text = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps(text | config))
        return target

    return make


def test_a_folder_in_every_dtype_and_attention(folder, same_bits):
    assert kd.load(folder, quiet=True).dtype == torch.bfloat16, "bfloat16 on the CPU"
    for dtype in ("float16", "bfloat16", "float32", "float64", torch.float32):
        model = kd.load(str(folder), dtype=dtype, attn="eager", device="cpu", quiet=True)
        assert model.dtype_name == str(dtype).removeprefix("torch.")
        assert model.attn == "eager"
        assert not model.hf.training
        assert not any(weight.requires_grad for weight in model.hf.parameters())
    exact = kd.load(folder, dtype="float32", quiet=True)
    assert all(same_bits(weight, exact.hf.state_dict()[name]) for name, weight in tiny("llama").state_dict().items())
    assert exact.attn == "sdpa"
    assert exact.tokenizer is None


def test_what_was_chosen_is_printed_to_stderr(folder, capsys):
    kd.load(folder)
    out, err = capsys.readouterr()
    assert out == ""
    assert "bfloat16" in err
    assert "sdpa" in err
    kd.load(folder, quiet=True)
    assert capsys.readouterr() == ("", "")


def test_a_loaded_module_is_taken_as_it_is():
    hf = tiny("llama", dtype=torch.bfloat16, attn="eager")
    for arguments in ({}, {"dtype": "bfloat16"}, {"dtype": torch.bfloat16}, {"attn": "eager"}, {"device": "cpu"}):
        assert kd.load(hf, quiet=True, **arguments).hf is hf
        assert kd.load(Model(hf), quiet=True, **arguments).hf is hf
    for arguments, words in (
        ({"dtype": "float32"}, "loaded in bfloat16"),
        ({"attn": "sdpa"}, "attn='eager'"),
        ({"dtype": "int8"}, "not supported"),
    ):
        for given in (hf, Model(hf)):
            with pytest.raises(InputError, match=words):
                kd.load(given, quiet=True, **arguments)
    assert hf.dtype == torch.bfloat16


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7", torch.device("cuda")])
def test_cuda_that_is_not_there(device, folder):
    for given in (folder, tiny("llama"), Model(tiny("llama"))):
        with pytest.raises(InputError, match="no CUDA device here"):
            kd.load(given, device=device, quiet=True)


@pytest.mark.parametrize("device", ["nonsense", "meta", "cpu:x", ""])
def test_other_devices(device, folder):
    with pytest.raises(InputError, match="device="):
        kd.load(folder, device=device, quiet=True)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("smolm2-135m", "did you mean 'smollm2-135m'"),
        ("gemma3_270m", "did you mean 'gemma3-270m'"),
        ("xyz", "presets: smollm2-135m, gemma3-270m"),
        ("/nothing/here/at/all", "Cannot load|no folder"),
    ],
)
def test_unknown_names(name, words):
    with pytest.raises(ModelError, match=words):
        kd.load(name, quiet=True)


def test_no_network_and_nothing_cached(monkeypatch, tmp_path):
    def refuse(*_, **__):
        raise OSError("Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"Cannot load 'nobody/nothing'.*network") as caught:
        kd.load("nobody/nothing", quiet=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("x", [None, 3, ["a"], object()])
def test_other_things(x):
    with pytest.raises(InputError, match="takes a name"):
        kd.load(x)


def test_modules_that_are_no_decoder_language_model():
    with pytest.raises(ModelError, match="not a transformers model"):
        kd.load(torch.nn.Linear(2, 2))
    small = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 64}
    with pytest.raises(ModelError, match="encoder-decoder"):
        kd.load(T5ForConditionalGeneration(T5Config(**small)), quiet=True)
    bert = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=64)
    with pytest.raises(ModelError, match="takes no cache"):
        kd.load(BertForMaskedLM(bert), quiet=True)


def refused(path, words):
    with pytest.raises(ModelError, match=words) as caught:
        kd.load(path, quiet=True)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_folders_that_hold_no_model(copy, tmp_path):
    refused(tmp_path, "without a config.json")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "is a file")


@pytest.mark.parametrize("content", [b"", b"x" * 100, None], ids=["empty", "garbage", "truncated"])
def test_broken_weights(content, copy):
    path = copy() / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000] if content is None else content)
    refused(path.parent, "Cannot load")


def test_weights_that_are_missing(copy, capfd):
    path = copy(num_hidden_layers=6)
    refused(path, "18 are missing .* random numbers")
    (path / "model.safetensors").unlink()
    refused(path, "Cannot load")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "nonsense"}, "nonsense"),
        ({"model_type": "vit"}, "is a vit model"),
        ({"model_type": "t5"}, "encoder-decoder"),
        ({"hidden_size": 128}, "Cannot load"),
        ({"num_attention_heads": 7}, "Cannot load"),
    ],
)
def test_configs_that_do_not_fit(config, words, copy, capfd):
    refused(copy(**config), words)


@pytest.mark.parametrize("text", ["{", "{}", "[]", ""])
def test_broken_configs(text, copy):
    path = copy()
    (path / "config.json").write_text(text)
    refused(path, "Cannot load")


def test_bad_attention_and_dtype(folder):
    with pytest.raises(ModelError, match="nonsense"):
        kd.load(folder, attn="nonsense", quiet=True)
    for dtype in ("int8", "float8", torch.int64, "fp16"):
        with pytest.raises(InputError, match="not supported; choose auto, float16"):
            kd.load(folder, dtype=dtype, quiet=True)


def test_gemma2_has_no_sdpa(tmp_path):
    tiny("gemma2").save_pretrained(tmp_path)
    assert kd.load(tmp_path, quiet=True).attn == "eager"
    with pytest.raises(ModelError, match="sdpa"):
        kd.load(tmp_path, attn="sdpa", quiet=True)


def test_float16_that_overflows_on_a_probe_becomes_bfloat16(tmp_path, capsys):
    hf = tiny("llama")
    hf.model.layers[2].mlp.down_proj.weight.mul_(60000 / hf.model.layers[2].mlp.down_proj.weight.abs().max())
    hf.save_pretrained(tmp_path)

    def fetch(dtype):
        return kd.load(tmp_path, dtype=dtype, quiet=True)

    assert _float16_if_finite(fetch, "a model", quiet=False).dtype == torch.bfloat16
    assert "a model overflows in float16" in capsys.readouterr().err
    tiny("llama").save_pretrained(tmp_path)
    assert _float16_if_finite(fetch, "a model", quiet=False).dtype == torch.float16


def test_a_loaded_model_takes_another_tokenizer_and_no_device_map(tiny_model):
    model, tokenizer = tiny_model("llama"), object()
    other = load(model, tokenizer=tokenizer, quiet=True)
    assert (other.tokenizer, other.hf, model.tokenizer) == (tokenizer, model.hf, None)
    for loaded in (model, model.hf):
        with pytest.raises(InputError, match="device_map='auto' is for a model that is loaded here"):
            load(loaded, device_map="auto", quiet=True)


def test_a_compiled_attention_kernel_is_refused_in_a_sentence():
    hf = tiny("llama")
    hf.set_attn_implementation("flex_attention")
    with pytest.raises(ModelError, match=r"flex_attention compiles its kernel, .* use attn='sdpa' or 'eager'"):
        load(hf, quiet=True)
