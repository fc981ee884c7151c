"""Conditions against numbers worked out by hand from records made by hand; tables and files."""

import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from kvdrift.errors import FileError, InputError
from kvdrift.evaluation.records import Gold
from kvdrift.evaluation.result import Evaluation
from kvdrift.statistics.detectable import detectable_difference

NAN = float("nan")


def wilson_by_hand(events, n, z=1.959963984540054):
    p = events / n
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return pytest.approx(((middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)), abs=1e-12)


@pytest.fixture(scope="module")
def found(result, text, first_text):
    """Ten items. greedy 7 : 1, top-p 8 : 0 discordant; three texts part under greedy; three re-rolls."""
    greedy, top_p = [], []
    for i in range(10):
        a, b = i < 8, i in (0, 9)  # both right: 0; only a: 1–7; only b: 9; neither: 8
        step = {1: 0, 2: 4, 3: 4}.get(i)
        null = [text(a, 2 if i == 5 else None), text(a and i > 2, 6 if i < 3 else None), text(a, 1 if i < 5 else None)]
        stop_a, answer_a = ("eos" if i < 4 else "length"), ("[invalid]" if i == 8 else None)
        answer_b = "[invalid]" if i in (1, 2) else None
        greedy.append([(first_text(a, stop_a, answer_a), text(b, step, answer=answer_b, stop="eos"), null)])
        top_p.append([(first_text(i < 8), text(False), [text(i < 8)] * 3)])
    gold = [(-10.0 - i, -10.5 - i, (-10.25 - i, -9.0 - i, -10.0 - i)) for i in range(10)]
    return result({"greedy": greedy, "top-p 0.9": top_p}, gold=gold)


# --- conditions


def test_accuracies(found):
    one, two = found.conditions
    assert (one.model, one.strategy, one.n_items, one.n_seeds) == ("made-up", "greedy", 10, 1)
    assert (one.accuracy_a.value, one.accuracy_a.events, one.accuracy_a.n) == (0.8, 8, 10)
    assert (one.accuracy_b.value, one.accuracy_b.events, one.accuracy_b.n) == (0.2, 2, 10)
    assert (one.accuracy_a.low, one.accuracy_a.high) == wilson_by_hand(8, 10)
    assert (one.accuracy_b.low, one.accuracy_b.high) == wilson_by_hand(2, 10)
    assert one.difference.value == pytest.approx(0.6)
    assert one.difference.low < 0.6 < one.difference.high
    assert two.accuracy_b.events == 0


def test_flips_and_tests(found):
    one, two = found.conditions
    assert (one.only_a, one.only_b, one.test) == (7, 1, "McNemar")
    assert (two.only_a, two.only_b) == (8, 0)
    assert one.p == pytest.approx(2 * (1 + 8) / 2**8)
    assert two.p == pytest.approx(2 / 2**8)
    assert two.p_holm == pytest.approx(2 * two.p)
    assert one.p_holm == pytest.approx(one.p)  # the larger of two
    assert one.enough
    assert two.enough
    assert one.detectable == detectable_difference(10, 0.8)


def test_invalid_and_truncated_are_counted_apart(found):
    one = found.conditions[0]
    assert (one.invalid_a, one.invalid_b) == (1, 2)
    assert (one.truncated_a, one.truncated_b) == (6, 0)


def test_divergence(found):
    one, two = found.conditions
    assert (one.divergence.value, one.divergence.events, one.divergence.n) == (0.3, 3, 10)
    assert (one.divergence.low, one.divergence.high) == wilson_by_hand(3, 10)
    assert (one.incidence.tokens, one.incidence.value, one.incidence.horizon) == ((1, 5), (0.1, 0.3), 12)
    assert [one.incidence.low[1], one.incidence.high[1]] == list(wilson_by_hand(3, 10).expected)
    assert (two.divergence.events, two.incidence.tokens) == (0, ())


