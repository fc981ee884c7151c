import re
from dataclasses import replace

import numpy as np
import pytest

from kvdrift.errors import InputError
from kvdrift.patching.spec import Cell, Patch
from kvdrift.views import recovery
from kvdrift.views.parts.interventions import signed
from kvdrift.views.parts.recovery_points import Point, points
from kvdrift.words.numbers import number

NAN = float("nan")


@pytest.fixture(scope="module")
def sweep(made):
    """Layer × site with an undefined cell, one far below −1, and a trivial one."""
    cells = made.layer_cells()
    share = {"resid_post": 1.05, "k": 0.95, "v": 0.85, "kv": 0.5}
    remains = [0.0 if cell.trivial(6, range(2, 12)) else share[cell.patches[0].site] for cell in cells]
    remains[8], remains[9] = NAN, 2.5
    return made.sweep(cells, remains)


def plain(fig):
    return fig.layout.title.text.replace("</b><br><b>", " ")


def trace(fig, name):
    return next(t for t in fig.data if t.name == name)


def test_colours_are_the_table_clipped_at_one(sweep):
    fig = recovery(sweep)
    z = trace(fig, "recovery").z
    table = sweep.to_dataframe()
    sites = list(fig.layout.xaxis.ticktext)
    assert sites == ["resid_post", "k", "v", "kv"]
    seen = 0
    for _, row in table.iterrows():
        value = z[row.layer, sites.index(row.site)]
        if np.isnan(row.recovery):
            assert np.isnan(value)
            continue
        assert value == max(row.recovery, -1.0)
        seen += 1
    assert seen == len(table) - 1
    assert (fig.layout.coloraxis.cmin, fig.layout.coloraxis.cmax) == (-1, 1)


def test_values_below_the_scale_are_given_raw(sweep):
    fig = recovery(sweep)
    table = sweep.to_dataframe()
    raw = table.recovery[9]
    assert raw < -1
    assert trace(fig, "recovery").z[3, 1] == -1
    shown = f"{raw:.2f}".replace("-", "−")
    assert f"recovery: <b>{shown}" in trace(fig, "recovery").customdata[3, 1]
    assert shown in list(trace(fig, "numbers").text)


def test_undefined_and_trivial_cells_are_marked(sweep):
    fig = recovery(sweep)
    grey = trace(fig, "undefined")
    assert np.argwhere(~np.isnan(grey.z)).tolist() == [[2, 1]]
    assert "undefined: the placebo has the donor's logits" in grey.customdata[2, 1]
    hatch = trace(fig, "by construction")
    x, y = (np.array([v for v in part if v is not None], dtype=float) for part in (hatch.x, hatch.y))
    assert len(np.unique(np.round(y - x, 6))) >= 5  # as many parallel strokes
    assert ((np.abs(x - 0) <= 0.5 + 1e-9) & (np.abs(y - 5) <= 0.5 + 1e-9)).all()
    assert "proves nothing" in trace(fig, "recovery").customdata[5, 0]
    assert {"hatched: 1 by construction", "?: undefined, nothing to recover"} <= {t.name for t in fig.data}


def test_an_ordinary_sweep_has_no_special_entries(made):
    fig = recovery(made.sweep(made.layer_cells(("k", "v"))))
    assert not any("hatched" in t.name or t.name.startswith("?") for t in fig.data)


def test_title_names_the_best_cell_that_is_not_trivial(sweep):
    best = sweep.best().iloc[0]
    text = plain(recovery(sweep))
    assert f"kv at layer {best.layer} (persistent): recovery {best.recovery:.2f}" in text
    assert f"{best.recovery_low:.2f} to {best.recovery_high:.2f}" in text
    bare = sweep.recovery(int(best.cell), role="unpatched").value
    assert f"best of 22 cells; without a patch: {bare:.2f}" in text


def test_a_best_cell_no_nearer_than_no_patch_says_so(made):
    cells = made.layer_cells(("k", "v"), range(2))
    text = plain(recovery(made.sweep(cells, [1.05] * 4)))
    assert "so the patch is not surely of use" in text


def test_hover_holds_what_a_reader_asks_next(sweep):
    row = sweep.to_dataframe().iloc[20]
    text = trace(recovery(sweep), "recovery").customdata[row.layer, 3]
    interval = f"{row.recovery_low:.2f} to {row.recovery_high:.2f}"
    for part in (
        f"recovery: <b>{row.recovery:.2f} (95 % interval {interval})</b>",
        f"after Holm over the cells: {number(row.p_holm)}",
        f"standard error: {number(row.recovery_se)}",
        "single placebos",
        "against no patch at all",
        f"at the written steps: {row.recovery_written:.2f}",
        "restored bit for bit",
        f"flips: {row.flips} (unpatched",
        f"tokens followed: {row.followed:.3g}",
        f"n = {row.n} prompts",
    ):
        assert part in text
    assert f"{row.placebo_low:.2f} to {row.placebo_high:.2f}".replace("-", "−") in text


def test_dropdown_holds_the_other_axes_and_starts_with_the_best(made):
    cells = made.layer_cells(("k", "kv"), range(3), ("one_shot(2)", "persistent"))
    sweep = made.sweep(cells, [1.0] * 9 + [0.4] * 3)
    fig = recovery(sweep)
    (menu,) = fig.layout.updatemenus
    assert [b.label for b in menu.buttons] == ["one-shot at step 2", "persistent"]
    assert menu.active == 1
    table = sweep.to_dataframe()
    for button in menu.buttons:
        shown = [t for t, v in zip(fig.data, button.args[0]["visible"], strict=True) if v]
        (z,) = [t.z for t in shown if t.name.startswith("recovery")]
        kind = "one-shot" if button.label.startswith("one-shot") else "persistent"
        for _, row in table[table.schedule == kind].iterrows():
            assert z[row.layer, ["k", "kv"].index(row.site)] == row.recovery
    assert [t.visible for t in fig.data] == menu.buttons[1].args[0]["visible"]


