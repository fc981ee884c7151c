"""Tables hold every measured cell, once, under the right coordinates: checked cell by cell on a small drift."""

import numpy as np
import pandas as pd
import pytest

from kvdrift.drift.result import Drift, PathInfo, Prompt
from kvdrift.models.architecture import Architecture, LayerInfo

P, S, L, H, SEEDS = 2, 3, 3, 2, 2  # the third layer has one KV head
LENGTHS, STEPS = (2, 3), np.array([0, 2, 4])


def numbered(*shape: int, start: float = 1.0) -> np.ndarray:
    """Every cell another number, so that a swapped axis shows."""
    return np.arange(np.prod(shape), dtype=float).reshape(shape) + start


@pytest.fixture(scope="module")
def drift() -> Drift:
    layers = (
        LayerInfo(0, "full", None, 2, 8), LayerInfo(1, "sliding", 4, 2, 8), LayerInfo(2, "full", None, 1, 8)
    )  # fmt: skip
    architecture = Architecture(
        "made-up", L, 16, 4, 2, 8, 50, 64, "rope", False, None, None, True, layers
    )  # fmt: skip
    measured = np.array([[True, True, True], [True, True, False]])

    def fill(values: np.ndarray) -> np.ndarray:
        return np.where(measured.reshape(P, S, *(1,) * (values.ndim - 2)), values, np.nan)

    k = fill(numbered(P, S, L, H, start=500))
    k[:, :, 2, 1] = np.nan
    positions = np.where(np.arange(7) < 1, np.nan, numbered(P, 2, L, H, 7))
    visible = np.broadcast_to(np.arange(7) >= 1, (P, 2, L, 7))
    arrays = {
        "steps": STEPS, "measured": measured, "n_steps": np.array([5, 3]),
        "fed": np.array([[7, 8, 9, 7, -1], [9, 8, -1, -1, -1]]),
        "top1_a": np.array([[7, 9, 8], [9, 7, -1]]), "top1_b": np.array([[7, 8, 8], [9, 7, -1]]),
        "layers/resid_post": np.arange(L), "layers/k": np.arange(L), "layers/local": np.array([0, 2]),
        "drift/resid_post/rel_l2": fill(numbered(P, S, L)), "drift/resid_post/identical": fill(numbered(P, S, L) / 99),
        "floor/resid_post/rel_l2": np.stack([fill(numbered(P, S, L)) * f for f in (2, 4)]),
        "local/resid_post/rel_l2": fill(numbered(P, S, 2, start=300)),
        "local_floor/resid_post/rel_l2": np.stack([fill(numbered(P, S, 2, start=300)) * f for f in (1, 3)]),
        "drift/embed/rel_l2": fill(np.zeros((P, S))),
        "drift/k/rel_l2": k, "self_a/k/rel_l2": k + 1,
        "positions/steps": np.array([0, 4]), "positions/k/rel_l2": positions.astype(np.float32),
        "positions/visible_a": visible, "positions/visible_b": visible,
        "drift/logits/kl": fill(numbered(P, S)), "drift/logits/flip": np.array([[0, 1, 0], [0, 0, 0]], bool),
        "floor/logits/kl": np.stack([fill(numbered(P, S)) * f for f in (1, 3)]),
        "floor/logits/flip": np.array([[[0, 1, 0], [0, 0, 0]], [[0, 0, 0], [0, 0, 0]]], bool),
    }  # fmt: skip
    info = PathInfo("cache-ON", "made-up", "float32", "eager", "cpu")
    prompts = tuple(Prompt(tuple(range(n)), ("x",) * n) for n in LENGTHS)
    return Drift(info, info, architecture, prompts, arrays, {7: "seven", 8: "eight", 9: "nine"})


