"""What a model says it can give, and what it refuses."""

import pytest
import torch
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, RecurrentGemmaConfig, RecurrentGemmaForCausalLM

import kvdrift as kd
from kvdrift.errors import ModelError, NotFaithfulError, SiteError
from kvdrift.models.sites import ALL_SITES
from kvdrift.models.tiny import FAMILIES, supported_attn, tiny

RESIDUAL = {"embed", "resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post", "final_norm", "logits"}
HEADS = {"q", "k", "v", "z"}
MISSING = {
    "falcon": {"attn_out", "resid_mid", "mlp_out", *HEADS},
    "gpt-neox": {"attn_out", "resid_mid", "mlp_out"},
    "bloom": HEADS,
    "mamba": {"attn_out", "resid_mid", "mlp_out", *HEADS},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_sites_of_every_family(family, tiny_model):
    for attn in supported_attn(family):
        coverage = tiny_model(family, attn=attn).coverage
        expected = (RESIDUAL | HEADS) - MISSING.get(family, set())
        if attn == "eager" and "q" in expected:
            expected |= {"pattern"}
        assert set(coverage.sites) == expected
        for site in ALL_SITES:
            if site not in coverage.sites:
                assert coverage.reasons[site], "every missing site has its sentence"
                with pytest.raises(SiteError) as caught:
                    coverage.resolve(site, None)
                assert coverage.reasons[site] in str(caught.value)
        assert all(str(site) in str(coverage) for site in coverage.sites)


def test_layers_without_attention_are_named(tiny_model):
    coverage = tiny_model("lfm2").coverage
    assert coverage.layers("k") == (1, 3)
    assert coverage.resolve("k", frozenset({0, 1})) == (1,)
    assert "in layers 0, 2" in coverage.reasons["k"]
    assert any("k" in note and "in layers 0, 2" in note for note in coverage.notes)
    with pytest.raises(SiteError, match="in layers 0, 2"):
        coverage.resolve("k", frozenset({0}))


def test_layers_that_call_the_table_twice_give_no_heads():
    config = DiffLlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=64,
    )
    coverage = kd.load(DiffLlamaForCausalLM(config), quiet=True).coverage
    assert coverage.table_layers == {0: True, 1: True}
    assert coverage.layers("k") == ()
    assert "not one call" in coverage.reasons["k"]


def test_which_layers_call_the_table(tiny_model):
    assert tiny_model("lfm2").coverage.table_layers == {1: True, 3: True}
    assert tiny_model("bloom").coverage.table_layers == {}


def test_global_sites_ignore_the_choice_of_layers(tiny_model):
    coverage = tiny_model("llama").coverage
    assert coverage.resolve("embed", frozenset({2})) == coverage.resolve("logits", frozenset({2})) == (0,)


def test_a_model_with_state_in_its_modules_is_refused(hooks):
    config = RecurrentGemmaConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=64,
        lru_width=32,
        attention_window_size=8,
    )
    model = kd.load(RecurrentGemmaForCausalLM(config).eval(), quiet=True)
    with pytest.raises(ModelError, match="state of a run outside its cache"):
        _ = model.coverage
    assert not hooks(model.hf)


def test_a_model_that_is_not_deterministic_is_refused():
    hf = tiny("llama")
    hf.model.layers[1].mlp.register_forward_hook(lambda _m, _a, out: out + 1e-3 * torch.randn(out.shape))
    with pytest.raises((ModelError, NotFaithfulError), match="deterministic"):
        _ = kd.load(hf, quiet=True).coverage


def test_dropout_in_training_mode_is_off_for_the_probe_and_put_back():
    hf = tiny("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    expected = kd.record(hf, [1, 2, 3], max_new_tokens=3, progress=False)["logits"]
    hf.train()
    hf.transformer.h[1].eval()
    modes = {name: module.training for name, module in hf.named_modules()}
    trace = kd.record(hf, [1, 2, 3], max_new_tokens=3, progress=False)
    kd.compare(hf, [1, 2, 3], max_new_tokens=2, floor=1, progress=False)
    assert torch.equal(trace["logits"], expected)
    assert {name: module.training for name, module in hf.named_modules()} == modes
    assert len(set(modes.values())) == 2


def test_a_model_without_a_head_is_refused():
    with pytest.raises(ModelError, match="no language-model head"):
        kd.load(tiny("llama").model, quiet=True)


def test_a_tap_that_would_change_the_logits_is_refused(monkeypatch, hooks):
    from kvdrift.tracing import tap

    def clumsy(call, proceed):
        call.key = call.key * 1.0001
        return proceed(call)

    monkeypatch.setattr(tap.Tap, "__call__", lambda self, call, proceed: clumsy(call, proceed))
    model = kd.load(tiny("llama"), quiet=True)
    with pytest.raises(NotFaithfulError, match="measure itself"):
        _ = model.coverage
    assert not hooks(model.hf)


def test_a_tap_that_never_fires_is_refused(monkeypatch):
    from kvdrift.tracing import tap

    monkeypatch.setattr(tap.Tap, "__call__", lambda self, call, proceed: proceed(call))
    with pytest.raises(NotFaithfulError, match="never fired"):
        _ = kd.load(tiny("llama"), quiet=True).coverage


@pytest.mark.parametrize("verb", ["compare", "patch", "record"])
@pytest.mark.parametrize("cached", [True, False])
def test_a_model_that_does_not_run_says_so_in_a_sentence(verb, cached):
    hf = tiny("llama")

    def fail(_, __, kwargs):
        if (kwargs.get("cache") is not None) == cached:
            raise IndexError("no such row")

    hf.register_forward_pre_hook(fail, with_kwargs=True)
    given = ("kv",) if verb == "patch" else ()
    how = "with a cache" if cached else "without a cache"
    with pytest.raises(ModelError, match=rf"fails on a few tokens {how}.*\(IndexError: no such row\)"):
        getattr(kd, verb)(hf, [5, 6, 7], *given, progress=False)
