"""The reading: direction and rate apart, each held against the null; never more than the numbers can carry."""

import json

import pytest

pytestmark = pytest.mark.usefixtures("quick_statistics")


def sentences(found, *words):
    return [sentence for sentence in found.reading() if all(word in sentence for word in words)]


# --- direction


@pytest.mark.parametrize("discordant", [0, 1, 5])
def test_below_six_discordant_items_it_cannot_tell(discordant, rights):
    (said,) = sentences(rights(discordant, 0, both=20), "is right in")
    assert "cannot tell" in said
    assert "direction" not in said
    assert f"{discordant} answered rightly by cache-ON alone, 0 by cache-OFF alone" in said


def test_six_to_nil_is_a_direction(rights):
    (said,) = sentences(rights(6, 0, both=20), "is right in")
    assert "a direction (McNemar p = 0.031, 0.031 after Holm" in said


def test_eight_to_nil_is_a_direction(rights):
    (said,) = sentences(rights(0, 8, both=12), "is right in")
    assert "cache-ON is right in 60 %, cache-OFF in 100 % (difference −40.0 percentage points" in said
    assert ": a direction (McNemar p = 0.0078" in said


def test_five_to_three_is_no_direction(rights):
    (said,) = sentences(rights(5, 3, both=12), "is right in")
    assert "no direction shown (McNemar p = 0.73" in said
    assert "80 % power" in said


def test_holm_takes_a_direction_away(rights):
    found = rights(6, 0, both=20, strategies=("greedy", "top-k 50"))
    said = sentences(found, "is right in")
    assert len(said) == 2
    assert all("no direction shown (McNemar p = 0.031, 0.062 after Holm" in sentence for sentence in said)


def test_without_answers_nothing_is_said_of_direction(result, text, first_text):
    found = result({"greedy": [[(first_text(None), text(None, 3), [])]] * 4})
    assert not sentences(found, "right")
    assert sentences(found, "greedy: 4 of 4 texts of cache-OFF leave those of cache-ON", "half of all texts by token 4")


# --- the rate and its null


def rates(result, text, first_text, parted, null_parted, n=20):
    """``n`` items: ``parted`` of b's texts leave, and so many of each re-roll's."""
    rows = [
        [
            (
                first_text(True),
                text(True, 2 if i < parted else None),
                [text(True, 2 if i < count else None, unequal=1) for count in null_parted],
            )
        ]
        for i in range(n)
    ]
    return result({"greedy": rows})


@pytest.mark.parametrize(
    ("parted", "null", "words"),
    [
        (20, [2] * 19, "stands out from them (p = 0.05)"),
        (20, [2] * 18 + [20], "does not stand out from them (p = 0.1)"),
        (5, [18] * 19, "does not stand out from them (p = 1)"),
        (20, [2] * 5, "lies beyond all of them, which are too few to say more (p = 0.17)"),
        (2, [2] * 5, "does not stand out from them (p = 1)"),
    ],
)
def test_the_rate_against_the_null(parted, null, words, result, text, first_text):
    found = rates(result, text, first_text, parted, null)
    (said,) = sentences(found, "leave those of")
    assert said.endswith(words)
    assert f"{parted} of 20 texts" in said
    assert bool(sentences(found, "19 or more can reach 5 %")) == (len(null) < 19)


def test_without_a_null_the_rate_says_nothing_of_cause(rights):
    assert sentences(rights(1, 1), "without a null nothing says whether that is more than the order of summation does")


def test_a_refused_null_is_named(result, text, first_text):
    found = result({"greedy": [[(first_text(True), text(True, 1), [text(True)] * 19)]] * 6})
    assert sentences(found, "greedy: the null is refused: the re-rolls of cache-ON changed no bit")
    assert sentences(found, "without a null nothing says")
    assert not sentences(found, "stand")


def test_direction_and_null_are_said_side_by_side(result, text, first_text):
    """8 : 0, but every re-roll differs by as much."""
    rows = [[(first_text(True), text(i >= 8), [text(i < 8, unequal=1)] * 19)] for i in range(16)]
    (said,) = sentences(result({"greedy": rows}), "is right in")
    assert "a direction" in said
    assert "19 re-rolls of 19 differ from cache-ON by as much or more" in said


# --- all conditions, gold


def test_all_conditions_together(rights):
    (said,) = sentences(rights(6, 0, both=20, strategies=("greedy", "top-k 50")), "over all 2 conditions")
    assert "cache-ON scores higher in 2 and cache-OFF in 0; item by item the sign-flip test gives p = 0.031" in said
    (said,) = sentences(rights(2, 0, both=20, strategies=("greedy", "top-k 50")), "over all 2 conditions")
    assert said.endswith("cannot tell, too few discordant items")
    assert not sentences(rights(6, 0), "over all")


def test_gold(result, text, first_text):
    rows = [[(first_text(True), text(True), [text(True, unequal=1)] * 19)]] * 4
    gold = [(-5.0 - 0.1 * i, -4.5, [-5.01] * 19) for i in range(4)]
    (said,) = sentences(result({"greedy": rows}, gold=gold), "the gold text is")
    assert "0.65 nats less likely under cache-ON" in said
    assert "against its re-rolls the same number runs from" in said
    assert "stands out from them (p = 0.05)" in said


# --- plain data


def test_json_has_no_nan(result, text, first_text):
    found = result(
        {"greedy": [[(first_text(None), text(None), [text(None)])]]}
    )  # no answers, a refused null: NaN abounds
    values = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert '"nan"' not in json.dumps(values)
    condition = values["conditions"][0]
    assert condition["p"] is None
    assert condition["accuracy_a"]["value"] is None
    assert condition["null"]["p_divergence"] is None
    assert condition["null"]["refused"]
    assert values["overall"]["p"] is None
    assert values["reading"] == found.reading()


def test_json_says_what_the_object_says(rights):
    found = rights(7, 1, both=4)
    values = found.to_dict()
    assert (values["model"], values["dtype"], values["items"], values["task"]) == (
        "made-up",
        "bfloat16",
        12,
        "made-up questions",
    )
    assert values["conditions"][0]["only_a"] == 7
    assert values["conditions"][0]["divergence"]["n"] == 12
    assert values["b"]["controls"] == ["a control"]


def test_summary_and_repr(rights):
    found = rights(8, 0, both=2)
    text = found.summary()
    assert text.startswith(
        "made-up · bfloat16 · a = cache-ON, b = cache-OFF · made-up questions: 10 items × 1 strategy,"
    )
    assert "100 %" in text.splitlines()[2]
    assert "8 : 0" in text.splitlines()[2]
    assert text.splitlines()[-1].startswith("! A note")
    assert repr(found) == text
    assert max(map(len, text.splitlines())) < 140


def test_html_is_escaped(rights):
    html = rights(8, 0)._repr_html_()
    assert "&lt;u&gt;markup" in html
    assert "<u>" not in html
