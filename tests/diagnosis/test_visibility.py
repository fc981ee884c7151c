"""The probe names the keys that native attention reads: right on clean models, and it finds every planted fault."""

from dataclasses import replace

import pytest
import torch
from pairwise import params
from transformers import StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import eager_attention_forward

import kvdrift as kd
from kvdrift.diagnosis.visibility import Misread, expected, is_causal, misread, readable, seen
from kvdrift.models.architecture import LayerInfo
from kvdrift.models.tiny import FAMILIES, supported_attn
from kvdrift.tracing.seam import AttentionCall, Order, seam

PROMPT = [5, 9, 100, 33, 7, 8, 250, 301, 12, 44, 77, 21, 200, 5, 6, 7, 9, 3]  # beyond the windows of 8
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
IN_THE_TABLE = [family for family in FAMILIES if family not in ("falcon", "bloom", "mamba")]
PATHS = {
    "cache-ON": kd.CacheOn(),
    "cache-OFF": kd.CacheOff(),
    "in chunks": kd.CacheOn(prefill_chunk=5),
    "left-padded": kd.CacheOn(left_padding=3),
}
CLEAN = [(f, d, attn, name) for f in IN_THE_TABLE for d in DTYPES for attn in supported_attn(f) for name in PATHS]
FULL = LayerInfo(0, "full", None, 2, 8)


class Recorder:
    """The attention calls of a run with their layers and the positions of their queries and keys."""

    order = Order.OBSERVE

    def __init__(self, model, padding=0):
        self.model, self.padding = model, padding
        self.consumed, self.calls = {}, []

    def __call__(self, call, proceed):
        layer = self.model.layer_of[id(call.module)]
        n_queries, n_keys = call.query.shape[2], call.key.shape[2]
        end = self.consumed.get(layer, -self.padding) + n_queries
        self.consumed[layer] = end
        first = max(end - n_keys, -self.padding)  # the slots of a static cache begin at 0 and go on after the query
        self.calls.append((layer, replace(call), range(end - n_queries, end), range(first, first + n_keys)))
        return proceed(call)


def recorded(model, path, n_steps=3):
    recorder = Recorder(model, getattr(path, "left_padding", 0))
    run = path.start(model, PROMPT)
    with seam(model.hf, recorder):
        for step in range(n_steps):
            if isinstance(path, kd.CacheOff):
                recorder.consumed.clear()
            run.step(None if step == 0 else 100 + step)
    run.close()
    return recorder.calls


def misreads(model, calls, native=None):
    found = []
    for layer, call, queries, keys in calls:
        call = call if native is None else replace(call, native=native(call.native))
        found.append(misread(call, model.architecture.layers[layer], queries, keys))
    return [one for one in found if one is not None]


def call(n_queries, n_keys, native=sdpa_attention_forward, mask=None, dtype=torch.float32, **kwargs):
    """A call of 4 heads on 2 KV heads."""
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    query = torch.randn(1, n_queries, 4, 8).to(dtype).transpose(1, 2)
    key, value = torch.randn(2, 1, 2, n_keys, 8).to(dtype)
    return AttentionCall(module, query, key, value, mask, {"scaling": 0.3, **kwargs}, native)


@pytest.mark.parametrize(("family", "dtype", "attn", "name"), params(CLEAN))
def test_clean_models_read_what_positions_and_window_imply(family, dtype, attn, name, tiny_model):
    model = tiny_model(family, dtype, attn)
    calls = recorded(model, PATHS[name], 2)
    assert len(calls) >= 2 * len({layer for layer, *_ in calls})
    for layer, each, *_ in calls:
        assert readable(model.architecture.layers[layer], each) is None
    assert not misreads(model, calls)


def test_slots_of_a_static_cache_that_are_not_filled_are_hidden(tiny_model):
    model = tiny_model("llama")
    path = kd.CacheOn(cache=lambda: StaticCache(config=model.hf.config, max_cache_len=32))
    calls = recorded(model, path)
    assert {each.key.shape[2] for _, each, *_ in calls} == {32}
    assert not misreads(model, calls)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("dropped", [0, 7, -1])
