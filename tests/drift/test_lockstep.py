"""Two paths in lockstep: a third path with a planted fault, local drift, schedules, and tidiness."""

import gc
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

import kvdrift as kd
from kvdrift.models.tiny import tiny
from kvdrift.paths.cache_on import CacheOn, CacheOnRun
from kvdrift.tracing.seam import Order, seam

PROMPT = [5, 9, 100, 33, 7, 8, 250, 301, 12, 44]


def compare(*arguments, **options):
    return kd.compare(*arguments, **{"progress": False, "max_new_tokens": 4, "floor": 0, **options})


@dataclass(frozen=True)
class ZeroedKey(CacheOn):
    """Cache-ON with a fault: after the prefill one old key of one KV head of one layer is zero in the cache."""

    layer: int = field(default=2, kw_only=True)
    head: int = field(default=1, kw_only=True)
    position: int = field(default=6, kw_only=True)
    label: str = field(default="zeroed key", kw_only=True)

    def start(self, model, ids, controls=None):
        run = super().start(model, ids, controls)
        run.__class__ = _ZeroedKeyRun
        return run


class _ZeroedKeyRun(CacheOnRun):
    def step(self, token=None):
        first = token is None
        step = super().step(token)
        if first:
            layer = self.cache.layers[self.path.layer]
            layer.keys = layer.keys.clone()
            oldest = len(self._prompt) - layer.keys.shape[2]  # a window has let go of what lies before
            layer.keys[:, self.path.head, self.path.position - oldest] = 0
        return step


class DroppedKey:
    """Not a dataclass: cache-ON whose kernel at decode does not read the oldest key of one layer."""

    label, model, attn, controls = "dropped key", None, None, ()

    def __init__(self, layer):
        self.layer = layer

    def start(self, model, ids, controls=None):
        return _DroppedKeyRun(self, model, list(ids), model.backend.new_cache(), controls or ())


class _DroppedKeyRun(CacheOnRun):
    def __init__(self, path, *rest):
        self._dropped = path.layer
        super().__init__(CacheOn(), *rest)

    order = Order.EXECUTE

    def __call__(self, call, proceed):
        if call.module.layer_idx == self._dropped and call.query.shape[2] == 1:
            call.key, call.value = call.key[:, :, 1:], call.value[:, :, 1:]
            assert call.mask is None
        return proceed(call)

    def step(self, token=None):
        with seam(self.model.hf, self):
            return super().step(token)

    def fork(self, controls=None):
        other = super().fork(controls)
        other.__class__, other._dropped = _DroppedKeyRun, self._dropped
        return other


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_zeroed_key_shows_at_its_layer_head_and_position(family, layer, tiny_model):
    model = tiny_model(family)
    drift = compare(model, PROMPT, a=ZeroedKey(layer=layer), b=kd.CacheOn(), kv_every=1)
    positions = drift.arrays["positions/k/rel_l2"][0]  # [kept, layer, head, position]
    assert np.argwhere(np.nan_to_num(positions[1, : layer + 1])).tolist() == [[layer, 1, 6]]
    assert positions[1, layer, 1, 6] == 1
    assert not np.nan_to_num(positions[0]).any(), "step 0 is before the fault"
    assert (np.nan_to_num(positions[1, layer + 1 :, :, : len(PROMPT)]) == 0).all(), "the past of later layers is whole"
    per_head = drift.values("k")[0]
    assert np.argwhere(per_head[1, : layer + 1]).tolist() == [[layer, 1]]
    resid = drift.values("resid_post")[0]
    assert (resid[1:, :layer] == 0).all()
    assert (resid[1:, layer:] > 1e-6).all()
    assert (drift.values("logits", "kl")[0, 1:] > 0).all()


def test_local_drift_forgives_a_fault_in_the_cache(tiny_model):
    """The fault sits in the past keys, which local drift takes from path b: no layer does wrong by itself."""
    drift = compare(tiny_model("llama"), PROMPT, a=ZeroedKey(), b=kd.CacheOn())
    assert (drift.values("resid_post", of="local")[0, 1:] == 0).all()
    assert drift.onset().source_layer is None


@pytest.mark.parametrize("layer", [0, 1, 3])
def test_a_kernel_that_drops_a_key_is_found_by_onset(layer, tiny_model):
    model = tiny_model("llama")
    drift = compare(model, PROMPT, a=DroppedKey(layer), b=kd.CacheOn())
    local = drift.values("attn_out", of="local")[0, 1:]
    assert (local[:, layer] > 1e-4).all()
    assert (np.delete(local, layer, axis=1) == 0).all()
    assert (drift.values("mlp_out", of="local")[0, 1:] == 0).sum() >= 9
    onset = drift.onset()
    assert onset.source_layer == layer
    assert onset.source_module == "attn"
    assert drift.a.label == "dropped key"
    assert len(kd.record(model, PROMPT, path=DroppedKey(layer), max_new_tokens=3, progress=False).fed) == 3


