import warnings
from itertools import product

import numpy as np
import pytest
import torch
from pairwise import params
from transformers import DynamicCache

import kvdrift as kd
from kvdrift.backends.bridge_attention import attentions
from kvdrift.backends.transformer_lens import repaired
from kvdrift.errors import FileError, InputError, ModelError, NonFiniteError

pytest.importorskip("transformer_lens")
from transformer_lens.model_bridge.sources import build_bridge_from_module

FAMILIES = ("llama", "mistral", "qwen3", "gemma2", "gemma3")
SITES = ("embed", "resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post", "final_norm", "q", "k", "v", "z",
         "pattern", "logits")  # fmt: skip
PROMPT, FED = list(range(1, 12)), [5, 6, 7, 8]  # beyond the windows of 8
QUIET = {"progress": False, "max_new_tokens": 4}


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def tiny(family, dtype=torch.float32, n_layers=2):
    return kd.models.tiny(family, dtype=dtype, attn="eager", num_hidden_layers=n_layers)


def bridge_of(hf):
    return build_bridge_from_module(hf, type(hf).__name__, hf_config=hf.config, tokenizer=None)


def bridge(family, dtype=torch.float32, n_layers=2):
    return bridge_of(tiny(family, dtype, n_layers))


def bridged(family, dtype=torch.float32, **options):
    return kd.load(bridge(family, dtype), quiet=True, **options)


def record(model, path, sites=SITES, **options):
    options = {"positions": "all", "tokens": FED, "progress": False} | options
    return kd.record(model, PROMPT, path=path, sites=list(sites), **options)


def differing(one, two):
    def flat(value):
        return list(value.values()) if isinstance(value, dict) else [value]

    return [s for s in one.sites if not all(map(torch.equal, flat(one[s]), flat(two[s])))]


def overridden(hf):
    """What is on single attention components that is not on their class: nothing, once kvdrift is through."""
    names = ("forward", "_update_kv_cache", "_reshape_qkv_to_heads", "rope_optional")
    hooks = [len(p._forward_hooks) + len(p._forward_pre_hooks) for p in hf.modules()]
    return [name for module in attentions(hf) for name in names if name in vars(module)], hooks


# --- parity


CASES = list(product(FAMILIES, (torch.float32, torch.bfloat16, torch.float16)))


@pytest.mark.parametrize(("family", "dtype"), params(CASES, 1))
def test_every_site_has_the_bits_of_kvdrifts_own_hooks_on_both_paths(family, dtype):
    own, theirs = kd.load(tiny(family, dtype), quiet=True), bridged(family, dtype)
    assert theirs.architecture == own.architecture
    for path in (kd.CacheOn(), kd.CacheOff()):
        assert differing(record(own, path), record(theirs, path)) == []


def test_gpt2_computes_otherwise_which_is_declared_and_agrees_in_float64(capsys):
    model = kd.load(bridge("gpt2"))
    assert "three products where the model has one fused product" in capsys.readouterr().err
    assert any("fused product" in note for note in model.coverage.notes)
    own = kd.load(tiny("gpt2"), quiet=True)
    assert differing(record(own, kd.CacheOn(), ["logits"]), record(model, kd.CacheOn(), ["logits"])) == ["logits"]
    exact = (kd.TrueFloat64(),)
    drift = kd.compare(
        kd.load(tiny("gpt2", torch.float64), quiet=True),
        PROMPT,
        a=kd.CacheOn(controls=exact),
        b=kd.CacheOn(model=bridged("gpt2", torch.float64), controls=exact),
        floor=0,
        local=False,
        **QUIET,
    )
    assert drift.values("logits", "logit_max").max() < 1e-12
    assert drift.values("resid_post").max() < 1e-12


def test_the_bridge_against_the_model_itself_is_bitwise_zero():
    model = tiny("qwen3")
    drift = kd.compare(model, PROMPT, a=kd.CacheOn(), b=kd.CacheOn(model=bridge("qwen3")), floor=1, **QUIET)
    assert drift.values("logits", "logit_max").max() == 0
    assert drift.values("k", "identical").all()
    assert drift.values("resid_post", "identical").all()
    assert any("never updates the cache" in note for note in drift.notes)