def test_a_key_dropped_at_decode_is_named(attn, dropped, tiny_model):
    def forgetful(native):
        def attention(module, query, key, value, mask, **kwargs):
            if query.shape[2] > 1:
                return native(module, query, key, value, mask, **kwargs)
            kept = [slot for slot in range(key.shape[2]) if slot != dropped % key.shape[2]]
            mask = None if mask is None else mask[..., kept]
            return native(module, query, key[:, :, kept], value[:, :, kept], mask, **kwargs)

        return attention

    model = tiny_model("gemma3", torch.bfloat16, attn)
    found = misreads(model, recorded(model, PATHS["cache-ON"]), forgetful)
    assert len(found) == 2 * 4  # every layer of two decode steps
    for one in found:
        start = one.position + 1 - one.n_keys
        assert one == Misread(one.layer, one.position, (start + dropped % one.n_keys,), (), 1, one.n_keys)
    assert misreads(model, recorded(model, PATHS["cache-OFF"]), forgetful) == []


def test_a_fault_at_lengths_that_are_multiples_of_16_is_found_there_and_not_elsewhere():
    def careless(module, query, key, value, mask, **kwargs):
        if key.shape[2] % 16 == 0:
            key, value = key[:, :, :-1], value[:, :, :-1]
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    for n_keys in (15, 16, 17, 31, 32, 33):
        found = misread(call(1, n_keys, careless), FULL, [n_keys - 1], range(n_keys))
        assert (found is not None) == (n_keys in (16, 32))
        assert found is None or found.missing == (n_keys - 1,)


def test_a_causal_mask_aligned_top_left_is_found():
    def top_left(module, query, key, value, mask, **kwargs):
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        ).transpose(1, 2), None

    visible = torch.ones(1, 1, 3, 8, dtype=torch.bool).tril(5)
    assert misread(call(3, 8, mask=visible), FULL, range(5, 8), range(8)) is None
    found = misread(call(3, 8, top_left, mask=visible), FULL, range(5, 8), range(8))
    assert found == Misread(0, 5, (1, 2, 3, 4, 5), (), 3, 8)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_an_ignored_mask_is_found(attn, tiny_model):
    def blind(native):
        def attention(module, query, key, value, mask, **kwargs):
            nothing_hidden = None if mask is None else torch.ones_like(mask) if mask.dtype == torch.bool else mask * 0
            return native(module, query, key, value, nothing_hidden, **kwargs)

        return attention

    model = tiny_model("mistral", torch.float32, attn)
    for layer, each, queries, keys in recorded(model, PATHS["in chunks"], 1):
        found = misread(replace(each, native=blind(each.native)), model.architecture.layers[layer], queries, keys)
        if each.mask is None:  # the first chunk under sdpa
            assert found is None
        else:
            assert found.missing == ()
            assert found.position == queries[0]
            assert set(found.extra) >= set(queries[1:])


def test_a_window_that_is_not_kept_is_found():
    found = misread(call(1, 12), LayerInfo(3, "sliding", 8, 2, 8), [11], range(12))
    assert found == Misread(3, 11, (), (0, 1, 2, 3), 1, 12)
    assert str(found) == (
        "In layer 3 the query at position 11 reads positions 0 to 3, which it should not (native attention, queries × "
        "keys: 1 × 12)."
    )


def test_a_fault_in_one_head_is_found():
    def one_head(module, query, key, value, mask, **kwargs):
        value = value.clone()
        value[:, 1, 3] = 0
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    assert misread(call(1, 6, one_head), FULL, [5], range(6)).missing == (3,)
    read = seen(call(1, 6, one_head))[0, :, 0, 3]
    assert read.tolist() == [True, True, False, False]


