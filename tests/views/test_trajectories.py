import numpy as np
import pytest

from kvdrift.errors import InputError
from kvdrift.patching.spec import Patch
from kvdrift.views import trajectories
from kvdrift.views.parts.labels import token_label

ARMS = ("donor", "unpatched", "patched")


@pytest.fixture(scope="module")
def result(made):
    return made.patch_result(n_steps=20)


def shown(fig, name):
    return next(t for t in fig.data if t.name == name and t.visible is not False)


def plain(fig):
    return fig.layout.title.text.replace("</b><br><b>", " ")


@pytest.mark.parametrize("prompt", [0, 1, 2])
def test_rows_are_the_texts_step_by_step(result, prompt):
    fig = trajectories(result, prompt=prompt)
    texts = result.trajectories[prompt]
    cells = shown(fig, "tokens")
    for row, arm in enumerate(ARMS):
        words = shown(fig, f"tokens: {arm}")
        assert list(words.text) == [token_label(result.token_texts[t], 7) for t in texts[arm]]
        for step, token in enumerate(texts[arm]):
            y, x = 4 * (step // 16) + row, step % 16
            assert (words.x[step], words.y[step]) == (x, -y)
            hover = cells.customdata[y, x]
            assert f"step {step}, {arm}" in hover
            assert f"(id {token})" in hover
    n = sum(len(text) for text in texts.values())
    assert np.isfinite(cells.z).sum() == n


def test_marks_where_each_leaves_the_donor(result):
    fig = trajectories(result)
    marks = shown(fig, "leaves the donor's text")
    assert list(marks.x) == [3, 5]
    assert list(marks.text) == [
        "unpatched leaves the donor's text at step 3",
        "patched leaves the donor's text at step 5",
    ]
    z = shown(fig, "tokens").z
    assert (z[0][:16] == 0).all()  # the donor is its own text
    assert z[1][:6].tolist() == [0, 0, 0, 1, 2, 2]
    assert z[2][:7].tolist() == [0, 0, 0, 0, 0, 1, 2]
    assert "cache-OFF's for 5 of 20 tokens; unpatched, for 3" in plain(fig)
    assert "donor: " in shown(fig, "tokens").customdata[1, 3]


def test_a_text_that_never_leaves(result):
    fig = trajectories(result, prompt=1)
    assert len(shown(fig, "leaves the donor's text").x) == 1
    assert "for all of 18 tokens" in plain(fig)


def test_rows_say_which_path_they_are(result):
    labels = list(trajectories(result).layout.yaxis.ticktext)
    assert labels[:3] == ["step 0…  donor (cache-OFF)", "unpatched (cache-ON)", "patched (cache-ON)"]
    assert labels[3].startswith("step 16…")


def test_written_steps_are_marked_unless_they_are_all(made, result):
    once = trajectories(made.patch_result(Patch("kv", schedule="one_shot(4)")))
    bar = shown(once, "patch is written")
    assert list(bar.x) == [3.55, 4.45, None]
    assert "the patch is written at this step" in shown(once, "tokens").customdata[2, 4]
    assert "the patch is written" not in shown(once, "tokens").customdata[2, 5]
    always = trajectories(result)
    assert all(len(t.x) == 0 for t in always.data if t.name == "patch is written")


def test_shorter_texts_leave_at_their_end(made):
    result = made.patch_result(n_prompts=1)
    result.extra["trajectories"] = [{"donor": [1, 2, 3, 4], "unpatched": [1, 2], "patched": [1, 2, 3, 4]}]
    assert "cache-OFF's for all of 4 tokens; unpatched, for 2" in plain(trajectories(result))


def test_same_length_is_no_gain(made):
    result = made.patch_result(n_prompts=1)
    result.extra["trajectories"] = [{"donor": [1, 2, 3], "unpatched": [1, 5, 3], "patched": [1, 6, 3]}]
    assert "for 1 of 3 tokens, as long as unpatched" in plain(trajectories(result))


def test_prompt_dropdown(result):
    menu = trajectories(result).layout.updatemenus[0]
    assert menu.buttons[1].label == "prompt 1: made-up &lt;i&gt;prompt&lt;/i&gt; 1"
    assert len({b.args[1]["title.text"] for b in menu.buttons}) >= 2


def test_other_things_are_refused(made, result):
    with pytest.raises(InputError, match=r"trajectories was given a Sweep; it shows what kvdrift\.patch returns"):
        trajectories(made.sweep())
    with pytest.raises(InputError, match=r"patch\(\.\.\., trajectories=True\)"):
        trajectories(made.patch_result(trajectories=False))
    with pytest.raises(InputError, match="prompt=6 is out of range: this result has 6 prompts"):
        trajectories(result, prompt=6)
