import numpy as np
import pytest

from kvdrift.errors import InputError
from kvdrift.views import precision


def by_layer(drift):
    table = drift.to_dataframe("layers").query("site == 'resid_post' and step >= 1")
    return table.groupby(["prompt", "layer"]).rel_l2.median().unstack().median().to_numpy(dtype=float)


def test_both_dtypes_equal_their_tables(drift):
    fig = precision(drift)
    for name, which in (("bfloat16", drift), ("float32", drift.control)):
        trace = next(t for t in fig.data if t.name == name)
        np.testing.assert_allclose(trace.y, by_layer(which), rtol=1e-12)
        kl = next(t for t in fig.data if t.name == f"KL, {name}")
        table = which.to_dataframe("logits").query("step >= 1")
        np.testing.assert_array_equal(kl.y, table.kl)
        assert sum(symbol == "x" for symbol in kl.marker.symbol) == table.flip.sum()


def test_panels_share_one_axis(drift):
    fig = precision(drift)
    assert fig.layout.yaxis2.matches == "y"
    assert fig.layout.yaxis.range == fig.layout.yaxis2.range
    assert fig.layout.yaxis3.matches is None


def test_takeaway_compares_plateau_kl_and_flips(drift):
    title = precision(drift).layout.title.text.replace("</b><br><b>", " ")
    ratio = drift.growth().plateau.value / drift.control.growth().plateau.value
    assert f"float32 lowers the drift of the last layers {ratio:,.0f}×" in title
    flips = [int(d.values("logits", "flip")[d.counted].sum()) for d in (drift, drift.control)]
    assert f"flips {flips[0]} → {flips[1]}" in title


def test_zero_drift_claims_nothing_else(make_drift):
    title = precision(make_drift(all_zero=True, inf=False)).layout.title.text
    assert "No drift at the last layers in bfloat16 or in float32" in title.replace("</b><br><b>", " ")
    nothing = precision(make_drift(n_steps=1)).layout.title.text
    assert "No step after step 0 was measured" in nothing


def test_a_drift_without_control_is_refused_with_the_fix(make_drift):
    with pytest.raises(InputError, match=r'run compare\(\.\.\., also_in="float32"\)'):
        precision(make_drift(control=False))
