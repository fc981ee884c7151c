"""Models wrapped by nnsight: every verb, driven through nnsight's traces, with the bits of the plain model."""

import importlib.util
import pickle
import sys

import numpy as np
import pytest
import torch
from pairwise import params
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import kvdrift as kd
from kvdrift.backends.nnsight import NNsightBackend, is_nnsight
from kvdrift.errors import InputError, ModelError
from kvdrift.models.tiny import supported_attn, tiny

nnsight = pytest.importorskip("nnsight")

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]  # longer than the windows of the tiny models
QUICK = {"max_new_tokens": 4, "progress": False}
PARITY = [
    (family, dtype, attn)
    for family in ("llama", "mistral", "qwen3", "gemma2", "gemma3")
    for dtype in ("float32", "bfloat16", "float16")
    for attn in supported_attn(family)
]


def tokenizer():
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))


def wrapped(hf):
    return nnsight.TransformersModel(hf, tokenizer=tokenizer())


@pytest.fixture(scope="module")
def pair():
    """A plain tiny llama and the same one in nnsight, both loaded."""
    return kd.load(tiny("llama"), quiet=True), kd.load(wrapped(tiny("llama")), quiet=True)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert np.array_equal(found[name], values, equal_nan=values.dtype.kind == "f"), name


# --- bits


@pytest.mark.parametrize(("family", "dtype", "attn"), params(PARITY))
def test_logits_of_both_paths_are_those_of_the_plain_model(family, dtype, attn, same_bits):
    options = {"dtype": getattr(torch, dtype), "attn": attn, "num_hidden_layers": 3}
    found = []
    for wrapper in (lambda hf: hf, wrapped):
        model = kd.load(wrapper(tiny(family, **options)), quiet=True)
        on, off = kd.CacheOn().start(model, PROMPT), kd.CacheOff().start(model, PROMPT)
        tokens = [None, 3, 1, 4]
        found.append([run.step(token).logits for run in (on, off) for token in tokens])
    plain, through = found
    assert all(same_bits(x, y) for x, y in zip(through, plain, strict=True))


def test_padded_and_chunked_prompts_keep_their_bits(pair, same_bits):
    for path in (kd.CacheOn(left_padding=3), kd.CacheOn(prefill_chunk=4)):
        plain, through = ([run.step(t).logits for t in (None, 3)] for run in (path.start(m, PROMPT) for m in pair))
        assert all(same_bits(x, y) for x, y in zip(through, plain, strict=True))


@pytest.mark.parametrize("wrap", [wrapped, nnsight.NNsight])
def test_every_pass_is_a_trace(wrap, monkeypatch):
    model = kd.load(wrap(tiny("llama")), quiet=True)
    traces = []
    trace = type(model.backend.wrapper).trace
    monkeypatch.setattr(type(model.backend.wrapper), "trace", lambda *a, **k: traces.append(k) or trace(*a, **k))
    run = kd.CacheOn().start(model, PROMPT)
    run.step()
    run.step(3)
    assert [k["attention_mask"].shape[1] for k in traces] == [10, 11]
    assert all(k["logits_to_keep"] == 1 for k in traces)


def test_the_mask_that_nnsight_adds_by_itself_is_a_bug():
    class Unmasked(NNsightBackend):
        def arguments(self, *args, **kwargs):
            arguments = super().arguments(*args, **kwargs)
            del arguments["attention_mask"]
            return arguments

    backend = Unmasked(wrapped(tiny("llama", num_hidden_layers=1)))
    model = kd.models.model.Model(backend.module, backend=backend)
    verdict = kd.diagnose(model, max_new_tokens=4, progress=False)
    assert verdict.kind == "bug"


# --- verbs


def test_compare_gives_the_same_arrays(pair):
    plain, through = (kd.compare(model, PROMPT, kv_every=1, **QUICK) for model in pair)
    assert_equal(through.arrays, plain.arrays)
    assert through.a.model == "tiny-llama (nnsight)"
    assert pair[1].backend.driver.startswith("nnsight 0.")


