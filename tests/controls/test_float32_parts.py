"""LayerCast, and float32 in one part of a 16-bit model: each against arithmetic written out by hand."""

from itertools import product

import pytest
import torch
from pairwise import params

import kvdrift as kd
from kvdrift.controls import cast_copy
from kvdrift.controls.derived_weights import DerivedWeights
from kvdrift.errors import InputError, ModelError
from kvdrift.models.tiny import tiny
from kvdrift.tracing.seam import Order, seam
from kvdrift.tracing.tap import Tap

IDS = [5, 9, 100, 33, 7, 8, 250, 301, 12, 44]
FAMILIES = ("llama", "gemma3", "gpt2", "mixtral", "deepseek-v3", "gpt-oss", "lfm2")
HALVES = (torch.bfloat16, torch.float16)


def logits(hf, path, n=3):
    run = path.start(kd.load(hf, quiet=True), IDS)
    out = [run.step().logits, *(run.step(20 + step).logits for step in range(n))]
    run.close()
    return torch.stack(out)


@pytest.mark.parametrize(
    ("family", "dtype", "path"), params(list(product(FAMILIES, HALVES, (kd.CacheOn, kd.CacheOff))), 1)
)
def test_layercast_is_float32_arithmetic_on_the_same_weights(family, dtype, path, same_bits):
    hf = tiny(family, dtype=dtype)
    expected = logits(cast_copy(hf, torch.float32), path())
    assert same_bits(logits(hf, path(controls=(kd.LayerCast(),))), expected)
    assert not torch.equal(logits(hf, path()).float(), expected)


def test_layercast_leaves_the_weights_as_they_were(hooks):
    hf = tiny("gemma3", dtype=torch.bfloat16)
    before = {name: (weight, weight.clone()) for name, weight in hf.named_parameters()}
    logits(hf, kd.CacheOn(controls=(kd.LayerCast(),)))

    def fail(*_):
        raise ZeroDivisionError

    hook = hf.model.layers[2].mlp.register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        logits(hf, kd.CacheOn(controls=(kd.LayerCast(),)))
    hook.remove()
    assert not hooks(hf)
    assert dict(hf.named_parameters()).keys() == before.keys()
    for name, weight in hf.named_parameters():
        assert weight is before[name][0]
        assert torch.equal(weight, before[name][1])


def test_layercast_keeps_keys_and_values_in_float32_and_one_block_wide():
    hf, wide = tiny("llama", dtype=torch.bfloat16), []

    def count(*_):
        wide.append(
            [layer for layer, block in enumerate(hf.model.layers) if block.mlp.up_proj.weight.dtype.itemsize == 4]
        )

    removes = [block.mlp.register_forward_pre_hook(count) for block in hf.model.layers]
    run = kd.CacheOn(controls=(kd.LayerCast(),)).start(kd.load(hf, quiet=True), IDS)
    run.step()
    for hook in removes:
        hook.remove()
    assert wide == [[0], [1], [2], [3]], "one block's weights at a time"
    assert run.cache.layers[0].keys.dtype == torch.float32


def test_layercast_needs_16_bit_weights():
    with pytest.raises(InputError, match="load it in bfloat16 or float16"):
        kd.LayerCast().bind(kd.load(tiny("llama"), quiet=True))


class Kept:
    """Remembers calls before they are executed, and what came out."""

    order = Order.WRITE

    def __init__(self):
        self.calls = []

    def __call__(self, call, proceed):
        given = (call.module, call.query, call.key, call.value, call.mask, dict(call.kwargs), call.native)
        output = proceed(call)
        self.calls.append((given, output[0]))
        return output


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("family", ["llama", "gpt-oss"])
def test_attention_alone(family, dtype, attn, same_bits):
    if family == "gpt-oss" and attn == "sdpa":
        pytest.skip("sinks need eager attention")
    hf, kept = tiny(family, dtype=dtype, attn=attn), Kept()
    path = kd.CacheOn(controls=(kd.AttentionFloat32(),))
    with seam(hf, kept):
        controlled = logits(hf, path)
    assert len(kept.calls) == 4 * 4
    native_differs = False
    for (module, query, key, value, mask, kwargs, native), output in kept.calls:
        assert query.dtype == key.dtype == dtype, "what is stored stays in 16 bits"
        wide = {name: x.float() if isinstance(x, torch.Tensor) else x for name, x in kwargs.items()}
        mask32 = mask.float() if mask is not None and mask.is_floating_point() else mask
        expected = native(module, query.float(), key.float(), value.float(), mask32, **wide)[0].to(dtype)
        assert same_bits(output, expected)
        native_differs |= not torch.equal(output, native(module, query, key, value, mask, **kwargs)[0])
    assert native_differs, "the control changed nothing"
    assert controlled.dtype == dtype


