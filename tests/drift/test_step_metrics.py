"""From live tensors to numbers, against plain numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from kvdrift.drift import step_metrics
from kvdrift.drift.stacking import pad_stack
from kvdrift.drift.step_metrics import Reading, head_metrics, kv_metrics, kv_positions, residual_metrics

CPU = torch.device("cpu")


def rel_l2(x, y):
    x, y = (np.asarray(z.double() if isinstance(z, torch.Tensor) else z, dtype=np.float64) for z in (x, y))
    return np.linalg.norm(x - y) / np.linalg.norm(y)


def values(site, n_layers, shape, seed, dtypes=None, start=0):
    generator = torch.Generator().manual_seed(seed)
    dtypes = dtypes or [torch.float32] * n_layers
    return {site: {start + i: torch.randn(shape, generator=generator).to(d) for i, d in enumerate(dtypes)}}


def reading(values, positions, current, first_seen=0):
    layers = next(iter(values.values()))
    return Reading(values, dict.fromkeys(layers, positions), dict.fromkeys(layers, first_seen), current)


def test_what_a_window_hides_is_neither_compared_nor_visible():
    a, b = values("k", 1, (1, 1, 8, 4), 0), values("k", 1, (1, 1, 8, 4), 0)
    a["k"][0][0, 0, 3] += 1.0
    full, hidden = (reading(a, range(8), 7, first) for first in (0, 4))
    assert (kv_metrics(full, reading(b, range(8), 7), ("k",))["k/rel_l2"] > 0).all()
    assert (kv_metrics(hidden, reading(b, range(8), 7), ("k",))["k/rel_l2"] == 0).all()
    rows = kv_positions(hidden, reading(b, range(8), 7), ("k",))
    assert rows["visible_a"].tolist() == [[False] * 4 + [True] * 4]
    assert rows["visible_b"].all()
    assert np.isnan(rows["k/rel_l2"][0, 0]).tolist() == [True] * 4 + [False] * 4


def test_residual_sites_layer_by_layer():
    a, b = values("resid_post", 3, (1, 8), 0), values("resid_post", 3, (1, 8), 1)
    a["embed"], b["embed"] = {0: torch.ones(1, 8)}, {0: torch.full((1, 8), 2.0)}
    found = residual_metrics(a, b, ("embed", "resid_post"), CPU)
    assert found["embed/rel_l2"].shape == ()
    assert float(found["embed/rel_l2"]) == 0.5
    expected = [rel_l2(a["resid_post"][x], b["resid_post"][x]) for x in range(3)]
    np.testing.assert_allclose(found["resid_post/rel_l2"], expected, rtol=1e-14)
    assert {name.partition("/")[2] for name in found} == {"rel_l2", "max_abs", "max_ulp", "cosine", "identical"}


def test_layers_of_mixed_dtypes_stay_in_order():
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.bfloat16]
    a, b = (values("resid_pre", 4, (1, 8), seed, dtypes) for seed in (0, 1))
    found = residual_metrics(a, b, ("resid_pre",), CPU)
    expected = [rel_l2(a["resid_pre"][x], b["resid_pre"][x]) for x in range(4)]
    np.testing.assert_allclose(found["resid_pre/rel_l2"], expected, rtol=1e-14)


def test_only_shared_layers_are_compared():
    a, b = values("resid_mid", 3, (1, 8), 0), values("resid_mid", 3, (1, 8), 1, start=1)
    found = residual_metrics(a, b, ("resid_mid",), CPU)
    np.testing.assert_allclose(
        found["resid_mid/rel_l2"], [rel_l2(a["resid_mid"][x], b["resid_mid"][x]) for x in (1, 2)], rtol=1e-14
    )


def test_heads_one_by_one(monkeypatch):
    a, b = values("q", 2, (1, 3, 4), 0), values("q", 2, (1, 3, 4), 1)
    whole = head_metrics(a, b, ("q",))
    expected = [[rel_l2(a["q"][x][0, h], b["q"][x][0, h]) for h in range(3)] for x in range(2)]
    np.testing.assert_allclose(whole["q/rel_l2"], expected, rtol=1e-14)
    monkeypatch.setattr(step_metrics, "MAX_ELEMENTS", 1)
    parts = head_metrics(a, b, ("q",))
    assert all(np.array_equal(whole[name], parts[name]) for name in whole)


@pytest.mark.parametrize("elements", [1, 2**22])
def test_keys_over_shared_positions(elements, monkeypatch):
    """Path a reads positions 3 to 7, path b reads 0 to 7: compared are 3 to 7, aligned."""
    monkeypatch.setattr(step_metrics, "MAX_ELEMENTS", elements)
    b = values("k", 2, (1, 2, 8, 4), 0)
    a = {"k": {x: t[:, :, 3:].clone() for x, t in b["k"].items()}}
    one, two = reading(a, range(3, 8), 7), reading(b, range(8), 7)
    same = kv_metrics(one, two, ("k",))
    assert (same["k/rel_l2"] == 0).all()
    assert (same["k/identical"] == 1).all()
    a["k"][1][0, 1, 2] += 1.0
    found = kv_metrics(one, two, ("k",))
    assert np.argwhere(found["k/rel_l2"]).tolist() == [[1, 1]]
    np.testing.assert_allclose(found["k/rel_l2"][1, 1], rel_l2(a["k"][1][0, 1], b["k"][1][0, 1, 3:]), rtol=1e-14)
    rows = kv_positions(one, two, ("k",))
    assert np.isnan(rows["k/rel_l2"][:, :, :3]).all()
    assert np.argwhere(np.nan_to_num(rows["k/rel_l2"])).tolist() == [[1, 1, 5]]
    assert rows["visible_a"].tolist() == [[False] * 3 + [True] * 5] * 2
    assert rows["visible_b"].all()


def test_slots_beyond_the_current_position_are_not_compared():
    """A static cache hands out slots that the mask hides."""
    a, b = values("v", 1, (1, 1, 10, 4), 0), {"v": {}}
    b["v"][0] = a["v"][0][:, :, :6].clone()
    a["v"][0][:, :, 6:] = float("nan")
    found = kv_metrics(reading(a, range(10), 5), reading(b, range(6), 5), ("v",))
    assert (found["v/rel_l2"] == 0).all()
    rows = kv_positions(reading(a, range(10), 5), reading(b, range(6), 5), ("v",))
    assert rows["v/rel_l2"].shape == (1, 1, 6)
    assert rows["visible_a"].shape == (1, 6)


def test_positions_in_any_order_land_at_their_place():
    b = values("k", 1, (1, 1, 4, 2), 0)
    order = [2, 0, 3, 1]
    a = {"k": {0: b["k"][0][:, :, order].clone()}}
    a["k"][0][0, 0, 2] *= 2  # position 3
    rows = kv_positions(reading(a, order, 3), reading(b, range(4), 3), ("k",))
    np.testing.assert_array_equal(rows["k/rel_l2"][0, 0], np.float32([0, 0, 0, 1]))


rows_of = st.sampled_from(["float32", "float64", "int64", "bool"]).flatmap(
    lambda dtype: st.integers(0, 3).flatmap(
        lambda ndim: st.lists(
            arrays.arrays(
                dtype, arrays.array_shapes(min_dims=ndim, max_dims=ndim, min_side=0, max_side=4) if ndim else ()
            ),
            min_size=1,
            max_size=4,
        )
    )
)


@settings(max_examples=150, deadline=None)
@given(rows_of)
def test_pad_stack_keeps_every_row_and_fills_the_rest(rows):
    stacked = pad_stack(rows)
    assert stacked.dtype == rows[0].dtype
    assert stacked.shape == (len(rows), *np.max([row.shape for row in rows], axis=0).astype(int))
    for row, place in zip(rows, stacked, strict=True):
        inside = tuple(slice(size) for size in row.shape)
        np.testing.assert_array_equal(place[inside], row)
        rest = np.ones(place.shape, dtype=bool)
        rest[inside] = False
        filled = place[rest]
        if row.dtype.kind == "f":
            assert np.isnan(filled).all()
        else:
            assert (filled == (False if row.dtype.kind == "b" else -1)).all()
