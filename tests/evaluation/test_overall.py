"""All conditions together: the items are the unit, not the conditions."""

import math

import pytest

from kvdrift.errors import InputError
from kvdrift.evaluation.overall import overall

pytestmark = pytest.mark.usefixtures("quick_statistics")


def table(result, text, first_text, rights, null=(), **options):
    """Strategy → per item (a, b); ``null``: per replicate, strategy → per item whether the re-roll is right."""
    trials = {
        name: [
            [(first_text(a), text(b), [text(replicate[name][i], unequal=0) for replicate in null])]
            for i, (a, b) in enumerate(pairs)
        ]
        for name, pairs in rights.items()
    }
    return result(trials, **options)


@pytest.fixture
def make(result, text, first_text):
    """``make({strategy: [(a, b), …]}, null=[{strategy: [right, …]}, …])``."""
    return lambda rights, **options: table(result, text, first_text, rights, **options)


YES, NO = (True, False), (False, True)
SAME = (True, True)


def test_counts_and_the_item_level_test(make):
    found = make({"greedy": [YES] * 5 + [NO], "top-k 50": [YES] * 5 + [SAME], "top-p 0.9": [NO] + [SAME] * 5}).overall()
    assert (found.n_conditions, found.n_items, found.a_higher, found.b_higher) == (3, 6, 2, 1)
    # item means in thirds: 1, 2, 2, 2, 2, −1; all six differ
    assert found.discordant == 6
    assert found.enough
    # by hand: the sum is 8 of at most 10; patterns at least as far from zero: all of one sign (10), one of the two
    # ones turned (8, twice), and their negatives
    assert found.p == pytest.approx(6 / 2**6)
    assert found.null_a_higher == ()
    assert math.isnan(found.null_share)


def test_one_item_that_favours_a_path_in_every_condition_is_one_item(make):
    """ "9 of 9 conditions" from a single item."""
    found = make({f"top-k {k}": [YES] + [SAME] * 9 for k in range(1, 10)}).overall()
    assert (found.a_higher, found.b_higher) == (9, 0)
    assert (found.discordant, found.p, found.enough) == (1, 1.0, False)


def test_differences_that_cancel_over_conditions_do_not_count(make):
    found = make({"greedy": [YES, SAME], "top-k 50": [NO, SAME]}).overall()
    assert (found.a_higher, found.b_higher, found.discordant, found.p) == (1, 1, 0, 1.0)


def test_the_null_counts_conditions_too(make):
    rights = {"greedy": [YES, SAME], "top-k 50": [YES, SAME]}
    null = [
        {"greedy": [False, True], "top-k 50": [False, True]},  # a higher in both
        {"greedy": [True, True], "top-k 50": [False, False]},  # in one
        {"greedy": [True, True], "top-k 50": [True, True]},  # in none
    ]
    found = make(rights, null=null).overall()
    assert found.null_a_higher == (2, 1, 0)
    assert found.null_share == pytest.approx((1 + 1) / 4)


def test_models_are_put_together_over_the_items_that_all_have(make):
    one = make({"greedy": [YES] * 6, "top-k 50": [YES] * 6})
    two = make({"greedy": [NO] * 4})
    found = one.overall(two)
    assert (found.n_conditions, found.n_items, found.a_higher, found.b_higher) == (3, 4, 2, 1)
    assert found.discordant == 4
    assert not found.enough
    assert found == overall([one, two])


def test_without_answers_there_is_no_test(make):
    found = make({"greedy": [(None, None)] * 3}).overall()
    assert math.isnan(found.p)
    assert (found.a_higher, found.b_higher, found.enough) == (0, 0, False)


def test_other_items_under_the_same_ids_are_refused(make):
    one = make({"greedy": [YES] * 2})
    with pytest.raises(InputError, match="other prompts under the same ids"):
        one.overall(make({"greedy": [YES] * 2}, prompts=["Question 0", "Another"]))


def test_other_ids_under_the_same_ids_are_refused(make):
    from dataclasses import replace

    one = make({"greedy": [YES] * 2}, prompts=[None, None])
    two = replace(one, records=tuple(replace(record, prompt_hash="other") for record in one.records))
    assert one.overall(one).n_items == 2
    with pytest.raises(InputError, match="other prompts under the same ids"):
        one.overall(two)


def test_no_item_in_common_is_refused(make):
    from dataclasses import replace

    one = make({"greedy": [YES] * 2})
    two = replace(one, records=tuple(replace(record, item=f"other {record.item}") for record in one.records))
    with pytest.raises(InputError, match="no item in common"):
        one.overall(two)
