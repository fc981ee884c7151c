"""`kd.patch`: arms and controls, sliding windows, odd paths, free running, tidiness, and what it refuses."""

import copy
import itertools

import numpy as np
import pytest
import torch
from pairwise import params
from transformers import DynamicCache, StaticCache

import kvdrift as kd
from kvdrift.errors import InputError, KvdriftError, NonFiniteError, SiteError
from kvdrift.models.tiny import tiny
from kvdrift.tracing import seam
from kvdrift.tracing.tap import Tap

PROMPT = [5, 9, 100, 33, 7, 8, 250, 301, 12, 44]  # longer than the windows of 8
ON, OFF = kd.CacheOn(), kd.CacheOff()
N = len(PROMPT)


def patch(model, patches="kv", prompt=PROMPT, **options):
    options = {"max_new_tokens": 5, "placebos": 1, "checks": False, "progress": False} | options
    return kd.patch(model, prompt, patches, **options)


def rows(result, metric, role="patched"):
    return result.values(metric, role)[0, 0]


def near(model, noise, seed=0):
    """The same model with weights that are a little off: a donor whose text parts from it after some steps."""
    hf = copy.deepcopy(model.hf)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in hf.parameters():
            weight += noise * weight.abs().mean() * torch.randn(weight.shape, generator=generator).to(weight.dtype)
    return kd.load(hf, quiet=True)


def same_arrays(one, two, same_bits):
    assert one.arms == two.arms
    assert sorted(one.arrays) == sorted(two.arrays)
    for name, array in one.arrays.items():
        assert same_bits(array, two.arrays[name]), name


# --- the arms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_control_is_there_and_says_what_it_must(dtype, tiny_model):
    model = tiny_model("llama", dtype, intermediate_size=2048)
    donor = kd.CacheOff(model=near(model, 0.1))  # differences of many ulps
    result = patch(model, kd.Patch("kv", schedule="one_shot(2)"), donor=donor, placebos=2, checks=True, tokens=[3] * 6)
    roles = ["unpatched", "re-roll", "full patch", "patched", "placebo", "placebo", "self-patch", "one ulp",
             "re-rolled patched"]  # fmt: skip
    assert [arm.role for arm in result.arms] == roles + ["float32 donor"] * (dtype == torch.bfloat16)
    assert [arm.seed for arm in result.arms if arm.role == "placebo"] == [0, 1]
    assert (rows(result, "unchanged", "unpatched") == 1).all()
    assert (rows(result, "unchanged", "self-patch") == 1).all()
    for arm, distances in zip(result.arms, result.arrays["logit_l2"][0], strict=True):
        np.testing.assert_array_equal(distances[:2], rows(result, "logit_l2", "unpatched")[:2], err_msg=arm.role)
        assert np.isfinite(distances).all()
    assert not (rows(result, "unchanged", "re-roll")[2:] == 1).all()
    assert not (rows(result, "unchanged", "re-rolled patched")[2:] == 1).all()
    moved = {role: rows(result, "moved", role) for role in roles}
    assert np.isnan(moved["unpatched"]).all()
    assert np.isnan(moved["re-roll"]).all()
    assert moved["self-patch"][2] == 0
    assert 0 < moved["one ulp"][2] < moved["patched"][2]
    for role in ("patched", "placebo", "one ulp", "self-patch"):
        assert np.isnan(np.delete(moved[role], 2)).all(), f"{role} is written once"
    assert np.isfinite(moved["full patch"][2:]).all(), "the full patch goes on to the end"


def test_float32_has_no_wider_donor_and_says_so(tiny_model):
    result = patch(tiny_model("llama"), checks=True)
    assert not result.find("float32 donor")
    assert np.isnan(result.arrays["signature"]).all()
    assert any("no float32 donor" in note and "float32" in note for note in result.notes)


