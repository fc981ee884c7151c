"""The promises of the project, on every tiny family, dtype, attention implementation and path.

The fast tests run them where every two of the four stand together (or each once, with every two of the others), the
slow ones in every combination.
"""

import json

import pytest
import torch
from pairwise import params

import kvdrift as kd
from kvdrift.models.tiny import FAMILIES, supported_attn

PROMPT = [5, 9, 100, 33, 7, 8, 250, 301, 12, 44]  # longer than the windows of 8
STEPS = 3
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MODELS = [(family, dtype, attn) for family in FAMILIES for dtype in DTYPES for attn in supported_attn(family)]
PATHS = {"on": kd.CacheOn(), "off": kd.CacheOff()}
CASES = [(*model, path) for model in MODELS for path in PATHS]


def layers_of(value):
    return value if isinstance(value, dict) else {"all": value}


@pytest.mark.parametrize(("family", "dtype", "attn", "name"), params(CASES))
def test_tracing_changes_no_bit_and_every_tap_fires(family, dtype, attn, name, tiny_model, hooks, same_bits):
    model = tiny_model(family, dtype, attn)
    generated = model.hf.generate(
        torch.tensor([PROMPT]),
        max_new_tokens=STEPS,
        do_sample=False,
        use_cache=name == "on",
        output_logits=True,
        return_dict_in_generate=True,
    )
    trace = kd.record(
        model,
        PROMPT,
        path=PATHS[name],
        sites=model.coverage.sites,
        positions="all",
        max_new_tokens=STEPS,
        progress=False,
    )
    assert not hooks(model.hf)
    assert trace["logits"].dtype == model.hf(torch.tensor([PROMPT])).logits.dtype  # float32 in mamba
    for step, untraced in enumerate(generated.logits):
        assert same_bits(trace["logits"][step].float(), untraced[0].float()), (name, step)
    assert list(trace.fed) == generated.sequences[0, len(PROMPT) :].tolist()
    assert set(trace.sites) == set(model.coverage.sites)
    for site in trace.sites:
        axes = trace.axes(site)
        sizes = [len(values) for axis, values in axes.items()]
        if "layer" in axes:
            assert axes["layer"] == model.coverage.layers(site)
        value = trace[site]
        if isinstance(value, dict):
            sizes.pop(list(axes).index("layer"))
            assert tuple(value) == axes["layer"]
        for tensor in layers_of(value).values():
            assert list(tensor.shape) == sizes, site
            assert tensor.isfinite().all()
        assert list(trace.valid(site).shape) == [len(values) for values in axes.values()][:-1]
        if "position" in axes:
            fired = trace.valid(site).flatten(1, -2) if trace.valid(site).ndim > 2 else trace.valid(site)[:, None]
            current = torch.tensor([len(PROMPT) - 1 + step for step in range(STEPS)])
            assert fired[torch.arange(STEPS), :, current].all(), f"{site} is silent at the current position"
            assert not fired[0, :, len(PROMPT) :].any(), f"{site} claims positions that were not there yet"
        else:
            assert trace.valid(site).all()


@pytest.mark.parametrize(("family", "dtype", "attn", "name"), params(CASES, alone=[0]))
def test_a_path_does_not_drift_from_itself(family, dtype, attn, name, tiny_model):
    model = tiny_model(family, dtype, attn)
    drift = kd.compare(model, PROMPT, a=PATHS[name], b=PATHS[name], max_new_tokens=2, floor=0, progress=False)
    kinds = [key for key in drift.arrays if key.startswith(("drift/", "local/"))]
    assert kinds
    for key in kinds:
        metric = key.rpartition("/")[2]
        if metric.startswith(("tie_", "margin_")):
            continue
        counted = drift.arrays[key][:, 1:] if key.startswith("local/") else drift.arrays[key]
        assert (counted == (1 if metric in ("identical", "topk_overlap") else 0)).all(), key
    assert drift.first_flip == (None,)
    if drift.has("resid_post", of="local"):
        assert drift.onset("resid_post").source_layer is None


@pytest.mark.parametrize(("family", "dtype", "attn"), params(MODELS, 1))
def test_the_same_call_gives_the_same_bits_and_so_does_its_file(
    family, dtype, attn, tiny_model, hooks, same_bits, tmp_path
):
    model = tiny_model(family, dtype, attn)

    def run():
        return kd.compare(model, PROMPT, max_new_tokens=2, floor=1, progress=False)

    first, second = run(), run()
    loaded = kd.Drift.load(first.save(tmp_path / "drift.safetensors"))
    for other in (second, loaded):
        assert sorted(other.arrays) == sorted(first.arrays)
        for key, array in first.arrays.items():
            assert same_bits(array, other.arrays[key]), key
    assert (loaded.a, loaded.b, loaded.prompts, loaded.architecture) == (
        first.a,
        first.b,
        first.prompts,
        first.architecture,
    )
    assert (loaded.token_texts, loaded.notes) == (first.token_texts, first.notes)
    assert loaded.provenance == json.loads(json.dumps(first.provenance))
    assert not hooks(model.hf)
    trace = kd.record(model, PROMPT, max_new_tokens=2, progress=False)
    again = kd.Trace.load(trace.save(tmp_path / "trace.safetensors"))
    assert again.sites == trace.sites
    for site in trace.sites:
        assert again.axes(site) == trace.axes(site)
        assert same_bits(again.valid(site), trace.valid(site))
        for x, y in zip(layers_of(trace[site]).values(), layers_of(again[site]).values(), strict=True):
            assert same_bits(x, y), site
