"""`kd.sweep`: each cell's numbers in any order, company and subset; its axes; its results folder; its engines."""

import itertools
import json
import pickle
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import kvdrift as kd
from kvdrift.backends.hf import HFBackend
from kvdrift.controls.scope import Scope
from kvdrift.errors import FileError, InputError, SiteError
from kvdrift.models.tiny import tiny
from kvdrift.patching import cells as running
from kvdrift.patching import sweep as module
from kvdrift.patching.outcome import Arm
from kvdrift.runs.store import Store
from kvdrift.settings import UNTOLD

PROMPT = [5, 9, 100, 33, 7, 8, 250, 301, 12, 44]  # longer than the windows of 8
ON, OFF = kd.CacheOn(), kd.CacheOff()
METRICS = ("logit_l2", "kl", "flip", "identical", "unchanged", "moved", "signature", "top1")
CELLS = [
    kd.Patch("kv", layers=1, schedule="one_shot(2)"),
    kd.Patch("resid_post", layers=2),
    [kd.Patch("k", 0, 1), kd.Patch("v", 3, positions=[0, 4, 9])],
    kd.Patch("v", positions=[1], schedule="window(1, 3)"),
    kd.Patch("z", 1, [0, 3], schedule="one_shot(3)"),
]  # fmt: skip


def sweep(model, prompt=PROMPT, **options):
    return kd.sweep(model, prompt, **{"max_new_tokens": 4, "progress": False} | options)


def rows(found, arm):
    return {name: found.arrays[name][:, found.arms.index(arm)] for name in METRICS}


def same_cell(one, cell, two, other):
    """The arms of a cell have the same numbers in two sweeps."""
    mine = [arm for arm in one.arms if arm.cell == cell]
    theirs = [arm for arm in two.arms if arm.cell == other]
    assert [(arm.role, arm.seed) for arm in mine] == [(arm.role, arm.seed) for arm in theirs]
    for arm, twin in zip(mine, theirs, strict=True):
        for name, values in rows(one, arm).items():
            np.testing.assert_array_equal(values, rows(two, twin)[name], err_msg=f"{arm} {name}")


def same(one, two):
    assert one.arms == two.arms
    assert one.notes == two.notes
    assert sorted(one.arrays) == sorted(two.arrays)
    for name, array in one.arrays.items():
        assert array.dtype == two.arrays[name].dtype, name
        np.testing.assert_array_equal(array, two.arrays[name], err_msg=name)


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("mistral")


@pytest.fixture(scope="module")
def whole(model):
    return sweep(model, patches=CELLS, placebos=2, checks="all")


def test_a_cell_has_the_numbers_that_it_has_alone(model, whole):
    for number in range(len(CELLS)):
        alone = sweep(model, patches=[CELLS[number]], placebos=2, checks="all")
        same_cell(whole, number, alone, 0)


def test_a_cell_has_the_numbers_of_kd_patch(model, whole):
    for number in (0, 2):
        patch = kd.patch(model, PROMPT, CELLS[number], max_new_tokens=4, placebos=2, progress=False)
        for arm in (arm for arm in whole.arms if arm.cell == number):
            for name, values in rows(whole, arm).items():
                place = patch.arms.index(Arm(arm.role, 0, arm.seed))
                np.testing.assert_array_equal(values, patch.arrays[name][:, place], err_msg=f"{arm} {name}")


def test_order_and_subset_do_not_matter(model, whole):
    order = [3, 0, 4]
    some = sweep(model, patches=[CELLS[i] for i in order], placebos=2, checks="all")
    for place, number in enumerate(order):
        same_cell(whole, number, some, place)
    fewer = sweep(model, patches=CELLS[::-1], placebos=1, checks="none")
    for number in range(len(CELLS)):
        for role, seed in (("patched", None), ("placebo", 0)):
            for name in METRICS:
                np.testing.assert_array_equal(
                    rows(whole, Arm(role, number, seed))[name], rows(fewer, Arm(role, 4 - number, seed))[name]
                )


@pytest.mark.parametrize("together", [1, 3])
def test_how_many_step_together_does_not_matter(together, model, whole, monkeypatch):
    monkeypatch.setattr(module, "TOGETHER", together)
    same(sweep(model, patches=CELLS, placebos=2, checks="all"), whole)