def test_record_gives_the_same_tensors(pair, same_bits):
    options = {"sites": pair[0].coverage.sites, "positions": "all", **QUICK}
    plain, through = (kd.record(model, PROMPT, **options) for model in pair)
    assert plain.fed == through.fed
    assert all(same_bits(through[site], plain[site]) for site in plain.sites)


def test_patching_gives_the_same_results(pair):
    plain, through = (kd.patch(model, PROMPT, [kd.Patch("k"), kd.Patch("v")], **QUICK) for model in pair)
    assert str(through).replace(" (nnsight)", "") == str(plain)
    plain, through = (kd.sweep(model, PROMPT, sites=["kv"], layers=[1, 2], **QUICK) for model in pair)
    assert str(through).replace(" (nnsight)", "") == str(plain)


@pytest.mark.parametrize(
    "control", [kd.ReRoll(0), kd.FixedShape(max_length=32)], ids=lambda control: type(control).__name__
)
def test_controls_work_within_the_trace(pair, control):
    a, b = kd.CacheOn(controls=(control,)), kd.CacheOff(controls=(control,))
    plain, through = (kd.compare(m, PROMPT, a=a, b=b, floor=0, local=False, **QUICK) for m in pair)
    assert_equal(through.arrays, plain.arrays)


def test_diagnose_finds_rounding():
    model = wrapped(tiny("llama", num_hidden_layers=1))
    assert kd.diagnose(model, max_new_tokens=4, progress=False).kind == "rounding"


def test_taps_and_patches_work_in_a_users_own_trace(pair, same_bits):
    plain, through = pair
    ids, model = torch.tensor([PROMPT]), through.backend.wrapper
    new = torch.randn((1, 256), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), kd.patched(plain, {"blocks.1.hook_resid_post": new}), kd.tap(plain, ["v"]) as expected:
        plain.hf(ids)
    with (
        torch.no_grad(),
        kd.patched(model, {"blocks.1.hook_resid_post": new}),
        kd.tap(model, ["v"]) as found,
        model.trace({"input_ids": ids}),
    ):
        nnsight.save(model.output)
    assert same_bits(found["v"], expected["v"])


# --- across backends


def test_nnsight_does_nothing_to_the_numbers(pair):
    plain, through = pair
    drift = kd.compare(
        plain, PROMPT, a=kd.CacheOn(label="plain"), b=kd.CacheOn(model=through, label="nnsight"), floor=0, **QUICK
    )
    assert (drift.values("resid_post", "identical")[drift.measured] == 1).all()
    assert (drift.values("logits", "logit_l2")[drift.measured] == 0).all()
    assert "plain of tiny-llama" in str(drift)
    assert "nnsight of tiny-llama (nnsight)" in str(drift)


def test_another_attention_backend_does_something(pair):
    drift = kd.compare(
        pair[1], PROMPT, a=kd.CacheOn(label="sdpa"), b=kd.CacheOn(attn="eager", label="eager"), floor=0, **QUICK
    )
    assert (drift.values("resid_post", "identical")[drift.measured][:, 0] < 1).any()
    assert pair[1].attn == "sdpa"


def test_an_edit_of_the_model_is_part_of_it(pair):
    model = wrapped(tiny("llama"))
    with model.edit() as (_, edited):
        edited.model.layers[2].output[:] *= 1.01
    drift = kd.compare(pair[0], PROMPT, a=kd.CacheOn(), b=kd.CacheOn(model=edited, label="edited"), floor=0, **QUICK)
    identical = drift.values("resid_post", "identical")[drift.measured]
    assert (identical[:, :2] == 1).all()
    assert (identical[:, 2] < 0.5).all()


# --- loading


