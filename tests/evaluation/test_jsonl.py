import json

import pytest

from kvdrift.errors import FileError, InputError
from kvdrift.evaluation.jsonl import JsonlTask
from kvdrift.evaluation.task import Item, Scored, items_hash


@pytest.fixture
def written(tmp_path):
    def write(*lines):
        path = tmp_path / "questions.jsonl"
        path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines), "utf-8")
        return path

    return write


def test_a_file_is_a_task(written):
    task = JsonlTask(
        written({"prompt": "2 + 2 =", "answer": 4}, "\n", {"prompt": "Say\u2028yes:\n", "answer": "yes"}), stop=["\n"]
    )
    assert task.items() == [
        Item("0", "2 + 2 =", answer="4", gold=" 4"),
        Item("1", "Say\u2028yes:\n", answer="yes", gold="yes"),
    ]
    assert (task.name, task.stop) == ("questions", ("\n",))


def test_lines_of_raw_unicode_separators_and_a_byte_order_mark_are_read(written):
    line = json.dumps({"prompt": "one\u2028two"}, ensure_ascii=False)
    assert JsonlTask(written("\ufeff" + line + "\r\n" + line)).items()[1].prompt == "one\u2028two"


def test_prompts_alone_are_a_task_without_answers():
    task = JsonlTask(["Once upon a time", "The"])
    assert task.items() == [Item("0", "Once upon a time"), Item("1", "The")]
    assert task.score("anything", task.items()[0]) == Scored(None, None)
    assert task.name == "prompts"


def test_keys_can_have_other_names(written):
    rows = {"q": "A", "a": "B", "n": 7, "why": " because B"}, {"q": [5, 6], "a": None, "n": 8, "why": None}
    task = JsonlTask(written(*rows), prompt="q", answer="a", id="n", gold="why")
    assert task.items() == [Item("7", "A", "B", " because B"), Item("8", [5, 6], None, None)]


def test_in_a_chat_the_gold_text_starts_the_turn():
    assert JsonlTask([{"prompt": "A", "answer": "B"}], chat=True).items() == [Item("0", "A", "B", "B", chat=True)]


@pytest.mark.parametrize(
    ("text", "correct"),
    [("Paris", True), ("  paris.\n", True), ("New  Paris", False), ("Paris. It is", False), ("", False)],
)
def test_the_whole_text_is_compared_unless_another_scorer_is_chosen(text, correct):
    task = JsonlTask([{"prompt": "?", "answer": "Paris"}])
    assert task.score(text, task.items()[0]).correct is correct


def test_a_scorer_by_name_refuses_answers_that_it_cannot_use_where_they_stand(written):
    file = written({"prompt": "?", "answer": "B"}, {"prompt": "?", "answer": "Paris"})
    with pytest.raises(FileError, match=r"line 2: The answer 'Paris' of item 1 is no letter from A to J"):
        JsonlTask(file, scorer="choice")
    with pytest.raises(FileError, match=r"line 1: There is no number in the answer 'B'"):
        JsonlTask(file, scorer="first-number")
    with pytest.raises(InputError, match="scorer='fuzzy': choose one of 'exact', 'normalised', 'contains'"):
        JsonlTask(file, scorer="fuzzy")


def test_a_scorer_of_ones_own():
    rows = [{"prompt": "?", "answer": "4"}]
    task = JsonlTask(rows, scorer=lambda text, item: item.answer in text)
    assert task.score(" 3 or 4 ", task.items()[0]) == Scored("3 or 4", True)
    task = JsonlTask(rows, scorer=lambda text, item: Scored("four", False))
    assert task.score("x", task.items()[0]) == Scored("four", False)
    task = JsonlTask(rows, scorer=lambda text, item: None)
    with pytest.raises(InputError, match="returned None for item 0"):
        task.score("x", task.items()[0])


def is_one(text, item):
    return text == "1"


def is_two(text, item):
    return text == "2"


