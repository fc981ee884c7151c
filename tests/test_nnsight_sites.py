"""kvdrift's sites in a user's own nnsight traces: the same bits as kd.record and kd.patched on the plain model."""

import re
import sys

import pytest
import torch
from pairwise import params
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import kvdrift as kd
from kvdrift.errors import InputError, ModelError, SiteError
from kvdrift.models.tiny import FAMILIES, supported_attn, tiny

nnsight = pytest.importorskip("nnsight")

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]  # longer than the windows of the tiny models
STEPS = 2
GENERATE = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False}
ONCE = ("embed", "final_norm", "logits")
PARITY = [
    (family, dtype, attn)
    for family in ("llama", "mistral", "qwen3", "gemma2", "gemma3")
    for dtype in ("float32", "bfloat16", "float16")
    for attn in supported_attn(family)[: 2 if dtype == "float32" else 1]
]
ids = torch.tensor([PROMPT])


def wrapped(hf):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    return nnsight.TransformersModel(hf, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def llama():
    """A tiny llama, nnsight's wrapper of another one with the same weights, and its sites."""
    model = wrapped(tiny("llama"))
    return kd.load(tiny("llama"), quiet=True), model, kd.nnsight.sites(model)


def keys(coverage):
    """Every site of a model in forward order, as `Sites` takes it."""
    inside = ("resid_pre", "q", "k", "v", "z", "pattern", "attn_out", "resid_mid", "mlp_out", "resid_post")
    per_layer = [(s, layer) for layer in range(coverage.n_layers) for s in inside if layer in coverage.layers(s)]
    return [key for key in ("embed", *per_layer, "final_norm", "logits") if isinstance(key, tuple) or key in ONCE]


def recorded(trace, key, step):
    """What kd.record kept at ``key`` in ``step``, cut to what was computed."""
    site, layer = key if isinstance(key, tuple) else (key, None)
    value, valid, axes = trace[site], trace.valid(site), trace.axes(site)
    value, valid = value[step], valid[step]
    if layer is not None:
        at = axes["layer"].index(layer)
        value, valid = value[at], valid[at]
    if site == "logits":
        return value
    positions = valid[0] if valid.ndim == 2 else valid
    return value[..., positions, :]


# --- reading


@pytest.mark.parametrize(("family", "dtype", "attn"), params(PARITY, 1))
def test_a_users_trace_reads_what_record_keeps(family, dtype, attn, same_bits):
    shape = {"dtype": getattr(torch, dtype), "attn": attn, "num_hidden_layers": 3}
    plain = kd.load(tiny(family, **shape), quiet=True)
    names = [site for site in plain.coverage.sites if site != "pattern"]
    options = {"sites": names, "positions": "all", "max_new_tokens": STEPS, "progress": False}
    on = kd.record(plain, PROMPT, **options)
    off = kd.record(plain, PROMPT, path=kd.CacheOff(), tokens=list(on.fed), **options)
    model = wrapped(tiny(family, **shape))
    sites = kd.nnsight.sites(model)
    wanted = [key for key in keys(plain.coverage) if key[0] != "pattern"]

    with torch.no_grad(), model.generate({"input_ids": ids}, **GENERATE) as tracer:
        found = []
        for _ in tracer.iter[:STEPS]:
            found.append({key: sites[key].clone() for key in wanted})
        found = nnsight.save(found)
    assert len(found) == STEPS
    for step, values in enumerate(found):
        assert values.keys() == set(wanted)
        different = [key for key, value in values.items() if not same_bits(value[0], recorded(on, key, step))]
        assert not different, f"cache-ON step {step}: {different}"

    for step in range(STEPS):
        prefix = torch.tensor([PROMPT + list(on.fed[:step])])
        with torch.no_grad(), model.trace({"input_ids": prefix}, logits_to_keep=1):
            values = nnsight.save({key: sites[key].clone() for key in wanted})
        different = [key for key, value in values.items() if not same_bits(value[0], recorded(off, key, step))]
        assert not different, f"cache-OFF step {step}: {different}"


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ("llama-mha", "llama-mqa", "mamba")])
def test_every_family_that_record_reads_is_reached(family, same_bits):
    options = {"full_attn_idxs": [1]} if family == "lfm2" else {}
    hf = tiny(family, attn="eager", num_hidden_layers=2, **options)
    plain, model = kd.load(hf, quiet=True), nnsight.NNsight(hf)
    sites, coverage = kd.nnsight.sites(model), plain.coverage
    with torch.no_grad(), kd.tap(plain, list(coverage.sites), positions="all") as taps:
        hf(ids)
    wanted = keys(coverage)
    with torch.no_grad(), model.trace(ids):
        values = nnsight.save({key: sites[key].clone() for key in wanted})
    for key, value in values.items():
        site, layer = key if isinstance(key, tuple) else (key, 0)
        scale = getattr(hf.config, "residual_multiplier", 1.0) if site in ("attn_out", "mlp_out") else 1.0
        assert same_bits(value if scale == 1.0 else value * scale, taps.steps[0][site][layer]), key


