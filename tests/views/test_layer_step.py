import numpy as np
import pytest

from kvdrift.errors import InputError, SiteError
from kvdrift.views import layer_step
from kvdrift.views.parts import choices
from kvdrift.views.parts.scale import Scale


def cells(drift, site, metric, prompt):
    """``[layer, step]`` from the table; NaN where it has no row."""
    table = drift.to_dataframe("layers")
    rows = table[(table.site == site) & (table.prompt == prompt)]
    wide = rows.pivot(index="layer", columns="step", values=metric)
    return wide.reindex(columns=drift.steps).to_numpy(dtype=float)


def check_colours(z, expected, metric, all_values):
    scale = Scale.of(all_values, metric)
    plain = np.isfinite(expected) & ((expected < 1) if scale.linear else (expected > 10**scale.low))
    shown = z[plain] if scale.linear else 10 ** z[plain]
    np.testing.assert_allclose(shown, expected[plain], rtol=2e-5, atol=1e-5 if scale.linear else 0)
    zero = expected == (1 if scale.linear else 0)
    assert (z[zero] == scale.z(expected[zero], np.array(True))).all()


def test_every_trace_equals_the_table(drift):
    fig = layer_step(drift)
    table = drift.to_dataframe("layers")
    everything = table[table.layer.notna()]["rel_l2"].to_numpy(dtype=float)
    assert len(fig.data) == 5 * 3
    for trace in fig.data:
        site, prompt = trace.meta[0], int(trace.name.rsplit(" ", 1)[1])
        expected = cells(drift, site, "rel_l2", prompt)
        check_colours(trace.z, expected, "rel_l2", everything)
        steps = table[table.prompt == prompt].step
        assert (np.isnan(trace.z).all(axis=0) == ~np.isin(drift.steps, steps)).all()
        assert np.isfinite(trace.z[:, np.isin(drift.steps, steps)]).all()
        first = np.array(trace.customdata)[..., 0]
        positive = np.isfinite(expected) & (expected > 0)
        np.testing.assert_allclose(first[positive].astype(float), expected[positive], rtol=6e-3)
        assert set(first[expected == 0]) <= {"0 (bit-identical)"}


@pytest.mark.parametrize("metric", ["max_abs", "max_ulp", "cosine", "identical"])
def test_metric_dropdown_equals_the_table(drift, metric):
    fig = layer_step(drift)
    menu = next(m for m in fig.layout.updatemenus if m.name == "metric")
    index = ["rel_l2", "max_abs", "max_ulp", "cosine", "identical"].index(metric)
    traces = menu.buttons[index].args[0]["z"]
    chosen = layer_step(drift, metric=metric)
    table = drift.to_dataframe("layers")
    everything = table[table.layer.notna()][metric].to_numpy(dtype=float)
    for trace, z, shown in zip(fig.data, traces, chosen.data, strict=True):
        z = np.array(z, dtype=float)
        np.testing.assert_array_equal(z, shown.z)
        check_colours(z, cells(drift, trace.meta[0], metric, int(trace.name[-1])), metric, everything)


def test_shows_the_site_and_prompt_asked_for(drift):
    fig = layer_step(drift, site="mlp_out", prompt=1)
    seen = [t.name for t in fig.data if t.visible and t.opacity]
    assert seen == ["mlp_out, prompt 1"]
    assert [m.name for m in fig.layout.updatemenus] == ["site", "metric", "prompt"]
    labels = [m.buttons[m.active].label for m in fig.layout.updatemenus]
    assert labels == ["mlp_out", "relative L2", "prompt 1: made-up &lt;i&gt;prompt&lt;/i&gt; 1"]


def test_infinity_and_nan_are_marked_not_hidden(drift):
    fig = layer_step(drift, site="mlp_out")
    trace = next(t for t in fig.data if t.name == "mlp_out, prompt 0")
    assert np.isfinite(trace.z[-2:, 3]).all()
    assert (trace.z[-2:, 3] > Scale.of(drift.values("mlp_out")[drift.measured]).high).all()
    assert {row[0] for row in np.array(trace.customdata)[-2:, 3]} == {"infinite", "not a number"}
    assert "NaN / inf" in fig.layout.coloraxis.colorbar.ticktext


def test_hover_holds_token_window_floor_and_local(drift):
    trace = layer_step(drift).data[4]
    assert "window 8" in trace.text[0][1]
    assert "reads" in trace.text[0][1]
    for word in ("rounding floor", "made by this layer alone", "step %{x}", "layer %{y}"):
        assert word in trace.hovertemplate
    table = drift.to_dataframe("layers").query("site == 'resid_post' and prompt == 0 and step == 5 and layer == 7")
    shown = np.array(trace.customdata)[7, 5]
    assert float(shown[2]) == pytest.approx(table.floor_median.item(), rel=6e-3)


def test_large_data_is_strided_and_says_so(make_drift, monkeypatch):
    monkeypatch.setattr(choices, "MAX_CELLS", 1000)
    drift = make_drift(n_layers=4, n_steps=150, n_prompts=2, control=False)
    fig = layer_step(drift)
    assert "only every 15th step is drawn" in fig.layout.title.text
    assert list(fig.data[0].x) == list(range(0, 150, 15))
    assert len(fig.layout.updatemenus) == 2
    np.testing.assert_allclose(10 ** fig.data[4].z[-1, 1:], drift.values("resid_post")[0, 15::15, -1], rtol=2e-5)


def test_unknown_site_metric_prompt_are_refused(drift):
    with pytest.raises(SiteError, match=r"layer_step cannot show 'k'.*sites=\[\.\.\., 'k'\]"):
        layer_step(drift, site="k")
    with pytest.raises(InputError, match="rel_l2, max_abs"):
        layer_step(drift, metric="kl")
    with pytest.raises(InputError, match="3 prompts"):
        layer_step(drift, prompt=3)


def test_nothing_is_drawn_on_a_screen(drift, monkeypatch):
    monkeypatch.setattr("plotly.io.show", lambda *a, **k: pytest.fail("a view must not show itself"))
    layer_step(drift)


def test_the_title_names_the_source_and_the_layer_from_which_it_shows(make_drift):
    drift = make_drift(control=False)
    assert "Drift starts in layer 2 and" in layer_step(drift).layout.title.text
    drift.arrays["drift/resid_post/rel_l2"][..., :4] = 0.0
    title = layer_step(drift).layout.title.text.replace("</b><br><b>", " ")
    assert "Drift starts in layer 2's attention, shows at resid_post from layer 4 on and" in title
    other = layer_step(drift, site="attn_out").layout.title.text
    assert "Drift starts in layer 2 and" in other  # what differs there is in the figure
