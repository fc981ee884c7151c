import numpy as np
import pytest

from kvdrift.errors import InputError
from kvdrift.patching.spec import Patch
from kvdrift.views import recovery_curve

NAMES = {
    "patched": "patched",
    "unpatched": "unpatched",
    "re-roll": "re-roll: sums in another order, no patch",
    "one ulp": "one entry moved by one ulp",
    "re-rolled patched": "patched, sums re-rolled",
    "float32 donor": "patched from a wider donor",
}


@pytest.fixture(scope="module")
def result(made):
    return made.patch_result()


def line(fig, name):
    lines = [t for t in fig.data if t.mode == "lines+markers" and t.visible]
    return next(t for t in lines if t.name == name or t.name.startswith(f"{name}:"))


def median(result, role, metric="logit_l2", cell=None):
    table = result.to_dataframe("steps")
    rows = table[(table.role == role) & (table.cell.isin([-1] if cell is None else [cell]))]
    return rows.groupby("step")[metric].median()


def plain(fig):
    return fig.layout.title.text.replace("</b><br><b>", " ")


@pytest.mark.parametrize("role", NAMES)
@pytest.mark.parametrize("metric", ["logit_l2", "kl"])
def test_lines_are_medians_of_the_table(result, role, metric):
    fig = recovery_curve(result, metric=metric)
    expected = median(result, role, metric, None if role in ("unpatched", "re-roll") else 0)
    drawn = line(fig, NAMES[role])
    assert list(drawn.x) == list(expected.index)
    positive = expected.to_numpy() > 0
    np.testing.assert_array_equal(drawn.y[positive], expected[positive])
    assert np.isnan(drawn.y[~positive]).all()
    assert (~positive).sum() == 1  # step 0


def test_placebo_band_is_the_range_of_seeds(result):
    fig = recovery_curve(result)
    table = result.to_dataframe("steps")
    seeds = table[table.role == "placebo"].groupby(["seed", "step"]).logit_l2.median().unstack()
    assert len(seeds) == 3
    shape = next(t for t in fig.data if t.name.endswith("range"))
    x, y = np.array(shape.x), np.array(shape.y)
    keep = ~np.isnan(x)
    n = keep.sum() // 2
    np.testing.assert_array_equal(y[keep][:n], seeds.max()[1:])
    np.testing.assert_array_equal(y[keep][n:][::-1], seeds.min()[1:])
    np.testing.assert_array_equal(line(fig, "placebo").y[1:], seeds.median()[1:])


def test_bit_identical_steps_are_grey_marks_at_the_bottom(made):
    result = made.patch_result(remains=0.0)
    fig = recovery_curve(result)
    zeros = next(t for t in fig.data if t.name == "patched: exactly zero")
    assert list(zeros.x) == list(range(12))
    assert len(set(zeros.y)) == 1
    assert 0 < zeros.y[0] < np.nanmin(line(fig, "unpatched").y)
    assert "bit-identical" in fig.layout.yaxis.ticktext
    assert "gives cache-OFF's logits bit for bit at every step" in plain(fig)


def test_written_steps_are_shaded(made):
    once = recovery_curve(made.patch_result(Patch("kv", schedule="one_shot(4)")))
    assert [(s.x0, s.x1) for s in once.layout.shapes] == [(3.65, 4.35)]
    assert once.layout.annotations[0].text == "patch written at step 4 only"
    window = recovery_curve(made.patch_result(Patch("kv", schedule="window(2, 5)")))
    assert [(s.x0, s.x1) for s in window.layout.shapes] == [(1.65, 5.35)]
    always = recovery_curve(made.patch_result())
    assert always.layout.shapes[0].x0 == 0.65
    assert always.layout.annotations[0].text == "patch written at every step from 1 on"


def test_title_holds_the_table_s_distances_and_recovery(result):
    row = result.to_dataframe().iloc[0]
    text = plain(recovery_curve(result))
    assert (
        f"{row.logit_l2:.3g} away; unpatched {row.logit_l2_unpatched:.3g}, placebo {row.logit_l2_reference:.3g}" in text
    )
    assert f"recovery {row.recovery:.2f} (95 % interval {row.recovery_low:.2f} to {row.recovery_high:.2f})" in text


def test_controls_start_hidden(result):
    fig = recovery_curve(result)
    hidden = {t.name for t in fig.data if t.visible == "legendonly" and t.mode == "lines+markers"}
    assert hidden == {NAMES[role] for role in ("one ulp", "re-rolled patched", "float32 donor")}


def test_dropdown_over_the_cells_of_a_sweep(made):
    sweep = made.sweep(made.layer_cells(("k", "kv"), range(2), ("one_shot(3)",)))
    fig = recovery_curve(sweep, 2)
    (menu,) = fig.layout.updatemenus
    assert [b.label for b in menu.buttons][2] == "2: kv, layers 0, one_shot(3)"
    assert menu.active == 2
    for cell, button in enumerate(menu.buttons):
        shown = [t for t, v in zip(fig.data, button.args[0]["visible"], strict=True) if v is True]
        (drawn,) = [t for t in shown if t.name == "patched" and t.mode == "lines+markers"]
        np.testing.assert_array_equal(drawn.y[1:], median(sweep, "patched", cell=cell)[1:])
        assert sweep.cells[cell].label in button.args[1]["title.text"]
    assert [t.visible for t in fig.data] == menu.buttons[2].args[0]["visible"]


def test_many_cells_have_no_dropdown(made):
    fig = recovery_curve(made.sweep(made.layer_cells(layers=range(11), sites=("k", "v", "q", "z")), n_layers=11), 43)
    assert fig.layout.updatemenus == ()
    assert "Patch: z, layers 10, persistent" in fig.layout.title.text


def test_a_trivial_patch_says_so(made):
    fig = recovery_curve(made.patch_result("resid_post", remains=0.0))
    assert "By construction" in plain(fig)


def test_nothing_follows(made):
    fig = recovery_curve(made.patch_result(Patch("kv", schedule="one_shot(11)"), n_prompts=1))
    assert "No step follows the first write" in plain(fig)


def test_other_things_are_refused(drift, result):
    with pytest.raises(InputError, match=r"recovery_curve was given a Drift"):
        recovery_curve(drift)
    with pytest.raises(InputError, match="cell=1 is out of range: this result has 1 cell, counted from 0"):
        recovery_curve(result, 1)
    with pytest.raises(InputError, match="logit_l2 or kl"):
        recovery_curve(result, metric="flip")