def test_gold(found):
    assert found.gold.value == pytest.approx(0.5)
    assert math.isnan(found.gold.low)  # all items differ by the same
    assert found.gold_null == pytest.approx((0.25, -1.0, 0.0))
    assert [condition.gold for condition in found.conditions] == [found.gold] * 2


def test_null_numbers(found):
    null = found.conditions[0].null
    assert null.refused is None
    assert null.divergence == pytest.approx((0.1, 0.3, 0.5))
    assert null.differences == pytest.approx((0.0, 0.3, 0.0))
    assert null.gold == pytest.approx((0.25, -1.0, 0.0))
    assert null.p_divergence == pytest.approx(3 / 4)  # two of three as high as 0.3
    assert null.p_difference == pytest.approx(1 / 4)  # none as far from zero as 0.6
    assert null.p_gold == pytest.approx(2 / 4)  # −1 is farther from zero than 0.5


def test_a_null_without_a_changed_bit_is_refused_per_strategy(found):
    null = found.conditions[1].null
    assert "cache-ON changed no bit" in null.refused
    assert null.divergence == (0.0, 0.0, 0.0)
    assert all(math.isnan(p) for p in (null.p_divergence, null.p_difference, null.p_gold))


def test_a_changed_bit_is_enough_even_where_no_text_parts(result, text, first_text):
    rows = [[(first_text(True), text(True), [text(True, unequal=3 if i == 2 else None)])] for i in range(4)]
    assert result({"greedy": rows}).conditions[0].null.refused is None


def test_without_a_null_there_is_none(rights):
    condition = rights(2, 1).conditions[0]
    assert condition.null is None
    assert condition.gold is None
    assert not condition.enough


def test_several_seeds(result, text, first_text):
    """Three seeds of each item: the items are the unit, and the test is the sign flip's."""
    right = [[(1, 0), (1, 0), (0, 0)]] * 6 + [[(0, 1), (1, 1), (0, 0)]]
    rows = [[(first_text(bool(a)), text(bool(b)), []) for a, b in seeds] for seeds in right]
    one = result({"top-p 0.9": rows}, seeds=(0, 1, 2)).conditions[0]
    assert (one.n_items, one.n_seeds, one.test) == (7, 3, "sign flip")
    assert (one.accuracy_a.events, one.accuracy_a.n) == (6 * 2 + 1, 21)
    assert (one.only_a, one.only_b) == (12, 1)
    assert one.difference.value == pytest.approx((6 * 2 / 3 - 1 / 3) / 7)
    # by hand: of 2⁷ sign patterns of six 2/3 and one 1/3, those at least as far from zero as 11/3 are
    # all of one sign (13/3) and this one with the small item turned: two of each
    assert one.p == pytest.approx(4 / 2**7)
    assert one.enough


def test_items_without_an_answer_are_left_out(result, text, first_text):
    rows = [[(first_text(None), text(None), [])], [(first_text(True), text(False), [])]]
    one = result({"greedy": rows}).conditions[0]
    assert (one.accuracy_a.n, one.accuracy_b.n, one.difference.value, one.divergence.n) == (1, 1, 1.0, 2)
    none = result({"greedy": rows[:1]}).conditions[0]
    assert none.accuracy_a.n == 0
    assert math.isnan(none.p)
    assert math.isnan(none.p_holm)
    assert none.detectable is None


# --- tables


def test_the_table_of_conditions(found):
    table = found.to_dataframe()
    assert list(table["strategy"]) == ["greedy", "top-p 0.9"]
    assert table.loc[0, "accuracy_a"] == 0.8
    assert [table.loc[0, "divergence_low"], table.loc[0, "divergence_high"]] == list(wilson_by_hand(3, 10).expected)
    assert table.loc[0, "p_null_divergence"] == 0.75
    assert np.isnan(table.loc[1, "p_null_divergence"])
    assert {"difference", "difference_low", "only_a", "p_holm", "enough", "detectable", "truncated_b", "gold"} <= set(
        table
    )


