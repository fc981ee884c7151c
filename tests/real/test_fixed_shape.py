"""Shape-invariant arithmetic on real weights: cache-ON and cache-OFF agree in every bit, beyond the window too."""

import pytest
import torch

import kvdrift as kd
from kvdrift.controls import cast_copy

pytestmark = pytest.mark.real


def largest(model, ids, fed):
    """The largest difference of logits between the paths under fixed shape."""
    fixed = (kd.FixedShape(len(ids) + len(fed)),)
    on = kd.CacheOn(controls=fixed).start(model, ids)
    steps = [on.step().logits, *(on.step(token).logits for token in fed)]
    found = []
    for n, logits in enumerate(steps):
        off = kd.CacheOff(controls=fixed).start(model, [*ids, *fed[:n]]).step().logits
        assert torch.equal(logits, off)
        found.append(float((logits - off).abs().max()))
    return max(found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_short_prompts(name, dtype):
    model = kd.load(name, dtype="bfloat16", quiet=True)
    model = kd.load(cast_copy(model.hf, dtype), quiet=True)
    ids = torch.randint(40000, (21,), generator=torch.Generator().manual_seed(0)).tolist()
    assert largest(model, ids, [1000, 2000, 3000]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_beyond_gemmas_window(dtype):
    model = kd.load(cast_copy(kd.load("gemma3-270m", dtype="bfloat16", quiet=True).hf, dtype), quiet=True)
    ids = torch.randint(40000, (511,), generator=torch.Generator().manual_seed(0)).tolist()
    assert largest(model, ids, [1000, 2000, 3000]) == 0