@pytest.mark.parametrize("recipient", [ON, OFF], ids=["on", "off"])
def test_two_prompts_and_both_directions(recipient, tiny_model, monkeypatch):
    model, prompts = tiny_model("llama"), [PROMPT, [7, 8]]
    options = {"sites": ["kv", "resid_mid"], "layers": [0, 3], "recipient": recipient, "max_new_tokens": 3}
    together = sweep(model, prompts, **options)
    monkeypatch.setattr(module, "TOGETHER", 1)
    same(sweep(model, prompts, **options), together)
    for number, prompt in enumerate(prompts):
        alone = sweep(model, prompt, **options)
        for name in METRICS:
            np.testing.assert_array_equal(together.arrays[name][number], alone.arrays[name][0], err_msg=name)


# --- the results folder


def calls_of(monkeypatch, stop=None):
    """Count the walks, and be interrupted at one of them."""
    native, calls = running.one_prompt, []

    def counted(*arguments, **options):
        calls.append(1)
        if len(calls) == stop:
            raise KeyboardInterrupt
        return native(*arguments, **options)

    monkeypatch.setattr(running, "one_prompt", counted)
    return calls


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_an_interrupted_sweep_goes_on_where_it_was(stop, model, whole, monkeypatch, tmp_path, hooks):
    options = {"patches": CELLS, "placebos": 2, "checks": "all", "store": tmp_path}
    monkeypatch.setattr(module, "TOGETHER", 2)
    with monkeypatch.context() as patched:
        calls_of(patched, stop)
        with pytest.raises(KeyboardInterrupt):
            sweep(model, **options)
    assert not hooks(model.hf)
    assert len(records(tmp_path)) == (2 * (stop - 1) + 1 if stop > 1 else 0)
    calls = calls_of(monkeypatch)
    same(sweep(model, **options), whole)
    assert len(calls) == 3 - (stop - 1)
    calls.clear()
    same(sweep(model, **options), whole)
    assert not calls, "nothing is left to run"


def records(folder):
    return Store.read(folder, "sweep")[1]


def test_a_file_that_was_cut_off_anywhere(model, tmp_path):
    options = {"patches": CELLS, "placebos": 1, "checks": "none", "store": tmp_path}
    whole = sweep(model, **options)
    path = tmp_path / "records.jsonl"
    content, kept = path.read_bytes(), records(tmp_path)
    for cut in (0, 40, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:cut])
        same(sweep(model, **options), whole)
        assert str(sorted(records(tmp_path).items())) == str(sorted(kept.items()))


def test_records_do_not_depend_on_company_or_order(model, tmp_path, monkeypatch):
    """Two prompts, so that what one could not write is not told of the other."""
    options = {"prompt": [PROMPT, PROMPT[:4]], "patches": CELLS[:3], "placebos": 1}
    options["patches"][2] = [kd.Patch("k", 0, 1), kd.Patch("v", 3, positions=[0, 3])]
    whole = sweep(model, **options, store=tmp_path / "together")
    monkeypatch.setattr(module, "TOGETHER", 1)
    same(sweep(model, **options, store=tmp_path / "alone"), whole)
    one, other = (str(sorted(records(tmp_path / name).items())) for name in ("together", "alone"))
    assert one == other
    kept = records(tmp_path / "alone")
    assert kept["0/2"]["absent"] == [["v", 3, "outside the window", 0, 1], ["v", 3, "outside the window", 3, 2]]
    assert kept["1/2"]["absent"] == []


class Travelling:
    """An engine whose workers and jobs are pickled on their way, as those of a cluster are; the last job first."""

    threads, workers = 1, 3

    def run(self, make_worker, jobs):
        worker = pickle.loads(pickle.dumps(make_worker))()
        for key, job in reversed(jobs.items()):
            yield key, worker(pickle.loads(pickle.dumps(job)))


@pytest.mark.parametrize("donor", ["path", "trace"])
def test_workers_that_have_travelled_give_the_same_records(donor, tiny_model, tmp_path, monkeypatch):
    model, other = tiny_model("mistral"), tiny_model("mistral", dtype=torch.bfloat16)
    options = {"prompt": [PROMPT, PROMPT[:7]], "sites": "kv", "placebos": 1, "checks": "all", "threads": 1}
    if donor == "trace":
        options["donor"] = [
            kd.record(
                model, ids, path=OFF, sites=["k", "v", "logits"], positions="all", max_new_tokens=4, progress=False
            )
            for ids in options["prompt"]
        ]
    else:
        options["donor"] = kd.CacheOff(model=other, controls=(kd.ReRoll(1),))
    whole = sweep(model, **options, store=tmp_path / "here")
    monkeypatch.setattr(module, "engine_of", lambda *_, **__: Travelling())
    same(sweep(model, **options, store=tmp_path / "there"), whole)
    here, there = (str(sorted(records(tmp_path / name).items())) for name in ("here", "there"))
    assert here == there