def test_sites_are_read_at_the_bridges_own_hook_points():
    places = bridged("gemma2").coverage.places
    names = {site: {place.module.name for place in by_layer.values()} for site, by_layer in places.items()}
    assert names["resid_post"] == {"blocks.0.hook_out", "blocks.1.hook_out"}
    assert names["attn_out"] == {"blocks.0.ln1_post.hook_out", "blocks.1.ln1_post.hook_out"}
    assert names["resid_mid"] == {"blocks.0.ln2.hook_in", "blocks.1.ln2.hook_in"}


def test_a_users_hook_fires_once_and_is_part_of_what_is_measured():
    b = bridge("llama")
    model, calls = kd.load(b, quiet=True), []
    clean = record(model, kd.CacheOn(), ["z"])

    def halve(pattern, hook):
        calls.append(hook.name)
        return pattern * 0.5

    with b.hooks(fwd_hooks=[("blocks.0.attn.hook_pattern", halve)]):
        changed = record(model, kd.CacheOn(), ["z"])
    assert calls == ["blocks.0.attn.hook_pattern"] * len(FED)
    assert torch.equal(changed["z"][:, 0], clean["z"][:, 0] * 0.5)


# --- the cache


def test_the_defect_is_found_said_and_repaired_during_kvdrifts_calls_only(capsys):
    b = bridge("llama")
    b(torch.tensor([PROMPT]))  # the bridge puts hooks of its own in place at its first pass
    before = overridden(b.original_model)
    model = kd.load(b)
    said = capsys.readouterr().err
    assert "never updates the cache" in said
    assert "repair=True" in said
    with kd.tap(model, ["k", "z"]):
        pass
    kd.compare(model, PROMPT, **QUIET)
    assert overridden(b.original_model) == before == ([], before[1])
    cache = DynamicCache(config=b.original_model.config)
    b.original_model(torch.tensor([PROMPT]), cache=cache)
    assert cache.get_seq_length() == 0  # the bridge itself is as it was


def test_a_failing_pass_leaves_nothing_behind():
    b = bridge("llama")
    model = kd.load(b, quiet=True)
    assert "z" in model.coverage.sites
    before = overridden(b.original_model)

    def stop(*_):
        raise RuntimeError("stop")

    handle = b.blocks[1].attn.hook_pattern.register_forward_hook(stop)
    with kd.tap(model, ["z"]), pytest.raises(RuntimeError, match="stop"):
        model.backend.forward(torch.tensor([PROMPT]), 0, model.backend.new_cache())
    handle.remove()
    assert overridden(b.original_model) == before


def test_without_the_repair_the_bridge_runs_as_it_is(capsys):
    model = kd.load(bridge("llama"), repair=False)
    assert "runs as it is" in capsys.readouterr().err
    drift = kd.compare(model, PROMPT, floor=0, local=False, sites=["logits"], **QUIET)
    assert drift.values("logits", "logit_max")[drift.measured].max() > 1


@pytest.mark.parametrize("repair", [True, False])
def test_diagnose_calls_the_bridge_as_it_is_a_bug(repair):
    verdict = kd.diagnose(kd.load(bridge("llama"), repair=repair, quiet=True), PROMPT, max_new_tokens=2, progress=False)
    assert verdict.kind == "bug"
    assert verdict.wrong == "a"
    assert verdict.where.layer == 0
    assert verdict.where.module == "model.layers.0.self_attn (cache update)"
    assert any("empty after 11 tokens" in reason for reason in verdict.reasons)


def test_diagnose_acquits_a_bridge_whose_attention_finds_its_cache():
    hf = tiny("llama")
    b = bridge_of(hf)
    with repaired(hf):
        verdict = kd.diagnose(b, PROMPT, max_new_tokens=2, progress=False)
    assert verdict.kind in ("rounding", "exact")
    assert not any("No bitwise promise" in reason for reason in verdict.reasons)


# --- verbs, controls, refusals


def test_patching_and_the_controls_run_on_a_bridge():
    model = bridged("llama")
    patch = kd.Patch("kv", schedule="persistent")
    own = kd.patch(kd.load(tiny("llama"), quiet=True), PROMPT, [patch], placebos=1, **QUIET)
    assert own.to_dataframe().equals(kd.patch(model, PROMPT, [patch], placebos=1, **QUIET).to_dataframe())
    z = kd.sweep(model, PROMPT, sites=("z",), **QUIET).to_dataframe()
    assert z.equals(kd.sweep(tiny("llama"), PROMPT, sites=("z",), **QUIET).to_dataframe())
    fixed = (kd.FixedShape(64),)
    drift = kd.compare(model, PROMPT, a=kd.CacheOn(controls=fixed), b=kd.CacheOff(controls=fixed), **QUIET)
    assert drift.values("logits", "logit_max")[drift.measured].max() == 0
    own, theirs = (
        kd.compare(x, PROMPT, also_in="bfloat16", floor=1, local=False, **QUIET) for x in (tiny("llama"), model)
    )
    for site, metric, of in (("logits", "kl", "drift"), ("resid_post", "rel_l2", "drift"), ("k", "rel_l2", "drift")):
        for one, two in ((own, theirs), (own.control, theirs.control)):
            assert np.array_equal(one.values(site, metric, of), two.values(site, metric, of), equal_nan=True)
    assert np.array_equal(own.values("resid_post", of="floor"), theirs.values("resid_post", of="floor"), equal_nan=True)


