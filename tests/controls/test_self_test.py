"""The self-test of fixed shape passes here, and fails where what it tests does not hold."""

from itertools import product

import pytest
import torch
import transformers
from pairwise import params

import kvdrift as kd
from kvdrift.controls import row_tiles
from kvdrift.controls.fixed_shape import FixedShape, not_covered
from kvdrift.controls.self_test import rows_differ, self_test
from kvdrift.models.tiny import FAMILIES, tiny

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize(("family", "dtype"), params(list(product(FAMILIES, DTYPES)), 1))
def test_it_passes_on_every_family(family, dtype, tiny_model, hooks):
    model = tiny_model(family, dtype)
    failures = self_test(model)
    uncovered = {f"block {layer}" for layer in not_covered(model)}
    assert {failure.where for failure in failures if failure.kind == "junk"} <= uncovered
    assert [failure for failure in failures if failure.kind != "junk"] == []
    assert not hooks(model.hf)


def test_attention_outside_the_table_fails_on_junk(tiny_model):
    assert "block 0" in {failure.where for failure in self_test(tiny_model("falcon"))}


def test_short_sequences_and_other_tiles(tiny_model):
    model = tiny_model("gemma3")
    for control in (FixedShape(1), FixedShape(2), FixedShape(20), FixedShape(64, tile=8)):
        assert self_test(model, control) == []


def _place(rows):
    return rows + torch.arange(len(rows))[:, None] * 1e-6


def _company(rows):
    return rows + rows.sum() * 1e-3


def _neighbour(rows):
    return rows + rows.roll(1, 0)


def test_rows_that_depend_on_their_place_or_company_are_found():
    rows = torch.randn(16, 5, generator=torch.Generator().manual_seed(0))
    assert rows_differ(torch.exp, [rows]) is None
    assert rows_differ(torch.add, [rows, rows + 1]) is None
    assert rows_differ(lambda tile: (tile, tile.sum(-1)), [rows]) is None
    assert rows_differ(_place, [rows]) == "a row has other bits at another place in its tile"
    assert rows_differ(_neighbour, [rows]) == "a row has other bits with other rows beside it"
    assert rows_differ(_company, [torch.ones(16, 5)]) == "a row has other bits with other rows beside it"
    assert rows_differ(lambda tile: (tile, _place(tile)), [rows]) is not None


def test_a_kernel_that_depends_on_the_place_fails_the_operator(monkeypatch):
    """A matrix product that is off by an ulp in the last row of its tile."""
    single = torch.ops.aten.mm.default

    def product(mode, op, args, kwargs):
        a, b = args

        def function(tile):
            result = op(tile, b, **kwargs)
            result[-1] = torch.nextafter(result[-1], result[-1] + 1)
            return result

        return mode.rows(op, function, [a], [b])

    row_tiles.handler_of.cache_clear()
    monkeypatch.setitem(row_tiles._HANDLERS, single, product)
    try:
        failures = self_test(tiny("llama"))
    finally:
        row_tiles.handler_of.cache_clear()
    operators = [failure for failure in failures if failure.kind == "operator"]
    assert operators
    assert all(failure.where.startswith("mm of [16, ") for failure in operators)
    assert "at another place" in str(operators[0])


def test_a_model_that_looks_ahead_fails_on_junk():
    model = tiny("llama")

    def look_ahead(module, args, output):
        return output + 1e-3 * output.mean(1, keepdim=True)

    model.model.layers[2].register_forward_hook(look_ahead)
    failures = self_test(model)
    assert [failure.kind for failure in failures] == ["junk", "junk", "junk"]
    assert {failure.where for failure in failures} == {"block 2"}
    assert failures[0].what == "40 tokens appended after 1 change an earlier row"


def test_blocks_that_return_several_streams_have_their_tokens_on_another_axis():
    """Gemma 3n's blocks return ``[stream, batch, position, feature]``."""
    config = transformers.Gemma3nTextConfig(
        vocab_size=384,
        vocab_size_per_layer_input=384,
        hidden_size=64,
        hidden_size_per_layer_input=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        laurel_rank=8,
        num_kv_shared_layers=0,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        activation_sparsity_pattern=[0.5, 0.0],
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    assert self_test(model) == []
    model.model.layers[1].register_forward_hook(lambda _, __, output: output + 1e-3 * output.mean(2, keepdim=True))
    assert {failure.where for failure in self_test(model)} == {"block 1"}


def test_an_operator_that_is_not_run_on_tiles_fails_on_junk(monkeypatch):
    """Without tiles for matrix products a row's bits depend on how many others there are."""
    monkeypatch.setattr(row_tiles, "_HANDLERS", {})
    row_tiles.handler_of.cache_clear()
    try:
        failures = self_test(kd.models.tiny("llama"))
    finally:
        row_tiles.handler_of.cache_clear()
    assert failures
    assert {failure.kind for failure in failures} == {"junk"}


@pytest.mark.real
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_real_models_pass(name, dtype):
    assert self_test(kd.load(name, dtype=dtype, quiet=True)) == []
