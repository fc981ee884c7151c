"""`kd.factorial`: its four runs against a loop of one's own and against patches, its placebo, what it refuses."""

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import kvdrift as kd
from kvdrift.drift.metrics import kl_divergence, logit_l2
from kvdrift.errors import InputError, SiteError
from kvdrift.models.tiny import FAMILIES, tiny
from kvdrift.patching.factorial_result import EDGES, METRICS, PAIRS, PLACEBOS, WHOLE

PROMPT = [5, 9, 100, 33, 7, 8, 250, 301, 12, 44]  # longer than the windows of 8
TOKENS = [3, 1, 4, 1]
N, STEPS = len(PROMPT), len(TOKENS)
ON, OFF = kd.CacheOn(), kd.CacheOff()


def factorial(model, prompt=PROMPT, **options):
    return kd.factorial(model, prompt, **{"max_new_tokens": 4, "progress": False} | options)


@torch.no_grad()
def by_hand(model):
    """Logits y00, y11 and y10 at every step, without kvdrift."""
    y00, y11, y10 = [], [], []
    cache = DynamicCache(config=model.hf.config)
    for t in range(STEPS):
        past = DynamicCache()  # without a configuration it keeps every position
        ids = torch.tensor([PROMPT + TOKENS[:t]])
        y00.append(model.hf(ids, cache=past, use_cache=True, logits_to_keep=1).logits[0, -1])
        some, at = (PROMPT, 0) if t == 0 else ([TOKENS[t - 1]], N + t - 1)

        def step(over, some=some, at=at):
            places = torch.arange(at, at + len(some))[None]
            ids = torch.tensor([some])
            return model.hf(ids, position_ids=places, cache=over, use_cache=True, logits_to_keep=1).logits[0, -1]

        if t == 0:
            y11.append(step(cache))
            y10.append(y11[0])
            continue
        crossed = DynamicCache(config=model.hf.config)
        step_of_prompt = torch.tensor([PROMPT + TOKENS[: t - 1]])
        model.hf(step_of_prompt, cache=crossed, use_cache=True, logits_to_keep=1)
        for layer, mine in enumerate(crossed.layers):
            window = model.architecture.layers[layer].window
            start = 0 if window is None else max(0, at - (window - 1))
            mine.keys = past.layers[layer].keys[:, :, start:at].clone()
            mine.values = past.layers[layer].values[:, :, start:at].clone()
        y10.append(step(crossed))
        y11.append(step(cache))
    return {"y00": y00, "y11": y11, "y10": y10}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_the_decode_kernel_on_cache_offs_state_by_hand(family, dtype, tiny_model):
    model = tiny_model(family, dtype, intermediate_size=1024)
    found, y = factorial(model, tokens=TOKENS), by_hand(model)
    for pair in ("y10-y00", "y10-y11", "y11-y00"):
        one, two = (y[name] for name in pair.split("-"))
        expected = {
            "logit_l2": [float(logit_l2(a, b)) for a, b in zip(one, two, strict=True)],
            "kl": [float(kl_divergence(b, a)) for a, b in zip(one, two, strict=True)],
            "identical": [float(torch.equal(a, b)) for a, b in zip(one, two, strict=True)],
        }
        for metric, values in expected.items():
            np.testing.assert_array_equal(found.values(pair, metric)[0], values, err_msg=f"{pair} {metric}")
    if dtype == torch.float32:
        assert found.values(WHOLE)[0, 1:].all()


@pytest.mark.parametrize("family", ["llama", "gpt-oss", "deepseek-v3", "lfm2"])
def test_each_crossing_is_a_one_shot_patch_of_what_is_read(family, tiny_model):
    model = tiny_model(family)
    found = factorial(model, tokens=TOKENS)
    for step in range(1, STEPS):
        patch = kd.Patch("kv", schedule=kd.Schedule.one_shot(step), write="read")
        for recipient, donor, pair in ((ON, OFF, "y10-y00"), (OFF, ON, "y01-y11")):
            result = kd.patch(
                model, PROMPT, patch, recipient=recipient, donor=donor, tokens=TOKENS, placebos=0, checks=False,
                progress=False,
            )  # fmt: skip
            for metric in METRICS:
                assert result.values(metric, "patched")[0, 0, step] == found.values(pair, metric)[0, step], (pair, step)


