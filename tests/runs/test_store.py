"""The store of a long run: what it keeps through a kill, what it cuts off, and what it refuses without harm."""

import json
import math
import multiprocessing
import os
import random
import signal
import time
from contextlib import contextmanager

import numpy as np
import pytest

from kvdrift.errors import FileError, InputError
from kvdrift.runs.settings import differences
from kvdrift.runs.store import Store

SETTINGS = {"seed": 0, "software": {"torch": "2.13", "python": "3.12"}, "prompts": [(1, 2), (3,)]}


class Trickle:
    """A file that takes few bytes at a time, so that a kill often comes in the middle of a line."""

    def __init__(self, file):
        self.file = file

    def write(self, piece):
        time.sleep(0.0005)
        return self.file.write(piece[:1000])

    def __getattr__(self, name):
        return getattr(self.file, name)


def write_for_ever(folder, said):
    with Store(folder, "demo", {"seed": 0}) as store:
        store._file = Trickle(store._file)
        number = len(store.done)
        os.write(said, f"open\n{number - 1}\n".encode())
        while True:
            store.add(f"item {number}", {"number": number, "text": "x" * length(number)})
            os.write(said, f"{number}\n".encode())
            number += 1


def length(number):
    return number * 7919 % 40_000


@contextmanager
def writer():
    """A process that writes into a folder, to be killed: ``start(folder)`` gives it and what it says, by line."""
    running = []

    def start(folder):
        hear, said = os.pipe()
        process = multiprocessing.get_context("fork").Process(target=write_for_ever, args=(folder, said), daemon=True)
        process.start()
        os.close(said)
        running.append(process)
        return process, os.fdopen(hear)

    yield start
    for process in running:
        process.kill()
        process.join()


def opened(folder, kind="demo", settings=SETTINGS):
    return Store(folder, kind, settings)


def filled(folder, n=3):
    with opened(folder) as store:
        for i in range(n):
            store.add(f"item {i}", {"value": i})
    return folder / "records.jsonl"


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def test_what_is_kept_comes_back_bit_for_bit(tmp_path):
    rng = np.random.default_rng(0)
    floats = (rng.standard_normal(2000) * 10.0 ** rng.integers(-300, 300, 2000)).tolist()
    floats += [5e-324, -0.0, 1.7976931348623157e308, 0.1 + 0.2, math.nan, math.inf, -math.inf]
    text = "naïve \u2028 \x00 \ud800 \n 猫"
    with opened(tmp_path / "new" / "folder") as store:
        store.add("a", {"floats": floats, "text": text, "big": 2**80, "none": None})
        kept = dict(store.done)
    with opened(tmp_path / "new" / "folder") as store:
        again = dict(store.done)
    for done in (kept, again):
        assert np.array(done["a"]["floats"]).tobytes() == np.array(floats).tobytes()
        assert (done["a"]["text"], done["a"]["big"], done["a"]["none"]) == (text, 2**80, None)


def test_a_record_is_the_same_now_and_after_opening_again(tmp_path):
    with opened(tmp_path) as store:
        store.add("a", {"pair": (1, 2), 3: "three"})
        assert dict(store.done) == {"a": {"pair": [1, 2], "3": "three"}}
    assert Store.read(tmp_path) == (json.loads(json.dumps(SETTINGS)), {"a": {"pair": [1, 2], "3": "three"}})


def test_without_a_folder_it_remembers_all_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with opened(None) as store:
        store.add("a", {"value": 1})
        with pytest.raises(InputError, match="'a' is in the store already"):
            store.add("a", {"value": 1})
        assert dict(store.done) == {"a": {"value": 1}}
    assert not list(tmp_path.iterdir())


def test_what_is_done_cannot_be_changed_from_outside():
    store = opened(None)
    with pytest.raises(TypeError):
        store.done["a"] = {}


def test_the_files_are_plain_json(tmp_path):
    lines = filled(tmp_path).read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"key": f"item {i}", "record": {"value": i}} for i in range(3)]
    head = json.loads((tmp_path / "settings.json").read_text())
    assert (head["schema"], head["kind"], head["settings"]["seed"]) == (1, "demo", 0)


