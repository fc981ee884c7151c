"""The table of operators: no name twice, every exception a real one, and every user has a choice for all it treats."""

import pytest
import torch

from kvdrift.controls import matmul_float32, reroll, row_tiles, wide_sums
from kvdrift.controls.operators import (
    EXACT,
    KINDS,
    PLACES,
    TABLE,
    Kind,
    Use,
    axes_of,
    by_kind,
    by_operator,
    elementwise,
    row_wise,
    treated,
)
from kvdrift.diagnosis import operator_witness

aten = torch.ops.aten
USERS = {
    Use.RE_ROLL: reroll._HANDLERS,
    Use.TILES: row_tiles._HANDLERS,
    Use.WIDE: wide_sums._OPERATORS,
    Use.WITNESS: operator_witness._RULES,
}


def test_every_operator_stands_once_and_every_exception_has_a_reason():
    names = [name for row in TABLE for name in row.names]
    assert len(set(names)) == len(names)
    for row in TABLE:
        for use, reason in row.but.items():
            assert row.kind in KINDS[use], (row.names, use)
            assert len(reason) > 20
        assert any(row.kind in KINDS[use] and use not in row.but for use in Use), row.names


@pytest.mark.parametrize("use", Use)
def test_a_user_treats_what_the_table_says_and_nothing_else(use):
    assert set(USERS[use]) == set(by_operator(dict(treated(use))))


def test_what_tiles_replace_the_witness_checks_but_for_what_the_table_names():
    unbounded = {name for row in TABLE if Use.WITNESS in row.but and Use.TILES not in row.but for name in row.names}
    assert set(row_tiles._HANDLERS) - set(operator_witness._RULES) == set(by_operator(dict.fromkeys(unbounded)))
    assert unbounded == {"_addmm_activation"}
    assert set(matmul_float32._PRODUCTS) <= set(wide_sums._OPERATORS)


def test_a_choice_is_by_name_before_kind_and_none_is_idle():
    kinds = dict.fromkeys(KINDS[Use.RE_ROLL], "kind")
    chosen = by_kind(Use.RE_ROLL, {**kinds, "mm": "name"})
    assert (chosen[aten.mm.default], chosen[aten.bmm.default]) == ("name", "kind")
    with pytest.raises(LookupError, match=r"RE_ROLL does not treat \{'cumsum'\}"):
        by_kind(Use.RE_ROLL, {**kinds, "cumsum": "name"})
    with pytest.raises(LookupError):
        by_kind(Use.RE_ROLL, {Kind.PRODUCT: "kind"})


@pytest.mark.parametrize("op", PLACES, ids=str)
def test_places_are_those_of_the_schema(op):
    (row,) = (row for row in TABLE if op in by_operator(dict.fromkeys(row.names)))
    names = [argument.name for argument in op._schema.arguments]
    if row.kind is Kind.PRODUCT:
        assert row.place == int("beta" in names)
    elif row.kind in (Kind.REDUCTION, Kind.RUNNING, Kind.SOFTMAX):
        assert row.place == (names.index("dim") if "dim" in names else None)
    else:
        assert row.place is None


def test_the_place_of_the_axes():
    x = torch.ones(2, 3)
    assert axes_of(aten.linalg_vector_norm.default, (x, 2, [1])) == [1]
    assert axes_of(aten.mean.dim, (x, [])) is axes_of(aten.sum.default, (x,)) is None


def test_elementwise_are_functions_that_may_round_twice():
    assert [elementwise(op) for op in (aten.exp.default, aten.exp_.default, aten.exp.out)] == [True, True, False]
    packets = [getattr(aten, name) for name in sorted(EXACT)]
    assert not any(elementwise(getattr(packet, overload)) for packet in packets for overload in packet.overloads())
    assert [row_wise(op) for op in (aten.exp.default, aten.mm.default, aten.dot.default, aten.cat.default, "mm")] == [
        True, True, False, False, False,
    ]  # fmt: skip
