import numpy as np
import pytest

from kvdrift.errors import InputError, SiteError
from kvdrift.views import families


@pytest.fixture(scope="module")
def other(make_drift):
    return make_drift(n_layers=5, n_prompts=2, window=None, control=False, model="org/other-1b", seed=3)


def test_curves_equal_the_tables_over_relative_depth(drift, other):
    fig = families({"small": drift, "other": other})
    for name, which, n in (("small", drift, 12), ("other", other, 5)):
        trace = next(t for t in fig.data if t.name == name)
        np.testing.assert_allclose(trace.x, (np.arange(n) + 1) / n)
        table = which.to_dataframe("layers").query("site == 'resid_post' and step >= 1")
        expected = table.groupby(["prompt", "layer"]).rel_l2.median().unstack().median()
        np.testing.assert_allclose(trace.y, expected.to_numpy(dtype=float), rtol=1e-12)
        floor = next(t for t in fig.data if t.name == f"{name}: rounding floor")
        assert len(floor.y) == n


def test_a_list_is_named_by_model_and_dtype(drift, other):
    names = {t.name for t in families([drift, other, drift.control, drift]).data}
    assert {"org/other-1b, bfloat16", "made-up-135m, float32"} <= names
    assert {"made-up-135m, bfloat16 (1)", "made-up-135m, bfloat16 (2)"} <= names


def test_takeaway_gives_the_range(drift, other):
    title = families([drift, drift.control]).layout.title.text.replace("</b><br><b>", " ")
    assert "Drift ends between" in title
    assert "each model's own rounding floor" in title


def test_names_are_escaped(drift):
    names = [t.name for t in families({"<b>x</b>": drift}).data]
    assert "&lt;b&gt;x&lt;/b&gt;" in names


def test_empty_and_single_inputs_are_explained(drift):
    with pytest.raises(InputError, match="at least one drift"):
        families([])
    with pytest.raises(InputError, match="dict of name to drift, or a list"):
        families(drift)
    with pytest.raises(SiteError, match="embed"):
        families([drift], site="embed")