def test_layers_hold_every_measured_cell_once(drift):
    table = drift.to_dataframe("layers")
    assert not table.duplicated(["prompt", "step", "site", "layer"]).any()
    rows = table[table.site == "resid_post"]
    assert len(rows) == drift.measured.sum() * L
    for row in rows.itertuples():
        cell = (row.prompt, int(np.flatnonzero(row.step == STEPS)[0]), row.layer)
        value = drift.arrays["drift/resid_post/rel_l2"][cell]
        assert row.rel_l2 == value
        assert row.identical == value / 99
        assert row.floor_median == 3 * value
        assert row.kind == ("sliding" if row.layer == 1 else "full")
    assert rows[rows.layer == 1].window.eq(4).all()
    assert rows[rows.layer == 0].window.isna().all()


def test_local_drift_stands_at_its_own_layers(drift):
    rows = drift.to_dataframe("layers").query("site == 'resid_post' and prompt == 0 and step == 2").set_index("layer")
    local = drift.arrays["local/resid_post/rel_l2"][0, 1]
    assert rows.local[0] == local[0]
    assert rows.local[2] == local[1]
    assert np.isnan(rows.local[1])
    assert rows.local_floor_median[2] == 2 * local[1]


def test_sites_without_layers_have_no_layer(drift):
    rows = drift.to_dataframe("layers").query("site == 'embed'")
    assert len(rows) == drift.measured.sum()
    assert rows.layer.isna().all()
    assert rows.rel_l2.eq(0).all()
    assert rows.floor_median.isna().all()


def test_logits_have_tokens_texts_and_floor(drift):
    table = drift.to_dataframe("logits").set_index(["prompt", "step"])
    assert list(table.index) == [(0, 0), (0, 2), (0, 4), (1, 0), (1, 2)]
    row = table.loc[(0, 2)]
    assert (row.top1_a, row.top1_b, row.text_a, row.text_b, row.fed) == (9, 8, "nine", "eight", 9)
    assert row.kl == 2
    assert row.kl_floor_median == 4
    assert row.flip_floor_share == 0.5
    assert table.flip.dtype == bool
    assert table.loc[(0, 4)].fed == -1


def test_heads_that_a_layer_lacks_are_left_out(drift):
    table = drift.to_dataframe("heads")
    assert len(table) == drift.measured.sum() * (2 + 2 + 1)
    assert table.rel_l2.notna().all()
    row = table.query("prompt == 1 and step == 2 and layer == 1 and head == 0")
    assert row.rel_l2.item() == drift.arrays["drift/k/rel_l2"][1, 1, 1, 0]
    assert row.self_a.item() == row.rel_l2.item() + 1


def test_positions_stop_at_the_current_one_and_keep_what_is_evicted(drift):
    table = drift.to_dataframe("positions")
    assert not table.duplicated(["prompt", "step", "site", "layer", "head", "position"]).any()
    assert set(table.step[table.prompt == 1]) == {0}  # step 4 was not measured there
    longest = table.groupby(["prompt", "step"]).position.max()
    assert longest.to_dict() == {(0, 0): 1, (0, 4): 5, (1, 0): 2}
    evicted = table[table.position == 0]
    assert evicted.rel_l2.isna().all()
    assert not evicted.visible_a.any()
    row = table.query("prompt == 0 and step == 4 and layer == 2 and head == 0 and position == 5")
    assert row.rel_l2.item() == drift.arrays["positions/k/rel_l2"][0, 1, 2, 0, 5]


def test_what_was_not_measured_gives_an_empty_table(drift):
    arrays = {name: x for name, x in drift.arrays.items() if "/k/" not in name}
    bare = Drift(drift.a, drift.b, drift.architecture, drift.prompts, arrays, {})
    for what in ("heads", "positions"):
        table = bare.to_dataframe(what)
        assert isinstance(table, pd.DataFrame)
        assert table.empty


def test_unknown_table_is_refused(drift):
    with pytest.raises(ValueError, match="layers, logits, heads, positions"):
        drift.to_dataframe("sites")
