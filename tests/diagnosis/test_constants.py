"""Differences in float64 that are the rounding of constants held in float32, and those that are not."""

import torch
from torch import nn

import kvdrift as kd
from kvdrift.controls.float64_copy import float64_copy
from kvdrift.diagnosis.cases import default_cases
from kvdrift.diagnosis.constants import is_unstable, nudged_constants
from kvdrift.diagnosis.float64 import float64_witness
from kvdrift.models.tiny import tiny


class Decays(nn.Module):
    """Adds a running decayed sum: by a table for many tokens, by a factor for one, which fit together to 1e-8."""

    def __init__(self, mlp, off):
        super().__init__()
        self.mlp = mlp
        rate = torch.tensor(0.37)
        self.step, self.table = nn.Buffer(torch.exp(-rate)), nn.Buffer(torch.exp(-rate * torch.arange(64)))
        self.off = off

    def forward(self, x):
        n = x.shape[1]
        factor = self.table[3] if n > 1 else self.step**3 * (1 + self.off)
        return self.mlp(x) * factor.to(x.dtype)


def witness(off):
    hf = tiny("llama")
    hf.model.layers[2].mlp = Decays(hf.model.layers[2].mlp, off)
    model = kd.load(hf, quiet=True)
    case = next(case for case in default_cases(model, kd.CacheOn(), 0) if case.steps)
    return float64_witness(float64_copy(model), case, kd.CacheOff())


def test_constants_that_are_rounded_are_no_other_function():
    found = witness(0.0)
    assert 1e-9 < found.error < 1e-6
    assert found.constants
    assert found.agrees


def test_a_fault_of_a_size_not_far_from_it_stays_one():
    found = witness(5e-7)
    assert found.error < 1e-6
    assert not found.constants
    assert not found.agrees


def test_buffers_come_back(same_bits):
    module = nn.Module()
    module.kept = nn.Buffer(torch.rand(5).double())
    module.exact = nn.Buffer(torch.rand(5, dtype=torch.float64))
    module.count = nn.Buffer(torch.arange(3))
    before = [buffer.clone() for buffer in module.buffers()]
    with nudged_constants(module) as moved:
        assert moved
        assert not torch.equal(module.kept, before[0])
        torch.testing.assert_close(module.kept, before[0], rtol=2.0**-24, atol=0)
        assert torch.equal(module.exact, before[1])
    assert all(same_bits(x, y) for x, y in zip(module.buffers(), before, strict=True))
    with nudged_constants(nn.Linear(2, 2).double()) as moved:
        assert not moved


def test_what_counts_as_another_difference():
    fault = torch.randn(8, generator=torch.Generator().manual_seed(0))
    assert not is_unstable(fault, fault * 1.01)
    assert is_unstable(fault, -fault)
