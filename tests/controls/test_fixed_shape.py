"""Under fixed shape cache-ON and cache-OFF agree in every bit, where they compute the same function."""

import pytest
import torch
import transformers
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import DynamicCache, StaticCache
from transformers.models.llama import modeling_llama

import kvdrift as kd
from kvdrift.controls import ReRoll, cast_copy, promote_float32
from kvdrift.controls.fixed_shape import FixedShape, fixed_shape, not_covered
from kvdrift.controls.row_tiles import CHUNK, RowTiles
from kvdrift.controls.self_test import self_test
from kvdrift.errors import InputError, ModelError
from kvdrift.models.tiny import FAMILIES, supported_attn, tiny
from kvdrift.tracing.seam import Order, seam

PROMPT = [5, 9, 100, 33, 7, 8, 250, 301, 12, 44, 77, 21, 200, 5, 6, 7, 9, 3]  # beyond the windows of 8, and a tile
LONG = [*PROMPT, *range(40, 56)]
STEPS = 3
FIXED = (FixedShape(64),)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OUTSIDE_THE_TABLE = {"falcon", "bloom", "lfm2", "mamba"}
COVERED = [family for family in FAMILIES if family not in OUTSIDE_THE_TABLE]
NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES}


def moving(drift):
    """Every measured number that is not what a path compared with itself has."""
    found = []
    for key, array in drift.arrays.items():
        metric = key.rpartition("/")[2]
        if not key.startswith(("drift/", "local/")) or metric.startswith(("tie_", "margin_")):
            continue
        counted = array[:, 1:] if key.startswith("local/") else array
        if not (counted == (1 if metric in ("identical", "topk_overlap") else 0)).all():
            found.append(key)
    return found


def compare(model, prompt, a=FIXED, b=FIXED, **options):
    return kd.compare(
        model,
        prompt,
        a=kd.CacheOn(controls=a, **options),
        b=kd.CacheOff(controls=b),
        max_new_tokens=STEPS,
        floor=0,
        local=model.dtype == torch.float32,
        progress=False,
    )


def logits(path, model, prompt, n_steps=2):
    run = path.start(model, prompt)
    try:
        return torch.stack([run.step(None if step == 0 else 100 + step).logits for step in range(n_steps)])
    finally:
        run.close()


def other(model_type, **values):
    """A tiny model of an architecture that is no family: two layers (deepseek_v4 three), random float32 weights."""
    shape = {"vocab_size": 384, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2} | values
    config = transformers.AutoConfig.for_model(model_type, initializer_range=0.08, **shape)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    return kd.load(model.eval(), quiet=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize("family", COVERED)
def test_on_equals_off_in_every_bit_of_every_site(family, dtype, tiny_model):
    model = tiny_model(family, dtype)
    drift = compare(model, PROMPT)
    assert {"k", "v", "z", "resid_post"} <= set(drift.sites)
    assert not moving(drift)
    if dtype == torch.float32:
        assert {"drift/k/rel_l2", "drift/logits/logit_l2"} <= set(moving(compare(model, PROMPT, (), ())))


def test_half_precision_drifts_without_it(tiny_model):
    for dtype in (torch.bfloat16, torch.float16):
        model = tiny_model("mistral", dtype)
        assert moving(compare(model, PROMPT, (), ()))
        assert not moving(compare(model, PROMPT))


@pytest.mark.parametrize("family", COVERED)
def test_chunked_prefill_static_caches_and_other_kernels_give_the_same_bits(family, tiny_model):
    model = tiny_model(family)
    expected = logits(kd.CacheOff(controls=FIXED), model, LONG)
    others = [
        kd.CacheOn(controls=FIXED, prefill_chunk=5),
        kd.CacheOn(controls=FIXED, cache=lambda: StaticCache(model.hf.config, max_cache_len=150)),
        *(path(controls=FIXED, attn=attn) for attn in supported_attn(family)[1:] for path in (kd.CacheOn, kd.CacheOff)),
    ]
    for path in others:
        assert torch.equal(logits(path, model, LONG), expected), path


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 15, 16, 17])
def test_every_length_beside_windows_and_tiles(length, tiny_model):
    for family in ("gemma3", "gpt-oss"):
        model = tiny_model(family)
        on, off = kd.CacheOn(controls=FIXED), kd.CacheOff(controls=FIXED)
        assert torch.equal(logits(on, model, LONG[:length]), logits(off, model, LONG[:length]))