def test_names_are_those_of_kvdrift(llama, same_bits):
    _, model, sites = llama
    with torch.no_grad(), model.trace({"input_ids": ids}):
        values = [sites["hook_embed"], sites["embed"]]
        values += [sites["blocks.1.attn.hook_rot_k"], sites["k", 1], sites["k", -3]]
        values += [sites["blocks.3.hook_resid_post"], sites["resid_post", -1]]
        values = nnsight.save(values)
    embed, again, k, short, negative, full, last = values
    assert same_bits(embed, again)
    assert same_bits(k, short)
    assert same_bits(k, negative)
    assert same_bits(full, last)
    assert not same_bits(full, embed)


# --- writing


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gemma2", "gemma3"])
def test_a_write_equals_patched(family, same_bits):
    plain = kd.load(tiny(family), quiet=True)
    model = wrapped(tiny(family))
    sites = kd.nnsight.sites(model)
    names = [site for site in plain.coverage.sites if site not in ("logits", "pattern")]
    with torch.no_grad(), kd.tap(plain, names, positions="all") as taps:
        clean = plain.hf(ids).logits
    full = {"embed": "hook_embed", "final_norm": "ln_final.hook_normalized"}
    for number, site in enumerate(names):
        own = list(taps.steps[0][site].values())[-1]
        own = own if number % 2 else own[..., -1, :]  # the whole value, or its last position
        new = torch.randn(own.shape, generator=torch.Generator().manual_seed(number))
        name = full.get(site, f"blocks.3.hook_{site}")
        with torch.no_grad(), kd.patched(plain, {name: new}):
            expected = plain.hf(ids).logits
        with torch.no_grad(), model.trace({"input_ids": ids}):
            sites[name] = new
            found = nnsight.save(model.output.logits)
        assert same_bits(found, expected), site
        assert not same_bits(found, clean), site


def test_writes_at_every_decode_step_equal_patched(llama, same_bits):
    plain, model, sites = llama
    head_dim, steps = 32, range(STEPS)
    new = [torch.randn((1, 2, head_dim), generator=torch.Generator().manual_seed(step)) for step in steps]
    expected, x, cache = [], ids, plain.backend.new_cache()
    for step in steps:
        edits = {
            "blocks.1.attn.hook_q": lambda q: q * 0.5,
            "blocks.1.hook_k": new[step],
            "blocks.1.hook_v": new[step] * 2,
        }
        with torch.no_grad(), kd.patched(plain, edits):
            expected.append(plain.hf(x, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1])
        x = expected[-1].argmax(-1, keepdim=True)
    with torch.no_grad(), model.generate({"input_ids": ids}, **GENERATE) as tracer:
        found = []
        for step in tracer.iter[:STEPS]:
            sites["q", 1] = sites["q", 1] * 0.5
            sites["k", 1] = new[step]
            sites["v", 1] = new[step] * 2
            found.append(sites["logits"])
        found = nnsight.save(found)
    assert all(same_bits(x, y) for x, y in zip(found, expected, strict=True))


def test_writing_what_was_read_changes_no_bit(llama, same_bits):
    plain, model, sites = llama
    wanted = keys(plain.coverage)[:-1]
    with torch.no_grad(), model.trace({"input_ids": ids}):
        for key in wanted:
            sites[key] = sites[key].clone()
        found = nnsight.save(model.output.logits)
    assert same_bits(found, plain.hf(ids).logits)


# --- refusals


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (("nope", 1), "no site"),
        (("resid_post", 9), "layers 0 to 3"),
        ("resid_post", "name one"),
        (("k", "x"), "name one"),
        (("pattern", 0), "attn='eager'"),
        (5, "no site"),
    ],
)
def test_unknown_sites_and_layers_are_one_sentence(llama, key, message):
    _, model, sites = llama
    with pytest.raises(SiteError, match=message) as caught, model.trace({"input_ids": ids}):
        sites[key].save()
    assert "\n" not in str(caught.value).strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (("resid_post", 1), torch.zeros(3, 3), "its last position"),
        (("k", 1), 0.0, "takes a tensor"),
        ("logits", torch.zeros(1, 384), "not written"),
    ],
)
def test_what_cannot_be_written_is_refused(llama, key, value, message):
    _, model, sites = llama
    with pytest.raises(SiteError, match=message), model.trace({"input_ids": ids}):
        sites[key] = value


def test_a_layer_without_the_site_is_named():
    sites = kd.nnsight.sites(nnsight.NNsight(tiny("lfm2")))
    with pytest.raises(SiteError, match="does not give 'k' in layer 0"):
        sites._find(("k", 0))


