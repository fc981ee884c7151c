import numpy as np
import pytest

from kvdrift.errors import SiteError
from kvdrift.views import tokens
from kvdrift.views.parts.labels import token_label


def shown(fig, name):
    return next(t for t in fig.data if t.name == name and t.visible is not False)


@pytest.mark.parametrize("prompt", [0, 2])
def test_rows_flips_and_ties_equal_the_table(drift, prompt):
    fig = tokens(drift, prompt=prompt)
    table = drift.to_dataframe("logits").query(f"prompt == {prompt}")
    for path in "ab":
        words = shown(fig, f"tokens of path {path}")
        assert list(words.text) == [token_label(t, 9) for t in table[f"text_{path}"]]
        ties = shown(fig, f"ties of path {path}")
        assert len(ties.x) == table[f"tie_{path}"].sum()
        margin = shown(fig, f"margin of path {path}")
        np.testing.assert_array_equal(margin.x, table.step)
        expected = table[f"margin_{path}"].to_numpy()
        np.testing.assert_array_equal(margin.y[expected > 0], expected[expected > 0])
        assert (margin.y[expected == 0] < expected[expected > 0].min()).all()
    cells = shown(fig, "tokens").z
    assert np.nansum(cells) == 2 * table.flip.sum()
    assert np.isfinite(cells).sum() == 2 * len(table)


def test_mark_where_free_runs_part(drift):
    fig = tokens(drift, prompt=0)
    mark = shown(fig, "free runs part")
    step = drift.free_divergence[0]
    assert step is not None
    assert list(mark.x) == [step % 16]
    assert f"free runs part at step {step}" in fig.layout.title.text.replace("</b><br><b>", " ")


def test_zero_drift_says_so(make_drift):
    fig = tokens(make_drift(all_zero=True, inf=False, control=False))
    assert "same token at all 16 measured steps" in fig.layout.title.text.replace("</b><br><b>", " ")
    assert not np.nansum(shown(fig, "tokens").z)


def test_prompt_dropdown_changes_title_and_traces(drift):
    menu = tokens(drift).layout.updatemenus[0]
    assert len(menu.buttons) == 3
    assert menu.buttons[1].label == "prompt 1: made-up &lt;i&gt;prompt&lt;/i&gt; 1"
    titles = {b.args[1]["title.text"] for b in menu.buttons}
    assert len(titles) == 3


def test_long_runs_keep_a_bounded_grid_and_say_so(make_drift):
    drift = make_drift(n_layers=2, n_steps=400, n_prompts=1, heads=False, control=False)
    fig = tokens(drift)
    assert "first 288 measured steps; 112 more" in fig.layout.title.text
    assert len(shown(fig, "margin of path a").x) == 400


def test_missing_logits_are_refused(drift):
    from dataclasses import replace

    arrays = {k: v for k, v in drift.arrays.items() if not k.startswith("drift/logits/")}
    with pytest.raises(SiteError, match="logits"):
        tokens(replace(drift, arrays=arrays))