def test_the_table_of_trials(found):
    table = found.to_dataframe("trials")
    assert len(table) == 10 * 2 * (2 + 3)
    assert set(table["arm"]) == {"a", "b", "null 0", "null 1", "null 2"}
    row = table[(table["item"] == "q2") & (table["strategy"] == "greedy") & (table["arm"] == "b")].iloc[0]
    assert (row["divergence"], row["unequal"], row["margin_a"], row["margin"]) == (4, 4, 0.25, 0.5)
    assert (row["answer"], row["correct"], row["stop"], row["n_tokens"]) == ("[invalid]", False, "eos", 12)
    assert row["tokens"] == [7] * 4 + [8] * 8
    assert table[table["arm"] == "a"]["divergence"].isna().all()


def test_the_table_of_items(found):
    table = found.to_dataframe("items")
    assert list(table["item"]) == [f"q{i}" for i in range(10)]
    assert (table.loc[3, "gold_a"], table.loc[3, "gold_b"], table.loc[3, "gold_tokens"]) == (-13.0, -13.5, 2)
    assert table.loc[3, "gold_null"] == [-13.25, -12.0, -13.0]


def test_another_table_is_refused(found):
    with pytest.raises(InputError, match="choose one of conditions, trials, items"):
        found.to_dataframe("rows")


def test_parquet_holds_the_trials(found, tmp_path):
    path = found.to_parquet(tmp_path / "trials.parquet")
    again, table = pd.read_parquet(path), found.to_dataframe("trials")
    assert list(again) == list(table)
    assert [list(tokens) for tokens in again["tokens"]] == list(table["tokens"])
    rest = [name for name in table if name != "tokens"]
    pd.testing.assert_frame_equal(again[rest], table[rest], check_dtype=False)
    assert [file.name for file in tmp_path.iterdir()] == ["trials.parquet"]


def test_rows_and_texts(found):
    assert found.rows(["q3", "q0"]) == [3, 0]
    assert found.texts(["q3"]) == ["Question 3"]


# --- files


def test_saved_and_loaded_is_equal(found, tmp_path):
    again = Evaluation.load(found.save(tmp_path / "e.safetensors"))
    assert again == found
    assert again.conditions[0] == found.conditions[0]
    assert again.summary() == found.summary()
    assert json.dumps(again.to_dict()) == json.dumps(found.to_dict())


def test_gold_that_is_ruled_out_survives(result, text, first_text, tmp_path):
    rows = [[(first_text(True), text(True), [])]] * 2
    found = result({"greedy": rows}, gold=[(-math.inf, -math.inf, ()), (-2.0, -1.5, ())])
    again = Evaluation.load(found.save(tmp_path / "e.safetensors"))
    assert again == found
    assert again.records[0].gold.a == -math.inf
    assert again.gold.value == -0.5  # there is no difference of two infinities
    json.dumps(again.to_dict(), allow_nan=False)


def test_gold_that_every_path_rules_out_is_left_out_of_the_null_too(made_evaluation):
    found = made_evaluation.evaluation(n_items=6, replicates=3)
    ruled_out = [replace(r, gold=Gold(7, -math.inf, -math.inf, (-math.inf,) * 3)) for r in found.records[:2]]
    mixed = replace(found, records=(*ruled_out, *found.records[2:]))
    rest = replace(found, records=found.records[2:])
    assert (mixed.gold_null, mixed.gold) == (rest.gold_null, rest.gold)
    assert mixed.conditions[0].null.p_gold == rest.conditions[0].null.p_gold


@pytest.mark.parametrize("damage", ["missing", "truncated", "edited"])
def test_a_damaged_file_is_refused(damage, found, tmp_path):
    path = found.save(tmp_path / "e.safetensors")
    if damage == "missing":
        path.unlink()
    else:
        content = bytearray(path.read_bytes())
        content[-40] ^= 1
        path.write_bytes(content[:-20] if damage == "truncated" else content)
    with pytest.raises(FileError, match=r"e\.safetensors"):
        Evaluation.load(path)