@pytest.mark.slow
def test_two_ray_workers_go_on_where_this_process_stopped_with_the_same_records(
    model, tmp_path, monkeypatch, cluster, hooks
):
    options = {"prompt": [PROMPT, PROMPT[:7]], "patches": CELLS, "placebos": 1, "threads": 1}
    whole = sweep(model, **options, store=tmp_path / "here")
    with monkeypatch.context() as patched:
        patched.setattr(module, "TOGETHER", 2)
        calls_of(patched, 2)
        with pytest.raises(KeyboardInterrupt):
            sweep(model, **options, store=tmp_path / "ray")
    assert len(records(tmp_path / "ray")) == 3
    same(sweep(model, **options, store=tmp_path / "ray", engine="ray", workers=2), whole)
    here, there = (str(sorted(records(tmp_path / name).items())) for name in ("here", "ray"))
    assert here == there
    assert not hooks(model.hf)


def test_other_threads_are_other_numbers(model, tmp_path):
    before = torch.get_num_threads()
    options = {"patches": CELLS[:1], "placebos": 0, "checks": "none", "store": tmp_path}
    sweep(model, **options, threads=before)
    with pytest.raises(FileError, match=f"threads: {before} there, {before + 1} here"):
        sweep(model, **options, threads=before + 1)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("where", ["bar", "step"])
