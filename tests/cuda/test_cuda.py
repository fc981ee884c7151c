"""The same promises on a CUDA device; skipped where there is none."""

import pytest
import torch

import kvdrift as kd
from kvdrift.errors import InputError
from kvdrift.models.tiny import supported_attn, tiny

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

pytestmark = pytest.mark.cuda

PROMPT = [5, 9, 100, 33, 7, 8, 250, 301, 12, 44]
CASES = [
    (family, dtype, attn)
    for family in ("llama", "gemma3", "gpt2", "mixtral")
    for attn in supported_attn(family)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
]
PATHS = {"on": kd.CacheOn(), "off": kd.CacheOff()}


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case)))
def model(request):
    family, dtype, attn = request.param
    return kd.load(tiny(family, dtype=dtype, attn=attn).cuda(), quiet=True)


@pytest.mark.parametrize("name", PATHS)
def test_tracing_changes_no_bit_and_stays_on_the_device(model, name, hooks, same_bits):
    generated = model.hf.generate(
        torch.tensor([PROMPT], device="cuda"),
        max_new_tokens=3,
        do_sample=False,
        use_cache=name == "on",
        output_logits=True,
        return_dict_in_generate=True,
    )
    trace = kd.record(
        model, PROMPT, path=PATHS[name], sites=model.coverage.sites, positions="all", max_new_tokens=3, progress=False
    )
    assert not hooks(model.hf)
    for step, untraced in enumerate(generated.logits):
        assert same_bits(trace["logits"][step].float().cpu(), untraced[0].float().cpu())
    for site in model.coverage.sites:
        assert trace[site].device.type == "cuda"
        assert trace[site].isfinite().all()
        assert list(trace[site].shape) == [len(values) for values in trace.axes(site).values()]


@pytest.mark.parametrize("name", PATHS)
def test_a_path_does_not_drift_from_itself(model, name):
    drift = kd.compare(model, PROMPT, a=PATHS[name], b=PATHS[name], max_new_tokens=3, floor=0, progress=False)
    for site in drift.sites:
        assert (drift.values(site) == 0).all(), site
        assert (drift.values(site, "identical") == 1).all()
    assert drift.onset().source_layer is None


def test_a_comparison_is_finite_and_the_same_twice(model, same_bits, tmp_path):
    def run():
        return kd.compare(model, PROMPT, max_new_tokens=3, floor=1, self_drift=True, progress=False)

    first, second = run(), run()
    assert all(same_bits(array, second.arrays[key]) for key, array in first.arrays.items())
    assert first.values("resid_post").max() < 0.5
    assert first.a.device.startswith("cuda")
    assert (first.values("resid_post", of="floor")[:, :, :, -1] > 0).any()
    loaded = kd.Drift.load(first.save(tmp_path / "drift"))
    assert all(same_bits(array, loaded.arrays[key]) for key, array in first.arrays.items())


def test_offload_and_file(model, same_bits, tmp_path):
    on_device = kd.record(model, PROMPT, max_new_tokens=2, progress=False)
    offloaded = kd.record(model, PROMPT, max_new_tokens=2, offload=True, progress=False)
    loaded = kd.Trace.load(on_device.save(tmp_path / "trace"))
    for site in on_device.sites:
        assert offloaded[site].device.type == "cpu"
        assert same_bits(on_device[site].cpu(), offloaded[site])
        assert same_bits(loaded[site], offloaded[site])


def test_auto_is_float16_on_cuda(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    model = kd.load(tmp_path, quiet=True)
    assert (model.device.type, model.dtype) == ("cuda", torch.float16)
    assert kd.load(tmp_path, device="cpu", quiet=True).dtype == torch.bfloat16
    assert kd.load(tmp_path, dtype="float32", device="cuda:0", quiet=True).dtype == torch.float32


def test_auto_falls_back_to_bfloat16_where_float16_overflows(tmp_path):
    hf = tiny("llama")
    weight = hf.model.layers[2].mlp.down_proj.weight
    weight.mul_(60000 / weight.abs().max())
    hf.save_pretrained(tmp_path)
    assert kd.load(tmp_path, quiet=True).dtype == torch.bfloat16


def test_devices_that_are_not_there_or_not_asked_for():
    with pytest.raises(InputError, match="CUDA devices"):
        kd.load("smollm2-135m", device=f"cuda:{torch.cuda.device_count()}", quiet=True)
    with pytest.raises(InputError, match="does not move your copy"):
        kd.load(tiny("llama"), device="cuda", quiet=True)


def test_two_devices_side_by_side():
    """Path a on the GPU, path b on the CPU, one comparison."""
    gpu, cpu = kd.load(tiny("llama").cuda(), quiet=True), kd.load(tiny("llama"), quiet=True)
    drift = kd.compare(gpu, PROMPT, b=kd.CacheOff(model=cpu), max_new_tokens=3, floor=1, progress=False)
    assert (drift.a.device[:4], drift.b.device) == ("cuda", "cpu")
    assert 0 < drift.values("resid_post").max() < 1e-2
