"""What each scorer takes for right, by its definition."""

import pytest

from kvdrift.errors import InputError
from kvdrift.evaluation.scorers import SCORERS, normalise, scorer_of
from kvdrift.evaluation.task import INVALID, Item


def right(name, text, answer):
    return scorer_of(name)(text, Item("1", "?", answer=answer)).correct


# --- texts


@pytest.mark.parametrize(
    ("text", "answer", "by"),
    [
        ("Paris", "Paris", {"exact", "normalised", "contains"}),
        (" Paris\n", "Paris", {"exact", "normalised", "contains"}),
        ("Paris.", "Paris", {"normalised", "contains"}),
        ("paris", "Paris", {"normalised", "contains"}),
        ("The  Eiffel Tower!", "eiffel tower", {"normalised", "contains"}),
        ("Paris. It is the capital of France.", "Paris", {"contains"}),
        ("The capital, of course, is Paris", "Paris", {"contains"}),
        ("Parisians", "Paris", set()),
        ("Tower Eiffel", "Eiffel Tower", set()),
        ("", "Paris", set()),
        ("Straße", "STRASSE", set()),  # SQuAD lowers case, it does not fold it
    ],
)
def test_what_is_compared_of_a_text(text, answer, by):
    names = ("exact", "normalised", "contains")
    assert {name for name in names if right(name, text, answer)} == by


def test_normalisation_is_squads():
    """Its own script, word for word, on what it was made for."""
    import re
    import string

    def squad(s):
        s = "".join(ch for ch in s.lower() if ch not in set(string.punctuation))
        return " ".join(re.sub(r"\b(a|an|the)\b", " ", s).split())

    for text in ("The cat, a dog & an owl", "U.S.A.", "  theatre ", "don't", "3.5", "A", "—an—", "the\u00a0end"):
        assert normalise(text) == squad(text)


@pytest.mark.parametrize(
    ("text", "answer", "correct"),
    [("A", "A", True), ("a.", "A", True), ("B", "A", False), ("the", "A", False), ("", "The", False), ("!", "!", True),
     ("?", "!", False), ("The The", "The The", True)],
)  # fmt: skip
@pytest.mark.parametrize("name", ["normalised", "contains"])
def test_an_answer_of_which_normalisation_leaves_nothing_is_still_an_answer(name, text, answer, correct):
    assert right(name, text, answer) is correct


# --- numbers


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5", "5"), ("It is 5.", "5"), ("$1,200.00 in 3 days", "1200.00"), ("-7 degrees", "-7"), ("−7", "-7"),
        ("- 7 apples", "7"), ("10-5", "10"), (".5", "0.5"), ("the 3rd of 12", "3"), ("gpt2 says 9", "9"),
        ("none", INVALID), ("", INVALID), ("x5", INVALID),
    ],
)  # fmt: skip
def test_the_first_number(text, number):
    assert scorer_of("first-number")(text, Item("1", "?", answer="1")).answer == number


def test_numbers_are_compared_as_values():
    assert right("first-number", "18.00 dollars", "18")
    assert right("first-number", "0018", "$18")
    assert not right("first-number", "1.8", "18")  # which SQuAD's normalisation takes for one
    assert right("normalised", "1.8", "18")


# --- choices


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"), ("b", "B"), ("B) Paris", "B"),
        ("(B) Paris", "B"), ("B Paris", "B"), ("**B**", "B"), (" C\nas", "C"),
        ("A dog is meant. The answer is (C).", "C"), ("Answer: D", "D"), ("I would say E.", "E"), ("A", "A"),
        ("A cat", INVALID), ("Both", INVALID), ("the answer is a cat", INVALID), ("K", INVALID), ("", INVALID),
    ],
)  # fmt: skip
def test_the_letter_chosen(text, letter):
    assert scorer_of("choice")(text, Item("1", "?", answer="B")).answer == letter
    assert right("choice", text, "(b)") is (letter == "B")


# --- names


@pytest.mark.parametrize("name", SCORERS)
def test_an_answer_is_right_of_itself(name):
    answer = {"first-number": "-1,200.5", "choice": "C"}.get(name, "The Answer")
    assert right(name, answer, answer)


def test_names_and_functions():
    assert scorer_of(right) is right
    with pytest.raises(InputError, match="scorer='rouge': choose one of"):
        scorer_of("rouge")
