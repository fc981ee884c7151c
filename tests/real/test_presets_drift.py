"""The promises of the project on real pretrained weights, in short runs."""

import pytest
import torch

import kvdrift as kd
from kvdrift.errors import NonFiniteError

TEXT = "A train leaves the station at nine and travels eighty kilometres an hour. How far"
STEPS = 6
CASES = [
    ("smollm2-135m", "bfloat16"),
    ("smollm2-135m", "float32"),
    pytest.param(("smollm2-135m", "float16"), marks=pytest.mark.slow),
    ("gemma3-270m", "bfloat16"),
    ("gemma3-270m", "float32"),
]
PATHS = {"on": kd.CacheOn(), "off": kd.CacheOff()}

pytestmark = pytest.mark.real


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case))
def model(request):
    name, dtype = request.param
    return kd.load(name, dtype=dtype, quiet=True)


@pytest.mark.parametrize("name", PATHS)
def test_tracing_changes_no_bit_and_every_tap_fires(model, name, hooks, same_bits):
    ids = model.encode(TEXT)
    generated = model.hf.generate(
        torch.tensor([ids]),
        max_new_tokens=STEPS,
        do_sample=False,
        use_cache=name == "on",
        output_logits=True,
        return_dict_in_generate=True,
    )
    sites = model.coverage.sites
    assert set(sites) >= {"resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post", "q", "k", "v", "z", "logits"}
    trace = kd.record(model, TEXT, path=PATHS[name], sites=sites, max_new_tokens=STEPS, progress=False)
    assert not hooks(model.hf)
    assert list(trace.fed) == generated.sequences[0, len(ids) :].tolist()
    for step in range(len(trace.fed)):
        assert same_bits(trace["logits"][step].float(), generated.logits[step][0].float()), step
    for site in sites:
        assert list(trace[site].shape) == [len(values) for values in trace.axes(site).values()]
        assert trace.valid(site).all()
        assert trace[site].isfinite().all()
        assert trace[site].flatten(1).any(1).all()
    assert same_bits(trace["resid_mid"], trace["resid_pre"] + trace["attn_out"])
    assert same_bits(trace["resid_post"], trace["resid_mid"] + trace["mlp_out"])
    assert same_bits(trace["resid_pre"][:, 1:], trace["resid_post"][:, :-1])


@pytest.mark.parametrize("name", PATHS)
def test_a_path_does_not_drift_from_itself(model, name):
    drift = kd.compare(model, TEXT, a=PATHS[name], b=PATHS[name], max_new_tokens=2, floor=0, progress=False)
    for site in drift.sites:
        assert (drift.values(site) == 0).all()
        assert (drift.values(site, "identical") == 1).all()
    assert (drift.values("logits", "kl") == 0).all()
    assert drift.onset().source_layer is None
    assert drift.first_flip == (None,)


def test_twice_the_same_and_saved(model, hooks, same_bits, tmp_path):
    def run():
        return kd.compare(model, TEXT, max_new_tokens=2, floor=1, progress=False)

    first, second = run(), run()
    loaded = kd.Drift.load(first.save(tmp_path / "drift"))
    assert set(first.arrays) == set(second.arrays) == set(loaded.arrays)
    for key, array in first.arrays.items():
        assert same_bits(array, second.arrays[key]), key
        assert same_bits(array, loaded.arrays[key]), key
    assert not hooks(model.hf)
    limit = 1e-3 if model.dtype == torch.float32 else 0.5
    assert (first.values("resid_post")[0, 0] == 0).all(), "both paths do the same work at step 0"
    assert first.values("resid_post").max() < limit
    assert (first.values("resid_post", of="floor")[:, :, 1:, -1] > 0).all()
    trace = kd.record(model, TEXT, max_new_tokens=2, progress=False)
    again = kd.Trace.load(trace.save(tmp_path / "trace"))
    assert all(same_bits(trace[site], again[site]) for site in trace.sites)
    assert again.prompt == trace.prompt


def test_gemma_in_float16_is_one_clear_sentence(hooks):
    model = kd.load("gemma3-270m", dtype="float16", quiet=True)
    for verb in (kd.record, kd.compare):
        with pytest.raises(NonFiniteError, match=r"layer \d+.*largest finite value.*\d.*bfloat16") as caught:
            verb(model, TEXT, max_new_tokens=2, progress=False)
        assert "\n" not in str(caught.value)
    assert not hooks(model.hf)


def test_a_long_prompt_past_gemmas_window(same_bits):
    """Windows of 512: what both paths read there are the last 512 positions, and drift stays rounding."""
    model = kd.load("gemma3-270m", dtype="float32", quiet=True)
    ids = (model.encode(TEXT) * 40)[:530]
    drift = kd.compare(model, ids, max_new_tokens=2, floor=0, local=False, kv_every=1, progress=False)
    visible = drift.arrays["positions/visible_a"][0, 1]
    for info in model.architecture.layers:
        expected = 531 if info.window is None else 512
        assert visible[info.index].sum() == expected
        assert visible[info.index][-expected:].all()
    assert drift.values("resid_post").max() < 1e-3