def test_what_a_bridge_cannot_do_is_said():
    b = bridge("llama")
    model = kd.load(b, quiet=True)
    with pytest.raises(InputError, match="its own eager attention"):
        kd.load(b, attn="sdpa", quiet=True)
    with pytest.raises(InputError, match="its own eager attention"):
        kd.compare(model, PROMPT, a=kd.CacheOn(attn="sdpa"), **QUIET)
    with pytest.raises(ModelError, match="give the Hugging Face model itself"):
        kd.counterfactual.expand_kv_heads(model)
    with pytest.raises(ModelError, match="is no bridge"):
        kd.load(b.blocks[0], quiet=True)
    b.set_use_attn_result(True)
    with pytest.raises(ModelError, match=r"bridge\.set_use_attn_result\(False\)"):
        kd.load(b, quiet=True)
    folded = bridge("llama")
    folded.enable_compatibility_mode(disable_warnings=True)
    with pytest.raises(ModelError, match="compatibility mode"):
        kd.load(folded, quiet=True)


# --- ActivationCache


def test_an_activation_cache_holds_what_the_bridge_itself_records_and_comes_back_in_every_bit():
    b = bridge("gemma2")
    model = kd.load(b, quiet=True)
    _, theirs = b.run_with_cache(torch.tensor([PROMPT]))
    sites = [site for site in SITES if site != "logits"]
    trace = kd.record(model, PROMPT, path=kd.CacheOff(), sites=sites, positions="all", max_new_tokens=1, progress=False)
    ours = trace.to_activation_cache(model=b)
    assert ours["blocks.1.hook_resid_post"].shape == (1, len(PROMPT), 256)
    assert ours["blocks.1.attn.hook_rot_k"].shape == (1, len(PROMPT), 2, 32)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    back = kd.Trace.from_activation_cache(theirs, model, PROMPT)
    assert differing(trace, back) == []
    assert all(back.axes(site) == trace.axes(site) for site in sites)


def test_one_entry_per_step_comes_back_in_every_bit():
    model = kd.load(tiny("llama"), quiet=True)
    trace = record(model, kd.CacheOn(), positions="current", sites=[site for site in SITES if site != "pattern"])
    cache = trace.to_activation_cache()
    assert cache["blocks.0.attn.hook_z"].shape == (1, len(FED), 8, 32)
    back = kd.Trace.from_activation_cache(cache, model, PROMPT, fed=trace.fed)
    assert differing(trace, back) == []
    assert back.fed == trace.fed
    with pytest.raises(InputError, match="names 1 steps"):
        kd.Trace.from_activation_cache(cache, model, PROMPT, fed=[1])


def test_with_all_positions_each_is_taken_from_the_latest_step_that_computed_it():
    trace = record(kd.load(tiny("mistral"), quiet=True), kd.CacheOn(), sites=["resid_post", "k"])
    cache = trace.to_activation_cache()
    n = len(PROMPT)
    residual = cache["blocks.1.hook_resid_post"][0]
    assert residual.shape[0] == n + len(FED) - 1
    assert torch.equal(residual[:n], trace["resid_post"][0, 1, :n])
    assert all(torch.equal(residual[n + i], trace["resid_post"][i + 1, 1, n + i]) for i in range(len(FED) - 1))
    k, read = cache["blocks.1.attn.hook_rot_k"][0], trace.valid("k")[:, 1, 0]
    at = [int(read[:, position].nonzero().max()) for position in range(n + len(FED) - 1)]
    assert at[0] == 0  # evicted by the window of 8
    assert all(torch.equal(k[p], trace["k"][step, 1, :, p]) for p, step in enumerate(at))
    assert trace.to_activation_cache(step=0)["blocks.1.hook_resid_post"].shape[1] == n