def test_settings_change_with_items_scorer_and_stop_strings():
    rows = [{"prompt": "?", "answer": "4"}]
    base = JsonlTask(rows).settings()
    assert JsonlTask(rows, name="other").settings() == base
    assert json.loads(json.dumps(base)) == base
    others = [
        JsonlTask([{"prompt": "?", "answer": "5"}]),
        JsonlTask(rows, stop=["\n"]),
        JsonlTask(rows, scorer=is_one),
        JsonlTask(rows, scorer=is_two),
        JsonlTask(rows, chat=True),
        JsonlTask(rows, scorer="contains"),
    ]
    found = [json.dumps(task.settings()) for task in others]
    assert len({json.dumps(base), *found}) == 7


def test_items_hash_knows_order_and_fields():
    one, two = Item("1", "A"), Item("2", "B")
    hashes = {items_hash(x) for x in ([one, two], [two, one], [one], [Item("1", "A", gold="")], [Item("1", [65])])}
    assert len(hashes) == 5


def test_the_list_of_items_is_a_copy():
    task = JsonlTask(["A"])
    task.items().clear()
    assert len(task.items()) == 1


GOOD = {"prompt": "A", "answer": "B"}


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ([GOOD, '{"prompt": "A"\n'], r"line 2: not JSON \(.*column"),
        ([GOOD, "1" * 5000 + "\n"], "line 2: cannot be read"),
        ([GOOD, "\n", "[1, 2]\n"], r"line 3: \[1, 2\] is not an object"),
        ([GOOD, {"promt": "A", "answer": "B"}], "line 2: there is no 'prompt'; the keys are 'promt', 'answer'"),
        ([{}], "line 1: there is no 'prompt'; the keys are none"),
        ([GOOD, {"prompt": "A"}], "line 2: there is no 'answer'; the keys are 'prompt'"),
        ([{**GOOD, "id": 1}, {**GOOD, "id": "1"}], r"line 2: the id '1' is that of .*line 1 too; ids must be unique"),
        ([{**GOOD, "id": 1}, GOOD], "line 2: there is no 'id'"),
        ([{**GOOD, "id": None}], "line 1: 'id' is null"),
        ([{"prompt": "  "}], "line 1: 'prompt' must be a text that is not empty"),
        ([{"prompt": 5}], "line 1: 'prompt' must be a text that is not empty, not 5"),
        ([{"prompt": []}], "line 1: 'prompt' must be a text or a list of token ids"),
        ([{"prompt": [1, True]}], "line 1: 'prompt' must be a text or a list of token ids"),
        ([{"prompt": "A", "answer": ["B"]}], "line 1: 'answer' must be a text, a number or null"),
        ([{"prompt": "A", "answer": True}], "line 1: 'answer' must be a text, a number or null"),
        (["\n", "  \n"], "questions.jsonl is empty"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(written, lines, sentence):
    with pytest.raises(FileError, match=sentence):
        JsonlTask(written(*lines))


def test_files_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(FileError, match=r"none\.jsonl: No such file"):
        JsonlTask(tmp_path / "none.jsonl")
    with pytest.raises(FileError, match="Cannot read"):
        JsonlTask(tmp_path)
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "caf\xe9"}')
    with pytest.raises(FileError, match="not UTF-8"):
        JsonlTask(str(tmp_path / "latin.jsonl"))


def test_a_bad_list_is_refused_with_its_item():
    with pytest.raises(InputError, match="empty list"):
        JsonlTask([])
    with pytest.raises(InputError, match="item 1: 5 is neither"):
        JsonlTask(["A", 5])
    with pytest.raises(InputError, match="item 0: there is no 'answr'"):
        JsonlTask([GOOD], answer="answr")
    with pytest.raises(InputError, match="item 0: 'prompt' holds token ids"):
        JsonlTask([{"prompt": [1, 2]}], chat=True)


@pytest.mark.parametrize("stop", ["\n", [""], [5]])
def test_bad_stop_strings_are_refused(stop):
    with pytest.raises(InputError, match="stop="):
        JsonlTask(["A"], stop=stop)
