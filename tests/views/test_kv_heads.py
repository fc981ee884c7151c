import numpy as np
import pytest

from kvdrift.errors import SiteError
from kvdrift.views import kv_heads


def test_first_stop_is_the_median_over_counted_steps(drift):
    fig = kv_heads(drift, prompt=1)
    table = drift.to_dataframe("heads").query("prompt == 1 and step >= 1")
    for site in ("k", "v"):
        trace = next(t for t in fig.data if t.name == f"{site}, prompt 1")
        assert trace.visible
        median = table[table.site == site].groupby(["head", "layer"]).rel_l2.median().unstack()
        np.testing.assert_allclose(10**trace.z, median.to_numpy(dtype=float), rtol=2e-5)


def test_slider_stops_equal_the_table(drift):
    fig = kv_heads(drift)
    slider = fig.layout.sliders[0]
    assert [s.label for s in slider.steps] == ["median of all", *map(str, drift.steps)]
    step, site, prompt = 4, "v", 0
    z = np.array(slider.steps[1 + step].args[0]["z"][1], dtype=float)
    table = drift.to_dataframe("heads").query(f"prompt == {prompt} and step == {step} and site == '{site}'")
    expected = table.pivot(index="head", columns="layer", values="rel_l2").to_numpy(dtype=float)
    np.testing.assert_allclose(10 ** z[expected > 0], expected[expected > 0], rtol=2e-5)
    assert len(set(z[expected == 0])) == 1
    assert z[expected == 0].max() < z[expected > 0].min()


def test_unmeasured_steps_of_a_short_prompt_are_empty(drift):
    last = kv_heads(drift).layout.sliders[0].steps[-1].args[0]["z"]
    assert all(value is None for row in last[4] for value in row)  # K of prompt 2
    assert any(value is not None for row in last[0] for value in row)


def test_one_kv_head_and_one_step(make_drift):
    drift = make_drift(n_kv_heads=1, n_steps=1, n_prompts=1, control=False)
    fig = kv_heads(drift)
    assert fig.data[0].z.shape == (1, 12)
    assert fig.layout.sliders[0].active == 1
    assert "No step after step 0" in fig.layout.title.text


@pytest.mark.parametrize("prompt", [0, 1])
def test_takeaway_names_the_largest_of_the_prompt_shown(drift, prompt):
    medians = {s: drift.per_prompt(s)[prompt] for s in ("k", "v")}
    site = max(medians, key=lambda s: medians[s].max())
    layer, head = np.unravel_index(medians[site].argmax(), medians[site].shape)
    fig = kv_heads(drift, prompt=prompt)
    title = fig.layout.title.text.replace("</b><br><b>", " ")
    assert f"In prompt {prompt} {site.upper()} of layer {layer}, head {head} drifts most" in title
    assert fig.layout.updatemenus[0].buttons[prompt].args[1]["title.text"] == fig.layout.title.text


def test_missing_heads_are_refused_with_the_fix(make_drift):
    with pytest.raises(SiteError, match=r"run compare\(\.\.\., sites=\[\.\.\., 'k', 'v'\]\)"):
        kv_heads(make_drift(heads=False, control=False))