@pytest.mark.parametrize("experts", ["eager", "batched_mm"])  # every other test has grouped ones, the default
def test_experts_run_one_by_one_or_in_batches_are_covered(experts):
    model = kd.load(tiny("mixtral", experts_implementation=experts), quiet=True)
    assert not moving(compare(model, PROMPT))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_function_stays_the_same(family):
    model = kd.load(cast_copy(tiny(family), torch.float64), quiet=True)
    with promote_float32():
        for path in (kd.CacheOn, kd.CacheOff):
            plain, fixed = logits(path(), model, PROMPT), logits(path(controls=FIXED), model, PROMPT)
            assert 0 < float((fixed - plain).norm() / plain.norm()) < 1e-12


@pytest.mark.parametrize("fault", ["stale key", "one bit of one key", "position"])
def test_a_fault_shows_at_once(fault, tiny_model):
    """What native bfloat16 noise hides: one wrong key in one layer."""
    model = tiny_model("llama", torch.bfloat16)
    on, off = (path(controls=FIXED).start(model, PROMPT) for path in (kd.CacheOn, kd.CacheOff))
    assert torch.equal(on.step().logits, off.step().logits)
    keys = on.cache.layers[1].keys
    if fault == "stale key":
        keys[:, 0, 3] = keys[:, 0, 2]
    elif fault == "one bit of one key":
        keys.view(torch.int16)[:, :, 3] ^= 1
    else:
        on._consumed += 1
    assert not torch.equal(on.step(9).logits, off.step(9).logits)


def test_patterns_keep_their_shape(tiny_model):
    model = tiny_model("gemma3", attn="eager")
    plain = kd.record(model, PROMPT, sites=["pattern"], max_new_tokens=2, progress=False)
    path = kd.CacheOn(controls=FIXED)
    fixed = kd.record(model, PROMPT, path=path, sites=["pattern"], max_new_tokens=2, progress=False)
    assert fixed["pattern"].shape == plain["pattern"].shape
    torch.testing.assert_close(fixed["pattern"], plain["pattern"], rtol=1e-4, atol=1e-5)


def test_it_composes_with_taps(tiny_model, same_bits):
    model = tiny_model("gemma3", torch.bfloat16)
    expected = logits(kd.CacheOn(controls=FIXED), model, PROMPT)
    for order in range(2):
        contexts = [lambda: fixed_shape(model, 64), lambda: kd.tap(model, ["resid_post", "q", "k", "z"])]
        first, second = contexts[::-1] if order else contexts
        with torch.no_grad(), first() as x, second() as y:
            tapped = model.backend.forward(torch.tensor([PROMPT]), 0)
        taps = x if order else y
        assert same_bits(tapped, expected[0])
        assert set(taps.values) >= {"resid_post", "q", "k", "z"}


def test_nested_entry_and_restoration(tiny_model, hooks):
    model = tiny_model("llama", torch.bfloat16)
    ids = torch.tensor([PROMPT])
    plain = model.backend.forward(ids, 0)
    bound = FixedShape(64).bind(model)
    with bound:
        once = model.backend.forward(ids, 0)
        with bound, FixedShape(64).bind(model):
            assert torch.equal(model.backend.forward(ids, 0), once)
        assert torch.equal(model.backend.forward(ids, 0), once)
    assert not torch.equal(plain, once)
    assert torch.equal(model.backend.forward(ids, 0), plain)
    assert not hooks(model.hf)
    assert _get_current_dispatch_mode_stack() == []


