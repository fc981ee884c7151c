from itertools import product

import pytest
import torch
from pairwise import params

import kvdrift as kd
from kvdrift.errors import InputError
from kvdrift.models.tiny import tiny
from kvdrift.tracing.seam import Order, seam

DRIFTING = ("llama-mha", "gemma3", "gpt2", "mixtral", "granite")
IDS = [5, 9, 100, 33, 7, 8, 250, 301, 12, 44, 17, 61] * 2 + [99, 98, 97]


def drift(hf, controls):
    on, off = kd.CacheOn(controls=controls), kd.CacheOff(controls=controls)
    return kd.compare(hf, IDS, a=on, b=off, max_new_tokens=8, floor=0, local=False, progress=False)


@pytest.mark.parametrize(
    ("family", "dtype"), params(list(product(DRIFTING, (torch.bfloat16, torch.float16, torch.float32))), 1)
)
def test_what_is_left_of_drift_when_sums_are_wide(family, dtype):
    """Storage rounds as before, so that the drift of the usual arithmetic is the work of accumulated sums."""
    hf = tiny(family, dtype=dtype)
    assert drift(hf, ()).values("logits", "logit_max").max() > 0
    assert drift(hf, (kd.WideSums(),)).values("logits", "logit_max").max() == 0


def test_a_fault_in_the_native_attention_is_still_seen():
    """The model's own attention function runs, on float64 numbers."""

    class DropsAKey:
        order = Order.EXECUTE

        def __call__(self, call, proceed):
            if call.query.shape[2] == 1:
                call.key, call.value = call.key[:, :, 1:], call.value[:, :, 1:]
                call.mask = None if call.mask is None else call.mask[..., 1:]
            return proceed(call)

    hf = tiny("llama")
    with seam(hf, DropsAKey()):
        assert drift(hf, (kd.WideSums(),)).values("logits", "logit_max").max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_and_norms_by_hand(dtype, same_bits):
    hf, kept = tiny("llama", dtype=dtype), []
    modules = [*hf.model.layers[1].mlp.children(), hf.model.norm, hf.lm_head]
    removes = [m.register_forward_hook(lambda m, args, output: kept.append((m, args[0], output))) for m in modules]
    run = kd.CacheOn(controls=(kd.WideSums(),)).start(kd.load(hf, quiet=True), IDS)
    run.step()
    run.close()
    for hook in removes:
        hook.remove()
    assert len(kept) == len(modules)
    for module, x, output in kept:
        if isinstance(module, torch.nn.Linear):
            expected = (x.double() @ module.weight.double().T).to(dtype)
        elif module is hf.model.norm:
            wide = x.float()
            mean = wide.pow(2).double().mean(-1, keepdim=True).float()
            expected = module.weight * (wide * torch.rsqrt(mean + module.variance_epsilon)).to(dtype)
        else:
            expected = module(x)  # an activation function adds nothing up
        assert same_bits(output, expected)


def test_nothing_is_wider_than_float64():
    with pytest.raises(InputError, match="in float64 already"):
        kd.WideSums().bind(kd.load(tiny("llama", dtype=torch.float64), quiet=True))


def test_counts_stay_counts(tiny_model):
    """A sum that is asked for in integers truncates its terms first, and nothing rounds it."""
    model, halves = tiny_model("llama"), torch.tensor([0.6, 0.6, 1.5])
    bound = kd.WideSums().bind(model)
    with bound:
        found = halves.cumsum(0, dtype=torch.int32)
    assert found.tolist() == [0, 0, 1]
    assert found.dtype == torch.int32
