"""How numbers are written, at the edges of each way."""

import math

import pytest

from kvdrift.words.numbers import count, decades, interval, number, p_value, percent, points, signed, span, times

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("say", "value", "written"),
    [
        *((number, *pair) for pair in (
            (0.01523, "0.0152"), (2.5e-5, "2.5e-5"), (0.0, "0"), (None, "not measured"), (NAN, "not a number"),
            (INF, "infinite"), (-INF, "minus infinite"), (12345.0, "1.23e4"), (1234.0, "1,234"), (999.6, "1e+03"),
        )),
        *((times, *pair) for pair in (
            (0.95, "0.95×"), (9.96, "10×"), (12.3, "12×"), (0.001, "0.001×"), (5.4e8, "5.4e8×"),
            (INF, "infinitely many times"), (NAN, "not a number"),
        )),
        *((decades, *pair) for pair in ((3.2e6, "10^6.5"), (64.0, "64×"), (1.5, "1.5×"), (1e17, "10^17.0"))),
        *((points, *pair) for pair in ((0.025, "+2.5"), (-0.025, "−2.5"), (0.0, "+0.0"), (NAN, "–"))),
        *((signed, *pair) for pair in ((-0.001, "0.00"), (-1234.5, "−1,234"), (-INF, "−∞"), (NAN, "undefined"))),
        *((p_value, *pair) for pair in ((0.0009, "< 0.001"), (0.001, "0.001"), (1.0, "1"), (NAN, "–"))),
    ],
)  # fmt: skip
def test_one_number(say, value, written):
    assert say(value) == written


@pytest.mark.parametrize(
    ("share", "digits", "decimal", "whole"),
    [
        (0, "0 %", "0 %", "0 %"), (0.00213, "0.21 %", "0.2 %", "< 1 %"), (0.004, "0.4 %", "0.4 %", "< 1 %"),
        (0.05, "5 %", "5 %", "5 %"), (0.0999, "10 %", "10 %", "10 %"), (0.123, "12 %", "12 %", "12 %"),
        (0.999, "100 %", "100 %", "> 99 %"), (1, "100 %", "100 %", "100 %"), (NAN, "?", "?", "?"),
        (INF, "infinite", "infinite", "infinite"),
    ],
)  # fmt: skip
def test_percent(share, digits, decimal, whole):
    ways = {"digits": digits, "decimal": decimal, "whole": whole}
    assert {way: percent(share, "?", below_ten=way) for way in ways} == ways


def test_what_is_not_known_is_named_as_asked():
    assert number(NAN, "none") == "none"
    assert span(NAN, 1.0) == span(1.0, NAN) == "none"
    assert span(0.1, 0.2, percent) == "10 % to 20 %"
    assert interval(0.1, 0.2) == "95 % 0.1 to 0.2"
    assert interval(NAN, 0.2) == "no interval"


@pytest.mark.parametrize(
    ("n", "noun", "said"),
    [(0, "step", "0 steps"), (1, "strategy", "1 strategy"), (1200, "strategy", "1,200 strategies")],
)
def test_counts(n, noun, said):
    assert count(n, noun) == said
