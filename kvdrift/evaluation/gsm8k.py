"""GSM8K (grade-school mathematics; Cobbe et al., "Training Verifiers to Solve Math Word Problems", 2021).

Prompts, stop strings, extraction and normalisation are those of lm-evaluation-harness (task ``gsm8k``, version 3.0),
its oddities included, so that accuracies can be held against published ones.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any, Literal

from kvdrift.errors import InputError
from kvdrift.evaluation.jsonl import Row, Rows, read_rows
from kvdrift.evaluation.task import INVALID, Item, Scored, items_hash

Extraction = Literal["flexible", "strict"]
FORMAT = "lm-evaluation-harness gsm8k 3.0"
_STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
_IGNORED = tuple(map(re.compile, (r",", r"\$", r"(?s).*#### ", r"\.$")))
_SHOT_SEED = 1234


class GSM8K:
    """Grade-school questions, whose answer is the number after ``####``.

    Parameters
    ----------
    data
        A JSON-lines file with ``question`` and ``answer``, as openai/grade-school-math has them, or a list of such
        mappings. Default: the test split of ``openai/gsm8k`` from the Hugging Face hub, through ``datasets``.
    shots
        Solved examples before each question, drawn from the training split. They are those of lm-evaluation-harness
        if ``data`` and ``train`` are the whole splits in their order: each question draws its own, one after the
        other from one generator (``random.Random(1234)``).
    train
        Where they come from; as ``data``. Default: the training split of ``openai/gsm8k``.
    chat
        Put question and examples into the chat template, as one user's turn.
    extraction
        What counts as the answer of a text: ``"strict"``, the first ``#### number``; ``"flexible"``, the last thing
        that looks like a number. See `extract`. Without examples few models write ``####``.
    gold
        The text whose log-probability is taken: ``"solution"``, the worked solution with its answer, or ``"answer"``,
        ``#### number`` alone. A space comes first, except in a chat.

    Raises
    ------
    FileError
        A file cannot be read, or a line lacks a question or an answer with ``#### number`` (with its number).
    InputError
        The same of a list; an option is not one of those above; fewer training examples than ``shots``; the hub
        cannot be reached.

    Examples
    --------
    >>> import kvdrift as kd
    >>> ducks = {"question": "A pond has 2 ducks, and 3 more come. How many is that?", "answer": "2 + 3 = 5\\n#### 5"}
    >>> task = kd.GSM8K([ducks])
    >>> print(task.items()[0].prompt)
    Question: A pond has 2 ducks, and 3 more come. How many is that?
    Answer:
    >>> task.score(" That makes $5.00, or 5.", task.items()[0])
    Scored(answer='5.', correct=True)
    """

    name = "gsm8k"
    stop = ("Question:", "</s>", "<|im_end|>")

    def __init__(
        self,
        data: Rows | None = None,
        *,
        shots: int = 0,
        train: Rows | None = None,
        chat: bool = False,
        extraction: Extraction = "flexible",
        gold: Literal["solution", "answer"] = "solution",
    ) -> None:
        if not isinstance(shots, int) or shots < 0:
            raise InputError(f"shots={shots!r}: give a whole number from 0; lm-evaluation-harness has 5.")
        _check("extraction", extraction, ("flexible", "strict"))
        _check("gold", gold, ("solution", "answer"))
        self.shots, self.chat, self.extraction, self.gold = shots, chat, extraction, gold
        examples = [_pair(row) for row in _rows(train, "train")] if shots else []
        if len(examples) < shots:
            raise InputError(f"{shots} examples a question are asked for, but train has {len(examples)} in all.")
        draw = random.Random(_SHOT_SEED)
        self._items = []
        for i, (question, solution) in enumerate(map(_pair, _rows(data, "test"))):
            shown = draw.sample(examples, shots)
            told = solution if gold == "solution" else f"#### {solution.split('#### ')[-1].strip()}"
            item = Item(
                id=f"gsm8k-{i}",
                prompt="".join(f"{_asked(q)} {a}\n\n" for q, a in shown) + _asked(question),
                answer=normalise(solution),
                gold=told if chat else f" {told}",
                chat=chat,
            )
            self._items.append(item)

    def items(self) -> list[Item]:
        """All questions, in the order of the split; ``gsm8k-0`` is its first."""
        return list(self._items)

    def score(self, text: str, item: Item) -> Scored:
        """Extract the answer of a text (by ``extraction``) and compare it with the item's, both normalised."""
        answer = extract(text, self.extraction)
        return Scored(answer, normalise(answer) == item.answer)

    def settings(self) -> dict[str, Any]:
        """What decides items and scores: format, shots, chat, extraction, gold, and a hash of the items."""
        return {
            "format": FORMAT,
            "shots": self.shots,
            "chat": self.chat,
            "extraction": self.extraction,
            "gold": self.gold,
            "items": items_hash(self._items),
        }