def test_a_line_that_was_cut_off_is_dropped_wherever_it_was_cut(tmp_path):
    records = filled(tmp_path)
    whole = records.read_bytes()
    kept = whole[: whole.rfind(b"\n", 0, -1) + 1]
    for cut in range(len(kept), len(whole)):
        records.write_bytes(whole[:cut])
        assert list(Store.read(tmp_path)[1]) == ["item 0", "item 1"]
        assert len(records.read_bytes()) == cut, "reading changes nothing"
        with opened(tmp_path) as store:
            assert list(store.done) == ["item 0", "item 1"]
            assert records.read_bytes() == kept
            store.add("item 2", {"value": 2})
        assert records.read_bytes() == whole


def test_twenty_kills_lose_nothing_and_repeat_nothing(tmp_path):
    rng, acknowledged, torn = random.Random(0), -1, 0
    with writer() as start:
        for _ in range(20):
            process, said = start(tmp_path)
            assert said.readline() == "open\n"
            before = [said.readline() for _ in range(rng.randrange(1, 4))]  # however slow the machine is
            time.sleep(rng.random() * 0.05)
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            acknowledged = max([acknowledged, *(int(line) for line in (*before, *said) if line.endswith("\n"))])
            torn += not (tmp_path / "records.jsonl").read_bytes().endswith(b"\n")
            _, records = Store.read(tmp_path)
            assert [record["number"] for record in records.values()] == list(range(len(records)))
            assert all(len(record["text"]) == length(number) for number, record in enumerate(records.values()))
            assert acknowledged + 1 <= len(records) <= acknowledged + 2, "at most the one under way is not acknowledged"
    assert acknowledged > 20
    assert torn, "no kill came in the middle of a line"


def test_a_corrupt_line_is_refused_with_its_number_and_not_harmed(tmp_path):
    records = filled(tmp_path)
    lines = records.read_bytes().splitlines(keepends=True)
    for bad in (b"my thesis\n", b"{}\n", b"[1]\n", b'{"key": "x", "record": 3}\n', b"\x00\xff\n", b"\n"):
        records.write_bytes(lines[0] + bad + lines[2])
        before = content(tmp_path)
        for use in (opened, Store.read):
            with pytest.raises(FileError, match=r"Line 2 of .*records\.jsonl is no record") as raised:
                use(tmp_path)
            assert "\n" not in str(raised.value)
        assert content(tmp_path) == before


def test_a_key_that_is_there_twice_is_refused(tmp_path):
    records = filled(tmp_path)
    with records.open("ab") as file:
        file.write(records.read_bytes().splitlines(keepends=True)[1])
    with pytest.raises(FileError, match=r"Line 4 of .* has the key 'item 1' of an earlier line"):
        opened(tmp_path)


def test_the_same_key_is_added_once(tmp_path):
    filled(tmp_path)
    with opened(tmp_path) as store, pytest.raises(InputError, match="'item 1' is in the store already"):
        store.add("item 1", {"value": 7})
    assert Store.read(tmp_path)[1]["item 1"] == {"value": 1}


@pytest.mark.parametrize(
    ("here", "words"),
    [
        (SETTINGS | {"seed": 1}, "seed: 0 there, 1 here"),
        (SETTINGS | {"software": {"torch": "2.12", "python": "3.12"}}, "software.torch: 2.13 there, 2.12 here"),
        (SETTINGS | {"software": {"torch": "2.13"}}, "software.python: 3.12 there, nothing here"),
        (SETTINGS | {"new": None}, "new: nothing there, null here"),
        (SETTINGS | {"prompts": [[1, 2], [4]]}, "prompts.1.0: 3 there, 4 here"),
        (SETTINGS | {"prompts": [[1, 2]]}, "prompts: 2 entries there, 1 here"),
        (SETTINGS | {"seed": True, "prompts": [1, 2]}, r"seed: 0 there, true here; prompts.0: \[1, 2\] there, 1 here"),
    ],
)
def test_other_settings_are_refused_by_name_and_nothing_is_touched(here, words, tmp_path):
    records = filled(tmp_path)
    records.write_bytes(records.read_bytes() + b'{"cut off')
    before = content(tmp_path)
    with pytest.raises(FileError, match=rf"holds another demo \(it differs in {words}.*\); choose another folder"):
        opened(tmp_path, settings=here)
    assert content(tmp_path) == before


def test_many_or_long_differences_are_cut_short():
    there, here = ({"text": f"{letter}" * 999} | {str(i): letter for i in range(9)} for letter in "ab")
    text = differences(there, here)
    assert text.endswith("2: a there, b here; and 6 more")
    assert len(text) < 300
    assert differences(there, here, skip=frozenset({"text", *map(str, range(9))})) == ""