def test_keys_that_are_not_finite_after_masking_do_not_count_as_read():
    visible = torch.tensor([[True, True, False], [False, False, False]])[None, None]
    with_minimum = torch.zeros(1, 1, 2, 3).masked_fill(~visible, torch.finfo(torch.float32).min)
    with_infinity = torch.zeros(1, 1, 2, 3).masked_fill(~visible, -torch.inf)
    for native, mask in (
        (sdpa_attention_forward, visible),
        (eager_attention_forward, with_minimum),  # the second query attends to all keys alike
        (eager_attention_forward, with_infinity),  # … and comes out as NaN
    ):
        assert torch.equal(seen(call(2, 3, native, mask=mask)), visible.expand(1, 4, 2, 3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_biases_hide_nothing_and_a_thousand_keys_are_all_seen(dtype):
    bias = -torch.arange(2000.0).to(dtype).view(1, 1, 1, -1)  # ALiBi: e^-2000 is zero
    bias[..., 5] = torch.finfo(dtype).min
    read = seen(call(1, 2000, eager_attention_forward, mask=bias, dtype=dtype))
    assert (~read[0, 0, 0]).nonzero().tolist() == [[5]]


def test_the_probe_runs_the_call_as_it_stands_and_leaves_it_alone(same_bits):
    shown = []

    def watching(*args, **kwargs):
        shown.append((args, kwargs))
        return sdpa_attention_forward(*args, **kwargs)

    mask = torch.ones(1, 1, 2, 20, dtype=torch.bool)
    one = call(2, 20, watching, mask=mask, sliding_window=None)
    before = [tensor.clone() for tensor in (one.query, one.key, one.value)]
    seen(one)
    assert len(shown) == 3  # values of 8 features, 20 keys
    for (module, query, key, value, given), kwargs in shown:
        assert module is one.module
        assert key is one.key
        assert given is mask
        assert kwargs == one.kwargs
        for probe, own in ((query, one.query), (value, one.value)):
            assert (probe.shape, probe.stride(), probe.dtype) == (own.shape, own.stride(), own.dtype)
    assert all(map(same_bits, before, (one.query, one.key, one.value)))


def test_a_bidirectional_layer_reads_later_positions_and_says_so():
    both_ways = call(3, 3, is_causal=False)
    found = misread(both_ways, FULL, range(3), range(3))
    assert (found.position, found.missing, found.extra) == (0, (), (1, 2))
    assert not is_causal(both_ways)
    assert torch.equal(seen(both_ways)[0, 0], expected(FULL, range(3), range(3), causal=False))


def test_expected_chunks_windows_padding_and_future_slots():
    chunked = expected(LayerInfo(0, "chunked", 4, 1, 8), [3, 4, 6], range(8))
    assert [row.nonzero()[:, 0].tolist() for row in chunked] == [[0, 1, 2, 3], [4], [4, 5, 6]]
    padded = expected(LayerInfo(0, "sliding", 3, 1, 8), range(-2, 4), range(-2, 6))
    assert [row.nonzero()[:, 0].sub(2).tolist() for row in padded] == [[], [], [0], [0, 1], [0, 1, 2], [1, 2, 3]]


def test_padding_that_is_read_is_called_padding():
    found = misread(call(1, 5), FULL, [2], range(-2, 3))
    assert found.extra == (-2, -1)
    assert "reads left padding, which it should not" in str(found)


@pytest.mark.parametrize(
    ("info", "kwargs", "reason"),
    [
        (LayerInfo(0, "linear", None, 2, 8), {}, "depends on the data"),
        (FULL, {"indices": torch.zeros(1)}, "indices"),
        (FULL, {"dropout": 0.1}, "at random"),
        (FULL, {}, None),
    ],
)
def test_where_nothing_is_promised_there_is_a_reason(info, kwargs, reason):
    found = readable(info, call(1, 3, **kwargs))
    assert (found is None) == (reason is None)
    assert reason is None or reason in found


def test_keys_that_are_not_finite_are_not_probed():
    one = call(1, 3)
    one.key[0, 0, 1, 2] = torch.nan
    assert readable(FULL, one) == "its keys are not finite"