def test_nothing_is_left_after_an_exception(hooks):
    model = tiny("llama", dtype=torch.bfloat16)
    ids = torch.tensor([PROMPT])
    plain = model(ids).logits

    def fail(*_):
        raise RuntimeError("on purpose")

    handle = model.model.layers[1].register_forward_hook(fail)
    bound = FixedShape(64).bind(kd.load(model, quiet=True))
    with pytest.raises(RuntimeError, match="on purpose"), bound:
        model(ids)
    with pytest.raises(RuntimeError, match="on purpose"), fixed_shape(model, max_length=64):
        model(ids)
    handle.remove()
    assert not hooks(model)
    assert _get_current_dispatch_mode_stack() == []
    assert torch.equal(model(ids).logits, plain)
    with bound:
        again = model(ids).logits
    with fixed_shape(model, max_length=64):
        assert torch.equal(model(ids).logits, again)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_loop_of_ones_own(mode, same_bits):
    model = tiny("gemma3", dtype=torch.bfloat16)
    cache = DynamicCache(config=model.config)
    with mode(), fixed_shape(model, max_length=32):
        off = model(torch.tensor([PROMPT])).logits
        prefill = model(torch.tensor([PROMPT[:12]]), cache=cache).logits
        decoded = [model(torch.tensor([[token]]), cache=cache).logits for token in PROMPT[12:]]
        body = model.model(torch.tensor([PROMPT])).last_hidden_state
    assert same_bits(torch.cat([prefill, *decoded], dim=1), off)
    assert body.shape[1] == len(PROMPT)


def test_generation_without_and_with_a_cache_gives_the_same_scores():
    model = tiny("mistral", dtype=torch.bfloat16)
    scores = []
    for use_cache in (False, True):
        with fixed_shape(model, max_length=32):
            scores.append(
                model.generate(
                    torch.tensor([PROMPT]),
                    max_new_tokens=4,
                    do_sample=False,
                    use_cache=use_cache,
                    output_logits=True,
                    return_dict_in_generate=True,
                ).logits
            )
    assert all(torch.equal(off, on) for off, on in zip(*scores, strict=True))


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_left_padding_changes_no_real_row(family, attn, tiny_model):
    """With and without a cache, whatever stands in the padding: keys are placed by their logical position."""
    model = tiny_model(family, attn=attn).hf
    mask = torch.tensor([[0, 0, 0, *[1] * len(PROMPT)]])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    rows = []
    with torch.no_grad(), fixed_shape(model, max_length=32):
        unpadded = model(torch.tensor([PROMPT])).logits
        for junk in ([0, 0, 0], [7, 8, 9]):
            ids, cache = torch.tensor([[*junk, *PROMPT]]), DynamicCache(config=model.config)
            rows.append(model(ids, attention_mask=mask, position_ids=positions).logits[:, 3:])
            parts = [
                model(
                    ids[:, part], attention_mask=mask[:, : part.stop], position_ids=positions[:, part], cache=cache
                ).logits
                for part in (slice(0, 8), slice(8, 20), slice(20, 21))
            ]
            rows.append(torch.cat(parts, dim=1)[:, 3:])
    assert all(torch.equal(row, unpadded) for row in rows)


class Biased:
    """Gives an attention a bias for each query and key, and a gate for each query, by their positions."""

    order = Order.WRITE

    def __call__(self, call, proceed):
        queries, keys = (torch.arange(x.shape[2]) for x in (call.query, call.key))
        queries = (queries + len(keys) - len(queries))[:, None].float()
        call.kwargs["position_bias"] = (queries - keys).sin()[None, None]
        call.kwargs["sinks"] = queries.cos()[None, None]
        return proceed(call)


def test_what_comes_with_each_query_is_cut_and_placed_with_it(monkeypatch):
    native = modeling_llama.eager_attention_forward

    def biased(module, query, key, value, mask, position_bias, sinks, **kwargs):
        output, pattern = native(module, query, key, value, mask + position_bias, **kwargs)
        return output * sinks.transpose(1, 2), pattern

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", biased)
    model = kd.load(tiny("llama", attn="eager"), quiet=True)
    with seam(model.hf, Biased()):
        on, off = (logits(path(controls=FIXED), model, LONG[:1]) for path in (kd.CacheOn, kd.CacheOff))
        plain = logits(kd.CacheOff(), model, LONG[:1])
        long_on, long_off = (logits(path(controls=FIXED), model, LONG) for path in (kd.CacheOn, kd.CacheOff))
    assert torch.equal(on, off)
    assert torch.equal(long_on, long_off)
    torch.testing.assert_close(on, plain, rtol=1e-4, atol=1e-4)


LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
TWO_CALLS = {
    "diffllama": {"num_key_value_heads": 2, "intermediate_size": 128},  # one module calls twice
    "longcat_flash": {  # two modules in a block
        **LATENT,
        "num_hidden_layers": 4,
        "head_dim": 8,
        "ffn_hidden_size": 128,
        "expert_ffn_hidden_size": 32,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "moe_topk": 2,
        "experts_implementation": "eager",
    },
}


@pytest.mark.parametrize("name", TWO_CALLS)
def test_layers_that_call_twice_are_covered(name):
    model = other(name, **TWO_CALLS[name])
    assert not_covered(model) == {}
    on, off, native = (
        logits(path, model, LONG)
        for path in (kd.CacheOn(controls=FIXED), kd.CacheOff(controls=FIXED), kd.CacheOff(attn="sdpa"))
    )
    assert torch.equal(on, off)
    assert not torch.equal(native, logits(kd.CacheOn(attn="sdpa"), model, LONG))


def test_attention_over_something_else_than_tokens_is_left_alone():
    """Inkling 2 also attends over the outputs of earlier blocks, through the same table."""
    model = other(
        "inkling2_text",
        num_key_value_heads=2,
        head_dim=16,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=16,
        sliding_window_size=8,
        layer_types=["hybrid_sliding", "hybrid"],
        intermediate_size=128,
        dense_intermediate_size=128,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        experts_implementation="eager",
    )
    for path in (kd.CacheOn, kd.CacheOff):
        plain, fixed = logits(path(), model, PROMPT), logits(path(controls=FIXED), model, PROMPT)
        torch.testing.assert_close(fixed, plain, rtol=1e-4, atol=1e-4)


def test_a_window_that_the_mask_lacks_in_one_path_shows():
    """Moshi's cache keeps the last keys only, and its mask, None under sdpa, hides none of the others."""
    shape = {"num_key_value_heads": 4, "head_dim": 16, "ffn_dim": 128, "sliding_window": 8}
    model = other("moshi", **shape)
    for attn in ("sdpa", "eager"):
        on, off = (path(controls=FIXED, attn=attn) for path in (kd.CacheOn, kd.CacheOff))
        assert torch.equal(logits(on, model, PROMPT[:6]), logits(off, model, PROMPT[:6]))
        assert not torch.allclose(logits(on, model, PROMPT)[1], logits(off, model, PROMPT)[1], rtol=0.1, atol=0.1)


def test_flash_attention_is_told_of_its_window_instead_of_given_a_mask(tiny_model, monkeypatch):
    class NoMask:
        order = Order.WRITE

        def __call__(self, call, proceed):
            call.mask = None
            return proceed(call)

    model = tiny_model("gemma3", attn="eager")
    expected = logits(kd.CacheOff(controls=FIXED), model, LONG)
    monkeypatch.setattr(type(model), "attn", "flash_attention_2")
    with seam(model.hf, NoMask()):
        for path in (kd.CacheOn, kd.CacheOff):
            assert torch.equal(logits(path(controls=FIXED), model, LONG), expected)


def test_a_longer_sequence_is_refused(tiny_model, hooks):
    model = tiny_model("llama")
    run = kd.CacheOn(controls=(FixedShape(len(PROMPT)),)).start(model, PROMPT)
    run.step()
    with pytest.raises(InputError, match=r"reaches 19 tokens, and fixed shape 18 .* max_length of at least 19"):
        run.step(3)
    run.close()
    assert not hooks(model.hf)
    with pytest.raises(InputError, match="max_length=0"):
        FixedShape(0)
    with pytest.raises(InputError, match="tile=0"):
        FixedShape(8, tile=0)


def test_masks_that_are_no_tensors_are_refused(tiny_model):
    class OtherMask:
        order = Order.WRITE

        def __call__(self, call, proceed):
            call.mask = object()  # as flex attention has it
            return proceed(call)

    model = tiny_model("llama")
    with seam(model.hf, OtherMask()), fixed_shape(model, max_length=32):  # noqa: SIM117
        with pytest.raises(ModelError, match=r"Layer 0 .* as object.*attn='sdpa'"):
            model.backend.forward(torch.tensor([PROMPT]), 0)