def test_an_interruption_in_the_bar_or_a_step(where, model, monkeypatch, tmp_path, hooks):
    options = {"patches": CELLS, "placebos": 1, "checks": "shared"}
    whole = sweep(model, **options)
    options["store"] = tmp_path
    monkeypatch.setattr(module, "TOGETHER", 2)
    calls, ticks = itertools.count(), itertools.count()

    class Bar(module.tqdm):
        def update(self, n=1):
            super().update(n)
            if n == 2 and next(ticks) == 4:  # the first group of two cells has taken its four steps
                raise KeyboardInterrupt

    forward = HFBackend.forward

    def interrupted(*arguments):
        if next(calls) == 50:
            raise KeyboardInterrupt
        return forward(*arguments)

    with monkeypatch.context() as patched:
        if where == "bar":
            patched.setattr(module, "tqdm", Bar)
        else:
            patched.setattr(HFBackend, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sweep(model, **options)
    assert not hooks(model.hf)
    assert len(records(tmp_path)) in (3, 5), "finished groups are kept"
    same(sweep(model, **options), whole)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"seed": 1}, "seed: 0 there, 1 here"),
        ({"placebos": 1}, "placebos: 2 there, 1 here"),
        ({"checks": "none"}, "controls: all there, none here"),
        ({"patches": CELLS[:2]}, "cells: 1 entries there, 2 here"),
        ({"prompt": PROMPT[1:]}, "prompts.0: 10 entries there, 9 here"),
        ({"max_new_tokens": 5}, "lengths.0: 4 there, 5 here"),
        ({"tokens": [3, 1, 4, 1]}, r"tokens: null there, \[\[3, 1, 4, 1\]\] here"),
        ({"recipient": kd.CacheOn(label="mine")}, "recipient.label: cache-ON there, mine here"),
        ({"recipient": OFF}, "recipient.label: cache-ON there, cache-OFF here; donor.label: cache-OFF there, cache-ON"),
        ({"donor": kd.CacheOff(controls=(kd.ReRoll(1),))}, "donor.controls: 0 entries there, 1 here"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_folder_of_another_sweep_is_refused_by_name(change, names, model, tmp_path, hooks):
    options = {"patches": [CELLS[4]], "placebos": 2, "checks": "all", "store": tmp_path}
    sweep(model, **options)
    before = (tmp_path / "records.jsonl").read_bytes()
    with pytest.raises(FileError, match=f"holds another sweep .it differs in {names}.*; choose another folder"):
        sweep(model, **options | change)
    assert (tmp_path / "records.jsonl").read_bytes() == before
    assert not hooks(model.hf)


def test_a_folder_of_another_model_or_a_file_is_refused(model, tiny_model, tmp_path):
    options = {"patches": [CELLS[4]], "store": tmp_path, "placebos": 0, "checks": "none"}
    sweep(model, **options)
    with pytest.raises(FileError, match=r"it differs in weights\.0: \w+ there, \w+ here"):
        sweep(tiny_model("mistral", seed=1), **options)
    thesis = tmp_path / "thesis.txt"
    thesis.write_text("my thesis\n")
    with pytest.raises(FileError, match="is a file, and results are kept in a folder"):
        sweep(model, **options | {"store": thesis})
    assert thesis.read_text() == "my thesis\n"


def test_the_store_has_a_record_per_cell(model, tmp_path):
    sweep(model, patches=CELLS[:2], store=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert [line["key"] for line in lines] == ["0/shared", "0/0", "0/1"]


# --- notes


def test_what_a_window_has_evicted_is_reported_whatever_ran_before(model, monkeypatch, tmp_path):
    options = {"sites": "k", "layers": [1], "over": ["layer", "position"], "positions": [0, 3, 9]}
    once = sweep(model, **options)
    (note,) = [note for note in once.notes if "outside the window" in note]
    assert "0 (step 1)" in note
    assert "3 (step 2)" in note
    monkeypatch.setattr(module, "TOGETHER", 1)
    same(sweep(model, **options), once)
    with monkeypatch.context() as patched:
        calls_of(patched, 3)
        with pytest.raises(KeyboardInterrupt):
            sweep(model, **options, store=tmp_path / "sweep")
    same(sweep(model, **options, store=tmp_path / "sweep"), once)
    same(sweep(model, **options, store=tmp_path / "sweep"), once)


# --- axes


def places(found):
    return [(p.site, p.layers, p.heads, p.positions, str(p.schedule)) for c in found.cells for p in c.patches]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"sites": ["k", "resid_post"]},
            [(s, (x,), None, None, "persistent") for s in ("k", "resid_post") for x in range(4)],
        ),
        ({"sites": "k", "layers": [-1, 1]}, [("k", (x,), None, None, "persistent") for x in (3, 1)]),
        ({"sites": "embed"}, [("embed", None, None, None, "persistent")]),
        ({"sites": "kv", "over": "head"}, [("kv", None, (h,), None, "persistent") for h in range(2)]),
        ({"sites": "q", "over": "head", "layers": 2}, [("q", (2,), (h,), None, "persistent") for h in range(8)]),
        ({"sites": "k", "over": "head", "heads": [1]}, [("k", None, (1,), None, "persistent")]),
        (
            {"sites": "v", "over": ("layer", "head"), "layers": [0, 2]},
            [("v", (x,), (h,), None, "persistent") for x in (0, 2) for h in range(2)],
        ),
        ({"sites": "k", "over": "position", "layers": 1}, [("k", (1,), None, (p,), "persistent") for p in range(10)]),
        (
            {"sites": "k", "over": "position", "positions": [4, 2]},
            [("k", None, None, (p,), "persistent") for p in (4, 2)],
        ),
        ({"sites": "kv", "over": "step"}, [("kv", None, None, None, f"one_shot({s})") for s in range(1, 4)]),
        (
            {"sites": "kv", "over": ["step", "layer"], "steps": [1, 3], "layers": [2]},
            [("kv", (2,), None, None, f"one_shot({s})") for s in (1, 3)],
        ),
        (
            {"sites": "z", "layers": [1], "schedule": ["persistent", "one_shot(2)"]},
            [("z", (1,), None, None, s) for s in ("persistent", "one_shot(2)")],
        ),
    ],
)  # fmt: skip
def test_the_cells_of_an_axis(options, expected, tiny_model):
    found = sweep(tiny_model("llama"), **options, placebos=0, checks="none", max_new_tokens=5)
    assert places(found) == expected
    table = found.to_dataframe()
    assert len(table) == len(expected)
    for row, (site, layers, heads, positions, schedule) in zip(table.to_dict("records"), expected, strict=True):
        assert row["site"] == site
        for name, single in (("layer", layers), ("head", heads), ("position", positions)):
            assert (row[name] == single[0]) if single else row[name] is None or np.isnan(row[name])
        assert row["schedule"] == kd.Schedule.parse(schedule).kind
    over = options.get("over", "layer")
    assert found.over == ((over,) if isinstance(over, str) else tuple(over))