def test_local_drift_by_hand(tiny_model):
    """Cache-ON's layers called alone on cache-OFF's inputs, against cache-OFF's outputs, in numpy."""
    from transformers import DynamicCache

    model, tokens = tiny_model("llama"), [3, 1, 4, 1]
    drift = compare(model, PROMPT, tokens=tokens)
    off = kd.record(
        model, PROMPT, path=kd.CacheOff(), sites=["resid_pre", "resid_post", "k", "v"], positions="all", tokens=tokens,
        progress=False,
    )  # fmt: skip
    for step in range(1, 4):
        past = len(PROMPT) + step - 1
        rotary = model.hf.model.rotary_emb(torch.zeros(1), torch.tensor([[past]]))
        for layer, block in enumerate(model.hf.model.layers):
            cache = DynamicCache(config=model.hf.config)
            cache.update(off["k"][step, layer, None, :, :past], off["v"][step, layer, None, :, :past], layer)
            own = block(
                off["resid_pre"][step, layer, past][None, None],
                attention_mask=None,
                position_ids=torch.tensor([[past]]),
                cache=cache,
                use_cache=True,
                position_embeddings=rotary,
            )
            x = (own[0] if isinstance(own, tuple) else own).double().flatten().numpy()
            y = off["resid_post"][step, layer, past].double().numpy()
            expected = np.linalg.norm(x - y) / np.linalg.norm(y)
            np.testing.assert_allclose(drift.values("resid_post", of="local")[0, step, layer], expected, rtol=1e-12)
    assert np.isnan(drift.values("resid_post", of="local")[0, 0]).all()


@pytest.mark.parametrize("path", [kd.CacheOn(), kd.CacheOff(), kd.CacheOn(prefill_chunk=3)], ids=["on", "off", "chunk"])
def test_the_floor_is_the_drift_against_the_re_rolled_path(path, tiny_model):
    from dataclasses import replace

    model = tiny_model("gemma3", torch.bfloat16, intermediate_size=1024)
    tokens = [3, 1, 4, 1]
    drift = compare(model, PROMPT, a=path, floor=2, seed=5, tokens=tokens, local=False)
    for place, seed in enumerate((5, 6)):
        rerolled = compare(
            model, PROMPT, a=replace(path, controls=(kd.ReRoll(seed),)), b=path, tokens=tokens, local=False
        )
        for site in ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post"):
            np.testing.assert_array_equal(drift.values(site, of="floor")[place], rerolled.values(site))
        for metric in ("kl", "flip", "logit_l2"):
            np.testing.assert_array_equal(
                drift.values("logits", metric, "floor")[place], rerolled.values("logits", metric)
            )
    assert (drift.values("resid_post", of="floor") > 0).any()


def test_the_local_floor_is_local_drift_between_a_and_its_re_roll(tiny_model):
    """Path b's inputs are path a's here, so the local floor and the local drift of the re-roll agree."""
    model, tokens = tiny_model("llama"), [3, 1, 4, 1]
    floor = compare(model, PROMPT, a=kd.CacheOn(), b=kd.CacheOn(), floor=1, tokens=tokens)
    rerolled = compare(model, PROMPT, a=kd.CacheOn(controls=(kd.ReRoll(0),)), b=kd.CacheOn(), tokens=tokens)
    for site in ("attn_out", "mlp_out", "resid_post"):
        np.testing.assert_array_equal(
            floor.values(site, of="local_floor")[0, :, 1:], rerolled.values(site, of="local")[:, 1:]
        )


@pytest.mark.parametrize("every", [2, 3, 5])
def test_measuring_fewer_steps_gives_the_same_numbers_there(every, tiny_model):
    model = tiny_model("mistral")
    whole = compare(model, PROMPT, max_new_tokens=7, floor=1, kv_every=1)
    some = compare(model, PROMPT, max_new_tokens=7, floor=1, every=every, kv_every=every)
    chosen = np.arange(0, 7, every)
    assert some.steps.tolist() == chosen.tolist()
    assert some.arrays["positions/steps"].tolist() == chosen.tolist()
    np.testing.assert_array_equal(some.arrays["fed"], whole.arrays["fed"])
    for name in some.arrays:
        if name.startswith(("drift/", "local/", "top1")):
            np.testing.assert_array_equal(some.arrays[name], whole.arrays[name][:, chosen], err_msg=name)
        if name.startswith(("floor/", "local_floor/")):
            np.testing.assert_array_equal(some.arrays[name], whole.arrays[name][:, :, chosen], err_msg=name)
        if name.startswith("positions/k"):
            n = some.arrays[name].shape[-1]
            np.testing.assert_array_equal(some.arrays[name], whole.arrays[name][:, chosen][..., :n], err_msg=name)