@pytest.mark.parametrize("family", ["falcon", "mamba"])
def test_attention_that_is_not_seen_is_refused(family):
    with pytest.raises(ModelError, match="No attention call in half precision"):
        logits(tiny(family, dtype=torch.bfloat16), kd.CacheOn(controls=(kd.AttentionFloat32(),)))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_products_alone(family, dtype, same_bits):
    hf, kept = tiny(family, dtype=dtype), []
    kinds = ("Linear", "Conv1D")
    removes = [
        module.register_forward_hook(lambda module, args, output: kept.append((module, args[0], output)))
        for module in hf.modules()
        if type(module).__name__ in kinds
    ]
    controlled = logits(hf, kd.CacheOn(controls=(kd.MatmulFloat32(),)))
    for hook in removes:
        hook.remove()
    assert len(kept) > 20
    assert controlled.dtype == dtype
    differs = False
    for module, x, output in kept:
        weight = module.weight.float() if type(module).__name__ == "Conv1D" else module.weight.float().T
        rows, bias = x.reshape(-1, x.shape[-1]).float(), getattr(module, "bias", None)
        expected = rows @ weight if bias is None else torch.addmm(bias.float(), rows, weight)
        assert same_bits(output.reshape(-1, output.shape[-1]), expected.to(dtype))
        differs |= not torch.equal(output, module(x))
    assert differs or dtype == torch.bfloat16, "the control changed nothing"


def test_float32_weights_are_kept_until_the_run_is_closed(monkeypatch):
    made = []
    monkeypatch.setattr(
        DerivedWeights, "refresh", lambda self, real=DerivedWeights.refresh: (made.append(self), real(self))
    )
    run = kd.CacheOn(controls=(kd.MatmulFloat32(),)).start(
        kd.load(tiny("llama", dtype=torch.bfloat16), quiet=True), IDS
    )
    run.step()
    assert made[0].n_bytes > 0
    run.close()
    assert made[0].n_bytes == 0


def test_products_that_are_float32_already_are_refused():
    with pytest.raises(ModelError, match="float32 already"):
        logits(tiny("llama"), kd.CacheOn(controls=(kd.MatmulFloat32(),)))


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite"])
def test_head_alone(family, same_bits):
    hf = tiny(family, dtype=torch.bfloat16)
    model = kd.load(hf, quiet=True)
    states = {}
    for controls in ((), (kd.HeadFloat32(),)):
        run = kd.CacheOn(controls=controls).start(model, IDS)
        with Tap(model, {"final_norm": None}) as tap:
            out = run.step().logits
        states[controls] = (tap.values["final_norm"][0], out)
        run.close()
    (plain, native), (state, wide) = states.values()
    assert same_bits(plain, state), "the blocks are left alone"
    expected = (state.float() @ hf.lm_head.weight.float().T)[0]
    if family == "gemma2":
        cap = hf.config.final_logit_softcapping
        expected = torch.tanh(expected / cap) * cap
    if family == "granite":
        expected = expected / hf.config.logits_scaling
    assert wide.dtype == torch.float32
    assert not torch.equal(wide, native.float())
    torch.testing.assert_close(wide, expected, rtol=1e-5, atol=1e-5)
    assert hf.lm_head.weight.dtype == torch.bfloat16


def test_a_head_in_float32_already_is_refused():
    with pytest.raises(ModelError, match="no LM head in half precision"):
        kd.HeadFloat32().bind(kd.load(tiny("llama"), quiet=True))
