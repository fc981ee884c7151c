from contextlib import nullcontext

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import kvdrift as kd
from kvdrift.controls.attention_backend import SdpaBackend, WatchSdpa
from kvdrift.errors import InputError, ModelError
from kvdrift.models.tiny import tiny

IDS = [5, 9, 100, 33, 7, 8, 250, 301, 12, 44]


def logits(hf, path, n=3):
    run = path.start(kd.load(hf, quiet=True), IDS)
    out = [run.step().logits, *(run.step(20 + step).logits for step in range(n))]
    run.close()
    return torch.stack(out)


@pytest.mark.parametrize("path", [kd.CacheOn, kd.CacheOff])
def test_the_named_kernel_runs(path, same_bits):
    hf = tiny("llama")
    found = {name: logits(hf, path(controls=(SdpaBackend(name),))) for name in ("math", "flash")}
    for name, kernel in (("math", SDPBackend.MATH), ("flash", SDPBackend.FLASH_ATTENTION)):
        with sdpa_kernel(kernel):
            assert same_bits(found[name], logits(hf, path()))
    assert not torch.equal(found["math"], found["flash"])
    assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.math_sdp_enabled()


@pytest.mark.parametrize("name", ["efficient", "cudnn"])
def test_a_kernel_that_cannot_run_is_refused_and_never_replaced(name):
    if torch.cuda.is_available():
        pytest.skip("this machine may have it")
    with pytest.raises(ModelError, match=f"The {name} kernel .* cannot run here: No viable backend"):
        logits(tiny("llama"), kd.CacheOn(controls=(SdpaBackend(name),)))
    assert torch.backends.cuda.math_sdp_enabled()


def test_another_attention_is_refused():
    with pytest.raises(ModelError, match="no scaled_dot_product_attention at all ran instead of the math kernel"):
        logits(tiny("llama", attn="eager"), kd.CacheOn(controls=(SdpaBackend("math"),)))


def test_a_kernel_that_ran_in_its_place_is_noticed(monkeypatch):
    monkeypatch.setattr("kvdrift.controls.attention_backend.sdpa_kernel", lambda _: nullcontext())
    with pytest.raises(ModelError, match="flash ran instead of the math kernel"):
        logits(tiny("llama"), kd.CacheOn(controls=(SdpaBackend("math"),)))


def test_unknown_kernels_are_refused():
    with pytest.raises(InputError, match="choose one of math, flash, efficient, cudnn"):
        SdpaBackend("fast")


def test_watching_changes_nothing(same_bits):
    hf, watch = tiny("llama", dtype=torch.bfloat16), WatchSdpa()
    assert same_bits(logits(hf, kd.CacheOn(controls=(watch,))), logits(hf, kd.CacheOn()))
    assert watch.ran == {"flash": 4 * 4}
    with sdpa_kernel(SDPBackend.MATH):
        logits(hf, kd.CacheOn(controls=(watch,)), n=0)
    assert watch.ran == {"flash": 4 * 4, "math": 4}
