import numpy as np
import pytest

from kvdrift.views.parts.scale import Scale, log_ticks
from kvdrift.views.parts.theme import IDENTICAL, NOT_FINITE


def colour_at(scale: Scale, z: float) -> str:
    axis = scale.coloraxis()
    place = (z - axis["cmin"]) / (axis["cmax"] - axis["cmin"])
    return [colour for start, colour in axis["colorscale"] if start <= place][-1]


def test_values_become_log10():
    values = np.array([1e-5, 1e-3, 2e-1])
    z = Scale.of(values).z(values, np.array(True))
    np.testing.assert_allclose(10**z, values, rtol=2e-5)


def test_zero_inf_nan_and_unmeasured_stay_apart():
    values = np.array([0.0, 1e-4, np.inf, np.nan, np.nan])
    measured = np.array([True, True, True, True, False])
    scale = Scale.of(values[measured])
    z = scale.z(values, measured)
    assert np.isfinite(z[:4]).all()
    assert np.isnan(z[4])
    assert colour_at(scale, z[0]) == IDENTICAL
    assert colour_at(scale, z[2]) == colour_at(scale, z[3]) == NOT_FINITE
    assert colour_at(scale, z[1]) not in (IDENTICAL, NOT_FINITE)
    assert {"bit-identical", "NaN / inf"} <= set(scale.coloraxis()["colorbar"]["ticktext"])


def test_blocks_are_left_out_where_not_needed():
    labels = Scale.of(np.array([1e-4, 1e-2])).coloraxis()["colorbar"]["ticktext"]
    assert [label for label in labels if "·" not in label] == [f"10<sup>−{e}</sup>" for e in (4, 3, 2)]
    assert "bit-identical" not in labels
    assert "NaN / inf" not in labels


def test_all_zero_has_one_colour_and_no_decades():
    scale = Scale.of(np.zeros((2, 3)))
    axis = scale.coloraxis()
    assert axis["colorbar"]["ticktext"] == ["bit-identical"]
    assert {colour for _, colour in axis["colorscale"]} == {IDENTICAL}


def test_identical_share_is_linear_with_one_in_grey():
    values = np.array([0.0, 0.5, 1.0])
    scale = Scale.of(values, "identical")
    z = scale.z(values, np.array(True))
    np.testing.assert_array_equal(z[:2], [0.0, 0.5])
    assert colour_at(scale, z[2]) == IDENTICAL
    assert colour_at(scale, z[0]) != IDENTICAL


def test_a_few_tiny_values_share_the_lowest_colour_and_the_tick_says_so():
    values = np.concatenate([[1e-12], np.geomspace(1e-4, 1e-1, 999)])
    scale = Scale.of(values)
    z = scale.z(values, np.array(True))
    assert (scale.clipped, scale.low) == (True, -4)
    assert z[0] == scale.low
    np.testing.assert_allclose(10 ** z[1:], values[1:], rtol=2e-5)
    assert scale.coloraxis()["colorbar"]["ticktext"][0] == "≤ 10<sup>−4</sup>"
    assert not Scale.of(values[1:]).clipped


def test_colour_positions_rise_from_0_to_1():
    for values in ([0.0, 1e-3, np.inf], [1e-3], [0.0], [np.nan], [1e-9, 1.0]):
        places = [place for place, _ in Scale.of(np.array(values)).coloraxis()["colorscale"]]
        assert places == sorted(places)
        assert (places[0], places[-1]) == (0, 1)


@pytest.mark.parametrize(("low", "high"), [(-5.3, -1.7), (-12, 0), (-1.2, -0.4), (-40, 3)])
def test_ticks_are_decades_inside_the_range(low, high):
    ticks = log_ticks(low, high)
    assert 2 <= len(ticks) <= 12
    assert all(low - 1e-6 <= place <= high + 1e-6 for place, _ in ticks)
    whole = [place for place, label in ticks if "·" not in label]
    assert all(place == round(place) for place in whole)
