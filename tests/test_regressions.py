"""Faults found by a stranger, each with the smallest case that showed it."""

import doctest
import importlib
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import kvdrift as kd
from kvdrift.cli import app, console
from kvdrift.cli.prompts import read_jsonl
from kvdrift.drift.profile import onset
from kvdrift.errors import FileError, InputError, ModelError, NonFiniteError, SiteError

PROMPT = [5, 9, 100, 33, 7, 8, 250, 301, 12, 44]
ROOT = Path(kd.__file__).parent
SHORT = {"max_new_tokens": 3, "floor": 0, "progress": False}
WITH_EXAMPLES = sorted(
    ".".join(("kvdrift", *file.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    for file in ROOT.rglob("*.py")
    if ">>>" in file.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_in_docstrings(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    failed, attempted = doctest.testmod(importlib.import_module(name))
    assert attempted > failed == 0
    assert not list(tmp_path.iterdir()), "an example leaves a file behind"


def test_a_path_takes_whatever_load_takes(tiny_model):
    model, other = tiny_model(), kd.models.tiny("llama", seed=1)
    drift = kd.compare(model, PROMPT, b=kd.CacheOff(model=other), **SHORT)
    assert drift.values("resid_post").min() > 0.1
    trace = kd.record(model, PROMPT, path=kd.CacheOn(model=other), max_new_tokens=2, progress=False)
    assert trace.path.model == "tiny-llama"


@pytest.mark.parametrize("path", ["on", kd.CacheOn, 3])
def test_what_is_no_path_is_refused(tiny_model, path):
    with pytest.raises(InputError, match="is no path"):
        kd.compare(tiny_model(), PROMPT, a=path, **SHORT)
    with pytest.raises(InputError, match="is no path"):
        kd.record(tiny_model(), PROMPT, path=path, progress=False)


@pytest.mark.parametrize("name", ["every", "kv_every", "floor", "max_new_tokens"])
def test_counts_are_whole_numbers(tiny_model, name):
    with pytest.raises(InputError, match=f"{name}=1.5: give a whole number"):
        kd.compare(tiny_model(), PROMPT, progress=False, **{name: 1.5})
    assert kd.compare(tiny_model(), PROMPT, **SHORT | {name: np.int64(2)})
    with pytest.raises(InputError, match="whole number"):
        kd.record(tiny_model(), PROMPT, max_new_tokens=1.5, progress=False)


def test_heads_that_do_not_match_are_refused_by_site(tiny_model):
    other = kd.CacheOff(model=tiny_model("llama-mha"))
    with pytest.raises(SiteError, match="'k' cannot be compared"):
        kd.compare(tiny_model(), PROMPT, b=other, sites=["k"], **SHORT)


def test_a_tap_knows_two_kinds_of_positions(tiny_model):
    for wrong in ("last", [1, 2]):
        with pytest.raises(SiteError, match="'current' or 'all'"):
            kd.tap(tiny_model(), "q", positions=wrong)


def test_every_run_needs_a_cache_of_its_own(tiny_model):
    shared = DynamicCache(config=tiny_model().hf.config)
    with pytest.raises(InputError, match="give a function that makes an empty cache"):
        kd.CacheOn(cache=shared)
    with pytest.raises(InputError, match="must make a new one at every call"):
        kd.compare(tiny_model(), PROMPT, a=kd.CacheOn(cache=lambda: shared), **SHORT | {"floor": 1})


def test_a_model_without_weights_is_one_sentence(tiny_model):
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(tiny_model().hf.config)
    assert kd.load(empty, quiet=True).architecture.n_layers == 4
    for call in (kd.compare, kd.record):
        with pytest.raises(ModelError, match="meta device"):
            call(empty, PROMPT, progress=False)


@pytest.mark.parametrize("window", [2, 4])
def test_a_window_shorter_than_the_probe_gives_keys_all_the_same(window):
    model = kd.load(kd.models.tiny("mistral", sliding_window=window), quiet=True)
    assert {"q", "k", "v", "z"} <= set(model.coverage.sites)
    drift = kd.compare(model, PROMPT, kv_every=1, **SHORT)
    table = drift.to_dataframe("positions").query("step == 2 and layer == 0 and head == 0 and site == 'k'")
    seen = table[table.visible_a].position.tolist()
    assert seen == list(range(12 - window, 12))


def test_growth_names_the_sites_it_can_be_told_of(tiny_model):
    drift = kd.compare(tiny_model(), PROMPT, **SHORT)
    for site in ("k", "final_norm"):
        with pytest.raises(SiteError, match="residual site"):
            drift.growth(site)


def test_a_zero_median_is_not_called_bit_identical(tiny_model):
    drift = kd.compare(tiny_model(), PROMPT, max_new_tokens=6, floor=0, progress=False)
    drift.arrays["drift/resid_post/rel_l2"][:] = 0
    drift.arrays["drift/resid_post/rel_l2"][0, -1, -1] = 1e-3  # one step of five differs
    assert "identical" not in drift.to_dict()["growth"]["note"]


def test_tokens_between_measured_steps_end_the_free_run(tiny_model):
    model = tiny_model()
    own = kd.compare(model, PROMPT, **SHORT | {"max_new_tokens": 5}).arrays["fed"][0].tolist()
    followed = [own[0], (own[1] + 1) % 384, *own[2:]]  # leaves path a's own way at step 1, which is not measured
    drift = kd.compare(model, PROMPT, tokens=followed, every=4, **SHORT)
    assert drift.free_steps[0] <= 2
    drift.arrays["top1_b"][0, 1] = (int(drift.arrays["top1_a"][0, 1]) + 1) % 384
    assert drift.first_flip == (4,)
    assert drift.free_divergence == (None,)


def test_a_huge_interval_does_not_warn():
    rng = np.random.default_rng(0)
    local = (rng.random((6, 47, 30)) < 0.01) * rng.lognormal(0, 1, (6, 47, 30))
    floor = (rng.random((3, 6, 47, 30)) < 0.01) * rng.lognormal(0, 1, (3, 6, 47, 30))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        onset({"resid_post": local}, floor, range(30), n_boot=2000)


@pytest.mark.parametrize("name", ["/nowhere/model", "./nowhere", "../nowhere"])
def test_a_folder_that_is_not_there_is_called_so(name):
    with pytest.raises(ModelError, match="There is no folder"):
        kd.load(name)


def test_a_fault_in_a_local_folder_does_not_send_to_the_hub(tmp_path, tiny_model):
    tiny_model().hf.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="foo") as caught:
        kd.load(tmp_path, attn="foo")
    assert "Hub" not in str(caught.value)


def test_ctrl_c_that_transformers_turned_into_an_import_error():
    def work():
        with console.working():
            try:
                raise KeyboardInterrupt
            except KeyboardInterrupt as error:
                raise ModuleNotFoundError("Could not import module 'PreTrainedModel'") from error

    def tell():
        with console.working():
            try:
                raise KeyboardInterrupt
            except KeyboardInterrupt:
                raise console.Interrupted("3 of 5 are kept") from None

    with pytest.raises(console.Interrupted, match="nothing was written"):
        work()
    with pytest.raises(console.Interrupted, match="3 of 5"):
        tell()


def test_a_full_disk_behind_stdout_is_one_sentence(capsys):
    assert app._end(OSError(28, "No space left on device")) == 1
    assert "no space left" in capsys.readouterr().err


def test_a_mamba_cache_counts_no_tokens(tiny_model):
    assert kd.compare(tiny_model("mamba"), PROMPT, **SHORT).free_divergence == (None,)


def test_the_fingerprint_sees_an_edit_in_place(tmp_path):
    model = kd.load(kd.models.tiny("llama"), quiet=True)
    before = model.fingerprint
    kd.compare(model, PROMPT, store=tmp_path, **SHORT)
    model.hf.model.layers[1].self_attn.o_proj.weight.data[:, 64:96] = 0  # one head
    assert model.fingerprint != before
    with pytest.raises(FileError, match="weights"):
        kd.compare(model, PROMPT, store=tmp_path, **SHORT)


def test_nan_made_by_a_cache_is_not_blamed_on_the_dtype(tiny_model):
    class Broken(DynamicCache):
        def update(self, key, value, *args, **kwargs):
            key, value = super().update(key, value, *args, **kwargs)
            return key, torch.full_like(value, torch.nan) if key.shape[2] > len(PROMPT) else value

    config = tiny_model().hf.config
    with pytest.raises(NonFiniteError, match="the path's own cache") as caught:
        kd.compare(tiny_model(), PROMPT, a=kd.CacheOn(cache=lambda: Broken(config=config)), **SHORT)
    assert "dtype=" not in str(caught.value)


def test_a_tap_inside_itself_leaves_no_hook(tiny_model, hooks):
    model = tiny_model()
    taps = kd.tap(model, "resid_post")
    with taps, pytest.raises(SiteError, match="in place already"):
        taps.__enter__()
    assert not hooks(model.hf)
    with taps:  # one after the other is fine
        model.hf(torch.tensor([PROMPT]))
    assert taps["resid_post"].shape == (4, 1, 256)


def test_a_file_of_prompts_may_begin_with_a_byte_order_mark(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('"One"\n"Two"\n', encoding="utf-8-sig")
    assert read_jsonl(file) == ["One", "Two"]


def test_gaps_between_measured_steps_are_not_blamed_on_the_tokens(tiny_model):
    words = kd.compare(tiny_model(), PROMPT, every=2, **SHORT | {"max_new_tokens": 6}).summary().replace("\n  ", " ")
    assert "not looked at" in words
    assert "own choice" not in words
