r"""Scorers by name: how a text is held against an item's answer.

=================  ====================================================================================================
``"exact"``        the whole text is the answer, but for white space around it (lm-evaluation-harness's ``exact_match``)
``"normalised"``   the whole text is the answer after SQuAD's normalisation
``"contains"``     the answer's words stand in the text, in a row, after SQuAD's normalisation
``"first-number"`` the first number in the text is the answer's, as a value: ``$1,200.00`` is ``1200``
``"choice"``       the letter that the text chooses is the answer's
=================  ====================================================================================================

SQuAD's normalisation (Rajpurkar et al., "SQuAD: 100,000+ Questions for Machine Comprehension of Text", 2016; its script
``evaluate-v1.1.py``) lowers case, leaves out ASCII punctuation and the words *a*, *an*, *the*, and makes runs of white
space one space. So ``3.5`` and ``35`` are one: for numbers take ``"first-number"``. An answer of which nothing is left
(the choice ``A`` is an article) keeps its articles, or, if it is all punctuation, is compared as it is.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from decimal import Decimal

from kvdrift.errors import InputError
from kvdrift.evaluation.task import INVALID, Item, Scored

Scorer = Callable[[str, Item], Scored | bool]
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NUMBER = re.compile(r"(?<![\w.,])([-−]?)\$?((?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)")
_STATED = re.compile(r"[Aa]nswer(?: is)?:?\s*\(?([A-J]\b|[a-j](?=[).]|\s*$))")
_FIRST = re.compile(r"\s*\(?([A-J]|[a-j](?!\s\S))(?:[).:,]|\s*$|\n|(?<=[B-HJ])\s)")
_BRACKETED = re.compile(r"\(([A-J])\)")
_ALONE = re.compile(r"(?<![\w'])([A-J])(?=[).:,\n]|\s*$)")


def normalise(text: str) -> str:
    """SQuAD's normalisation.

    Examples
    --------
    >>> normalise(" The  Eiffel Tower!"), normalise("A")
    ('eiffel tower', '')
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _levels(text: str) -> tuple[str, str, str]:
    """A text after SQuAD's normalisation, with its articles, and as it is but for case and white space."""
    return normalise(text), " ".join(text.lower().translate(_PUNCTUATION).split()), " ".join(text.lower().split())


def _compared(text: str, answer: str) -> tuple[str, str]:
    """Text and answer at the first level at which anything is left of the answer."""
    pairs = list(zip(_levels(text), _levels(answer), strict=True))
    return next((pair for pair in pairs if pair[1]), pairs[-1])


def exact(text: str, item: Item) -> Scored:
    """Right if the text is the answer, but for white space around it.

    Examples
    --------
    >>> paris = Item("1", "", answer="Paris")
    >>> exact(" Paris\\n", paris).correct, exact("Paris.", paris).correct
    (True, False)
    """
    return Scored(text.strip(), text.strip() == _answer(item).strip())


def normalised(text: str, item: Item) -> Scored:
    """Right if the text is the answer after SQuAD's normalisation.

    Examples
    --------
    >>> normalised(" the Eiffel Tower.", Item("1", "", answer="Eiffel tower")).correct
    True
    """
    said, right = _compared(text, _answer(item))
    return Scored(text.strip(), said == right)


def contains(text: str, item: Item) -> Scored:
    """Right if the answer's words stand in the text in a row, after SQuAD's normalisation.

    A text that names the answer only to deny it is right, too.

    Examples
    --------
    >>> paris = Item("1", "", answer="Paris")
    >>> contains("It is Paris, of course.", paris).correct, contains("Parisians", paris).correct
    (True, False)
    """
    said, right = _compared(text, _answer(item))
    return Scored(text.strip(), f" {right} " in f" {said} ")


def first_number(text: str, item: Item) -> Scored:
    """Right if the first number in the text has the value of the answer's first number.

    A minus, a dollar sign, commas between thousands and decimals belong to a number; digits inside a word do not begin
    one.

    Raises
    ------
    InputError
        There is no number in the answer.

    Examples
    --------
    >>> first_number("That is $1,200.00 in 3 days", Item("1", "", answer="1200"))
    Scored(answer='1200.00', correct=True)
    """
    found, right = _number(text), _number(_answer(item))
    if right is None:
        raise InputError(f"There is no number in the answer {item.answer!r} of item {item.id}; take another scorer.")
    return Scored(INVALID, False) if found is None else Scored(str(found), found == right)


def choice(text: str, item: Item) -> Scored:
    """Right if the text chooses the answer's letter, A to J.

    The letter is looked for in this order: after *answer is* or *answer:* (the first, as lm-evaluation-harness's
    ``mmlu_pro`` does), at the start of the text (``B``, ``b)``, ``(B) …``; not the words *A* and *I* before others),
    the first in round brackets, the first capital letter that stands alone before punctuation or a line's end.
    Asterisks and underscores do not count.

    Raises
    ------
    InputError
        The answer is no such letter.

    Examples
    --------
    >>> b = Item("1", "", answer="B")
    >>> [choice(text, b).answer for text in ("B) Paris", "I think the answer is (C).", "A dog, so (B)", "Paris")]
    ['B', 'C', 'B', '[invalid]']
    """
    right = _answer(item).strip().strip("().").upper()
    if not re.fullmatch("[A-J]", right):
        raise InputError(f"The answer {item.answer!r} of item {item.id} is no letter from A to J; take another scorer.")
    patterns = (_STATED.search, _FIRST.match, _BRACKETED.search, _ALONE.search)
    plain = text.replace("*", "").replace("_", " ")
    found = next((match[1].upper() for look in patterns if (match := look(plain))), INVALID)
    return Scored(found, found == right)


SCORERS: dict[str, Scorer] = {
    "exact": exact,
    "normalised": normalised,
    "contains": contains,
    "first-number": first_number,
    "choice": choice,
}
"""By name."""


def scorer_of(scorer: str | Scorer) -> Scorer:
    """The scorer of a name; a function of your own as it is.

    Raises
    ------
    InputError
        There is none of that name.

    Examples
    --------
    >>> scorer_of("contains").__name__
    'contains'
    """
    if callable(scorer):
        return scorer
    if scorer not in SCORERS:
        known = ", ".join(map(repr, SCORERS))
        raise InputError(f"scorer={scorer!r}: choose one of {known}, or give a function of text and item.")
    return SCORERS[scorer]


def _answer(item: Item) -> str:
    """Scorers are asked only about items with an answer."""
    return item.answer or ""


def _number(text: str) -> Decimal | None:
    found = _NUMBER.search(text)
    return None if found is None else Decimal(f"{'-' if found[1] else ''}{found[2].replace(',', '')}")