def test_signature(tiny_model):
    """Against float32, the donor's error has cosine 1 with itself: the full patch has it, the re-roll does not."""
    result = patch(tiny_model("llama", torch.bfloat16, intermediate_size=2048), checks=True)
    full = rows(result, "signature", "full patch")[1:]
    assert full == pytest.approx(np.ones(4), abs=1e-12)
    reroll = rows(result, "signature", "re-roll")[1:]
    assert (np.abs(reroll) < 1).all()
    wide = kd.load(tiny("llama", dtype=torch.float32, intermediate_size=2048), quiet=True)
    wide.hf.load_state_dict(tiny_model("llama", torch.bfloat16, intermediate_size=2048).hf.state_dict())
    tokens = result.arrays["fed"][0].tolist()
    logits = [
        kd.record(model, PROMPT, path=path, sites="logits", tokens=tokens, progress=False)["logits"].double()
        for model, path in (
            (tiny_model("llama", torch.bfloat16, intermediate_size=2048), ON),
            (tiny_model("llama", torch.bfloat16, intermediate_size=2048), OFF),
            (wide, OFF),
        )
    ]
    mine, donor = (x - logits[2] - (x - logits[2]).mean(-1, keepdim=True) for x in logits[:2])
    expected = torch.nn.functional.cosine_similarity(mine, donor, dim=-1, eps=0)
    np.testing.assert_allclose(rows(result, "signature", "unpatched"), expected, rtol=1e-9)


def test_one_ulp_is_not_washed_out_by_the_other_values_of_the_patch(tiny_model):
    """With the last residual written back too, nothing that the entry does at its own step would be seen."""
    changed = []
    for seed in range(8):
        result = patch(
            tiny_model("llama"), kd.Patch("resid_post", layers=[0, 3]), checks=True, seed=seed, max_new_tokens=2,
            placebos=0, trajectories=False,
        )  # fmt: skip
        changed.append(rows(result, "unchanged", "one ulp")[1] == 0)
    assert sum(changed) >= 6  # now and then one ulp is lost in the sum that it enters


def test_one_ulp_is_moved_once_and_noise_is_drawn_anew(tiny_model, monkeypatch):
    from kvdrift.patching import walk

    native, keys = walk.generator, []
    monkeypatch.setattr(walk, "generator", lambda *key: keys.append(key) or native(*key))
    result = patch(
        tiny_model("llama"), kd.Patch("v", layers=[1, 2]), checks=True, placebos=2, seed=4, trajectories=False
    )
    moved = rows(result, "moved", "one ulp")
    assert moved[1] > 0
    assert np.isnan(np.delete(moved, 1)).all()
    drawn = [key for key in keys if len(key) == 4]
    assert sorted(drawn) == [(seed, t, "v", layer) for seed in (4, 5) for t in range(1, 5) for layer in (1, 2)]


@pytest.mark.parametrize("site", ["kv", "resid_post", "q"])
@pytest.mark.parametrize("recipient", [ON, OFF], ids=["on", "off"])
def test_placebos_have_the_norm_of_the_patch_where_differences_are_many_ulps(site, recipient, tiny_model):
    model = tiny_model("mistral", torch.bfloat16)
    result = patch(
        model, kd.Patch(site, schedule="one_shot(2)"), placebos=3, recipient=recipient,
        donor=kd.CacheOff(model=near(model, 0.1)), tokens=[3, 1, 4, 1],
    )  # fmt: skip
    moved = rows(result, "moved")[2]
    assert moved > 0
    for place in result.find("placebo"):
        assert result.arrays["moved"][0, place, 2] == pytest.approx(moved, rel=0.05)
    first, second, third = (result.arrays["logit_l2"][0, place] for place in result.find("placebo"))
    assert (first != second).any()
    assert (second != third).any()


def test_no_placebos_and_no_controls(tiny_model):
    result = patch(tiny_model("llama"), placebos=0)
    assert [arm.role for arm in result.arms] == ["unpatched", "patched"]
    assert result.recovery().reference == "unpatched"
    assert "against no patch" in result.summary()
    assert patch(tiny_model("llama"), placebos=0, checks=True).find("placebo") == []


def test_the_same_call_gives_the_same_bits_whatever_else_is_asked_for(tiny_model, same_bits, tmp_path):
    model = tiny_model("gemma3", torch.bfloat16)
    donor = kd.CacheOff(model=near(model, 0.1))
    options = {"donor": donor, "placebos": 2, "checks": True, "max_new_tokens": 3}
    one, two = (patch(model, kd.Patch("kv", layers=1), **options) for _ in range(2))
    same_arrays(one, two, same_bits)
    same_arrays(one, kd.PatchResult.load(one.save(tmp_path / "result")), same_bits)
    assert one.trajectories == two.trajectories
    alone = patch(model, kd.Patch("kv", layers=1), donor=donor, placebos=1, max_new_tokens=3, trajectories=False)
    for place, arm in enumerate(alone.arms):
        np.testing.assert_array_equal(
            alone.arrays["logit_l2"][:, place], one.arrays["logit_l2"][:, one.arms.index(arm)]
        )
    other = patch(model, kd.Patch("kv", layers=1), donor=donor, seed=5, max_new_tokens=3)
    np.testing.assert_array_equal(rows(other, "logit_l2"), rows(one, "logit_l2"))
    assert (rows(other, "logit_l2", "placebo") != rows(one, "logit_l2", "placebo")).any()