def test_attention_that_nnsight_cannot_see_into_is_refused():
    from kvdrift.nnsight import Sites

    model = nnsight.NNsight(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    sites = Sites({"k": {0: (model[0], "k")}}, 1, {}, {}, re.compile("none"))
    with pytest.raises(SiteError, match="Linear calls no attention_interface"), model.trace(torch.zeros(1, 2)):
        sites["k", 0].save()


def test_only_nnsight_models_have_nnsight_sites(llama):
    plain, model, _ = llama
    with pytest.raises(InputError, match="not LlamaForCausalLM"):
        kd.nnsight.sites(plain.hf)
    with pytest.raises(InputError, match="not Model"):
        kd.nnsight.sites(plain)
    assert "resid_post" in repr(kd.nnsight.sites(kd.load(model, quiet=True)))


def test_sites_are_made_before_the_trace(llama):
    _, model, _ = llama
    with pytest.raises(InputError, match="before the trace"), model.trace({"input_ids": ids}):
        kd.nnsight.sites(model)


# --- remote


def test_a_remote_trace_carries_the_sites_along(llama, same_bits):
    _, model, sites = llama
    with torch.no_grad(), model.generate({"input_ids": ids}, **GENERATE) as tracer:
        here = nnsight.save([])
        for _ in tracer.iter[:STEPS]:
            here.append(sites["v", 2])
    with torch.no_grad(), model.generate({"input_ids": ids}, remote="local", **GENERATE) as tracer:
        there = nnsight.save([])
        for _ in tracer.iter[:STEPS]:
            there.append(sites["v", 2])
    assert [x.shape[2] for x in there] == [len(PROMPT) + step for step in range(STEPS)]
    assert all(same_bits(x, y) for x, y in zip(there, here, strict=True))


class _NoKvdrift:
    """As on a server: nothing of kvdrift can be imported."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "kvdrift":
            raise ImportError(f"no module named {name}")


def test_sites_work_where_kvdrift_is_not_installed(llama, same_bits, monkeypatch):
    from nnsight.intervention.serialization import dumps, loads

    _, model, sites = llama
    with torch.no_grad(), model.trace({"input_ids": ids}):
        expected = sites["k", 1].save()
    sent = dumps(sites)
    for name in [name for name in sys.modules if name.partition(".")[0] == "kvdrift"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_NoKvdrift(), *sys.meta_path])
    remote = loads(sent, model._remoteable_persistent_objects())
    with torch.no_grad(), model.trace({"input_ids": ids}):
        found = remote["k", 1].save()
        remote["v", 1] = remote["v", 1] * 2
    with pytest.raises(LookupError, match="no site") as caught, model.trace({"input_ids": ids}):
        remote["nope", 1].save()
    assert same_bits(found, expected)
    assert not isinstance(caught.value, SiteError)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights")
    tiny("gemma3").save_pretrained(path)
    return str(path)


def undispatched(folder):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    return nnsight.TransformersModel(folder, task="text-generation", tokenizer=tokenizer)


def test_sites_of_an_undispatched_model_need_no_weights(folder, same_bits):
    model = undispatched(folder)
    sites = kd.nnsight.sites(model)
    assert not model.dispatched
    plain = kd.load(tiny("gemma3"), quiet=True)
    wanted = keys(plain.coverage)
    with (
        torch.no_grad(),
        kd.tap(
            plain, [key for key in wanted if isinstance(key, str)] + ["k", "resid_mid", "mlp_out"], positions="all"
        ) as taps,
    ):
        plain.hf(ids)
    with torch.no_grad(), model.trace({"input_ids": ids}):
        values = nnsight.save({key: sites[key].clone() for key in wanted})
    assert values.keys() == set(wanted)
    for site in ("k", "resid_mid", "mlp_out"):
        for layer in range(4):
            assert same_bits(values[site, layer], taps.steps[0][site][layer])
    assert same_bits(values["logits"], taps.steps[0]["logits"][0])


def test_an_undispatched_model_of_an_unknown_class_is_refused(folder, monkeypatch):
    monkeypatch.setattr(sys.modules["kvdrift.models.tiny"], "FAMILIES", ("llama",))
    with pytest.raises(ModelError, match=r"no tiny Gemma3ForCausalLM .*dispatch"):
        kd.nnsight.sites(undispatched(folder))


# --- weights of a real model


@pytest.mark.real
def test_a_real_model_keeps_its_bits_in_nnsight(same_bits):
    plain = kd.load("smollm2-135m", quiet=True)
    model = nnsight.TransformersModel(plain.hf, tokenizer=plain.tokenizer)
    prompt = plain.encode("The capital of France is")
    names = ["resid_pre", "k", "v", "z", "resid_post", "logits"]
    options = {"sites": names, "positions": "all", "max_new_tokens": 4, "progress": False}
    expected = kd.record(plain, prompt, **options)

    driven = kd.record(model, "The capital of France is", **options)
    assert driven.fed == expected.fed
    assert all(same_bits(driven[site], expected[site]) for site in names)

    sites = kd.nnsight.sites(model)
    wanted = [("resid_pre", 0), ("k", 15), ("v", 15), ("z", 15), ("resid_post", 15), ("resid_post", 29), "logits"]
    with torch.no_grad(), model.generate({"input_ids": torch.tensor([prompt])}, max_new_tokens=4, do_sample=False) as t:
        found = []
        for _ in t.iter[:4]:
            found.append({key: sites[key].clone() for key in wanted})
        found = nnsight.save(found)
    assert len(found) == 4
    for step, values in enumerate(found):
        for key, value in values.items():
            assert same_bits(value[0], recorded(expected, key, step)), (step, key)
