import numpy as np
import pytest

from kvdrift.experiments import PaperArchitecture
from kvdrift.views import architectures
from kvdrift.views.architectures import PANELS


@pytest.fixture(scope="module")
def result(make_drift):
    build = {"control": False, "heads": False, "n_prompts": 6}
    drifts = [make_drift(**build, seed=seed, window=window, n_kv_heads=heads)
              for seed, window, heads in ((0, 8, 3), (1, 8, 6), (0, 64, 3), (3, 64, 6))]  # fmt: skip
    return PaperArchitecture(*drifts)


def arms(fig, column):
    axis = "x" if column == 0 else "x2"
    return [trace for trace in fig.data if trace.meta == "arm" and trace.xaxis == axis]


def test_curves_are_the_table(result):
    fig, table = architectures(result), result.to_dataframe("layers")
    for column, of in enumerate(PANELS):
        for trace, arm in zip(arms(fig, column), result.arms, strict=True):
            rows = table[(table["arm"] == arm) & (table["of"] == of)]
            assert trace.name.startswith(arm)
            assert np.array_equal(trace.x, rows["layer"])
            value = rows["value"].to_numpy()
            drawn = np.asarray(trace.y)
            assert np.array_equal(drawn[value > 0], value[value > 0])
            zeros = drawn[value == 0]
            assert (zeros < value[value > 0].min()).all(), "exact zeros have a row of their own"
            assert np.isnan(drawn[np.isnan(value)]).all()


def test_the_floor_is_the_originals(result):
    fig, table = architectures(result), result.to_dataframe("layers")
    floors = [trace for trace in fig.data if trace.meta == "floor"]
    for trace, of in zip(floors, PANELS, strict=True):
        rows = table[(table["arm"] == "original") & (table["of"] == of) & (table["floor"] > 0)]
        assert np.array_equal(np.asarray(trace.y)[rows["layer"]], rows["floor"])


def test_each_arm_stands_once_in_the_legend_with_its_heads_and_windows(result):
    names = [trace.name for trace in architectures(result).data if trace.showlegend and trace.meta == "arm"]
    assert names == [
        "original: GQA 6:3, windows 9 of 12 layers: 8",
        "KV heads expanded: GQA 12:6, windows 9 of 12 layers: 8",
        "windows widened: GQA 6:3, windows 9 of 12 layers: 64 (same numbers)",
        "both: GQA 12:6, windows 9 of 12 layers: 64",
    ]


def test_the_title_is_the_answer(result):
    title = architectures(result).layout.title.text.replace("</b><br><b>", " ")
    assert result.headline() in title.replace("&lt;", "<")
    assert "6 prompts" in title


@pytest.mark.parametrize(
    "build",
    [{"n_prompts": 1, "seeds": 0}, {"all_zero": True}, {"n_steps": 1, "n_prompts": 1}, {"n_layers": 1, "inf": False}],
)
def test_odd_results_draw(make_drift, build):
    one = make_drift(**{"control": False, "heads": False, "n_prompts": 2, **build})
    fig = architectures(PaperArchitecture(one, kv_heads=one), dark=True)
    assert fig.layout.template.layout.paper_bgcolor == "#15181e"
    assert len(arms(fig, 0)) == 2
