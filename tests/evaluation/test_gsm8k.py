import json
import random
import sys
from types import SimpleNamespace

import pytest

from kvdrift.errors import FileError, InputError
from kvdrift.evaluation.gsm8k import GSM8K, extract, normalise
from kvdrift.evaluation.task import Scored

TEST = [
    {
        "question": "A shelf holds 3 rows of 6 jars. How many jars is that?",
        "answer": "3 * 6 = <<3*6=18>>18 jars.\n#### 18",
    },
    {
        "question": "A farm sells 2 fields at $1,200 each. What does it get?",
        "answer": "2 * $1,200 = $<<2*1200=2400>>2,400.\n#### 2,400",
    },
    {"question": "It was 3 degrees and fell by 8. How warm is it?", "answer": "3 - 8 = <<3-8=-5>>-5\n#### -5"},
]
TRAIN = [{"question": f"What is {n} + {n}?", "answer": f"{n} + {n} = {2 * n}\n#### {2 * n}"} for n in range(9)]


@pytest.fixture
def files(tmp_path):
    for name, rows in (("test", TEST), ("train", TRAIN)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_zero_shot(files):
    first = GSM8K(files / "test.jsonl").items()[0]
    assert first.id == "gsm8k-0"
    assert first.prompt == "Question: A shelf holds 3 rows of 6 jars. How many jars is that?\nAnswer:"
    assert first.answer == "18"
    assert first.gold == " 3 * 6 = <<3*6=18>>18 jars.\n#### 18"
    assert not first.chat


def test_answers_are_the_normalised_numbers():
    assert [item.answer for item in GSM8K(TEST).items()] == ["18", "2400", "-5"]


def test_shots_are_joined_and_drawn_as_lm_evaluation_harness_does(files):
    task = GSM8K(files / "test.jsonl", shots=2, train=files / "train.jsonl")
    draw = random.Random(1234)  # one generator for all questions, as the harness seeds it
    for item, row in zip(task.items(), TEST, strict=True):
        x, y = draw.sample(TRAIN, 2)
        assert item.prompt == (
            f"Question: {x['question']}\nAnswer: {x['answer']}\n\n"
            f"Question: {y['question']}\nAnswer: {y['answer']}\n\n"
            f"Question: {row['question']}\nAnswer:"
        )


def test_a_question_keeps_its_shots_when_more_questions_follow():
    few, all_ = GSM8K(TEST[:1], shots=3, train=TRAIN), GSM8K(TEST, shots=3, train=TRAIN)
    assert few.items() == all_.items()[:1]


@pytest.mark.parametrize(
    ("chat", "gold", "text"),
    [
        (False, "answer", " #### 2,400"),
        (True, "answer", "#### 2,400"),
        (True, "solution", "2 * $1,200 = $<<2*1200=2400>>2,400.\n#### 2,400"),
    ],
)
def test_gold_text(chat, gold, text):
    item = GSM8K(TEST, chat=chat, gold=gold).items()[1]
    assert (item.gold, item.chat) == (text, chat)


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("18 jars\n#### 18\n\n", "18", "18"),
        ("#### 5\n#### 6", "5", "6"),
        ("#### -1,234.50", "-1,234.50", "-1,234.50"),
        ("####18", "[invalid]", "18"),
        ("#### $18", "[invalid]", "$18"),
        ("costs $18 in total...", "[invalid]", "..."),
        ("It is 5.", "[invalid]", "5."),
        ("It is 5", "[invalid]", "5"),
        ("3 - 8 = -5", "[invalid]", "-5"),
        ("between 3 and 4, or so", "[invalid]", "4,"),
        ("no idea", "[invalid]", "[invalid]"),
        ("", "[invalid]", "[invalid]"),
    ],
)
def test_extraction_with_its_oddities(text, strict, flexible):
    assert extract(text, "strict") == strict
    assert extract(text, "flexible") == flexible


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        ("$1,800.", "1800"),
        ("18.00", "18.00"),
        ("a\nb #### 3 #### 4", "4"),
        ("#### 4", "4"),
        ("....", "..."),
        ("Ten", "ten"),
        ("[invalid]", "[invalid]"),
    ],
)
def test_normalisation(answer, normal):
    assert normalise(answer) == normal


def test_scores_by_the_extraction_asked_for():
    strict, flexible = GSM8K(TEST, extraction="strict"), GSM8K(TEST)
    item = flexible.items()[1]
    assert flexible.score(" They get $2,400.", item) == Scored("$2,400.", True)
    assert strict.score(" They get $2,400.", item) == Scored("[invalid]", False)
    assert strict.score(" Hm.\n#### 2400\n#### 7", item) == Scored("2400", True)
    assert flexible.score(" Hm.\n#### 2400\n#### 7", item) == Scored("7", False)
    assert flexible.score(" $2,400 in total...", item) == Scored("...", False)


@pytest.mark.parametrize("extraction", ["strict", "flexible"])
def test_every_solution_is_its_own_right_answer(extraction):
    task = GSM8K(TEST, extraction=extraction)
    assert all(task.score(item.gold, item).correct for item in task.items())


def test_settings_tell_tasks_apart():
    variants = [
        GSM8K(TEST),
        GSM8K(TEST[:2]),
        GSM8K(TEST, shots=2, train=TRAIN),
        GSM8K(TEST, shots=2, train=TRAIN[:5]),
        GSM8K(TEST, chat=True),
        GSM8K(TEST, extraction="strict"),
        GSM8K(TEST, gold="answer"),
    ]
    assert len({json.dumps(task.settings()) for task in variants}) == len(variants)
    assert GSM8K(TEST).settings() == GSM8K(list(TEST)).settings()


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"prompt": "?"}, "line 4: there is no 'question'; the keys are 'prompt'"),
        ({"question": "?"}, "line 4: there is no 'answer'"),
        ({"question": "?", "answer": "18"}, "line 4: the answer must end in '#### number'"),
        ({"question": 5, "answer": "#### 5"}, "line 4: 'question' must be a text"),
    ],
)
def test_a_bad_line_is_named(files, row, sentence):
    with (files / "test.jsonl").open("a") as file:
        file.write(json.dumps(row))
    with pytest.raises(FileError, match=sentence):
        GSM8K(files / "test.jsonl")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"shots": -1}, "shots=-1"),
        ({"shots": 10, "train": TRAIN}, "10 examples a question are asked for, but train has 9"),
        ({"extraction": "last"}, "extraction='last': choose 'flexible' or 'strict'"),
        ({"gold": "all"}, "gold='all'"),
    ],
)
def test_bad_options_are_refused(options, sentence):
    with pytest.raises(InputError, match=sentence):
        GSM8K(TEST, **options)


def test_without_a_file_it_comes_from_the_hub(monkeypatch):
    asked = []

    def load_dataset(*args, split):
        asked.append((*args, split))
        return TEST if split == "test" else TRAIN

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert GSM8K(shots=1).items() == GSM8K(TEST, shots=1, train=TRAIN).items()
    assert sorted(asked) == [("openai/gsm8k", "main", "test"), ("openai/gsm8k", "main", "train")]


def test_without_network_or_datasets_it_says_what_to_do(monkeypatch):
    def load_dataset(*args, split):
        raise ConnectionError("a page of text")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(InputError, match=r"^The test split .* could not be fetched .*\(ConnectionError\).* data=FILE"):
        GSM8K()
    with pytest.raises(InputError, match=r"^The train split .* train=FILE"):
        GSM8K(TEST, shots=1)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"not installed: pip install 'kvdrift\[eval\]', or give data=FILE"):
        GSM8K()
