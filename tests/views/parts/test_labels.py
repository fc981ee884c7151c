import numpy as np
import pytest

from kvdrift.views.parts.labels import cell_text, counts, escape, prompt_label, step_texts, token_label, versus


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" <b>", "␣&lt;b&gt;"),
        ("a\nb\t", "a⏎b⇥"),
        ("</script>", "&lt;/script&gt;"),
        ("&lt;", "&amp;lt;"),
        ("$x$", "&#36;x&#36;"),
        ("\x00\u200b", "\\x00\\x200b"),
        ("", "∅"),
    ],
)
def test_token_label_shows_text_as_text(text, shown):
    assert token_label(text) == shown


def test_token_label_is_cut_before_escaping():
    assert token_label("<" * 30, limit=3) == "&lt;&lt;…"


def test_escape_leaves_plain_text():
    assert escape("cache-ON (a) ‖a−b‖") == "cache-ON (a) ‖a−b‖"


def test_cells_name_zero_and_non_finite():
    assert cell_text(np.array([[0.0, np.inf], [np.nan, 0.0152]])).tolist() == [
        ["0 (bit-identical)", "infinite"],
        ["not a number", "0.0152"],
    ]


def test_versus_names_model_dtype_and_paths(drift):
    assert versus(drift) == "made-up-135m in bfloat16: cache-ON (a) against cache-OFF (b)"


def test_counts_and_prompt_labels(drift):
    assert counts(drift) == "3 prompts, up to 15 counted steps"
    assert prompt_label(drift, 1) == "prompt 1: made-up <i>prompt</i> 1"


def test_step_texts_say_what_is_read_and_written(drift):
    texts = step_texts(drift, 0)
    assert len(texts) == len(drift.steps)
    flip = drift.first_flip[0]
    read = token_label(drift.token_texts[int(drift.arrays["fed"][0, flip - 1])])
    a, b = (token_label(drift.token_texts[int(drift.arrays[f"top1_{p}"][0, flip])]) for p in "ab")
    assert texts[flip] == f"reads '{read}'; a says '{a}', b says '{b}' (flip)"
    assert step_texts(drift, 2)[-1] == "not measured"
