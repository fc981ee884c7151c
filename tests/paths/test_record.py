"""`record`: what is kept, where, and what is refused."""

import pytest
import torch

import kvdrift as kd
from kvdrift import fingerprint
from kvdrift.errors import InputError, MemoryBudgetError, ModelError, NonFiniteError, SiteError
from kvdrift.models.tiny import tiny

PROMPT = [5, 9, 100, 33, 7, 8, 250, 301, 12, 44]


def record(*arguments, **options):
    return kd.record(*arguments, **{"progress": False, "max_new_tokens": 3, **options})


@pytest.mark.parametrize("path", [kd.CacheOn(), kd.CacheOff(), kd.CacheOn(prefill_chunk=3)], ids=["on", "off", "chunk"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "mamba"])
def test_all_listed_and_current_positions_agree(family, path, tiny_model, same_bits):
    model = tiny_model(family, attn="eager")
    sites, chosen = model.coverage.sites, [len(PROMPT), 0, 4]
    every = record(model, PROMPT, path=path, sites=sites, positions="all")
    some = record(model, PROMPT, path=path, sites=sites, positions=chosen)
    current = record(model, PROMPT, path=path, sites=sites)
    for site in sites:
        if site == "logits":
            assert same_bits(every[site], current[site])
            continue
        at = list(every.axes(site)).index("position")
        assert some.axes(site)["position"] == tuple(chosen)
        assert same_bits(some[site], every[site].index_select(at, torch.tensor(chosen)))
        assert same_bits(some.valid(site), every.valid(site).index_select(at, torch.tensor(chosen)))
        for step in range(3):
            here = every[site][step].select(at - 1, len(PROMPT) - 1 + step)
            assert same_bits(here, current[site][step]), site
        assert "position" not in current.axes(site)


def test_layers_and_heads_are_cut_out(tiny_model, same_bits):
    model, sites = tiny_model("llama"), ["resid_post", "q", "k", "v", "z", "embed", "logits"]
    whole = record(model, PROMPT, sites=sites)
    cut = record(model, PROMPT, sites=sites, layers=[-1, 1], heads=[6, 0])
    assert cut.axes("q")["layer"] == cut.axes("k")["layer"] == (1, 3)
    assert (cut.axes("q")["head"], cut.axes("k")["kv_head"]) == ((6, 0), (0, 1))
    assert same_bits(cut["resid_post"], whole["resid_post"][:, [1, 3]])
    for site in ("q", "z"):
        assert same_bits(cut[site], whole[site][:, [1, 3]][:, :, [6, 0]])
    assert same_bits(cut["k"], whole["k"][:, [1, 3]])
    assert same_bits(record(model, PROMPT, sites="k", heads=[7])["k"], whole["k"][:, :, [1]])
    assert same_bits(record(model, PROMPT, sites="blocks.2.attn.hook_v")["v"], whole["v"][:, [2]])


def test_given_tokens_are_followed_to_the_end_and_a_path_stops_at_eos():
    hf = tiny("llama")
    free = record(hf, PROMPT, max_new_tokens=6)
    hf.generation_config.eos_token_id = [free.fed[2], 383]
    stopped = record(kd.load(hf, quiet=True), PROMPT, max_new_tokens=6, sites=["k", "resid_post"], positions="all")
    first = free.fed.index(free.fed[2])
    assert stopped.fed == free.fed[: first + 1]
    assert len(stopped["k"]) == len(stopped.axes("k")["step"]) == len(stopped.valid("k")) == first + 1
    forced = record(hf, PROMPT, tokens=[free.fed[2], 3, 5, 7])
    assert forced.fed == (free.fed[2], 3, 5, 7)


