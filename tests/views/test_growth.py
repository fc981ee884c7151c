import numpy as np
import pytest

from kvdrift.errors import SiteError
from kvdrift.views import growth
from kvdrift.views.parts.curves import curve


def by_layer(drift, column, site="resid_post"):
    """Median over steps ≥ 1 of each prompt, then over prompts, from the table."""
    table = drift.to_dataframe("layers")
    rows = table[(table.site == site) & (table.step >= 1)]
    per_prompt = rows.groupby(["prompt", "layer"])[column].median().unstack()
    return per_prompt.median().to_numpy(dtype=float)


def trace(fig, name, visible=True):
    return next(t for t in fig.data if t.name.startswith(name) and t.visible is visible)


def test_curve_equals_the_table(drift):
    shown = trace(growth(drift), "cache-ON against cache-OFF")
    np.testing.assert_allclose(shown.y, by_layer(drift, "rel_l2"), rtol=1e-12)
    np.testing.assert_array_equal(shown.x, drift.layers("resid_post"))


def test_site_dropdown_shows_that_site_alone(drift):
    fig = growth(drift)
    menu = fig.layout.updatemenus[0]
    for button in menu.buttons:
        seen = [t for t, v in zip(fig.data, button.args[0]["visible"], strict=True) if v is True]
        curves = [t for t in seen if t.name == "cache-ON against cache-OFF"]
        assert len(curves) == 1
        assert button.label in button.args[1]["title.text"]
        expected = by_layer(drift, "rel_l2", button.label)
        drawn = np.isfinite(curves[0].y) & (expected > 0)
        np.testing.assert_allclose(curves[0].y[drawn], expected[drawn], rtol=1e-12)
        broken = [t for t in seen if t.name.endswith("NaN / inf")]
        assert drawn.sum() + sum(len(t.x) for t in broken) == 12


def test_floor_band_covers_every_reroll(drift):
    fig = growth(drift)
    band = trace(fig, "rounding floor (range of 3 re-rolls in each of 3 prompts)")
    floors = drift.values("resid_post", of="floor")
    medians = np.array([np.median(floors[s, p][drift.counted[p]], axis=0) for p in range(3) for s in range(3)])
    n = len(drift.layers("resid_post"))
    np.testing.assert_allclose(band.y[:n], medians.max(axis=0))
    np.testing.assert_allclose(band.y[n:][::-1], medians.min(axis=0))


def test_many_rerolls_are_shown_by_quantiles_and_say_so(make_drift):
    drift = make_drift(n_prompts=6, seeds=4, n_steps=14, control=False)
    assert curve(drift, "resid_post").floor_words == "rounding floor (5 to 95 % of 4 re-rolls in each of 6 prompts)"


def test_source_is_marked_where_local_drift_starts(drift, make_drift):
    names = [t.name for t in growth(drift).data if t.visible is True]
    assert "source: layer 2, its attention" in names
    without = growth(make_drift(local=False, control=False))
    assert not [t.name for t in without.data if "source" in t.name]


def test_local_drift_and_its_floor_are_means_of_the_table(drift):
    fig = growth(drift)
    table = drift.to_dataframe("layers").query("site == 'resid_post' and step >= 1")
    expected = table.groupby(["prompt", "layer"]).local.mean().unstack().mean().to_numpy(dtype=float)
    shown = trace(fig, "made by the layer alone")
    assert np.isnan(shown.y[1])
    assert np.isnan(expected[1])
    assert shown.y[2] == pytest.approx(expected[2])
    assert list(shown.customdata[2]) == ["1e-4", "100%", trace(fig, "floor of local").customdata[2]]
    floors = drift.values("resid_post", of="local_floor").mean(axis=0)
    means = [floors[p][drift.counted[p]].mean(axis=0) for p in range(3)]
    drawn = trace(fig, "floor of local").y
    np.testing.assert_allclose(drawn[~np.isnan(drawn)], np.mean(means, axis=0))


def test_a_median_between_zero_and_the_smallest_prompt_stays_on_the_axis(make_drift):
    from dataclasses import replace

    drift = make_drift(n_prompts=2, seeds=0, local=False, control=False)
    arrays = dict(drift.arrays)
    arrays["drift/resid_post/rel_l2"] = arrays["drift/resid_post/rel_l2"].copy()
    arrays["drift/resid_post/rel_l2"][0, 1:, 0] = 0.0
    fig = growth(replace(drift, arrays=arrays))
    shown = trace(fig, "cache-ON")
    low = 10 ** fig.layout.yaxis.range[0]
    zero = fig.layout.yaxis.tickvals[list(fig.layout.yaxis.ticktext).index("bit-identical")]
    assert low < zero < shown.y[0]


def test_layers_are_tagged_by_window(drift, make_drift):
    names = [t.name for t in growth(drift).data]
    assert "sliding attention, window 8: 9 layers" in names
    assert "full attention: 3 layers" in names
    plain = growth(make_drift(window=None, control=False))
    assert not [t.name for t in plain.data if "full attention" in t.name]


def test_zeros_have_their_own_row_below_the_smallest_number(make_drift):
    fig = growth(make_drift(all_zero=True, inf=False, seeds=0, control=False))
    shown = trace(fig, "cache-ON")
    assert len(set(shown.y)) == 1
    assert fig.layout.yaxis.ticktext == ("bit-identical",)
    assert fig.layout.yaxis.tickvals[0] == pytest.approx(shown.y[0])
    assert "Bit-identical" in fig.layout.title.text


def test_title_states_the_finding(drift):
    found = drift.growth("resid_post")
    title = growth(drift).layout.title.text.replace("</b><br><b>", " ")
    assert "Drift starts in layer 2 and reaches its plateau" in title
    assert f"at layer {int(found.plateau_layer.value)} of 12" in title
    assert "the rounding floor" in title
    assert "made-up-135m in bfloat16" in title


def test_one_prompt_has_no_interval_and_one_step_no_curve(make_drift):
    one = growth(make_drift(n_prompts=1, control=False))
    assert not [t.name for t in one.data if "interval" in t.name]
    nothing = growth(make_drift(n_prompts=1, n_steps=1, control=False))
    assert "No step after step 0 was measured" in nothing.layout.title.text


def test_missing_site_is_refused(drift):
    with pytest.raises(SiteError, match=r"Run compare\(\.\.\., sites="):
        growth(drift, site="embed")


@pytest.mark.parametrize(
    ("seeds", "prompts", "said"),
    [
        (1, 3, "range of 1 re-roll in each of 3 prompts"),
        (2, 1, "range of 2 re-rolls"),
        (3, 4, "range of 3 re-rolls in each of 4 prompts"),
    ],
)
def test_the_floor_counts_re_rolls_not_prompts(make_drift, seeds, prompts, said):
    names = [trace.name for trace in growth(make_drift(seeds=seeds, n_prompts=prompts, control=False)).data]
    assert f"rounding floor ({said})" in names
