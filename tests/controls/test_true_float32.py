import pytest
import torch

import kvdrift as kd
from kvdrift.controls import true_float32
from kvdrift.errors import ModelError
from kvdrift.models.tiny import tiny


def flags():
    return [getattr(holder, flag) for _, holder, flag, _ in true_float32.switches()]


def test_flags_are_off_inside_and_as_before_outside():
    model, before = kd.load(tiny("llama"), quiet=True), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        loose = flags()
        with kd.TrueFloat32().bind(model) as bound, bound:
            assert flags() == [exact for *_, exact in true_float32.switches()] != loose
        assert flags() == loose
        assert torch.backends.cuda.matmul.allow_tf32
        with pytest.raises(ZeroDivisionError), kd.TrueFloat32().bind(model):
            _ = 1 / 0
        assert flags() == loose
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_flag_that_does_not_take_is_refused(monkeypatch):
    class Stuck:
        fp32_precision = property(lambda self: "tf32", lambda self, value: None)

    monkeypatch.setattr(true_float32, "switches", lambda: [("cuda.matmul", Stuck(), "fp32_precision", "ieee")])
    with pytest.raises(ModelError, match=r"torch\.backends\.cuda\.matmul\.fp32_precision stays 'tf32', not 'ieee'"):
        kd.TrueFloat32().bind(kd.load(tiny("llama"), quiet=True)).__enter__()


def test_rounding_that_flags_do_not_show_is_refused(monkeypatch):
    before = flags()
    monkeypatch.setattr(true_float32, "rounds_factors", lambda device: True)
    with pytest.raises(ModelError, match="NVIDIA_TF32_OVERRIDE"):
        kd.TrueFloat32().bind(kd.load(tiny("llama"), quiet=True)).__enter__()
    assert flags() == before


@pytest.mark.parametrize("bits", [7, 10])
def test_the_probe_sees_factors_of_bfloat16_and_tf32(monkeypatch, bits):
    """A product whose left factor is rounded to so many bits after the point."""

    def rounded(self, other):
        scale = 2.0**bits
        return torch.matmul((self * scale).round() / scale, other)

    assert not true_float32.rounds_factors(torch.device("cpu"))
    monkeypatch.setattr(torch.Tensor, "__matmul__", rounded)
    assert true_float32.rounds_factors(torch.device("cpu"))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_tf32_on_a_gpu_is_seen_and_turned_off():
    torch.set_float32_matmul_precision("high")
    try:
        assert true_float32.rounds_factors(torch.device("cuda"))
        with kd.TrueFloat32().bind(kd.load(tiny("llama").cuda(), quiet=True)):
            assert not true_float32.rounds_factors(torch.device("cuda"))
    finally:
        torch.set_float32_matmul_precision("highest")