def test_layers_and_heads_are_those_that_a_model_has(tiny_model):
    assert [p[1] for p in places(sweep(tiny_model("lfm2"), sites="kv", max_new_tokens=3))] == [(1,), (3,)]
    mqa = sweep(tiny_model("llama-mqa"), sites=["kv", "q"], over="head", layers=0, max_new_tokens=3)
    assert [p[:3] for p in places(mqa)] == [("kv", (0,), (0,)), *(("q", (0,), (h,)) for h in range(8))]
    mamba = sweep(tiny_model("mamba"), sites="resid_post", max_new_tokens=3)
    assert len(mamba.cells) == 4


def test_trivial_cells_are_not_the_best(tiny_model):
    found = sweep(tiny_model("llama"), sites=["resid_post", "v"])
    table = found.to_dataframe()
    assert table["trivial"].tolist() == [False] * 3 + [True] + [False] * 4
    assert table["recovery"][3] == 1
    assert 3 not in found.best(8)["cell"].tolist()


def test_a_saved_trace_serves_a_sweep(tiny_model):
    model = tiny_model("llama")
    trace = kd.record(
        model, PROMPT, path=OFF, sites=["resid_post", "final_norm", "k", "v", "logits"], positions="all",
        max_new_tokens=5, progress=False,
    )  # fmt: skip
    live, saved = (sweep(model, donor=donor, layers=[0, 2]) for donor in (OFF, trace))
    same(live, saved)
    with pytest.raises(SiteError, match="lacks 'q'"):
        sweep(model, donor=trace, sites="q")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"over": "token"}, InputError, "choose one or several of layer, head, position, step"),
        ({"over": []}, InputError, "choose one or several"),
        ({"over": ["layer", "layer"]}, InputError, "each once"),
        ({"over": "head", "sites": "resid_post"}, InputError, "'resid_post' has no heads"),
        ({"over": "position", "positions": "all"}, InputError, "absolute positions"),
        ({"over": "position", "positions": [99], "sites": "k"}, SiteError, "no position"),
        ({"over": "step", "schedule": "one_shot(2)"}, InputError, "cannot be combined with schedule"),
        ({"over": "step", "steps": [0]}, InputError, "steps start from 1"),
        ({"over": "step", "steps": [4]}, SiteError, "steps 0 to 3"),
        ({"over": "step", "steps": []}, InputError, "finds no step"),
        ({"steps": [1]}, InputError, "steps= is for over='step'"),
        ({"sites": []}, InputError, "There is no cell"),
        ({"schedule": []}, InputError, "There is no cell"),
        ({"patches": []}, InputError, "There is no cell"),
        ({"patches": [[]]}, InputError, "There is no patch"),
        ({"patches": [3]}, InputError, "3 is no patch"),
        ({"layers": [4]}, SiteError, "no layer 4"),
        ({"sites": "k", "heads": [2]}, SiteError, "KV heads 0 to 1"),
        ({"sites": "pattern"}, SiteError, "cannot be patched"),
        ({"schedule": "sometimes"}, InputError, "schedule='sometimes'"),
        ({"placebos": -1}, InputError, "placebos=-1"),
        ({"checks": True}, InputError, "choose 'all', 'shared' or 'none'"),
        ({"max_new_tokens": 1}, InputError, "give 2 or more"),
        ({"sites": "kv", "write": "cache", "recipient": OFF}, InputError, "needs a recipient with a cache"),
    ],
)
def test_bad_arguments_are_one_sentence(options, error, words, tiny_model, tmp_path, hooks):
    model = tiny_model("llama")
    with pytest.raises(error, match=words) as raised:
        sweep(model, **options, store=tmp_path / "sweep")
    assert "\n" not in str(raised.value)
    assert not hooks(model.hf)


# --- no cell under another's name


class Scaled(DynamicCache):
    """Hands a decode step other values than it stores."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def update(self, k, v, layer_idx, *args, **kwargs):
        keys, values = super().update(k, v, layer_idx)
        return keys, values * self.factor if k.shape[2] == 1 else values


class Halved:
    """A control that halves the output of one layer, by an attribute that its label does not show."""

    label = "halved"

    def __init__(self, layer=0):
        self.layer = layer

    def bind(self, model):
        def enter(stack):
            hook = model.tree.blocks[self.layer].mlp.register_forward_hook(lambda m, args, output: output / 2)
            stack.callback(hook.remove)

        return Scope(enter)


class Steered(kd.CacheOff):
    """A path of one's own, with a value that no field shows."""

    def __init__(self, strength):
        super().__init__()
        object.__setattr__(self, "strength", strength)


