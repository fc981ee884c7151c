from kvdrift.words.numbers import decades, percent


def said(ladder, start):
    return [sentence for sentence in ladder.reading() if sentence.startswith(start)]


def test_ratios_of_precisions_beside_both_predictions(made_ladder):
    found = made_ladder.ladder(levels={"float16": 1e-5, "float32": 1e-12, "layercast": 1e-12})
    (sentence,) = said(found, "From float16 to float32")
    row = found.ratios("float16").set_index("arm").loc["float32"]
    assert f"KL shrinks by {decades(1 / row['kl'])}" in sentence
    assert f"predicts {decades(1 / row['drift_squared'])}" in sentence
    assert "the unit roundoff, squared, 10^7.8" in sentence


def test_few_prompts_get_no_interval(made_ladder):
    few = made_ladder.ladder(n_prompts=3)
    assert any("Fewer than 5 prompts" in sentence for sentence in few.reading())
    assert not any("interval" in sentence for sentence in said(few, "From"))
    assert "95 % interval" in said(made_ladder.ladder(), "From float16 to float32")[0]


def test_fixed_shape_decides(made_ladder):
    (exact,) = said(made_ladder.ladder(), "With every row computed")
    assert "equal logits at all 27 steps: they compute the same function" in exact
    (broken,) = said(made_ladder.ladder(levels={"fixed-shape": 1e-9}), "With every row computed")
    assert "differ at 100 % of the steps" in broken
    assert "kd.diagnose" in broken


def test_a_zero_gives_no_ratio(made_ladder):
    (sentence,) = said(made_ladder.ladder(levels={"float16": 0.0}), "From float16 to float32")
    assert "exactly zero in float16" in sentence


def test_arms_that_failed_are_named_with_the_reason(made_ladder):
    found = made_ladder.ladder(broken={"float16": "not finite"})
    assert said(found, "float16 is not finite: ") == [f"float16 is not finite: {made_ladder.REASON}"]
    assert said(found, "sdpa-cudnn was not run: ")
    assert not said(found, "From float16")


def test_parts_kernels_orders_and_twins(made_ladder):
    found = made_ladder.ladder()
    assert "with LM head alone in float32" in said(found, "Beside bfloat16")[0]
    kernels = said(found, "With another attention kernel")[0]
    assert "exactly 0× with sdpa attention, math kernel" in kernels
    assert "flash" not in kernels, "it is the base arm's own kernel"
    assert said(found, "Cache-ON against itself")
    assert "layercast has the same numbers as float32 at every step." in found.reading()


def test_wide_sums(made_ladder):
    (exact,) = said(made_ladder.ladder(), "With every sum in float64, and every number stored in bfloat16")
    assert "equal at every step" in exact
    (rest,) = said(made_ladder.ladder(levels={"wide-sums": 1e-5}), "With every sum in float64")
    assert "equal at 0 % of the steps and KL is 0.0" in rest


def test_flips_come_with_their_bounds(made_ladder):
    found = made_ladder.ladder()
    (sentence,) = said(found, "Flips: ")
    steps, prompts, bound = found.count("bfloat16")
    assert f"bfloat16 {steps} in {prompts} of 6 prompts (below {percent(bound)}" in sentence
    assert "float32 0 in 0 of 6 prompts (below 39 %" in sentence


def test_html_is_escaped(made_ladder):
    html = made_ladder.ladder()._repr_html_()
    assert "&lt;u&gt;note" in html
    assert "<u>note" not in html
    assert "&lt;b&gt;no" in html
    assert "<b>no" not in html
