"""Models on their way to workers: the same bits there, or a sentence."""

import pickle

import pytest
import torch
from torch import nn

import kvdrift as kd
from kvdrift.errors import InputError
from kvdrift.models.tiny import tiny
from kvdrift.runs import ship
from kvdrift.runs.ship import ALIGNMENT, cuda_devices, digest, pack


def elsewhere(content):
    """What another process would unpack."""
    return pickle.loads(pickle.dumps(pack(content))).unpack()


def shifted(module, n_bytes):
    """Move the weights so that they start so many bytes after a 64-byte boundary."""
    for tensor in [*module.parameters(), *module.buffers()]:
        ship._put(tensor, n_bytes)
    return module


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A tiny model saved in a folder of the working directory, by its relative name."""
    monkeypatch.chdir(tmp_path)
    tiny("llama").save_pretrained("saved")
    return "saved"


def test_here_it_is_the_thing_itself_and_nothing_runs(tiny_model, monkeypatch):
    monkeypatch.setattr(ship, "digest", None)
    content = (tiny_model("llama"), object())
    assert pack(content).unpack() is content


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "mixtral", "mamba"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_module_in_memory_travels_with_its_bits(family, dtype, tiny_model, hooks):
    model = tiny_model(family, dtype=dtype)
    copy = elsewhere(model)
    assert copy.hf is not model.hf
    assert (copy.name, copy.attn, copy.dtype) == (model.name, model.attn, model.dtype)
    assert copy.fingerprint == model.fingerprint
    assert digest(copy) == digest(model)
    assert not hooks(model.hf)


def test_tied_weights_stay_tied():
    model = kd.load(tiny("gemma3"), quiet=True)
    copy = elsewhere(model)
    assert copy.hf.get_output_embeddings().weight is copy.hf.get_input_embeddings().weight
    assert copy.hf.training == model.hf.training


@pytest.mark.parametrize("n_bytes", [4, 8, 20, 60])
def test_weights_off_a_boundary_keep_their_place(n_bytes):
    model = kd.load(shifted(tiny("llama"), n_bytes), quiet=True)
    copy = elsewhere(model)
    places = {name: tensor.data_ptr() % ALIGNMENT for name, tensor in ship._weights(copy.hf).items()}
    assert set(places.values()) == {n_bytes}
    assert digest(copy) == digest(model)


def test_a_transposed_weight_keeps_its_strides():
    module = tiny("llama")
    weight = module.lm_head.weight
    weight.data = weight.detach().t().contiguous().t()
    model = kd.load(shifted(module, 12), quiet=True)
    copy = elsewhere(model)
    assert copy.hf.lm_head.weight.stride() == weight.stride() == (1, weight.shape[0])
    assert copy.fingerprint == model.fingerprint


def test_a_copy_with_other_bits_is_refused(tiny_model, monkeypatch):
    data = pickle.dumps(pack(tiny_model("llama")))
    monkeypatch.setattr(ship, "digest", lambda model: "other")
    with pytest.raises(
        InputError, match=r"A worker's copy of .* gives other bits than the model here; load it by name"
    ):
        pickle.loads(data).unpack()


def test_a_probe_sees_one_bit_of_one_weight():
    module = tiny("llama")
    model = kd.load(module, quiet=True)
    before = digest(model)
    with torch.no_grad():
        module.model.layers[3].self_attn.v_proj.weight.view(torch.int32)[0, 0] ^= 1
    assert digest(model) != before
    assert digest(model) == digest(model)


def test_a_short_context_is_no_obstacle():
    assert digest(kd.load(tiny("gpt2", n_positions=8), quiet=True))


# --- by name


def test_a_model_loaded_by_name_is_loaded_again(folder, tmp_path, monkeypatch):
    model = kd.load(folder, dtype="float32", attn="eager", quiet=True)
    data = pickle.dumps(pack(model))
    assert len(data) < 5000, "no weight travels"
    monkeypatch.chdir(tmp_path.parent)
    copy = pickle.loads(data).unpack()
    assert (copy.name, copy.attn, copy.dtype, copy.source) == (model.name, "eager", torch.float32, model.source)
    assert copy.fingerprint == model.fingerprint
    assert digest(copy) == digest(model)


def test_a_model_that_was_changed_since_is_refused(folder):
    model = kd.load(folder, dtype="float32", quiet=True)
    with torch.no_grad():
        model.hf.model.norm.weight[0] += 1
    with pytest.raises(InputError, match=r"saved was changed after it was loaded by name.*give the module itself"):
        elsewhere(model)
    assert elsewhere(kd.load(model.hf, quiet=True)).fingerprint == model.fingerprint


def test_a_model_that_has_hooks_is_refused(folder):
    model = kd.load(folder, dtype="float32", quiet=True)
    handle = model.hf.model.norm.register_forward_hook(lambda module, inputs, output: output * 2)
    with pytest.raises(InputError, match="saved, loaded by a worker, gives other bits than the model here: it has"):
        elsewhere(model)
    handle.remove()
    assert elsewhere(model).name == "saved"


def test_a_tokenizer_of_ones_own_travels(folder):
    model = kd.load(folder, dtype="float32", tokenizer={"mine": 1}, quiet=True)
    assert elsewhere(model).tokenizer == {"mine": 1}
    assert kd.load(tiny("llama"), quiet=True).source is None


# --- paths with models of their own


def test_one_model_in_several_places_is_one_model_there(tiny_model):
    one, two = tiny_model("llama"), tiny_model("mistral")
    model, paths = elsewhere((one, {"a": kd.CacheOn(model=two), "b": kd.CacheOff(model=one, controls=(kd.ReRoll(3),))}))
    assert paths["b"].model is model
    assert paths["a"].model.fingerprint == two.fingerprint
    assert paths["b"].controls == (kd.ReRoll(3),)


def test_a_path_with_a_lambda_travels_where_ray_is(tiny_model):
    pytest.importorskip("ray")
    from transformers import DynamicCache

    model = tiny_model("llama")
    path = elsewhere(kd.CacheOn(model=model, cache=lambda: DynamicCache()))
    run = path.start(path.model, [1, 2, 3])
    assert run.step().position == 2
    run.close()


def test_devices_are_counted_over_all_models():
    class Two:
        hf = nn.Linear(2, 2)

    assert cuda_devices(Two(), Two()) == 0