def test_metric_and_steps_change_what_is_drawn(sweep):
    by_kl = trace(recovery(sweep, metric="kl"), "recovery").z
    assert by_kl[0, 3] == sweep.to_dataframe().recovery_kl[18]
    written = trace(recovery(sweep, steps="written"), "recovery").z
    assert written[0, 3] == sweep.to_dataframe().recovery_written[18]
    words = re.sub(r"<[^>]*>", " ", plain(recovery(sweep, steps="written")))
    assert "the steps at which the patch is written" in " ".join(words.split())


# --- points


@pytest.fixture(scope="module")
def labelled(made):
    once, always = "one_shot(1)", "persistent"
    cells = (
        Cell("residual, <one-shot>", (Patch("resid_post", schedule=once),)),
        Cell("KV, persistent", (Patch("kv", schedule=always),)),
        Cell("K, persistent", (Patch("k", schedule=always),)),
        Cell("V, persistent", (Patch("v", schedule=always),)),
        Cell("residual, persistent", (Patch("resid_post", schedule=always),)),
    )
    return made.sweep(cells, [1.0, 0.5, 2.5, NAN, 0.0], over=())


def test_labels_are_rows_with_the_table_s_numbers(labelled):
    fig = recovery(labelled)
    table = labelled.to_dataframe()
    assert fig.layout.yaxis.ticktext[0] == "residual, &lt;one-shot&gt;"
    assert fig.layout.yaxis.range[0] > fig.layout.yaxis.range[1]  # the first row is at the top
    points = trace(fig, "patched (95 % interval)")
    assert list(points.y) == [0, 1]
    np.testing.assert_array_equal(points.x, table.recovery[:2])
    np.testing.assert_allclose(np.array(points.x) + points.error_x.array, table.recovery_high[:2])
    np.testing.assert_allclose(np.array(points.x) - points.error_x.arrayminus, table.recovery_low[:2])
    assert list(trace(fig, "below −1").x) == [-1.0]
    assert trace(fig, "below −1").text[0] == f"<b>{table.recovery[2]:.2f}</b>".replace("-", "−")
    assert list(trace(fig, "undefined: nothing to recover").y) == [3]
    assert list(trace(fig, "1 by construction").y) == [4]
    assert list(trace(fig, "1 by construction").x) == [1.0]


def test_placebos_and_arms_without_a_patch_stand_beside(labelled):
    fig = recovery(labelled)
    table = labelled.to_dataframe()
    spread = trace(fig, "spread of single placebos")
    ends = np.array(spread.x, dtype=float).reshape(-1, 3)[:, :2]
    known = table[table.placebo_low.notna()]
    np.testing.assert_allclose(ends, np.clip(known[["placebo_low", "placebo_high"]], -1, None))
    for name, role in (("without a patch", "unpatched"), ("re-roll, no patch", "re-roll")):
        values = [labelled.recovery(cell, role=role).value for cell in range(5)]
        shown = trace(fig, name)
        np.testing.assert_allclose(shown.x, [v for v in values if not np.isnan(v)])


def test_without_placebos_zero_is_no_patch(made):
    fig = recovery(made.sweep(made.layer_cells(("k",), range(3)), [0.5] * 3, placebos=0))
    assert "0<br>as without a patch" in fig.layout.yaxis.ticktext
    assert not any(t.name in ("without a patch", "spread of single placebos") for t in fig.data)
    assert "no placebo was run" in plain(fig)


def test_one_numbered_axis_goes_across(made):
    sweep = made.sweep(made.layer_cells(("kv",), (4, 1, 3)))
    fig = recovery(sweep)
    assert list(fig.layout.xaxis.ticktext) == ["1", "3", "4"]
    table = sweep.to_dataframe().sort_values("layer")
    np.testing.assert_array_equal(trace(fig, "patched (95 % interval)").y, table.recovery)


def test_an_interval_without_an_end_is_cut_at_the_axis(made):
    result = made.patch_result()
    cell = Point("x", "", False, replace(result.recovery(), low=-np.inf), result.recovery(), None)
    bars = points([cell], None, "the placebo", "", False).data[-1].error_x
    assert result.recovery().value - bars.arrayminus[0] == -1
    assert signed(-np.inf) == "−∞"


def test_a_single_patch_has_one_point(made):
    result = made.patch_result()
    fig = recovery(result)
    assert list(trace(fig, "patched (95 % interval)").x) == [result.recovery().value]


@pytest.mark.parametrize("n_prompts", [1, 4])
def test_few_prompts_have_no_bars(made, n_prompts):
    fig = recovery(made.patch_result(n_prompts=n_prompts))
    assert "(no interval)" in plain(fig)
    assert trace(fig, "patched (95 % interval)").error_x.array is None


def test_other_things_are_refused(drift, sweep):
    with pytest.raises(InputError, match=r"recovery was given a Drift; it shows what kvdrift\.patch"):
        recovery(drift)
    with pytest.raises(InputError, match="logit_l2 or kl"):
        recovery(sweep, metric="rel_l2")
    with pytest.raises(InputError, match="'after', 'written', 'all'"):
        recovery(sweep, steps="before")


@pytest.mark.parametrize("dark", [False, True])
def test_template(sweep, labelled, dark):
    for result in (sweep, labelled):
        paper = recovery(result, dark=dark).layout.template.layout.paper_bgcolor
        assert paper == ("#15181e" if dark else "#ffffff")
