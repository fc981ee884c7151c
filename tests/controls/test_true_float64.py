import pytest
import torch

import kvdrift as kd
from kvdrift.errors import InputError
from kvdrift.models.tiny import tiny

IDS = [5, 9, 100, 33, 7, 8, 250, 301]


def logits(hf, path):
    run = path.start(kd.load(hf, quiet=True), IDS)
    out = [run.step().logits, *(run.step(20 + step).logits for step in range(3))]
    run.close()
    return torch.stack(out)


@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral"])
def test_hard_coded_float32_is_promoted(family):
    hf, exact = tiny(family, dtype=torch.float64, attn="eager"), (kd.TrueFloat64(),)
    plain, on, off = (
        logits(hf, path) for path in (kd.CacheOn(), kd.CacheOn(controls=exact), kd.CacheOff(controls=exact))
    )
    assert on.dtype == torch.float64
    assert (on - plain).abs().max() > 1e-8, "nothing was promoted"
    torch.testing.assert_close(on, off, rtol=0, atol=1e-12)


def test_other_models_are_refused():
    with pytest.raises(InputError, match="float64"):
        kd.TrueFloat64().bind(kd.load(tiny("llama"), quiet=True))