def test_prompts_of_every_kind(tiny_model, same_bits):
    model = tiny_model("llama")
    one = record(model, PROMPT)
    for same in (torch.tensor(PROMPT), torch.tensor([PROMPT]), tuple(PROMPT)):
        assert same_bits(record(model, same)["logits"], one["logits"])
    many = record(model, [PROMPT, torch.tensor([1, 2, 3])])
    assert isinstance(many, list)
    assert same_bits(many[0]["logits"], one["logits"])
    assert many[1].prompt.ids == (1, 2, 3)
    assert isinstance(record(model, [PROMPT]), list)
    assert record(model, [7], max_new_tokens=1).prompt.ids == (7,)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "empty"),
        ([[]], "empty"),
        ("", "empty"),
        ("  \n", "empty"),
        (torch.empty(0, dtype=torch.long), "empty"),
        ("text", "no tokenizer"),
        ([384], "outside the vocabulary"),
        ([3, -1], "outside the vocabulary"),
        (torch.ones(2, 3, dtype=torch.long), "never batches"),
        ([torch.ones(2, 3, dtype=torch.long)], r"not \[2, 3\]"),
        (torch.tensor([1.5, 2.0]), "integers"),
        ([[1.5, 2.0]], "integers"),
        ([1, 2.0], "something else"),
        ([True, False], "something else"),
        ([["text"]], "flat list of token ids"),
        ([[1, [2]]], "flat list of token ids"),
        (3, "not int"),
        (None, "not NoneType"),
        ({"a": 1}, "not dict"),
        ([5] * 254, "exceed the context"),
    ],
)
def test_bad_prompts_are_one_sentence(prompt, words, tiny_model):
    for verb in (kd.record, kd.compare):
        with pytest.raises(InputError, match=words):
            verb(tiny_model("llama"), prompt, max_new_tokens=3, progress=False)


def test_the_last_position_of_the_context_can_be_used(tiny_model):
    assert len(record(tiny_model("llama"), [5] * 253, sites="logits").fed) == 3


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"sites": "nonsense"}, SiteError, "no site 'nonsense'"),
        ({"sites": []}, SiteError, "No site"),
        ({"sites": "pattern"}, SiteError, "attn='eager'"),
        ({"sites": "pattern", "path": kd.CacheOn(attn="eager")}, SiteError, "attn='eager'"),
        ({"layers": [4]}, SiteError, "layers 0 to 3"),
        ({"layers": [], "sites": "k"}, SiteError, "no layer that was asked for"),
        ({"heads": [8]}, SiteError, "heads 0 to 7"),
        ({"heads": [-1]}, SiteError, "heads 0 to 7"),
        ({"heads": []}, SiteError, "heads 0 to 7"),
        ({"positions": [12]}, SiteError, "0 to 11"),
        ({"positions": [-1]}, SiteError, "0 to 11"),
        ({"positions": []}, SiteError, "0 to 11"),
        ({"positions": [1, 1]}, SiteError, "each once"),
        ({"positions": "last"}, InputError, "'last'"),
        ({"max_new_tokens": 0}, InputError, "at least 1"),
        ({"tokens": [[1], [2]]}, InputError, "one list of token ids per prompt"),
        ({"tokens": [400]}, InputError, "outside the vocabulary"),
        ({"path": kd.CacheOn(attn="nonsense")}, ModelError, "nonsense"),
        ({"memory_budget": 1000}, MemoryBudgetError, "memory_budget"),
        ({"memory_budget": 0}, MemoryBudgetError, "memory_budget"),
    ],
)
def test_bad_arguments_are_one_sentence(options, error, words, tiny_model, hooks):
    model = tiny_model("llama")
    with pytest.raises(error, match=words):
        record(model, PROMPT, **options)
    assert not hooks(model.hf)
    assert model.attn == "sdpa"


def test_positions_may_be_a_tensor(tiny_model):
    trace = record(tiny_model("llama"), PROMPT, positions=torch.tensor([2, 0]), sites="resid_post")
    assert trace.axes("resid_post")["position"] == (2, 0)
    assert trace.valid("resid_post")[0].all()


def test_a_pattern_that_the_paths_attention_does_not_give_is_refused(tiny_model):
    model = tiny_model("llama", attn="eager")
    with pytest.raises(SiteError, match="pattern never fired with attn='sdpa'"):
        record(model, PROMPT, path=kd.CacheOn(attn="sdpa"), sites=["pattern", "q"])


def test_the_memory_estimate_is_what_is_kept(tiny_model, capsys):
    model = tiny_model("llama")
    trace = kd.record(model, PROMPT, max_new_tokens=3, positions="all")
    assert f"recording about {trace.n_bytes / 1e6:.3g} MB" in capsys.readouterr().err
    kd.record(model, PROMPT, max_new_tokens=3, positions="all", memory_budget=trace.n_bytes, progress=False)
    with pytest.raises(MemoryBudgetError):
        kd.record(model, PROMPT, max_new_tokens=3, positions="all", memory_budget=trace.n_bytes - 1, progress=False)


