"""`compare` end to end: its numbers against two recordings and plain numpy, its options, its refusals."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import kvdrift as kd
from kvdrift.drift.lockstep import Lockstep
from kvdrift.errors import FileError, InputError, ModelError, SiteError
from kvdrift.models.tiny import tiny
from kvdrift.paths.cache_off import CacheOff, CacheOffRun
from kvdrift.runs.engine import pinned

PROMPT = [5, 9, 100, 33, 7, 8, 250, 301, 12, 44, 17, 61]


def compare(*arguments, **options):
    return kd.compare(*arguments, **{"progress": False, "max_new_tokens": 4, "floor": 0, "local": False, **options})


def numpy(tensor):
    return tensor.double().numpy()


def rel_l2(x, y, axis=-1):
    return np.linalg.norm(x - y, axis=axis) / np.linalg.norm(y, axis=axis)


def log_softmax(x):
    shifted = x - x.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


CASES = [
    ("llama", torch.float32, "sdpa"),
    ("llama", torch.bfloat16, "sdpa"),
    ("mistral", torch.float32, "sdpa"),
    ("gemma3", torch.float32, "eager"),
    ("gemma2", torch.float16, "eager"),
    ("gpt-oss", torch.float32, "eager"),
    ("gpt2", torch.float32, "sdpa"),
    ("deepseek-v3", torch.float32, "sdpa"),
    ("lfm2", torch.float32, "sdpa"),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda c: "-".join(map(str, c)).replace("torch.", ""))
def both(request, tiny_model):
    """A comparison, and its two paths recorded one after the other on the same tokens."""
    model = tiny_model(*request.param)
    drift = compare(model, PROMPT, kv_every=1)
    tokens = drift.arrays["fed"][0].tolist()
    sites = [site for site in model.coverage.sites if site != "pattern"]
    on, off = (
        kd.record(model, PROMPT, path=path, sites=sites, positions="all", tokens=tokens, progress=False)
        for path in (kd.CacheOn(), kd.CacheOff())
    )
    return model, drift, on, off


def test_residual_sites_against_numpy(both):
    _, drift, on, off = both
    for site in drift.sites:
        if site in ("q", "k", "v", "z"):
            continue
        assert tuple(drift.layers(site)) == on.axes(site).get("layer", ())
        for step in range(4):
            x, y = (numpy(trace[site][step, ..., len(PROMPT) - 1 + step, :]) for trace in (on, off))
            np.testing.assert_allclose(drift.values(site)[0, step], rel_l2(x, y), rtol=1e-12, atol=0)
            np.testing.assert_array_equal(drift.values(site, "max_abs")[0, step], np.abs(x - y).max(-1))
            np.testing.assert_array_equal(drift.values(site, "identical")[0, step], (x == y).mean(-1))
            cosine = 1 - (x * y).sum(-1) / np.linalg.norm(x, axis=-1) / np.linalg.norm(y, axis=-1)
            np.testing.assert_allclose(drift.values(site, "cosine")[0, step], cosine, atol=1e-14)


def test_queries_and_head_outputs_against_numpy(both):
    _, drift, on, off = both
    for site in ("q", "z"):
        for step in range(4):
            x, y = (numpy(trace[site][step, ..., len(PROMPT) - 1 + step, :]) for trace in (on, off))
            np.testing.assert_allclose(drift.values(site)[0, step], rel_l2(x, y), rtol=1e-12)


def test_keys_and_values_over_shared_positions_against_numpy(both):
    model, drift, on, off = both
    for site in ("k", "v"):
        shared = (on.valid(site) & off.valid(site)).numpy()
        x, y = numpy(on[site]), numpy(off[site])
        for step in range(4):
            for place, layer in enumerate(drift.layers(site)):
                window = model.architecture.layers[int(layer)].window
                inside = np.arange(len(PROMPT) + 3) > len(PROMPT) - 1 + step - (window or np.inf)
                both_read = shared[step, place].all(0) & inside
                for head in range(x.shape[2]):
                    u, v = x[step, place, head][both_read], y[step, place, head][both_read]
                    at = (0, step, place, head)
                    np.testing.assert_allclose(drift.values(site)[at], rel_l2(u.ravel(), v.ravel()), rtol=1e-12)
                    np.testing.assert_array_equal(drift.values(site, "identical")[at], (u == v).mean())
                    row = drift.arrays[f"positions/{site}/rel_l2"][at]
                    assert row.dtype == np.float32
                    expected = np.full(len(PROMPT) + 3, np.nan)
                    expected[both_read] = rel_l2(u, v)
                    np.testing.assert_allclose(row, expected.astype(np.float32), rtol=1e-6)
                if window is not None:
                    assert both_read.sum() == min(window, len(PROMPT) + step)
                for name in ("visible_a", "visible_b"):
                    np.testing.assert_array_equal(drift.arrays[f"positions/{name}"][0, step, place], both_read)


def test_logits_against_numpy(both):
    _, drift, on, off = both
    x, y = numpy(on["logits"]), numpy(off["logits"])
    log_p, log_q = log_softmax(x), log_softmax(y)
    np.testing.assert_allclose(
        drift.values("logits", "kl")[0], (np.exp(log_q) * (log_q - log_p)).sum(-1), rtol=1e-5, atol=1e-14
    )
    centred = (x - y) - (x - y).mean(-1, keepdims=True)
    np.testing.assert_allclose(drift.values("logits", "logit_l2")[0], np.linalg.norm(centred, axis=-1), rtol=1e-12)
    np.testing.assert_array_equal(drift.values("logits", "logit_max")[0], np.abs(x - y).max(-1))
    np.testing.assert_array_equal(drift.values("logits", "flip")[0], x.argmax(-1) != y.argmax(-1))
    for name, values in (("a", x), ("b", y)):
        top = np.sort(values, axis=-1)
        np.testing.assert_array_equal(drift.values("logits", f"margin_{name}")[0], top[:, -1] - top[:, -2])
        np.testing.assert_array_equal(drift.values("logits", f"tie_{name}")[0], top[:, -1] == top[:, -2])
        np.testing.assert_array_equal(drift.arrays[f"top1_{name}"][0], values.argmax(-1))


def test_the_float32_head_against_numpy(both):
    model, drift, on, off = both
    if not drift.has("logits", "kl_float32_head"):
        pytest.skip("the head of this family is not a plain product")
    head = model.hf.get_output_embeddings()
    cap = getattr(model.hf.config, "final_logit_softcapping", None)
    logits = []
    for trace in (on, off):
        states = torch.stack([trace["final_norm"][step, len(PROMPT) - 1 + step] for step in range(4)])
        raw = numpy(states.float()) @ numpy(head.weight.float()).T
        logits.append(np.tanh(raw / cap) * cap if cap else raw)
    log_p, log_q = (log_softmax(x) for x in logits)
    expected = (np.exp(log_q) * (log_q - log_p)).sum(-1)
    if model.dtype != torch.float32:  # in float32 it is the product's own rounding
        np.testing.assert_allclose(drift.values("logits", "kl_float32_head")[0], expected, rtol=2e-3, atol=1e-11)
    assert drift.values("logits", "kl_float32_head").shape == (1, 4)


def test_there_is_something_to_compare(both):
    """The checks above would pass on zeros."""
    model, drift, *_ = both
    if model.dtype == torch.float32:
        assert (drift.values("resid_post")[0, 1:] > 0).any()
        assert np.nanmax(drift.arrays["positions/k/rel_l2"]) > 0


# --- tokens


@dataclass(frozen=True)
class Nudged(CacheOff):
    """Cache-OFF with a planted flip: from a step on the runner-up token gets the highest logit."""

    at: int = 3

    def start(self, model, ids, controls=None):
        run = super().start(model, ids, controls)
        run.__class__, run.count = NudgedRun, -1
        return run


class NudgedRun(CacheOffRun):
    def step(self, token=None):
        step = super().step(token)
        self.count += 1
        if self.count < self.path.at:
            return step
        logits = step.logits.clone()
        logits[logits.topk(2).indices[1]] = logits.max() + 1
        return replace(step, logits=logits)


def free_run(model, path, n_steps):
    run, tokens = path.start(model, PROMPT), []
    for number in range(n_steps):
        tokens.append(int(run.step(tokens[-1] if number else None).logits.argmax()))
    return tokens


def divergence(x, y):
    return next((step for step, (p, q) in enumerate(zip(x, y, strict=True)) if p != q), None)


@pytest.mark.parametrize("at", [0, 1, 3])
def test_free_divergence_is_that_of_two_free_runs(at, tiny_model):
    model, flipped = tiny_model("llama"), Nudged(at=at)
    a, b = free_run(model, kd.CacheOn(), 6), free_run(model, flipped, 6)
    assert divergence(a, b) == at
    drift = compare(model, PROMPT, b=flipped, max_new_tokens=6)
    assert drift.arrays["fed"][0].tolist() == a
    assert drift.free_divergence == drift.first_flip == (at,)
    led_by_b = compare(model, PROMPT, b=flipped, max_new_tokens=6, tokens="b")
    assert led_by_b.arrays["fed"][0].tolist() == b
    assert led_by_b.free_divergence == (at,)
    assert led_by_b.arrays["fed"][0].tolist() == led_by_b.arrays["top1_b"][0].tolist()


@pytest.mark.parametrize(("family", "n_prompts"), [("mistral", 3), ("mamba", 2)])
def test_free_divergence_is_that_of_generate(family, n_prompts):
    """A vocabulary large enough for near ties: where it was written, each family flips once in these prompts."""
    model = kd.load(tiny(family, dtype=torch.bfloat16, vocab_size=4096), quiet=True)
    generator = torch.Generator().manual_seed(3)
    for _ in range(n_prompts):
        prompt = torch.randint(4096, (24,), generator=generator).tolist()
        sequences = [
            model.hf.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, use_cache=cached)[0, 24:]
            for cached in (True, False)
        ]
        drift = compare(model, prompt, max_new_tokens=12, sites=["logits"])
        assert drift.free_divergence == (divergence(*(ids.tolist() for ids in sequences)),)


def test_given_tokens_are_followed_past_the_end_of_text():
    hf = tiny("llama")
    free = compare(hf, PROMPT, max_new_tokens=6)
    fed = free.arrays["fed"][0].tolist()
    hf.generation_config.eos_token_id = fed[2]
    model = kd.load(hf, quiet=True)
    stopped = compare(model, PROMPT, max_new_tokens=6)
    n = fed.index(fed[2]) + 1
    assert stopped.arrays["n_steps"].tolist() == [n]
    assert stopped.arrays["fed"].tolist() == [fed[:n]]
    np.testing.assert_array_equal(stopped.values("resid_post")[0], free.values("resid_post")[0, :n])
    forced = compare(model, PROMPT, tokens=fed)
    assert forced.arrays["n_steps"].tolist() == [6]
    for key, array in free.arrays.items():
        np.testing.assert_array_equal(array, forced.arrays[key], err_msg=key)
    for same in (torch.tensor(fed), torch.tensor([fed]), tuple(fed), [fed]):
        np.testing.assert_array_equal(compare(model, PROMPT, tokens=same).arrays["fed"], free.arrays["fed"])


def test_prompts_side_by_side_are_the_prompts_alone(tiny_model):
    model, prompts = tiny_model("mistral"), [PROMPT, [1, 2, 3], [9]]
    many = compare(model, prompts, floor=1, local=True)
    for place, prompt in enumerate(prompts):
        one = compare(model, prompt, floor=1, local=True)
        for key in ("drift/resid_post/rel_l2", "drift/logits/kl", "local/resid_post/rel_l2", "top1_a", "fed"):
            np.testing.assert_array_equal(many.arrays[key][place], one.arrays[key][0], err_msg=key)
        np.testing.assert_array_equal(
            many.values("resid_post", of="floor")[:, place], one.values("resid_post", of="floor")[:, 0]
        )


# --- control


def test_the_control_is_the_same_comparison_in_another_dtype_on_the_same_tokens(hooks):
    hf = tiny("llama", dtype=torch.bfloat16)
    before = {name: weight.clone() for name, weight in hf.state_dict().items()}
    drift = compare(hf, PROMPT, also_in="float32", floor=1, local=True)
    assert (drift.a.dtype, drift.control.a.dtype) == ("bfloat16", "float32")
    np.testing.assert_array_equal(drift.control.arrays["fed"], drift.arrays["fed"])
    upcast = kd.load(tiny("llama", dtype=torch.bfloat16).float(), quiet=True)
    own = compare(upcast, PROMPT, tokens=drift.arrays["fed"][0].tolist(), floor=1, local=True)
    for key in own.arrays:
        if key.startswith(("drift/", "floor/", "local/", "top1")):
            np.testing.assert_allclose(drift.control.arrays[key], own.arrays[key], rtol=0.5, atol=1e-5, err_msg=key)
    assert np.median(drift.control.values("resid_post")[0, 1:, -1]) < 1e-5
    assert all(torch.equal(weight, before[name]) for name, weight in hf.state_dict().items())
    assert not hooks(hf)


# --- resuming


class Stop(Exception):
    pass


@pytest.fixture
def interrupted(monkeypatch, tmp_path):
    """Runs ``compare`` and stops it in the middle of the second prompt."""

    def run(*arguments, **options):
        from kvdrift.drift import lockstep

        original, calls = lockstep.Lockstep._measure, []

        def stopping(self, *rest):
            calls.append(1)
            if len(calls) == 6:
                raise Stop
            return original(self, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(lockstep.Lockstep, "_measure", stopping)
            with pytest.raises(Stop):
                compare(*arguments, **options, store=tmp_path / "kept")
        return tmp_path / "kept"

    return run


def test_a_run_that_was_stopped_continues_to_the_same_numbers(interrupted, tiny_model, same_bits, monkeypatch, hooks):
    model, prompts = tiny_model("llama", torch.bfloat16), [PROMPT, [1, 2, 3], [9, 8]]
    options = {"floor": 1, "local": True, "also_in": "float32", "max_new_tokens": 2}
    whole = compare(model, prompts, **options)
    folder = interrupted(model, prompts, **options)
    assert not hooks(model.hf)
    kept = sorted(path.name for path in folder.iterdir())
    assert kept == [".lock", "prompt-00000.safetensors", "records.jsonl", "settings.json"]
    stamp = (folder / kept[1]).stat().st_mtime_ns
    resumed = compare(model, prompts, **options, store=folder)
    assert (folder / kept[1]).stat().st_mtime_ns == stamp, "a finished prompt was run again"
    for one, two in ((whole, resumed), (whole.control, resumed.control)):
        assert one.prompts == two.prompts
        assert all(same_bits(one.arrays[key], two.arrays[key]) for key in one.arrays | two.arrays)
    monkeypatch.setattr(Lockstep, "walk", None)  # nothing is run any more
    again = compare(model, prompts, **options, store=str(folder))
    assert all(same_bits(again.arrays[key], whole.arrays[key]) for key in whole.arrays)


def test_a_folder_of_another_comparison_is_refused(tmp_path, tiny_model):
    model, folder = tiny_model("llama"), tmp_path / "kept"
    compare(model, PROMPT, store=folder)
    other_weights = kd.load(tiny("llama", seed=1), quiet=True)
    for arguments, options in [
        ((model, [1, 2]), {}),
        ((model, PROMPT), {"tokens": "b"}),
        ((model, PROMPT), {"tokens": [1, 2, 3, 4]}),
        ((model, PROMPT), {"max_new_tokens": 5}),
        ((model, PROMPT), {"floor": 1}),
        ((model, PROMPT), {"local": True}),
        ((model, PROMPT), {"every": 2}),
        ((model, PROMPT), {"sites": ["k"]}),
        ((model, PROMPT), {"control": "float64"}),
        ((model, PROMPT), {"a": kd.CacheOn(prefill_chunk=3)}),
        ((model, PROMPT), {"a": kd.CacheOn(attn="eager")}),
        ((model, PROMPT), {"b": Nudged(at=3)}),
        ((model, PROMPT), {"a": kd.CacheOn(controls=(kd.ReRoll(1),))}),
        ((other_weights, PROMPT), {}),
    ]:
        with pytest.raises(FileError, match=r"holds another comparison .it differs in"):
            compare(*arguments, store=folder, **options)
    assert json.loads((folder / "settings.json").read_text())
    compare(model, PROMPT, store=folder)


def test_a_damaged_folder_is_refused(tmp_path, tiny_model):
    model, folder = tiny_model("llama"), tmp_path / "kept"
    compare(model, PROMPT, store=folder)
    kept = folder / "prompt-00000.safetensors"
    content = kept.read_bytes()
    kept.write_bytes(content[:-10])
    with pytest.raises(FileError, match="not a whole kvdrift file"):
        compare(model, PROMPT, store=folder)
    kept.write_bytes(content)
    for text in ("{", "[]x", "3"):
        (folder / "settings.json").write_text(text)
        with pytest.raises(FileError, match="is not of a store of results"):
            compare(model, PROMPT, store=folder)
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileError, match="is a file, and results are kept in a folder"):
        compare(model, PROMPT, store=tmp_path / "file")


# --- refusals


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"max_new_tokens": 0}, InputError, "max_new_tokens=0"),
        ({"every": 0}, InputError, "every=0"),
        ({"kv_every": 0}, InputError, "kv_every=0"),
        ({"floor": -1}, InputError, "floor=-1"),
        ({"tokens": "c"}, InputError, "'c'"),
        ({"tokens": []}, InputError, "empty"),
        ({"tokens": ["text"]}, InputError, "not text"),
        ({"tokens": [[1], [2]]}, InputError, r"per prompt \(1\), not 2"),
        ({"tokens": [384]}, InputError, "outside the vocabulary"),
        ({"tokens": "b", "every": 2}, InputError, "every step of path b"),
        ({"self_drift": True, "every": 2}, InputError, "neighbouring steps"),
        ({"also_in": "float32"}, InputError, "own dtype"),
        ({"control": "int8"}, InputError, "no dtype"),
        ({"sites": ["nonsense"]}, SiteError, "nonsense"),
        ({"sites": []}, SiteError, "No site"),
        ({"sites": ["pattern"]}, SiteError, "not compared"),
        ({"a": kd.CacheOn(attn="nonsense")}, ModelError, "nonsense"),
    ],
)
def test_bad_arguments_are_one_sentence(options, error, words, tiny_model, hooks):
    model = tiny_model("llama")
    with pytest.raises(error, match=words) as caught:
        compare(model, PROMPT, **options)
    assert "\n" not in str(caught.value)
    assert not hooks(model.hf)


def test_models_that_are_not_alike_are_refused(tiny_model):
    model = tiny_model("llama")
    for overrides, what in (({"num_hidden_layers": 2}, "n_layers"), ({"vocab_size": 200}, "vocab_size")):
        other = kd.load(tiny("llama", **overrides), quiet=True)
        with pytest.raises(InputError, match=what):
            compare(model, PROMPT, b=kd.CacheOff(model=other))
    drift = compare(model, PROMPT, b=kd.CacheOff(model=tiny_model("llama-mha")))
    assert "k" not in drift.sites
    assert any("other heads" in note for note in drift.notes)


def test_a_site_that_one_family_lacks_is_refused_with_its_reason(tiny_model):
    with pytest.raises(SiteError, match="attention table"):
        compare(tiny_model("mamba"), PROMPT, sites=["k"])
    drift = compare(tiny_model("mamba"), PROMPT, local=True, floor=1)
    assert any("past K/V cannot be written" in note for note in drift.notes)
    assert any("attention table" in note for note in drift.notes)
    assert drift.has("resid_post", of="floor")
    assert not drift.has("resid_post", of="local")


def test_only_logits_or_only_keys_can_be_asked_for(tiny_model):
    model = tiny_model("llama")
    whole = compare(model, PROMPT)
    for sites in (["logits"], ["k"], ["q", "embed"]):
        some = compare(model, PROMPT, sites=sites)
        assert set(some.sites) == set(sites) - {"logits"}
        for key in some.arrays:
            np.testing.assert_array_equal(some.arrays[key], whole.arrays[key], err_msg=key)


def test_one_token_and_one_step(tiny_model):
    model = tiny_model("llama")
    short = compare(model, [7], max_new_tokens=1, floor=2, local=True, self_drift=True)
    assert short.steps.tolist() == [0]
    assert (short.values("resid_post") == 0).all()
    assert short.summary()
    assert compare(model, [7], max_new_tokens=3, floor=1, local=True).values("k").shape == (1, 3, 4, 2)


# --- no prompt under another comparison's name


class Rounded(DynamicCache):
    """Keeps its keys in fewer steps."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def update(self, k, v, layer_idx, *args, **kwargs):
        return super().update((k * self.steps).round() / self.steps, v, layer_idx)