def test_kv_every_keeps_few_positions_and_all_aggregates(tiny_model):
    model = tiny_model("llama")
    drift = compare(model, PROMPT, max_new_tokens=7, kv_every=3)
    assert drift.arrays["positions/steps"].tolist() == [0, 3, 6]
    assert drift.values("k").shape == (1, 7, 4, 2)
    assert drift.arrays["positions/k/rel_l2"].shape == (1, 3, 4, 2, len(PROMPT) + 6)
    bounded = compare(model, PROMPT, max_new_tokens=40, local=False, sites=["k"])
    assert len(bounded.arrays["positions/steps"]) <= 9


def test_self_drift_of_a_cache_is_zero_and_of_a_recomputation_is_what_it_recomputes(tiny_model):
    model, tokens = tiny_model("mistral"), [3, 1, 4, 1]
    drift = compare(model, PROMPT, tokens=tokens, self_drift=True)
    for site in ("k", "v"):
        own = drift.arrays[f"self_a/{site}/rel_l2"]
        assert np.isnan(own[:, 0]).all()
        assert (own[:, 1:] == 0).all(), "a cache does not move"
        off = kd.record(model, PROMPT, path=kd.CacheOff(), sites=site, positions="all", tokens=tokens, progress=False)[
            site
        ]
        for step in range(1, 4):
            n = len(PROMPT) + step - 1
            seen = slice(n + 1 - 8, n)  # of the window of 8, what the step before had read too
            x, y = (off[s, :, :, seen].double().flatten(2).numpy() for s in (step, step - 1))
            expected = np.linalg.norm(x - y, axis=-1) / np.linalg.norm(y, axis=-1)
            np.testing.assert_allclose(drift.arrays[f"self_b/{site}/rel_l2"][0, step], expected, rtol=1e-12)
    assert (drift.arrays["self_b/k/rel_l2"][:, 1:] > 0).any()


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_self_drift_of_a_cache_that_writes_in_place(family, tiny_model):
    from transformers import StaticCache

    model = tiny_model(family)
    static = kd.CacheOn(cache=lambda: StaticCache(config=model.hf.config, max_cache_len=32))
    drift = compare(model, PROMPT, a=static, self_drift=True, floor=1)
    assert (drift.arrays["self_a/k/rel_l2"][:, 1:] == 0).all()
    assert np.nanmax(drift.values("k")) < 1e-4
    assert np.nanmax(drift.values("resid_post", of="local")) < 1e-4


def test_an_exception_in_the_middle_leaves_nothing(hooks):
    hf = tiny("llama")
    hf.train()
    calls = []

    def fail(*_):
        calls.append(1)
        if len(calls) > 4:
            raise RuntimeError("in the middle")

    model = kd.load(hf, quiet=True)
    _ = model.coverage
    handle = hf.model.layers[2].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        compare(model, PROMPT, floor=2, self_drift=True, a=kd.CacheOn(attn="eager"))
    handle.remove()
    assert not hooks(hf)
    assert model.attn == "sdpa"
    assert all(module.training for module in hf.modules())
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []


def test_two_models_and_two_dtypes_side_by_side(tiny_model):
    one, two = tiny_model("llama"), tiny_model("llama", torch.bfloat16)
    drift = compare(one, PROMPT, b=kd.CacheOff(model=two), tokens=[3, 1, 4])
    assert (drift.a.dtype, drift.b.dtype) == ("float32", "bfloat16")
    assert any("local drift was not measured" in note for note in drift.notes)
    assert "drift/resid_post/max_ulp" not in drift.arrays
    x = kd.record(one, PROMPT, tokens=[3, 1, 4], progress=False)["resid_post"].double()
    y = kd.record(two, PROMPT, path=kd.CacheOff(), tokens=[3, 1, 4], progress=False)["resid_post"].double()
    expected = ((x - y).norm(dim=-1) / y.norm(dim=-1)).numpy()
    np.testing.assert_allclose(drift.values("resid_post")[0], expected, rtol=1e-12)


def test_a_copy_of_the_model_is_the_same_model(tiny_model):
    twin = kd.load(tiny("llama"), quiet=True)
    drift = compare(tiny_model("llama"), PROMPT, a=kd.CacheOn(model=twin), b=kd.CacheOn(), floor=1)
    assert all((drift.values(site) == 0).all() for site in drift.sites)
    assert (drift.values("resid_post", of="local")[:, 1:] == 0).all()


def test_no_tensor_outlives_its_step(tiny_model):
    """Without the garbage collector: nothing that a step read may hang in a reference cycle."""
    model = tiny_model("llama")
    assert model.coverage.sites

    def alive():
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    compare(model, PROMPT, floor=1, local=True, self_drift=True)
    gc.collect()
    gc.disable()
    try:
        before = alive()
        compare(model, PROMPT, floor=1, local=True, self_drift=True)
        assert alive() <= before
    finally:
        gc.enable()