@pytest.mark.parametrize("path", [ON, OFF], ids=["on", "off"])
def test_a_path_crossed_with_itself(path, tiny_model):
    found = factorial(tiny_model("mistral"), a=path, b=path)
    for pair in (WHOLE, *EDGES):
        assert (found.values(pair, "identical") == 1).all(), pair
        assert (found.values(pair) == 0).all()
        assert (found.values(pair, "kl") == 0).all()
    for pair in PLACEBOS:
        assert (found.values(pair)[0, 1:] > 0).any(), "the placebo is not nothing"
    assert "agree bit for bit at every step" in found.summary()


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ("falcon", "bloom", "mamba")])
def test_every_family_with_a_kernel(family, tiny_model, hooks):
    model = tiny_model(family, **({} if family in ("gemma3", "lfm2") else {"num_hidden_layers": 2}))
    found = factorial(model, max_new_tokens=4)
    assert set(found.arrays) == {f"{m}/{p}" for m in METRICS for p in PAIRS} | {"fed", "n_steps"}
    for pair in PAIRS:
        assert (found.values(pair, "identical")[:, 0] == 1).all(), "at step 0 nothing differs"
        assert np.isfinite(found.values(pair)).all()
        np.testing.assert_array_equal(found.values(pair, "identical") == 1, found.values(pair) == 0)
    # In the one-token kernel a single row reads the entry, and often one ulp is lost in the sum that it enters.
    seeds = (found if seed == 0 else factorial(model, max_new_tokens=4, seed=seed) for seed in range(4))
    assert any(one.per_prompt("ulp-y00")[0] > 0 for one in seeds)
    assert found.per_prompt(WHOLE)[0] > 0
    assert found.arrays["fed"].tolist() == [
        list(kd.record(model, PROMPT, path=OFF, sites="logits", max_new_tokens=4, progress=False).fed)
    ]
    assert (found.on.label, found.off.label) == ("cache-ON", "cache-OFF")
    assert not hooks(model.hf)


def test_the_same_call_gives_the_same_bits_and_the_seed_moves_the_placebo_alone(tiny_model, same_bits):
    model = tiny_model("llama")
    one, two, other = factorial(model), factorial(model), factorial(model, seed=3)
    for name, array in one.arrays.items():
        assert same_bits(array, two.arrays[name]), name
        if "ulp" not in name:
            assert same_bits(array, other.arrays[name]), name
    assert any((one.values(pair) != other.values(pair)).any() for pair in PLACEBOS)


def test_prompts_of_several_lengths(tiny_model):
    model, prompts = tiny_model("llama"), [PROMPT, [7]]
    together = factorial(model, prompts, tokens=[TOKENS, TOKENS[:2]])
    assert together.arrays["n_steps"].tolist() == [4, 2]
    for number, prompt in enumerate(prompts):
        alone = factorial(model, prompt, tokens=[TOKENS, TOKENS[:2]][number])
        n = together.arrays["n_steps"][number]
        for pair in PAIRS:
            np.testing.assert_array_equal(together.values(pair)[number, :n], alone.values(pair)[0])
    assert np.isnan(together.values(WHOLE)[1, 2:]).all()
    assert together.arrays["fed"][1].tolist() == [3, 1, -1, -1]


def test_two_models(tiny_model):
    model, other = tiny_model("llama"), kd.load(tiny("llama", seed=1), quiet=True)
    found = factorial(model, b=kd.CacheOff(model=other), tokens=TOKENS)
    assert (found.values("y10-y11")[0, 1:] > 0.1).all(), "another model's keys and values matter"
    assert (found.values("y10-y00")[0, 1:] > 0.1).all()
    plain = factorial(other, tokens=TOKENS)
    np.testing.assert_array_equal(found.values("ulp-y00"), plain.values("ulp-y00"))


@pytest.mark.parametrize(
    ("family", "options", "error", "words"),
    [
        ("falcon", {}, SiteError, "does not give 'k'"),
        ("mamba", {}, SiteError, "does not give 'k'"),
        ("llama", {"max_new_tokens": 1}, InputError, "give 2 or more"),
        ("llama", {"prompt": []}, InputError, "prompt is empty"),
        ("llama", {"a": kd.CacheOn}, InputError, "no path"),
        ("llama", {"tokens": [[3], [4]]}, InputError, "one list of token ids per prompt"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_bad_arguments_are_one_sentence(family, options, error, words, tiny_model, hooks):
    model = tiny_model(family)
    with pytest.raises(error, match=words):
        factorial(model, **options)
    assert not hooks(model.hf)


@pytest.mark.parametrize(
    "overrides", [{"num_key_value_heads": 4}, {"head_dim": 64}, {"num_hidden_layers": 2}, {"vocab_size": 128}], ids=str
)
def test_models_of_other_shapes_are_refused(overrides, tiny_model, hooks):
    model, other = tiny_model("llama"), kd.load(tiny("llama", **overrides), quiet=True)
    for a, b in ((ON, kd.CacheOff(model=other)), (kd.CacheOn(model=other), OFF)):
        with pytest.raises((SiteError, InputError), match=r"different shapes|of one shape|one vocabulary"):
            factorial(model, a=a, b=b)
    assert not hooks(model.hf)
    assert not hooks(other.hf)


@pytest.mark.parametrize("at", [0, 5, 9])
def test_nothing_is_left_after_an_interruption(at, hooks):
    hf = tiny("llama")
    model, calls = kd.load(hf, quiet=True), iter(range(99))
    assert model.coverage.sites

    def interrupt(*_):
        if next(calls) == at:
            raise KeyboardInterrupt

    handle = hf.model.layers[1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        factorial(model)
    handle.remove()
    assert not hooks(hf)