def extract(text: str, extraction: Extraction) -> str:
    r"""Return the answer that a text gives, as lm-evaluation-harness finds it (``strict-match``, ``flexible-extract``).

    ``"strict"``: the first match of ``#### (\-?[0-9\.\,]+)``. ``"flexible"``: the last match of
    ``(-?[$0-9.,]{2,})|(-?[0-9]+)``. Its first part takes any two characters of ``$0-9.,``, so that an ellipsis passes
    for a number, and one digit with a full stop or comma after it keeps that. This is kept, because accuracies measured
    elsewhere have it.

    Parameters
    ----------
    text
        Generated text, cut at the stop string.
    extraction
        ``"strict"`` or ``"flexible"``.

    Returns
    -------
    str
        `kvdrift.evaluation.task.INVALID` if nothing matches.

    Raises
    ------
    InputError
        Another extraction is asked for.

    Examples
    --------
    >>> text = "It costs $18 in total...\n#### 18"
    >>> extract(text, "strict"), extract(text, "flexible"), extract("It costs $18 in total...", "flexible")
    ('18', '18', '...')
    >>> extract("I do not know", "flexible")
    '[invalid]'
    """
    _check("extraction", extraction, ("flexible", "strict"))
    if extraction == "strict":
        found = _STRICT.search(text)
        return found.group(1) if found else INVALID
    matches = _FLEXIBLE.findall(text)
    return (matches[-1][0] or matches[-1][1]) if matches else INVALID


def normalise(answer: str) -> str:
    """Return an answer or a solution as answers are compared: as lm-evaluation-harness's exact match does.

    Commas and dollar signs, everything up to the last ``#### `` and a full stop at the end are left out, in that
    order, and upper case is lowered. Numbers are compared as text: ``18.00`` is not ``18``.

    Examples
    --------
    >>> normalise("9 * 2,000 = $18,000 a day.\\n#### 18,000"), normalise("$18,000."), normalise("18.00")
    ('18000', '18000', '18.00')
    """
    for ignored in _IGNORED:
        answer = ignored.sub("", answer)
    return answer.lower()


def _asked(question: str) -> str:
    return f"Question: {question}\nAnswer:"


def _pair(row: Row) -> tuple[str, str]:
    question, solution = row.text("question"), row.text("answer").rstrip()
    if not _STRICT.search(solution):
        raise row.refuse("the answer must end in '#### number', as in openai/grade-school-math.")
    return question, solution


def _rows(source: Rows | None, split: str) -> list[Row]:
    return read_rows(_hub(split) if source is None else source)


def _hub(split: str) -> Sequence[dict[str, Any]]:
    """A split of openai/gsm8k from the Hugging Face hub (or its cache)."""
    instead = f"give {'data' if split == 'test' else 'train'}=FILE, JSON lines with question and answer"
    try:
        import datasets
    except ImportError as error:
        raise InputError(
            f"The {split} split of openai/gsm8k comes through datasets, which is not installed: "
            f"pip install 'kvdrift[eval]', or {instead}."
        ) from error
    try:
        return list(datasets.load_dataset("openai/gsm8k", "main", split=split))
    except Exception as error:  # datasets raises whatever its network, cache and parser raise
        raise InputError(
            f"The {split} split of openai/gsm8k could not be fetched from the Hugging Face hub "
            f"({type(error).__name__}): connect to it, or {instead}."
        ) from error


def _check(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InputError(f"{name}={value!r}: choose {' or '.join(map(repr, known))}.")