def test_several_prompts_are_what_each_gives_alone(tiny_model):
    model, prompts = tiny_model("llama"), [PROMPT, [7], PROMPT[::-1][:4]]
    together = kd.patch(model, prompts, "kv", max_new_tokens=4, placebos=1, progress=False)
    assert len(together.prompts) == 3
    for number, prompt in enumerate(prompts):
        alone = kd.patch(model, prompt, "kv", max_new_tokens=4, placebos=1, progress=False)
        for name in ("logit_l2", "kl", "moved", "top1", "fed"):
            np.testing.assert_array_equal(together.arrays[name][number], alone.arrays[name][0], err_msg=name)
    assert together.recovery().n == 3


# --- windows and odd paths


def test_positions_that_a_window_has_evicted_are_reported_and_the_others_written(tiny_model):
    model = tiny_model("mistral")  # at step t the current position is 9 + t, and 2 + t the first one seen
    off = kd.CacheOff(model=near(model, 0.1))
    for recipient in (ON, OFF):
        result = patch(model, kd.Patch("k", 1, positions=[0, 3, 9]), donor=off, recipient=recipient, tokens=[3] * 6)
        (note,) = [note for note in result.notes if "outside the window" in note]
        assert note.startswith("k of layer 1:")
        assert "0 (step 1)" in note
        assert "3 (step 2)" in note
        assert "9 (" not in note
        without = patch(model, kd.Patch("k", 1, positions=[9]), donor=off, recipient=recipient, tokens=[3] * 6)
        assert rows(result, "moved")[1] > rows(without, "moved")[1]
        np.testing.assert_array_equal(rows(result, "moved")[2:], rows(without, "moved")[2:])
        assert not without.notes
    one_shot = patch(model, kd.Patch("k", 1, positions=[0], schedule="one_shot(3)"), donor=off, tokens=[3] * 6)
    assert (rows(one_shot, "unchanged") == 1).all(), "nothing else is written instead"
    assert np.isnan(rows(one_shot, "moved")).all()
    assert any("0 (step 3)" in note for note in one_shot.notes)


@pytest.mark.parametrize("write", ["cache", "read"])
def test_full_layers_of_a_model_with_windows_have_every_position(write, tiny_model):
    model = tiny_model("gemma3")
    kinds = [info.window for info in model.architecture.layers]
    assert None in kinds
    result = patch(model, kd.Patch("v", positions=[0], write=write))
    named = {int(note.split("layer ")[1].split(":")[0]) for note in result.notes}
    assert named == {layer for layer, window in enumerate(kinds) if window is not None}
    assert np.isfinite(rows(result, "moved")[1:]).all()


def test_named_residual_positions_that_a_pass_does_not_compute_are_reported(tiny_model):
    model = tiny_model("llama")
    on = patch(model, kd.Patch("resid_post", 1, positions=[3]))
    assert (rows(on, "unchanged") == 1).all()
    assert any("not computed by the recipient" in note and "3 (step 1)" in note for note in on.notes)
    off = patch(model, kd.Patch("resid_post", 1, positions=[3]), recipient=OFF)
    assert any("not computed by the donor" in note for note in off.notes)
    both = patch(model, kd.Patch("resid_post", 1, positions=[3]), recipient=OFF, donor=kd.CacheOff(attn="eager"))
    assert not both.notes
    assert (rows(both, "unchanged")[1:] == 0).all()
    late = patch(model, kd.Patch("resid_post", 1, positions=[N + 1]))
    assert np.isfinite(rows(late, "moved")[2]), "it is the current one at step 2"
    assert np.isnan(np.delete(rows(late, "moved"), 2)).all()


