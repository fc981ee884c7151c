"""Fewer cases, every pair: which part of a product of parameters the fast tests run."""

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import combinations
from typing import Any

import pytest

Case = tuple[Hashable, ...]


def together(case: Case, n: int, alone: Sequence[int] = ()) -> set[tuple[tuple[int, Hashable], ...]]:
    """Every ``n`` values of a case, each with its place; those at places ``alone`` by themselves."""
    others = [(place, value) for place, value in enumerate(case) if place not in alone]
    return {*combinations(others, n), *(((place, case[place]),) for place in alone)}


def pairwise(cases: Sequence[Case], n: int = 2, alone: Sequence[int] = ()) -> list[Case]:
    """Few of the cases, in their order, in which any ``n`` values stand together that do so in one of all cases.

    Values at places ``alone`` need to be there once only. Greedy and without chance: the case with the most new pairs
    comes next, of equals the one whose values were used least.

    >>> pairwise([(x, y, z) for x in "ab" for y in "cd" for z in "ef"])
    [('a', 'c', 'e'), ('a', 'd', 'f'), ('b', 'c', 'f'), ('b', 'd', 'e')]
    """
    sets = {case: together(case, n, alone) for case in cases}
    left, chosen, used = set().union(*sets.values()), set(), Counter()
    while left:
        best = max(cases, key=lambda case: (len(sets[case] & left), -sum(used[value] for value in enumerate(case))))
        chosen.add(best)
        used.update(enumerate(best))
        left -= sets[best]
    return [case for case in cases if case in chosen]


def params(cases: Sequence[Case], n: int = 2, alone: Sequence[int] = ()) -> list[Any]:
    """All cases for ``pytest.mark.parametrize``: the `pairwise` ones are fast tests, the others are marked slow."""
    fast = set(pairwise(cases, n, alone))
    return [
        pytest.param(*case, marks=() if case in fast else pytest.mark.slow, id="-".join(map(name_of, case)))
        for case in cases
    ]


def name_of(value: Hashable) -> str:
    """How a value is called in the name of a test."""
    return str(getattr(value, "label", getattr(value, "__name__", value))).removeprefix("torch.")