def rounded(steps):
    def make():
        return Rounded(steps)

    return make


@pytest.mark.parametrize(
    ("one", "other", "names"),
    [
        (
            {"a": kd.CacheOn(cache=partial(Rounded, 8))},
            {"a": kd.CacheOn(cache=partial(Rounded, 16))},
            r"a\.path\.cache\.args\.0: 8 there, 16 here",
        ),
        ({"a": kd.CacheOn(), "b": kd.CacheOff()}, {"a": kd.CacheOff(), "b": kd.CacheOn()}, r"a\.label: .*; b\.label"),
        (
            {"b": kd.CacheOff(controls=(kd.FixedShape(32),))},
            {"b": kd.CacheOff(controls=(kd.FixedShape(32, tile=4),))},
            r"b\.path\.controls\.0\.tile: 16 there, 4 here",
        ),
        ({"a": kd.CacheOn(lossy="8 bits")}, {"a": kd.CacheOn(lossy="4 bits")}, r"a\.path\.lossy: 8 bits there, 4 bits"),
    ],
)  # fmt: skip
def test_another_path_is_not_handed_the_first_ones_drift(one, other, names, tiny_model, tmp_path, same_bits):
    model = tiny_model("llama")
    first = compare(model, PROMPT, **one, max_new_tokens=2, store=tmp_path)
    with pytest.raises(FileError, match=names):
        compare(model, PROMPT, **other, max_new_tokens=2, store=tmp_path)
    again = compare(model, PROMPT, **one, max_new_tokens=2, store=tmp_path)
    assert all(same_bits(again.arrays[key], first.arrays[key]) for key in first.arrays)


def test_a_closure_is_refused_where_prompts_are_kept(tiny_model, tmp_path):
    model, path = tiny_model("llama"), kd.CacheOn(cache=rounded(8))
    with pytest.raises(InputError, match=r"a\.path\.cache is make, a function made inside another one"):
        compare(model, PROMPT, a=path, max_new_tokens=2, store=tmp_path / "kept")
    assert not (tmp_path / "kept").exists()
    assert compare(model, PROMPT, a=path, max_new_tokens=2).a.label == "cache-ON"


def test_other_threads_are_another_comparison(tiny_model, tmp_path):
    model = tiny_model("llama")
    compare(model, PROMPT, max_new_tokens=2, store=tmp_path)
    with pinned(2 if torch.get_num_threads() == 1 else 1), pytest.raises(FileError, match="threads: "):
        compare(model, PROMPT, max_new_tokens=2, store=tmp_path)


def test_the_older_name_of_the_folder_works_and_warns(tiny_model, tmp_path):
    with pytest.warns(FutureWarning, match="resume= is called store= now"):
        compare(tiny_model("llama"), PROMPT, max_new_tokens=2, resume=tmp_path)
    assert (tmp_path / "records.jsonl").exists()
