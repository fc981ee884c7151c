"""How numbers are written: one function for each way, used by summaries, tables, pages and figures alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal


def number(value: float | None, unknown: str = "not a number") -> str:
    """Three significant digits; None, infinity and NaN (``unknown``) by name.

    Examples
    --------
    >>> number(0.01523), number(2.5e-5), number(0.0), number(None)
    ('0.0152', '2.5e-5', '0', 'not measured')
    """
    if value is None:
        return "not measured"
    if math.isnan(value):
        return unknown
    if math.isinf(value):
        return "infinite" if value > 0 else "minus infinite"
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def span(low: float, high: float, say: Callable[[float], str] = number, unknown: str = "none") -> str:
    """From one end to the other, or ``unknown``: an undefined end is no number to print.

    Examples
    --------
    >>> span(0.1, 0.25), span(float("nan"), 1.0)
    ('0.1 to 0.25', 'none')
    """
    return unknown if math.isnan(low) or math.isnan(high) else f"{say(low)} to {say(high)}"


def interval(
    low: float,
    high: float,
    say: Callable[[float], str] = number,
    lead: str = "95 % ",
    unknown: str = "no interval",
) -> str:
    """A 95 % interval behind ``lead``, or ``unknown``, that there is none.

    Examples
    --------
    >>> interval(0.1, 0.25), interval(float("nan"), float("nan"))
    ('95 % 0.1 to 0.25', 'no interval')
    >>> interval(0.1, 0.25, percent, lead=", 95 % interval ", unknown="")
    ', 95 % interval 10 % to 25 %'
    """
    ends = span(low, high, say, unknown="")
    return f"{lead}{ends}" if ends else unknown


def times(value: float) -> str:
    """A factor, as in ``0.95×``, ``12×`` or ``5.4e8×``."""
    if not math.isfinite(value):
        return "infinitely many times" if value > 0 else number(value)
    return f"{value:.2g}×" if 0.01 <= value < 10 else f"{round(value)}×" if 10 <= value < 1000 else f"{number(value)}×"


def decades(factor: float) -> str:
    """A factor as a power of ten, as in ``10^6.5``; below 100 as it is."""
    return f"10^{math.log10(factor):.1f}" if factor >= 100 else times(factor)


def percent(
    share: float, unknown: str = "not a number", below_ten: Literal["digits", "decimal", "whole"] = "digits"
) -> str:
    """A share in per cent, whole from 10 % on.

    Parameters
    ----------
    share
        A share, 1 being all.
    unknown
        What is written for NaN.
    below_ten
        How less than 10 % is written. ``"digits"``: with two significant digits. ``"decimal"``: with one decimal where
        it is not whole. ``"whole"``: whole too, and never 0 or 100 unless it is exactly that.

    Examples
    --------
    >>> percent(0.00213), percent(0.123), percent(0.0)
    ('0.21 %', '12 %', '0 %')
    >>> percent(0.0213, below_ten="decimal"), percent(0.05, below_ten="decimal"), percent(float("nan"), "–")
    ('2.1 %', '5 %', '–')
    >>> percent(0.004, below_ten="whole"), percent(0.9999, below_ten="whole")
    ('< 1 %', '> 99 %')
    """
    if math.isnan(share):
        return unknown
    if math.isinf(share):
        return number(share)
    value = 100 * share
    if below_ten == "whole" and (0 < share < 0.01 or 0.99 < share < 1):
        return "< 1 %" if share < 0.5 else "> 99 %"
    if abs(value) >= 10 or value == 0 or below_ten == "whole":
        return f"{value:.0f} %"
    return f"{value:.2g} %" if below_ten == "digits" else f"{value:.1f}".removesuffix(".0") + " %"


def points(difference: float, sign: bool = True) -> str:
    """A difference of shares in percentage points, as in ``+2.5``."""
    if math.isnan(difference):
        return "–"
    return f"{100 * difference:{'+' if sign else ''}.1f}".replace("-", "−")


def signed(value: float, unknown: str = "undefined") -> str:
    """Two decimals and a real minus; three digits from 100 on; ``unknown`` for NaN.

    Examples
    --------
    >>> signed(0.618), signed(-0.2), signed(-1234.5), signed(-math.inf)
    ('0.62', '−0.20', '−1,234', '−∞')
    """
    if math.isnan(value):
        return unknown
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    text = f"{value:.2f}" if abs(value) < 100 else number(value)
    text = "0.00" if text == "-0.00" else text
    return text.replace("-", "−")


def p_value(p: float) -> str:
    """A p-value with two digits, as in ``0.031`` or ``< 0.001``."""
    return "–" if math.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.2g}"


def plural(n: int, noun: str) -> str:
    """A noun as it follows a count: ``step``, ``steps``, ``strategies``."""
    return noun if n == 1 else f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"


def count(n: int, noun: str, thousands: str = ",") -> str:
    """A count with its noun, and what stands between thousands.

    Examples
    --------
    >>> count(1, "step"), count(2500, "step"), count(2500, "step", thousands="")
    ('1 step', '2,500 steps', '2500 steps')
    """
    return f"{n:{thousands}} {plural(n, noun)}"
