import pytest

from kvdrift.cli.prompts import gather, names, numbers, read_jsonl
from kvdrift.errors import InputError


def test_texts_come_before_the_file(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('"b"\n', encoding="utf-8")
    assert gather(["a"], file) == ["a", "b"]


@pytest.mark.parametrize(
    "line",
    [
        *["nonsense", "3", "null", '{"other": "x"}', '{"ids": []}', '{"ids": [1.5]}', '{"ids": [true]}', "[]"],
        pytest.param("1" * 5000, id="a number of 5000 digits"),
        pytest.param("[" * 100_000, id="brackets in brackets"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line):
    file = tmp_path / "p.jsonl"
    file.write_text(f'"fine"\n{line}\n', encoding="utf-8")
    with pytest.raises(InputError, match="line 2"):
        read_jsonl(file)


def test_an_empty_file(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text("\n\n", encoding="utf-8")
    with pytest.raises(InputError, match="holds no prompt"):
        read_jsonl(file)


def test_a_file_that_is_not_text(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="UTF-8"):
        read_jsonl(file)


def test_unicode_line_separators_do_not_split_a_line(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('"a\u2028b"\n', encoding="utf-8")
    assert read_jsonl(file) == ["a\u2028b"]


@pytest.mark.parametrize(("text", "found"), [("3", [3]), ("0,3,5-8", [0, 3, 5, 6, 7, 8]), (" 1 , 2 ", [1, 2])])
def test_numbers(text, found):
    assert numbers(text, "--layers") == found


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "1,,2", "1.5", "5-3"])
def test_numbers_that_are_none(text):
    with pytest.raises(InputError, match="--layers"):
        numbers(text, "--layers")


def test_names():
    assert names("k, v") == ["k", "v"]