@pytest.mark.parametrize(
    ("one", "other", "names"),
    [
        (
            kd.CacheOn(cache=partial(Scaled, 1.0), lossy="scales"),
            kd.CacheOn(cache=partial(Scaled, 1.5), lossy="scales"),
            r"recipient\.path\.cache\.args\.0: 1\.0 there, 1\.5 here",
        ),
        (kd.CacheOn(prefill_chunk=4), kd.CacheOn(prefill_chunk=8), r"recipient\.path\.prefill_chunk: 4 there, 8 here"),
        (kd.CacheOn(left_padding=1), kd.CacheOn(left_padding=2), r"recipient\.path\.left_padding"),
        (kd.CacheOn(controls=(Halved(0),)), kd.CacheOn(controls=(Halved(1),)), r"controls\.0\.layer: 0 there, 1 here"),
        (Steered(1.0), Steered(2.0), r"recipient\.path\.strength: 1\.0 there, 2\.0 here"),
    ],
)
def test_another_recipient_is_not_handed_the_first_ones_numbers(one, other, names, model, tmp_path):
    options = {"sites": "v", "layers": [0], "placebos": 0, "checks": "none", "donor": kd.CacheOn()}
    first = sweep(model, **options, recipient=one, store=tmp_path)
    with pytest.raises(FileError, match=names):
        sweep(model, **options, recipient=other, store=tmp_path)
    same(sweep(model, **options, recipient=one, store=tmp_path), first)


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_a_cache_without_a_name_is_refused_before_anything_runs(factor, model, tmp_path):
    nameless = kd.CacheOn(cache=lambda: Scaled(factor))
    words = r"recipient\.path\.cache is a lambda, which cannot be told .* give it a name: .* or leave out store="
    with pytest.raises(InputError, match=words):
        sweep(model, recipient=nameless, store=tmp_path / "kept")
    assert not (tmp_path / "kept").exists()
    found = sweep(model, recipient=nameless, sites="v", layers=[0], placebos=0, checks="none")
    assert found.provenance["settings"]["recipient"]["path"]["cache"] == {UNTOLD: "a lambda"}


def test_a_model_with_a_hook_is_another_model(tmp_path):
    options = {"sites": "v", "layers": [0], "placebos": 0, "checks": "none", "store": tmp_path}
    hf = tiny("llama")
    sweep(hf, **options)
    hook = hf.model.layers[1].mlp.register_forward_hook(lambda m, args, output: output * 1.25)
    with pytest.raises(FileError, match="logits_of_a_short_text"):
        sweep(hf, **options)
    hook.remove()
    sweep(hf, **options)
    hf.model.layers[1].mlp.forward = partial(_quarter, hf.model.layers[1].mlp.forward)
    with pytest.raises(FileError, match="logits_of_a_short_text"):
        sweep(hf, **options)


def _quarter(forward, *arguments):
    return forward(*arguments) / 4


def test_another_recorded_donor_is_told_by_its_bits(model, tmp_path):
    sites = ["v", "logits"]
    trace = kd.record(model, PROMPT, path=OFF, sites=sites, positions="all", max_new_tokens=4, progress=False)
    sweep(model, donor=trace, sites="v", layers=[0], placebos=0, checks="none", store=tmp_path)
    changed = replace(trace, tensors={**trace.tensors, "v": trace.tensors["v"] * 1.0000001})
    with pytest.raises(FileError, match=r"donor\.0\.tensors\.v\.bits"):
        sweep(model, donor=changed, sites="v", layers=[0], placebos=0, checks="none", store=tmp_path)


def test_the_older_name_of_the_folder_works_and_warns(model, tmp_path):
    options = {"sites": "v", "layers": [0], "placebos": 0, "checks": "none"}
    with pytest.warns(FutureWarning, match="results= is called store= now"):
        first = sweep(model, **options, results=tmp_path)
    same(sweep(model, **options, store=tmp_path), first)
    with pytest.raises(InputError, match="two names of one argument"):
        sweep(model, **options, store=tmp_path, results=tmp_path)
