from dataclasses import replace

import numpy as np
import pytest

from kvdrift.errors import InputError, SiteError
from kvdrift.views import kv_positions
from kvdrift.views.kv_positions import _outline
from kvdrift.views.parts import choices


def expected(drift, prompt, site, step, head=None):
    """``[layer, position]`` from the table: the largest of the heads, or one head."""
    table = drift.to_dataframe("positions").query(f"prompt == {prompt} and step == {step} and site == '{site}'")
    if head is not None:
        table = table[table["head"] == head]
    return table.groupby(["layer", "position"]).rel_l2.max().unstack().to_numpy(dtype=float)


@pytest.mark.parametrize("head", [None, 1])
def test_every_stop_equals_the_table(drift, head):
    fig = kv_positions(drift, head=head)
    kept = drift.arrays["positions/steps"]
    heat = [i for i, t in enumerate(fig.data) if t.type == "heatmap"]
    for row, step in enumerate(kept):
        shown = fig.layout.sliders[0].steps[row].args[0]
        for number, i in enumerate(heat):
            prompt, site = divmod(number, 2)
            z = np.array(shown["z"][i], dtype=float)
            if not drift.measured[prompt, step]:
                assert np.isnan(z).all()
                continue
            values = expected(drift, prompt, "kv"[site], step, head)
            z = z[:, : values.shape[1]]
            positive = values > 0
            np.testing.assert_allclose(10 ** z[positive], values[positive], rtol=2e-5)
            np.testing.assert_array_equal(np.isnan(z), np.isnan(values))


def test_window_is_drawn_where_it_ends(drift):
    fig = kv_positions(drift)
    step = int(drift.arrays["positions/steps"][-1])
    outside = next(t for t in fig.data if t.name == "outside the window (evicted)" and t.visible)
    xs = [x for x in outside.x if x is not None]
    assert max(xs) == 10 + step - 8 - 0.5  # ten prompt tokens, a window of eight
    assert min(xs) == -0.5
    layers = {y for y in outside.y if y is not None}
    assert layers == {-0.5, 2.5, 3.5, 6.5, 7.5, 10.5}  # layers 3, 7, 11 have full attention


def test_positions_read_by_one_path_only_stand_out(drift):
    arrays = dict(drift.arrays)
    arrays["positions/visible_a"] = arrays["positions/visible_a"].copy()
    arrays["positions/visible_a"][0, -1, 3, 2] = False  # full attention: the cache lost a key
    fig = kv_positions(replace(drift, arrays=arrays))
    odd = next(t for t in fig.data if t.name == "read by one path only" and t.visible)
    assert [x for x in odd.x if x is not None] == [1.5, 2.5, 2.5, 1.5, 1.5]


def test_what_a_cache_has_evicted_and_a_full_pass_still_holds_is_outside(drift):
    arrays = dict(drift.arrays)
    arrays["positions/visible_b"] = np.ones_like(arrays["positions/visible_b"])
    fig = kv_positions(replace(drift, arrays=arrays))
    by_name = {t.name: t for t in fig.data if t.visible}
    same = {t.name: t for t in kv_positions(drift).data if t.visible}
    assert by_name["outside the window (evicted)"].x == same["outside the window (evicted)"].x
    assert not by_name["read by one path only"].x


def test_outline_joins_equal_neighbours():
    mask = np.array([[1, 1, 0, 1], [1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]], dtype=bool)
    lines = _outline(mask, np.array([0, 1, 2, 5]), np.arange(0, 8, 2), stride=2)
    assert lines["x"] == [-1, 3, 3, -1, -1, None, 5, 7, 7, 5, 5, None, -1, 1, 1, -1, -1, None]
    assert lines["y"][:5] == [-0.5, -0.5, 1.5, 1.5, -0.5]
    assert lines["y"][-6:-1] == [4.5, 4.5, 5.5, 5.5, 4.5]


def test_prompt_end_is_marked(drift):
    line = next(t for t in kv_positions(drift, prompt=2).data if t.name == "end of the prompt" and t.visible)
    assert list(line.x) == [11.5, 11.5]


def test_a_short_prompt_opens_at_its_last_kept_step(drift):
    slider = kv_positions(drift, prompt=2).layout.sliders[0]
    assert slider.steps[slider.active].label == "8"
    assert kv_positions(drift, prompt=0).layout.sliders[0].active == 2


def test_long_sequences_are_strided_and_say_so(drift, monkeypatch):
    monkeypatch.setattr(choices, "MAX_CELLS", 600)
    fig = kv_positions(drift)
    assert "only every 4th position is drawn" in fig.layout.title.text
    heat = next(t for t in fig.data if t.type == "heatmap")
    assert list(heat.x) == list(range(0, 25, 4))
    full = expected(drift, 0, "k", 15)[:, ::4]
    np.testing.assert_allclose(10 ** heat.z[full > 0], full[full > 0], rtol=2e-5)


def test_hover_names_the_token_at_a_position(drift):
    heat = next(t for t in kv_positions(drift).data if t.type == "heatmap")
    assert heat.text[0][2] == "sliding attention, window 8<br>“␣&lt;b&gt;bold&lt;/b&gt;”"


def test_missing_positions_and_heads_are_refused(drift, make_drift):
    with pytest.raises(SiteError, match=r"run compare\(\.\.\., sites=\[\.\.\., 'k', 'v'\]\)"):
        kv_positions(make_drift(heads=False, control=False))
    with pytest.raises(InputError, match="3 KV heads"):
        kv_positions(drift, head=3)
