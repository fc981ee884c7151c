"""Positions of entries that a cache hands back, found bit by bit among those it was given."""

import torch

from kvdrift.paths.written import Written, match


def entries(*rows):
    """Keys and values ``[1, head, position, feature]`` of one head, a number in each."""
    return tuple(torch.tensor(rows, dtype=torch.float32).view(1, 1, -1, 1) + part for part in (0.0, 100.0))


def test_positions_are_counted_from_where_the_entries_begin():
    assert Written(-3).place(entries(1, 2, 3, 4, 5), entries(1, 4, 5)) == [-3, 0, 1]
    assert Written(0).place(entries(1, 2, 3), entries(2)) == [1]


def test_of_entries_that_are_alike_the_newest_are_meant():
    keys, values = (x[0, 0] for x in entries(7, 8, 7, 9))
    read = [x[0, 0] for x in entries(7, 9)]
    assert match(keys, values, *read) == [2, 3]
    twice = [x[0, 0] for x in entries(7, 7, 9)]
    assert match(keys, values, *twice) == [0, 2, 3]


def test_what_was_never_written_is_none_of_them():
    keys, values = (x[0, 0] for x in entries(7, 8))
    assert match(keys, values, *(x[0, 0] for x in entries(9))) is None
    assert match(keys, values, *(x[0, 0] for x in entries(8, 8))) is None, "there is one of it"
    assert match(keys, values, *(x[0, 0].double() for x in entries(8))) is None
    said = Written().place(entries(1, 2), entries(3))
    assert "not what it was given, bit for bit" in said