def test_layers_without_a_promise_are_named(tiny_model):
    for family in COVERED:
        assert not_covered(tiny_model(family)) == {}
    for family, layers in (
        ("falcon", [0, 1, 2, 3]),
        ("bloom", [0, 1, 2, 3]),
        ("lfm2", [0, 2]),
        ("mamba", [0, 1, 2, 3]),
    ):
        reasons = not_covered(tiny_model(family))
        assert list(reasons) == layers
        words = "attention table" if family in ("falcon", "bloom") else "other algorithms"
        assert all(words in reason for reason in reasons.values())


def test_layers_with_compressed_keys_are_named_even_where_a_probe_is_too_short_to_see_them():
    model = other(
        "deepseek_v4",
        num_hidden_layers=3,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        head_dim=16,
        q_lora_rank=32,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        index_head_dim=16,
        index_n_heads=2,
        sliding_window=8,
        experts_implementation="eager",
    )
    assert model.coverage.table_layers[2], "four tokens are compressed into one key here, and 128 there"
    reasons = not_covered(model)
    assert list(reasons) == [1, 2]
    assert all("other keys than one per token" in reason for reason in reasons.values())


def test_other_controls_and_models_are_left_alone(tiny_model):
    model, other = tiny_model("llama"), tiny("llama", seed=1)
    ids = torch.tensor([PROMPT])
    plain = other(ids).logits
    with fixed_shape(model, max_length=8), pytest.raises(InputError):
        model.backend.forward(ids, 0)
    with kd.tap(model, ["q"]), FixedShape(64).bind(model):
        assert torch.allclose(other(ids).logits, plain, atol=1e-4)  # no link of the other model's seam
    both = logits(kd.CacheOff(controls=(*FIXED, ReRoll(0))), model, PROMPT)
    assert not torch.equal(both, logits(kd.CacheOff(controls=FIXED), model, PROMPT))


def test_label_and_equality():
    assert FixedShape(64).label == "fixed shape 64"
    assert FixedShape(64) == FixedShape(64) != FixedShape(65)


# --- operators

PARTS = ((0, 1), (3, 5), (17, 16), (69, 1))  # first row and number of rows

OPERATIONS = {
    "mm": lambda x, y: x @ y.T,
    "mm with one column": lambda x, y: x @ y[:1].T,
    "mm with the right factor untransposed": lambda x, y: x[:, :6] @ y,
    "mv": lambda x, y: x @ y[0],
    "addmv": lambda x, y: torch.addmv(x[:, 0], x, y[0], alpha=0.5),
    "linear": lambda x, y: torch.nn.functional.linear(x, y, y[0, :6]),
    "linear over batches": lambda x, y: torch.nn.functional.linear(x.expand(2, -1, -1), y, y[0, :6]).transpose(0, 1),
    "addmm with a bias per row": lambda x, y: torch.addmm(x[:, :6], x, y.T),
    "bmm": lambda x, y: (x.expand(3, -1, -1) @ y.expand(3, -1, -1).mT).transpose(0, 1),
    "baddbmm": lambda x, y: torch.baddbmm(x[None, :, :6], x[None], y.T[None])[0],
    "mean": lambda x, y: x.mean(-1, keepdim=True),
    "sum over a middle axis": lambda x, y: x.unflatten(1, (3, 11)).sum(1),
    "sum over two axes": lambda x, y: x.unflatten(1, (3, 11)).sum((1, 2)),
    "var_mean": lambda x, y: torch.var_mean(x, -1)[0],
    "std": lambda x, y: x.std(-1),
    "vector norm": lambda x, y: torch.linalg.vector_norm(x, dim=-1),
    "norm": lambda x, y: x.norm(2, dim=-1, keepdim=True),
    "logsumexp": lambda x, y: x.logsumexp(-1),
    "softmax": lambda x, y: x.softmax(-1),
    "log_softmax": lambda x, y: x.log_softmax(-1),
    "cumsum": lambda x, y: x.cumsum(-1),
    "layer norm": lambda x, y: torch.nn.functional.layer_norm(x, (33,), y[0], y[1]),
    "rms norm": lambda x, y: torch.nn.functional.rms_norm(x, (33,), y[0]),
    "silu": lambda x, y: torch.nn.functional.silu(x),
    "silu in place": lambda x, y: torch.nn.functional.silu(x.clone(), inplace=True),
    "gelu": lambda x, y: torch.nn.functional.gelu(x, approximate="tanh"),
    "rsqrt": lambda x, y: (x.abs() + 1).rsqrt(),
    "cos of a transposed view": lambda x, y: x.T.cos().T,
    "pow with broadcasting": lambda x, y: torch.pow(x.abs() + 1, y[0]),
    "a power of tensors": lambda x, y: 2.0**x,
    "fused addition": lambda x, y: torch.add(x, y[0], alpha=0.3),
    "addcmul": lambda x, y: torch.addcmul(x, x, y[0], value=0.3),
    "lerp": lambda x, y: torch.lerp(x, y[0], 0.3),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_do_not_depend_on_the_number_of_rows(name, dtype, same_bits):
    """A row alone, among a few and among many: the same bits; and the function stays the same."""
    operation, generator = OPERATIONS[name], torch.Generator().manual_seed(0)
    x = torch.randn(70, 33, generator=generator).to(dtype)
    y = torch.randn(6, 33, generator=generator).to(dtype)
    plain = operation(x, y)
    seen = []
    mode = RowTiles(16)
    mode.watch = lambda op, *_: seen.append(op)
    with torch.no_grad(), mode:
        many = operation(x, y)
        few = [operation(x[start : start + n], y) for start, n in PARTS]
    assert seen
    assert many.shape == plain.shape
    assert many.stride() == plain.stride()
    for rows, (start, n) in zip(few, PARTS, strict=True):
        assert rows.is_contiguous() == operation(x[start : start + n], y).is_contiguous()
        assert same_bits(rows.clone(), many[start : start + n].clone())
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 4e-3}[dtype]
    torch.testing.assert_close(many, plain, rtol=tolerance, atol=tolerance)