@pytest.mark.real
def test_smollm2_has_the_bits_of_kvdrifts_own_hooks_and_the_bug_is_found():
    folder = str(kd.models.presets.resolve("smollm2-135m"))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def load():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager").eval()

    own, b = load(), bridge_of(load())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = kd.load(b, tokenizer=tokenizer, quiet=True)
    for path in (kd.CacheOn(), kd.CacheOff()):
        drift = kd.compare(
            kd.load(own, tokenizer=tokenizer, quiet=True),
            "The capital of France is",
            a=path,
            b=type(path)(model=model),
            floor=0,
            local=False,
            **QUIET,
        )
        assert drift.values("logits", "logit_max")[drift.measured].max() == 0
        assert drift.values("resid_post", "identical")[drift.measured].all()
        assert drift.values("v", "identical")[drift.measured].all()
    verdict = kd.diagnose(model, "The capital of France is", max_new_tokens=1, progress=False)
    assert verdict.kind == "bug"
    assert "cache update" in verdict.where.module


# --- the same object in other hands


def test_the_model_that_a_bridge_rebuilt_is_refused_without_its_bridge():
    with pytest.raises(ModelError, match="has rebuilt this model in place; give the bridge itself"):
        kd.load(bridge("llama").original_model)


def test_loading_a_loaded_bridge_again_can_leave_the_repair_out():
    model = bridged("llama")
    assert kd.load(model, quiet=True) is model
    assert kd.load(model, repair=False, quiet=True).backend.repairs is False
    assert model.backend.repairs is True


def test_what_a_repaired_and_an_unrepaired_bridge_keep_does_not_mix(tmp_path):
    model = bridged("llama")
    options = {"max_new_tokens": 3, "store": tmp_path, "progress": False}
    kd.evaluate(model, [[1, 2, 3]], **options)
    with pytest.raises(FileError, match=r"model\.driver\.0: transformer-lens .*, repaired there"):
        kd.evaluate(model.as_it_is(), [[1, 2, 3]], **options)


def test_broken_weights_are_named_as_transformers_names_them():
    hf = tiny("llama")
    hf.model.layers[1].mlp.down_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match=r" model\.layers\.1\.mlp\.down_proj\.weight holds NaN"):
        kd.evaluate(bridge_of(hf), [[1, 2, 3]], max_new_tokens=2, progress=False)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "qwen3"])
def test_transformer_lens_takes_a_trace_apart_as_it_does_its_own_cache(family):
    b = bridge(family, n_layers=3) if family != "gpt2" else bridge_of(kd.models.tiny("gpt2", attn="eager"))
    model = kd.load(b, quiet=True)
    _, theirs = b.run_with_cache(torch.tensor([PROMPT]))
    sites = ["embed", "resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post"]
    trace = kd.record(model, PROMPT, path=kd.CacheOff(), sites=sites, positions="all", max_new_tokens=1, progress=False)
    ours = trace.to_activation_cache(model=b)
    assert "ln_final.hook_scale" in ours
    exact = family != "gpt2"  # whose attention a bridge computes otherwise than the model itself
    for call in (
        lambda cache: cache.accumulated_resid(apply_ln=True),
        lambda cache: cache.decompose_resid(apply_ln=True),
        lambda cache: cache.decompose_resid(layer=1, mlp_input=True, apply_ln=True),
        lambda cache: cache.logit_attrs(cache.decompose_resid(), tokens=5),
        lambda cache: cache.logit_attrs(cache.accumulated_resid(), tokens=5, incorrect_tokens=6),
    ):
        assert torch.equal(call(ours), call(theirs)) or (not exact and torch.allclose(call(ours), call(theirs)))
    assert len(ours.accumulated_resid()) == model.architecture.n_layers + 1
    assert [name for name in ours if name in theirs and exact and not torch.equal(ours[name], theirs[name])] == []


def test_a_layers_input_is_what_the_layer_before_hands_on():
    b = bridge("llama", torch.bfloat16, n_layers=3)
    trace = record(kd.load(b, quiet=True), kd.CacheOn(), sites=["blocks.0.hook_resid_pre", "resid_post"])
    cache = trace.to_activation_cache(model=b)
    assert len(cache.accumulated_resid()) == 4
    assert torch.equal(cache["blocks.2.hook_resid_pre"], cache["blocks.1.hook_resid_post"])
    assert cache["ln_final.hook_scale"].dtype == torch.float32
    assert "ln_final.hook_scale" not in trace.to_activation_cache()
