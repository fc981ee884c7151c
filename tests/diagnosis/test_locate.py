"""The first place at which two observed steps differ."""

import pytest
import torch

import kvdrift as kd
from kvdrift.diagnosis.locate import changed_past, first_difference, place, within
from kvdrift.diagnosis.observe import Observer, Snapshot


def snapshot(**changes):
    """Two layers, three rows, keys at positions 0 to 2; changes are added to (layer, site) entries."""
    rows = {
        (layer, site): torch.arange(6.0).view(3, 2) for layer in (0, 1) for site in ("resid_pre", "z", "resid_post")
    }
    rows |= {(0, "embed"): torch.ones(3, 2), (0, "final_norm"): torch.ones(3, 2)}
    kv = {(layer, site): (torch.ones(1, 3, 2), range(3)) for layer in (0, 1) for site in ("k", "v")}
    return Snapshot(2, rows, kv, torch.zeros(5), **changes)


def test_equal_steps_have_no_difference():
    assert first_difference(snapshot(), snapshot()) is None


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ([(1, "resid_post"), (1, "z")], (1, "z")),
        ([(1, "resid_pre"), (0, "resid_post")], (0, "resid_post")),
        ([(0, "embed"), (0, "resid_pre")], (-1, "embed")),
    ],
)
def test_the_first_in_the_order_of_computation_is_named(changed, expected):
    other = snapshot()
    for key in changed:
        other.rows[key][-1, 0] += 1
    assert first_difference(snapshot(), other) == expected


def test_past_and_current_keys_are_told_apart_and_come_before_attention():
    past, current, both = snapshot(), snapshot(), snapshot()
    past.kv[1, "k"][0][0, 0] += 1
    current.kv[1, "k"][0][0, 2] += 1
    both.kv[1, "v"][0][0, 1] += 1
    both.rows[1, "z"][-1] += 1
    assert first_difference(snapshot(), past) == (1, "past k")
    assert first_difference(snapshot(), current) == (1, "k")
    assert first_difference(snapshot(), both) == (1, "past v")


def test_rows_are_aligned_at_the_current_position_and_keys_by_position():
    alone = snapshot()
    alone.rows = {key: value[-1:] for key, value in alone.rows.items()}
    alone.kv = {key: (value[:, 1:], range(1, 3)) for key, (value, _) in alone.kv.items()}
    assert first_difference(alone, snapshot()) is None
    padded = snapshot()
    padded.kv = {
        key: (torch.cat([torch.full((1, 2, 2), 7.0), value], dim=1), range(-2, 3))
        for key, (value, _) in padded.kv.items()
    }
    assert first_difference(padded, snapshot()) is None


def test_a_past_that_moves_is_found():
    before, now = snapshot(), snapshot()
    assert changed_past(before, now, 2) is None
    now.kv[1, "v"][0][0, 0] += 1
    assert changed_past(before, now, 2) == (1, "past v")
    now.kv[1, "v"][0][0, 0] -= 1
    now.kv[1, "v"][0][0, 2] += 1  # position 2 is new at this step, or another token has been put in its place
    assert changed_past(before, now, 2) is None
    assert changed_past(before, now, 3) == (1, "past v")


def test_tolerance_is_relative_and_nan_is_never_equal():
    equal, x = within(1e-3), torch.tensor([1000.0, 1.0])
    assert equal(x + 0.9, x)
    assert not equal(x + 1.1, x)
    assert not equal(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert not equal(torch.ones(2), torch.ones(3))


@pytest.mark.parametrize(
    ("site", "name"),
    [("past k", "the KV cache"), ("z", "model.layers.2.self_attn"), ("mlp_out", "model.layers.2"), ("q", "self_attn")],
)
def test_places_name_modules(site, name, tiny_model):
    where = place(tiny_model("llama"), 2, site)
    assert where.layer == 2
    assert name in where.module
    assert str(where).startswith("layer 2, ")


def test_observed_rows_are_those_of_a_plain_run(tiny_model):
    model = tiny_model("gemma3")
    prompt = list(range(7, 19))
    trace = kd.record(model, prompt, path=kd.CacheOn(prefill_chunk=5), sites=["resid_post", "k"], positions="all",
                      max_new_tokens=1, progress=False)  # fmt: skip
    seen = Observer(kd.CacheOn(prefill_chunk=5).start(model, prompt)).step()
    for layer in range(4):
        assert torch.equal(seen.rows[layer, "resid_post"], trace["resid_post"][0, layer])
        value, at = seen.kv[layer, "k"]
        assert torch.equal(value, trace["k"][0, layer][:, list(at)])
    assert [list(call.queries) for call in seen.calls if call.layer == 0] == [
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8, 9],
        [10, 11],
    ]
    assert seen.rotary == 11