ODD = {
    "eager": (kd.CacheOn(attn="eager"), None),
    "chunked prefill": (kd.CacheOn(prefill_chunk=3), None),
    "plain cache": (kd.CacheOn(cache=DynamicCache), None),
    "chunked donor": (ON, kd.CacheOn(prefill_chunk=4)),
    "re-rolled": (kd.CacheOn(controls=(kd.ReRoll(3),)), None),
    "off eager": (kd.CacheOff(attn="eager"), kd.CacheOn(prefill_chunk=3)),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_paths_of_every_kind(family, odd, tiny_model, hooks):
    model = tiny_model(family)
    recipient, donor = ODD[odd]
    result = patch(
        model, "kv", recipient=recipient, donor=donor, checks=True, trajectories=False, max_new_tokens=3, placebos=0
    )
    assert (rows(result, "unchanged", "self-patch") == 1).all()
    assert np.isfinite(rows(result, "moved")[1:]).all()
    if odd == "re-rolled":  # its LM head adds in another order too, so no patch could give the donor's logits
        assert not result.find("full patch")
        assert any("LM heads under different controls" in note for note in result.notes)
        return
    assert (rows(result, "identical", "full patch")[1:] == 1).all()
    assert not result.notes[1:]
    assert model.attn == "sdpa"
    assert not hooks(model.hf)


@pytest.mark.parametrize("write", ["cache", "read"])
def test_a_static_cache(write, tiny_model):
    model = tiny_model("llama")
    static = kd.CacheOn(cache=lambda: StaticCache(config=model.hf.config, max_cache_len=32))
    result = patch(model, kd.Patch("kv", write=write), recipient=static, checks=True, trajectories=False)
    assert (rows(result, "unchanged", "self-patch") == 1).all()
    assert (rows(result, "identical", "full patch")[1:] == 1).all()
    assert (rows(result, "unchanged")[2:] == 0).all()
    donor = patch(model, kd.Patch("kv", write=write), donor=static, trajectories=False)
    assert (rows(donor, "moved")[2:] > 0).all()
    model = tiny_model("mistral")
    sliding = kd.CacheOn(cache=lambda: StaticCache(config=model.hf.config, max_cache_len=32))
    if write == "read":
        found = patch(model, kd.Patch("kv", write=write), recipient=sliding, checks=True, trajectories=False)
        assert (rows(found, "unchanged", "self-patch") == 1).all()
    else:
        with pytest.raises(SiteError, match="use write='read'"):
            patch(model, kd.Patch("kv"), recipient=sliding)


class Own:
    """A path that is no dataclass."""

    label, model, attn, controls = "mine", None, None, ()

    def start(self, model, ids, controls=None):
        return OFF.start(model, ids, controls)


def test_a_path_of_ones_own_is_a_donor_like_any_other(tiny_model):
    model = tiny_model("llama", torch.bfloat16)
    mine, builtin = (patch(model, donor=donor, checks=True, trajectories=False) for donor in (Own(), OFF))
    for name, array in builtin.arrays.items():
        np.testing.assert_array_equal(mine.arrays[name], array, err_msg=name)
    assert mine.donor.label == "mine"


def test_positions_all_reach_the_current_key_and_value(tiny_model):
    """With the donor's q, k and v of every position, attention gives the donor's z at the patched layer."""
    model = tiny_model("llama")
    other = near(model, 0.05)
    for recipient, donor in ((ON, kd.CacheOff(model=other)), (OFF, kd.CacheOff(model=other))):
        patches = [kd.Patch("kv", 2, positions="all"), kd.Patch("q", 2, positions="all")]
        with (
            Tap(model, {"z": frozenset({2})}, keep=True) as mine,
            Tap(other, {"z": frozenset({2})}, keep=True) as theirs,
        ):
            patch(model, patches, recipient=recipient, donor=donor, placebos=0, max_new_tokens=3, trajectories=False)
        found = [step["z"][2] for step in mine.steps]  # of the unpatched and the patched recipient
        expected = [step["z"][2] for step in theirs.steps][-2:]  # the first ones look at default positions
        close = [min(float((x - y).norm() / y.norm()) for x in found) for y in expected]
        assert max(close) < 1e-5, "only kernels differ, not what they read"


@pytest.mark.parametrize("prompt", [[5], PROMPT], ids=["one token", "long"])
@pytest.mark.parametrize("recipient", [ON, OFF], ids=["on", "off"])
def test_the_shortest_run(prompt, recipient, tiny_model):
    result = patch(tiny_model("mistral"), "kv", prompt, max_new_tokens=2, recipient=recipient, checks=True)
    assert result.arrays["logit_l2"].shape[-1] == 2
    assert np.isfinite(rows(result, "moved")[1])
    assert not result.counted().any()
    assert "No step follows the first write at step 1: ask for more new tokens." in result.summary()
    assert np.isnan(result.recovery().value)
    assert np.isfinite(result.recovery(steps="written").value) or not rows(result, "logit_l2", "placebo").any()


# --- two models


def test_two_models_of_one_shape(tiny_model):
    model, other = tiny_model("llama"), kd.load(tiny("llama", seed=1), quiet=True)
    result = patch(model, "resid_post", donor=kd.CacheOff(model=other), checks=True)
    assert result.donor.model == result.recipient.model
    assert (rows(result, "flip", "unpatched") == 1).any()
    assert result.provenance["settings"]["weights"] == [model.fingerprint, other.fingerprint]
    assert (rows(result, "moved")[1:] > 1).all()
    twin = kd.load(tiny("llama"), quiet=True)
    same = patch(model, "kv", donor=kd.CacheOn(model=twin))
    assert (rows(same, "identical") == 1).all()


def test_a_donor_in_another_dtype(tiny_model):
    wide, narrow = tiny_model("llama"), tiny_model("llama", torch.bfloat16)
    result = patch(narrow, "kv", donor=kd.CacheOff(model=wide), checks=True)
    assert (result.donor.dtype, result.recipient.dtype) == ("float32", "bfloat16")
    assert (rows(result, "identical") == 0).all()
    assert (rows(result, "moved")[1:] > 0).all()
    assert not result.find("full patch")
    assert any("different dtypes" in note for note in result.notes)


@pytest.mark.parametrize(
    ("overrides", "site", "error", "words"),
    [
        ({"num_hidden_layers": 2}, "kv", SiteError, "donor's model does not give 'k' in layer 2, 3"),
        ({"hidden_size": 128}, "resid_post", SiteError, "patch between models of one shape"),
        ({"num_attention_heads": 4}, kd.Patch("q", heads=[0, 5]), SiteError, "patch between models of one shape"),
        ({"num_key_value_heads": 4}, "k", SiteError, "patch between models of one shape"),
        ({"vocab_size": 128}, "kv", InputError, "128 tokens, the recipient's 384"),
    ],
)
def test_two_models_of_different_shape_are_refused(overrides, site, error, words, tiny_model, hooks):
    model, other = tiny_model("llama"), kd.load(tiny("llama", **overrides), quiet=True)
    with pytest.raises(error, match=words):
        patch(model, site, donor=kd.CacheOff(model=other), checks=True)
    assert not hooks(model.hf)
    assert not hooks(other.hf)


def test_a_shallower_donor_serves_the_layers_that_it_has(tiny_model):
    other = kd.load(tiny("llama", num_hidden_layers=2), quiet=True)
    result = patch(tiny_model("llama"), kd.Patch("kv", layers=[0, 1]), donor=kd.CacheOff(model=other), checks=True)
    assert (rows(result, "moved")[1:] > 0).all()
    assert any("no full patch" in note for note in result.notes)


# --- free running


@pytest.mark.parametrize("recipient", [ON, OFF], ids=["on", "off"])
def test_free_texts(recipient, tiny_model):
    """Unpatched and donor write what `record` says; the patched text leaves the donor's where the forced run flips."""
    model = tiny_model("llama", torch.bfloat16)
    for noise, seed, site in ((0.005, 1, "kv"), (0.02, 3, kd.Patch("v", schedule="window(1, 4)"))):
        donor = kd.CacheOff(model=near(model, noise, seed))
        result = patch(model, site, donor=donor, recipient=recipient, max_new_tokens=8)
        (texts,) = result.trajectories
        expected = {
            name: kd.record(model, PROMPT, path=path, sites="logits", max_new_tokens=8, progress=False).fed
            for name, path in (("donor", donor), ("unpatched", recipient))
        }
        assert {name: texts[name] for name in expected} == expected
        ends = {}
        for role in ("unpatched", "patched"):
            ends[role] = min((t for t in range(8) if texts[role][t] != texts["donor"][t]), default=8)
            assert result.followed(role)[0, 0] == ends[role]
        assert 0 < ends["unpatched"] < 8, "the texts part in the middle"


def test_a_text_ends_where_the_donor_ends():
    hf = tiny("llama")
    free = kd.record(hf, PROMPT, sites="logits", max_new_tokens=6, progress=False).fed
    hf.generation_config.eos_token_id = free[3]
    stop = free.index(free[3]) + 1
    result = patch(hf, max_new_tokens=6)
    assert result.arrays["n_steps"].tolist() == [stop]
    assert result.trajectories[0]["donor"] == free[:stop]
    given = patch(hf, tokens=list(free))
    assert given.arrays["n_steps"].tolist() == [6]
    assert given.trajectories == ()


def test_given_tokens_are_consumed_and_leave_no_free_outcome(tiny_model):
    result = patch(tiny_model("llama"), tokens=[3, 1, 4, 1])
    assert result.arrays["fed"].tolist() == [[3, 1, 4, 1]]
    assert result.trajectories == ()
    assert np.isnan(result.followed("patched")).all()
    assert np.isnan(result.free_recovery().value)


# --- saved donors


@pytest.mark.parametrize(
    ("family", "recipient"),
    params([(f, to) for f in ("llama", "mistral", "gpt-oss", "deepseek-v3") for to in (ON, OFF)], 1),
)
def test_a_saved_trace_is_as_good_as_the_live_path(family, recipient, tiny_model, same_bits, tmp_path):
    model = tiny_model(family, torch.bfloat16 if family == "llama" else torch.float32)
    donor = OFF if recipient is ON else ON
    sites = ["resid_post", "final_norm", "q", "k", "v", "attn_out", "logits"]
    trace = kd.record(model, PROMPT, path=donor, sites=sites, positions="all", max_new_tokens=3, progress=False)
    trace = kd.Trace.load(trace.save(tmp_path / "donor.safetensors"))
    patches = [kd.Patch("kv", write="read"), kd.Patch("attn_out", layers=1), kd.Patch("q", layers=[0, 2], heads=[1, 3])]
    options = {"recipient": recipient, "checks": True, "trajectories": False, "max_new_tokens": 3}
    live, saved = patch(model, patches, donor=donor, **options), patch(model, patches, donor=trace, **options)
    same_arrays(live, saved, same_bits)
    assert (live.donor, live.notes) == (saved.donor, saved.notes)
    assert np.isfinite(saved.followed("patched")).all()


def test_a_trace_of_current_positions_serves_residual_sites(tiny_model, same_bits):
    model = tiny_model("llama")
    trace = kd.record(model, PROMPT, path=OFF, sites=["resid_mid", "logits"], max_new_tokens=4, progress=False)
    live, saved = (
        patch(model, kd.Patch("resid_mid", 1), donor=donor, trajectories=False, max_new_tokens=4)
        for donor in (OFF, trace)
    )
    same_arrays(live, saved, same_bits)


def test_a_trace_with_one_layer_serves_that_layer(tiny_model):
    model = tiny_model("llama")
    trace = kd.record(
        model, PROMPT, path=OFF, sites=["resid_post", "final_norm", "logits"], layers=[2], max_new_tokens=4,
        progress=False,
    )  # fmt: skip
    result = patch(model, kd.Patch("resid_post", layers=2), donor=trace, checks=True)
    assert any("no full patch" in note for note in result.notes)
    with pytest.raises(SiteError, match="lacks 'resid_post' of layer 1"):
        patch(model, kd.Patch("resid_post", layers=[1, 2]), donor=trace)


def test_one_trace_per_prompt(tiny_model, same_bits):
    model, prompts = tiny_model("llama"), [PROMPT, PROMPT[:4]]
    traces = kd.record(
        model, prompts, path=OFF, sites=["k", "v", "logits"], positions="all", max_new_tokens=4, progress=False
    )
    saved, live = (
        kd.patch(model, prompts, "kv", donor=d, max_new_tokens=4, placebos=1, checks=False, trajectories=False,
                 progress=False)
        for d in (traces, OFF)
    )  # fmt: skip
    same_arrays(live, saved, same_bits)
    with pytest.raises(InputError, match=r"one kd\.Trace per prompt .2"):
        kd.patch(model, prompts, "kv", donor=traces[:1], progress=False)
    with pytest.raises(InputError, match="another prompt"):
        kd.patch(model, prompts, "kv", donor=traces[::-1], progress=False)


def record(model, prompt=PROMPT, **options):
    options = {
        "sites": ["k", "v", "resid_post", "logits"],
        "positions": "all",
        "max_new_tokens": 4,
        "path": OFF,
    } | options
    return kd.record(model, prompt, progress=False, **options)


STRANGERS = {
    "other weights": (lambda get: record(kd.load(tiny("llama", seed=3), quiet=True)), "kv", InputError, "other weig"),
    "other dtype": (lambda get: record(get("llama", torch.bfloat16)), "kv", InputError, "in bfloat16.*float32"),
    "other prompt": (lambda get: record(get("llama"), PROMPT[1:]), "kv", InputError, "another prompt .9 tokens, hash"),
    "no logits": (lambda get: record(get("llama"), sites=["k", "v"]), "kv", InputError, "no logits.*add 'logits'"),
    "no such site": (lambda get: record(get("llama")), "q", SiteError, "lacks 'q'"),
    "no such layer": (lambda get: record(get("llama"), layers=[1]), kd.Patch("k", 2), SiteError, "'k' of layer 2"),
    "current K/V only": (
        lambda get: record(get("llama"), positions="current"), "kv", SiteError, "lacks 'k' at some positions.*'all'",
    ),
    "some K/V only": (
        lambda get: record(get("llama"), positions=[3, 4]), "v", SiteError, "lacks 'v' at some positions.*'all'",
    ),
    "not the named position": (
        lambda get: record(get("llama"), positions=[3, 4]), kd.Patch("k", positions=[4, 5]), SiteError, "'k' at some",
    ),
    "prompt residuals only": (
        lambda get: record(get("llama"), positions=[3, 4]), "resid_post", SiteError, "'resid_post' at some positions",
    ),
    "some heads": (
        lambda get: record(get("llama"), sites=["q", "logits"], heads=[0, 1]), "q", SiteError, "only some heads of 'q'",
    ),
    "some heads, others asked": (
        lambda get: record(get("llama"), sites=["q", "logits"], heads=[0, 1]), kd.Patch("q", heads=[0, 5]), SiteError,
        "only some heads of 'q'",
    ),
    "too short": (
        lambda get: record(get("llama"), max_new_tokens=3), kd.Patch("k", schedule="one_shot(3)"), SiteError,
        "steps 0 to 2",
    ),
    "a multiplied site": (
        lambda get: record(get("granite"), sites=["attn_out", "logits"]), "attn_out", SiteError, "residual multiplier",
    ),
}  # fmt: skip


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_trace_that_cannot_be_the_donor_is_one_sentence(stranger, tiny_model, hooks):
    make, site, error, words = STRANGERS[stranger]
    model = tiny_model("granite" if "multiplied" in stranger else "llama")
    with pytest.raises(error, match=words) as raised:
        patch(model, site, donor=make(tiny_model))
    assert "\n" not in str(raised.value)
    assert not hooks(model.hf)


def test_a_trace_brings_its_own_tokens(tiny_model):
    model = tiny_model("llama")
    with pytest.raises(InputError, match="brings its own"):
        patch(model, donor=record(model), tokens=[3, 1, 4])
    short = patch(model, donor=record(model, max_new_tokens=3), max_new_tokens=99)
    assert short.arrays["n_steps"].tolist() == [3]


# --- what is refused


@pytest.mark.parametrize(
    ("family", "options", "error", "words"),
    [
        ("llama", {"patches": kd.Patch("k", layers=4)}, SiteError, "no layer 4.*0 to 3"),
        ("llama", {"patches": kd.Patch("k", layers=-5)}, SiteError, "no layer -5.*0 to 3"),
        ("llama", {"patches": kd.Patch("k", heads=2)}, SiteError, "KV heads 0 to 1"),
        ("llama", {"patches": kd.Patch("q", heads=[0, 8])}, SiteError, "heads 0 to 7"),
        ("llama", {"patches": kd.Patch("z", heads=-1)}, SiteError, "heads 0 to 7"),
        ("llama", {"patches": kd.Patch("k", positions=[14])}, SiteError, "no position"),
        ("llama", {"patches": kd.Patch("k", schedule="one_shot(5)")}, SiteError, "steps 0 to 4.*more new tokens"),
        ("llama", {"patches": kd.Patch("k", schedule="window(2, 5)")}, SiteError, "steps 0 to 4"),
        ("llama", {"patches": kd.Patch("k", schedule="persistent(9)")}, SiteError, "steps 0 to 4"),
        ("llama", {"patches": []}, InputError, "There is no patch"),
        ("llama", {"patches": None}, InputError, "None is no patch"),
        ("llama", {"patches": "logits"}, SiteError, "cannot be patched"),
        ("llama", {"patches": kd.Patch("kv", write="cache"), "recipient": OFF}, InputError, "needs a recipient with a"),
        ("gpt-neox", {"patches": "resid_mid"}, SiteError, "does not give 'resid_mid'"),
        ("falcon", {"patches": "kv"}, SiteError, "does not give 'k'.*never calls"),
        ("mamba", {"patches": "q"}, SiteError, "does not give 'q'"),
        ("lfm2", {"patches": kd.Patch("k", layers=[0, 1])}, SiteError, "'k' in layer 0"),
        ("deepseek-v3", {"patches": "kv"}, SiteError, "use write='read'"),
        ("llama", {"prompt": []}, InputError, "prompt is empty"),
        ("llama", {"prompt": "text"}, InputError, "no tokenizer"),
        ("llama", {"prompt": [9999]}, InputError, "outside the vocabulary"),
        ("llama", {"prompt": [3] * 254}, InputError, "exceed the context"),
        ("llama", {"max_new_tokens": 1}, InputError, "give 2 or more"),
        ("llama", {"max_new_tokens": 2.5}, InputError, "give 2 or more"),
        ("llama", {"placebos": -1}, InputError, "placebos=-1"),
        ("llama", {"placebos": 1.5}, InputError, "placebos=1.5"),
        ("llama", {"donor": kd.CacheOff}, InputError, "donor=CacheOff is no path"),
        ("llama", {"recipient": "cache-ON"}, InputError, "recipient='cache-ON' is no path"),
        ("llama", {"donor": [OFF]}, InputError, "one kd.Trace per prompt"),
        ("llama", {"tokens": [[3, 1], [4, 1]]}, InputError, "one list of token ids per prompt .1"),
        ("llama", {"tokens": [3]}, SiteError, "steps 0 to 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_bad_arguments_are_one_sentence(family, options, error, words, tiny_model, hooks):
    model = tiny_model(family)
    with pytest.raises(error, match=words) as raised:
        patch(model, **options)
    assert isinstance(raised.value, KvdriftError)
    assert "\n" not in str(raised.value)
    assert not hooks(model.hf)


# --- nothing is left


def tables(hf):
    return [dict(table) for table in seam.attention_tables(hf)]


def test_nothing_is_left_after_success_also_inside_a_tap(tiny_model, hooks):
    model = tiny_model("llama")
    before = tables(model.hf)
    with kd.tap(model, ["resid_post", "k"]) as taps:
        inside, wrapped = hooks(model.hf), tables(model.hf)
        patch(model, ["kv", "resid_mid", "z"], checks=True)
        assert hooks(model.hf) == inside
        assert tables(model.hf) == wrapped
        assert len(taps.steps) > 5
    assert not hooks(model.hf)
    assert tables(model.hf) == before
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []


def test_an_arm_that_overflows_is_named(tiny_model, hooks):
    """The donor is finite in float32; in float16 what it writes is infinite."""
    narrow = tiny_model("llama", torch.float16)
    before = tables(narrow.hf)
    hf = copy.deepcopy(tiny_model("llama").hf)
    with torch.no_grad():
        hf.model.layers[1].mlp.down_proj.weight *= 1e6
    with pytest.raises(NonFiniteError, match=r"The patched arm leaves the finite numbers at step 2.*float16"):
        patch(narrow, kd.Patch("resid_post", 1, schedule="one_shot(2)"), donor=kd.CacheOff(model=hf), tokens=[3] * 4)
    assert not hooks(narrow.hf)
    assert not hooks(hf)
    assert tables(narrow.hf) == before


@pytest.mark.parametrize("at", [0, 1, 7, 12, 30])
def test_nothing_is_left_after_an_interruption_in_any_step(at, hooks):
    hf = tiny("llama")
    hf.train()
    model = kd.load(hf, quiet=True)
    assert model.coverage.sites
    before, calls = tables(hf), itertools.count()

    def interrupt(*_):
        if next(calls) == at:
            raise KeyboardInterrupt

    handle = hf.model.layers[2].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        patch(model, ["kv", "resid_post"], checks=True, recipient=kd.CacheOn(attn="eager"))
    handle.remove()
    assert next(calls) > at
    assert not hooks(hf)
    assert tables(hf) == before
    assert model.attn == "sdpa"
    assert all(module.training for module in hf.modules())
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []


def test_the_users_cache_factory_must_make_new_ones(tiny_model):
    model = tiny_model("llama")
    shared = DynamicCache(config=model.hf.config)
    with pytest.raises(InputError, match="must make a new one at every call"):
        patch(model, recipient=kd.CacheOn(cache=lambda: shared), donor=kd.CacheOn(cache=lambda: shared))
