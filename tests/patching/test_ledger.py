"""The results file of a sweep: what it keeps, what it forgives, and what it refuses without harm."""

import json
import stat

import numpy as np
import pytest

from kvdrift.errors import FileError
from kvdrift.patching.ledger import Ledger

SETTINGS = {"seed": 0, "prompts": ((1, 2),), "cells": [[{"site": "k", "layers": (1,)}]]}


def rows(seed=0):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((2, 4)) * 10.0 ** rng.integers(-300, 300, (2, 4))
    values[0, 0], values[0, 1] = np.nan, np.inf
    return {"logit_l2": values, "top1": rng.integers(0, 99, (2, 4)), "flip": np.array([[0.0, 1.0, np.nan, 1.0]] * 2)}


def same(one, two):
    return sorted(one) == sorted(two) and all(
        one[name].dtype == two[name].dtype and one[name].tobytes() == two[name].tobytes() for name in one
    )


def test_what_is_kept_comes_back_bit_for_bit(tmp_path):
    path = tmp_path / "new folder" / "sweep.jsonl"
    Ledger(path, SETTINGS).add({(0, -1): rows(1), (0, 0): rows(2)})
    Ledger(path, SETTINGS).add({(1, 0): rows(3)})
    again = Ledger(path, SETTINGS)
    for key, seed in (((0, -1), 1), ((0, 0), 2), ((1, 0), 3)):
        assert same(again.get(*key), rows(seed))
    assert again.get(1, -1) is None
    assert len(path.read_text().splitlines()) == 4


def test_without_a_file_it_remembers_all_the_same():
    ledger = Ledger(None, SETTINGS)
    ledger.add({(0, 3): rows()})
    assert same(ledger.get(0, 3), rows())


def test_a_line_that_was_cut_off_is_dropped_wherever_it_was_cut(tmp_path):
    path = tmp_path / "sweep.jsonl"
    Ledger(path, SETTINGS).add({(0, -1): rows(1), (0, 0): rows(2)})
    whole = path.read_bytes()
    kept = whole[: whole.rfind(b"\n", 0, -1) + 1]
    for cut in range(len(kept), len(whole), 97):
        path.write_bytes(whole[:cut])
        ledger = Ledger(path, SETTINGS)
        assert ledger.get(0, 0) is None
        assert same(ledger.get(0, -1), rows(1))
        assert path.read_bytes() == kept
        ledger.add({(0, 0): rows(2)})
        assert path.read_bytes() == whole


def test_other_settings_are_refused_by_name_and_nothing_is_touched(tmp_path):
    path = tmp_path / "sweep.jsonl"
    Ledger(path, SETTINGS).add({(0, 0): rows()})
    path.write_bytes(path.read_bytes() + b'{"cut off')
    before = path.read_bytes()
    for other in (SETTINGS | {"seed": 1}, SETTINGS | {"new": 3}, SETTINGS | {"prompts": [[1, 3]]}):
        (name,) = [key for key in other if other[key] != SETTINGS.get(key)]
        with pytest.raises(FileError, match=f"holds another sweep .it differs in {name}"):
            Ledger(path, other)
        assert path.read_bytes() == before


@pytest.mark.parametrize(
    "content",
    [
        b"my thesis\n",
        b"my thesis without a line break",
        b'{"a": 1}\n',
        b"[1, 2]\n",
        b"null\n",
        b"\x00\x80\xff\n",
        b'{"kvdrift": "sweep", "settings": {}}\nnot json\n',
        b'{"kvdrift": "sweep", "settings": {}}\n{"prompt": 0}\n',
        b"\n",
    ],
)
def test_a_file_of_something_else_is_refused_and_not_harmed(content, tmp_path):
    path = tmp_path / "thesis.txt"
    path.write_bytes(content)
    with pytest.raises(FileError, match=r"thesis\.txt.*choose another file"):
        Ledger(path, SETTINGS)
    assert path.read_bytes() == content


def test_an_empty_file_is_a_new_one(tmp_path):
    path = tmp_path / "sweep.jsonl"
    path.touch()
    Ledger(path, SETTINGS).add({(0, 0): rows()})
    assert same(Ledger(path, SETTINGS).get(0, 0), rows())
    assert json.loads(path.read_text().splitlines()[0])["kvdrift"] == "sweep"


def test_a_folder_or_a_place_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(FileError, match="choose another file"):
        Ledger(tmp_path, SETTINGS)
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="choose another file"):
        Ledger(tmp_path / "file" / "sweep.jsonl", SETTINGS)


def test_a_file_that_stops_being_writable(tmp_path, monkeypatch):
    path = tmp_path / "sweep.jsonl"
    ledger = Ledger(path, SETTINGS)
    path.unlink()
    path.mkdir()
    with pytest.raises(FileError, match="make room or choose another file"):
        ledger.add({(0, 0): rows()})
    assert stat.S_ISDIR(path.stat().st_mode)