def test_large_tensors_are_cut_into_chunks(same_bits):
    x = torch.randn(3 * CHUNK + 77, generator=torch.Generator().manual_seed(0))
    calls = []
    mode = RowTiles(16)
    mode.watch = lambda op, function, tiles, beside: calls.append(tiles[0].shape)
    with mode:
        whole = x.exp()
        part = x[CHUNK - 5 : CHUNK + 9].exp()
    assert calls == [(CHUNK,), (CHUNK,)]
    assert same_bits(whole[CHUNK - 5 : CHUNK + 9], part)
    torch.testing.assert_close(whole, x.exp())


def test_empty_and_integer_tensors_pass_through():
    mode = RowTiles(16)
    with mode:
        assert (torch.ones(0, 4) @ torch.ones(4, 3)).shape == (0, 3)
        assert torch.ones(0, 4).exp().shape == (0, 4)
        assert torch.ones(0, 4).sum(-1).shape == (0,)
        assert torch.bmm(torch.ones(0, 2, 4), torch.ones(0, 4, 3)).shape == (0, 2, 3)
        assert torch.arange(6).view(2, 3).sum(-1).tolist() == [3, 12]
        assert torch.ones(4).sum() == 4


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize("family", COVERED)
def test_cuda(family, dtype):
    model = kd.load(tiny(family, dtype=dtype).cuda(), quiet=True)
    assert self_test(model) == []
    assert not moving(compare(model, PROMPT))


# --- real weights


@pytest.mark.real
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_real_models(name, dtype):
    model = kd.load(name, dtype=dtype, quiet=True)
    prompt = model.encode("The cache holds what the model has read. " * 3)
    assert moving(compare(model, prompt, (), ()))
    assert not moving(compare(model, prompt))


@pytest.mark.real
def test_a_real_model_beyond_its_window():
    model = kd.load("gemma3-270m", dtype="bfloat16", quiet=True)
    window = max(layer.window or 0 for layer in model.architecture.layers)
    prompt = (model.encode("The cache holds what the model has read. ") * window)[: window + 3]
    fixed = (FixedShape(window + 16),)
    on, off = (logits(path(controls=fixed), model, prompt) for path in (kd.CacheOn, kd.CacheOff))
    assert torch.equal(on, off)
