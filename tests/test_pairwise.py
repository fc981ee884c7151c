"""The cases that stand for a whole product."""

from collections import Counter
from itertools import product

import pytest
from pairwise import pairwise, params, together

AXES = (range(7), ("float32", "bfloat16", "float16"), ("sdpa", "eager"), ("on", "off"))
ALL = list(product(*AXES))
ALLOWED = [case for case in ALL if case[2] == "sdpa" or case[0] % 2]


def union(cases, n):
    return set().union(*(together(case, n) for case in cases))


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("cases", [ALL, ALLOWED], ids=["all", "without some"])
def test_what_stands_together_in_some_case_does_so_in_a_chosen_one(cases, n):
    chosen = pairwise(cases, n)
    assert union(chosen, n) == union(cases, n)
    assert set(chosen) <= set(cases)
    assert chosen == [case for case in cases if case in chosen], "in their order"
    assert len(chosen) <= {1: 7, 2: 23, 3: 53}[n]


def test_values_that_need_to_be_there_once():
    chosen = pairwise(ALL, alone=[0])
    assert union([case[1:] for case in chosen], 2) == union([case[1:] for case in ALL], 2)
    assert len(chosen) == len(AXES[0]) == len({case[0] for case in chosen})


def test_of_equal_cases_the_values_used_least_come_first():
    chosen = pairwise(ALL, 1)
    assert Counter(case[1] for case in chosen) == {"float32": 3, "bfloat16": 2, "float16": 2}


def test_every_case_is_a_parameter_and_the_chosen_ones_are_fast():
    made = params(ALL)
    assert [case.values for case in made] == ALL
    assert [case.values for case in made if not case.marks] == pairwise(ALL)
    assert {mark.name for case in made for mark in case.marks} == {"slow"}
    assert made[0].id == "0-float32-sdpa-on"


def test_two_axes_cannot_be_thinned():
    cases = list(product("abc", "xy"))
    assert pairwise(cases) == cases
