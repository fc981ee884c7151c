import pytest

from kvdrift.patching.spec import Cell, Patch, as_cell
from kvdrift.views.parts.sweep_axes import Grid, Row, arrange, names


def laid_out(made, cells):
    sweep = made.sweep(cells)
    table = sweep.to_dataframe()
    return arrange(sweep, table), sweep, table


@pytest.mark.parametrize(
    ("options", "up", "across", "panels"),
    [
        ({"sites": ("k", "v"), "layers": range(3)}, "layer", "site", [""]),
        ({"sites": ("k",), "layers": range(3), "heads": range(2)}, "layer", "head", [""]),
        ({"sites": ("k",), "layers": range(3), "positions": (0, 4)}, "layer", "position", [""]),
        ({"sites": ("k",), "layers": range(3), "schedules": ("one_shot(1)", "one_shot(4)")}, "layer", "step", [""]),
        ({"sites": ("k", "v"), "layers": range(3), "heads": range(2)}, "layer", "head", ["site k", "site v"]),
        (
            {"sites": ("k", "v"), "layers": range(3), "schedules": ("one_shot(1)", "persistent")},
            "layer", "site", ["one-shot at step 1", "persistent"],
        ),
        ({"sites": ("k",), "layers": (2,), "heads": range(2), "positions": (1, 3)}, "head", "position", [""]),
    ],
)  # fmt: skip
def test_what_varies_makes_the_axes(made, options, up, across, panels):
    cells = made.layer_cells(**options)
    grid, _, table = laid_out(made, cells)
    assert isinstance(grid, Grid)
    assert (grid.y.name, grid.x.name) == (up, across)
    assert list(grid.panels) == panels
    placed = {cell: at for panel in grid.panels.values() for at, cell in panel.items()}
    assert sorted(placed) == list(range(len(cells)))
    for cell, (y, x) in placed.items():
        assert grid.y.values[y] == table[up][cell]
        assert grid.x.values[x] == table[across][cell]


def test_one_numbered_axis_is_a_row_in_order(made):
    row, *_ = laid_out(made, made.layer_cells(("k",), (4, 1, 3)))
    assert isinstance(row, Row)
    assert row.axis.values == (1, 3, 4)
    assert row.cells == (1, 2, 0)


def test_cells_without_a_layer_get_a_place_of_their_own(made):
    cells = (*made.layer_cells(("k",), range(2)), as_cell(Patch("embed")))
    grid, *_ = laid_out(made, cells)
    assert grid.y.labels == ["0", "1", "all"]


def test_labels_and_doubles_are_no_grid(made):
    double = (Cell("one", (Patch("k", layers=1),)), Cell("two", (Patch("k", layers=1),)))
    assert laid_out(made, double)[0] is None
    kinds = (Cell("K", (Patch("k"),)), Cell("V, once", (Patch("v", schedule="one_shot(2)"),)))
    layout, sweep, table = laid_out(made, kinds)
    assert layout is None
    assert names(sweep, table, layout) == ["K", "V, once"]


def test_names_of_places(made):
    cells = made.layer_cells(("k", "v"), (3,), ("one_shot(2)",), heads=(0, 1))
    grid, sweep, table = laid_out(made, cells)
    assert names(sweep, table, grid)[1] == "k at layer 3, head 1 (one-shot at step 2)"