def test_another_schema_kind_or_file_is_refused(tmp_path):
    filled(tmp_path)
    head = json.loads((tmp_path / "settings.json").read_text())
    for change, words in (
        ({"schema": 2}, "schema 2, this version of kvdrift reads 1"),
        ({"kind": "sweep"}, "another kind .sweep, not demo."),
        ({"settings": 3}, "is not of a store of results"),
        ({"schema": "x"}, "is not of a store of results"),
    ):
        (tmp_path / "settings.json").write_text(json.dumps(head | change))
        before = content(tmp_path)
        with pytest.raises(FileError, match=words):
            opened(tmp_path)
        with pytest.raises(FileError, match=words):
            Store.read(tmp_path, "demo")
        assert content(tmp_path) == before
    (tmp_path / "settings.json").write_text("my thesis")
    with pytest.raises(FileError, match="is not of a store of results"):
        opened(tmp_path)


def test_records_without_settings_are_refused(tmp_path):
    filled(tmp_path)
    (tmp_path / "settings.json").unlink()
    with pytest.raises(FileError, match=r"holds records\.jsonl without its settings\.json"):
        opened(tmp_path)


def test_a_place_that_cannot_be_used_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="is a file, and results are kept in a folder"):
        opened(tmp_path / "file")
    with pytest.raises(FileError, match=r"Cannot keep results in .*choose another folder"):
        opened(tmp_path / "file" / "folder")
    with pytest.raises(FileError, match="There are no results in"):
        Store.read(tmp_path / "nowhere")


def test_a_folder_is_open_once(tmp_path):
    with opened(tmp_path) as store:
        with pytest.raises(FileError, match="is in use by another run"):
            opened(tmp_path)
        store.add("a", {})
        assert list(Store.read(tmp_path)[1]) == ["a"]
    with pytest.raises(InputError, match="is closed"):
        store.add("b", {})
    with pytest.raises(FileError, match="differs in"):
        opened(tmp_path, settings={})
    with opened(tmp_path) as store:  # a refusal let go of the lock
        assert list(store.done) == ["a"]


def test_a_folder_is_open_in_one_process_and_free_once_that_is_killed(tmp_path):
    with writer() as start:
        _, said = start(tmp_path)
        said.readline()
        with pytest.raises(FileError, match="is in use by another run"):
            opened(tmp_path, settings={"seed": 0})
    with opened(tmp_path, settings={"seed": 0}) as store:
        assert list(store.done)[:1] in ([], ["item 0"])


class Full:
    """A file on a disk that has room for so many bytes more."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, piece):
        if not self.room:
            raise OSError(28, "No space left on device")
        written = self.file.write(piece[: self.room])
        self.room -= written
        return written

    def __getattr__(self, name):
        return getattr(self.file, name)


@pytest.mark.parametrize("room", [0, 10])
def test_a_full_disk_is_one_sentence_and_keeps_what_was_finished(room, tmp_path):
    filled(tmp_path)
    with opened(tmp_path) as store:
        store._file = Full(store._file, room)
        with pytest.raises(FileError, match=r"No space left.*make room, and the same call goes on"):
            store.add("item 3", {"value": 3})
        assert "item 3" not in store.done
        with pytest.raises(InputError, match="closed"):
            store.add("item 3", {"value": 3})
    with opened(tmp_path) as store:
        assert list(store.done) == ["item 0", "item 1", "item 2"]
        store.add("item 3", {"value": 3})
    assert list(Store.read(tmp_path)[1]) == ["item 0", "item 1", "item 2", "item 3"]


def test_what_json_cannot_hold_is_refused_before_it_is_written(tmp_path):
    with opened(tmp_path) as store:
        with pytest.raises(InputError, match="The record of 'a' cannot be kept as JSON"):
            store.add("a", {"array": np.zeros(2)})
        store.add("a", {"array": [0.0]})
    assert Store.read(tmp_path)[1] == {"a": {"array": [0.0]}}


@pytest.mark.parametrize("key", ["0", "[0]", "null"])
def test_a_key_that_is_no_text_is_refused(key, tmp_path):
    with Store(tmp_path, "demo", {}) as store:
        store.add("a", {})
    with (tmp_path / "records.jsonl").open("a") as file:
        file.write(f'{{"key": {key}, "record": {{}}}}\n')
    with pytest.raises(FileError, match=r"Line 2 of .* is no record"):
        Store(tmp_path, "demo", {})