def test_load_takes_every_wrapper_and_leaves_the_model_alone(hooks):
    hf = tiny("llama")
    with pytest.warns(nnsight.NNsightDeprecationWarning):
        old = nnsight.LanguageModel(hf, tokenizer=tokenizer())
    for wrapper in (wrapped(hf), nnsight.NNsight(hf), old):
        model = kd.load(wrapper, quiet=True)
        assert model.hf is hf
        assert model.backend.wrapper is wrapper
        assert model.coverage.sites
        assert (model.tokenizer is None) == (type(wrapper) is nnsight.NNsight)
    assert hooks(hf) == []
    assert kd.load(nnsight.NNsight(hf), tokenizer=old.tokenizer, quiet=True).tokenizer is old.tokenizer


def test_load_fetches_the_weights_of_an_undispatched_model(tmp_path, same_bits):
    hf = tiny("llama")
    hf.save_pretrained(tmp_path)
    lazy = nnsight.TransformersModel(str(tmp_path), task="text-generation", tokenizer=tokenizer())
    assert not lazy.dispatched
    model = kd.load(lazy, quiet=True)
    ids = torch.tensor([PROMPT])
    assert same_bits(model.backend.forward(ids, 0), kd.load(hf, quiet=True).backend.forward(ids, 0))


@pytest.mark.parametrize("wrap", [wrapped, nnsight.NNsight])
def test_a_model_travels_to_another_process(wrap, same_bits):
    model = kd.load(wrap(tiny("llama")), quiet=True)
    module, backend = pickle.loads(pickle.dumps((model.hf, model.backend)))
    ids = torch.tensor([PROMPT])
    assert backend.module is module
    assert type(backend.wrapper) is type(model.backend.wrapper)
    assert same_bits(backend.forward(ids, 0), model.backend.forward(ids, 0))
    module.lm_head.weight.data.zero_()
    assert (backend.forward(ids, 0) == 0).all()
    assert (model.backend.forward(ids, 0) != 0).any()


def test_weights_that_are_gone_are_one_sentence(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    lazy = nnsight.TransformersModel(str(tmp_path), task="text-generation", tokenizer=tokenizer())
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot be loaded"):
        kd.load(lazy, quiet=True)


def test_what_is_no_causal_lm_is_refused():
    with pytest.raises(ModelError, match="Linear, which is not a transformers model"):
        kd.load(nnsight.NNsight(torch.nn.Linear(2, 2)))
    whole = wrapped(tiny("llama"))
    with pytest.raises(ModelError, match="part of an nnsight model"):
        kd.load(whole.model.layers[0])
    with pytest.raises(InputError, match="loaded in float32"):
        kd.load(whole, dtype="bfloat16")


def test_errors_of_hooks_come_through_and_leave_nothing_behind(pair, hooks):
    model = pair[1]
    with kd.patched(model, {"resid_post": torch.zeros(3)}), pytest.raises(InputError, match="its last position"):
        model.backend.forward(torch.tensor([PROMPT]), 0)
    assert not model.backend.wrapper.interleaver.interleaving
    assert hooks(model.hf) == []


@pytest.mark.parametrize("name", ["kvdrift.nnsight", "kvdrift.backends.nnsight"])
def test_nnsight_is_needed_by_its_users_alone(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "nnsight", None)
    spec = importlib.util.find_spec(name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert not is_nnsight(tiny("llama"))
    assert kd.load(tiny("llama"), quiet=True).coverage.sites


@pytest.mark.parametrize("path", [kd.CacheOn(), kd.CacheOn(prefill_chunk=4), kd.CacheOff()], ids=str)
def test_a_recurrent_model_gets_no_mask_over_what_it_consumed_before(path, same_bits):
    plain, inside = kd.load(tiny("mamba"), quiet=True), kd.load(wrapped(tiny("mamba")), quiet=True)
    options = {"path": path, "sites": ["logits"], "tokens": [1, 2, 3, 4, 5], "progress": False}
    assert same_bits(*(kd.record(model, PROMPT, **options)["logits"] for model in (plain, inside)))