def test_offload_gives_the_same(tiny_model, same_bits):
    model = tiny_model("llama")
    assert all(
        same_bits(record(model, PROMPT)[s], record(model, PROMPT, offload=True)[s])
        for s in ("k", "logits", "resid_post")
    )


def test_nan_weights_are_named():
    hf = tiny("llama")
    hf.model.layers[2].mlp.up_proj.weight[3, 4] = float("nan")
    for verb in (kd.record, kd.compare):
        with pytest.raises(NonFiniteError, match=r"layers\.2\.mlp\.up_proj\.weight"):
            verb(hf, PROMPT, max_new_tokens=2, progress=False)


def scale_up(weight):
    """To the end of float16: the weight stays finite, sums of it do not."""
    weight.copy_(weight.float() * (60000 / weight.float().abs().max()))


def test_an_overflow_names_layer_largest_value_and_remedy(hooks):
    hf = tiny("llama", dtype=torch.float16)
    scale_up(hf.model.layers[2].mlp.down_proj.weight)
    for verb in (kd.record, kd.compare):
        with pytest.raises(
            NonFiniteError, match=r"mlp_out of layer 2: the largest finite value .* 6\.55e\+04"
        ) as caught:
            verb(hf, PROMPT, max_new_tokens=2, progress=False)
        assert "bfloat16" in str(caught.value)
    assert not hooks(hf)


def test_an_overflow_of_the_head_alone_is_refused():
    hf = tiny("llama", dtype=torch.float16)
    scale_up(hf.lm_head.weight)
    for verb in (kd.record, kd.compare):
        with pytest.raises(NonFiniteError, match="logits that are not finite"):
            verb(hf, PROMPT, max_new_tokens=2, progress=False)


def test_the_weights_are_fingerprinted_once_for_all_prompts(tiny_model, monkeypatch):
    model, taken = tiny_model("llama"), []
    own = fingerprint._taken
    monkeypatch.setattr(fingerprint, "_taken", lambda module: taken.append(module) or own(module))
    traces = kd.record(model, [PROMPT, PROMPT[:3]], max_new_tokens=2, progress=False)
    assert taken == [model.hf]
    assert [trace.provenance["weights"] for trace in traces] == [own(model.hf)] * 2
    other = kd.load(tiny("llama", seed=1), quiet=True)
    path = kd.CacheOn(model=other)
    assert kd.record(model, PROMPT, path=path, max_new_tokens=2, progress=False).provenance["weights"] == own(other.hf)


@pytest.mark.parametrize("family", ["llama", "gemma3", "mamba"])
def test_a_text_that_ended_early_has_the_shape_of_the_same_tokens_given(family):
    """Positions end with what was consumed, so that two paths over one text can be subtracted."""
    hf = tiny(family, attn="eager")
    free = record(hf, PROMPT, max_new_tokens=6)
    hf.generation_config.eos_token_id = free.fed[2]
    model = kd.load(hf, quiet=True)
    sites = [site for site in model.coverage.sites if site != "logits"]
    a = record(model, PROMPT, max_new_tokens=6, sites=sites, positions="all")
    b = record(model, PROMPT, path=kd.CacheOff(), tokens=a.fed, sites=sites, positions="all")
    assert len(a.fed) < 6
    for site in sites:
        one, two = a[site], b[site]
        pairs = [(one[layer], two[layer]) for layer in one] if isinstance(one, dict) else [(one, two)]
        assert all((x - y).shape == x.shape == y.shape for x, y in pairs), site
        assert (a.axes(site), a.valid(site).shape) == (b.axes(site), b.valid(site).shape), site
        assert a.axes(site).get("position", (len(PROMPT) + len(a.fed) - 2,))[-1] == len(PROMPT) + len(a.fed) - 2
    some = record(model, PROMPT, max_new_tokens=6, sites="resid_post", positions=[0, 3])
    assert some.axes("resid_post")["position"] == (0, 3), "positions that were named stay"
