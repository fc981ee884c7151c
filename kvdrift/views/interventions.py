"""What the figures of patching share: their words, the look of each arm, and what they refuse."""

from __future__ import annotations

import math
from typing import Any

from kvdrift.drift.summary import model_name, number
from kvdrift.errors import InputError
from kvdrift.models.labels import PathInfo
from kvdrift.patching.outcome import Outcomes
from kvdrift.patching.recovery import Recovery
from kvdrift.patching.schedule import Schedule
from kvdrift.patching.spec import Cell
from kvdrift.views.theme import FLOOR_LINE, PATH_A, PATH_B, SERIES

PLACEBO_WORDS = "placebo: noise of equal norm"
ARM_NAMES = {
    "patched": "patched",
    "unpatched": "unpatched",
    "placebo": PLACEBO_WORDS,
    "re-roll": "re-roll: sums in another order, no patch",
    "one ulp": "one entry moved by one ulp",
    "re-rolled patched": "patched, sums re-rolled",
    "float32 donor": "patched from a wider donor",
}
"""Arms that are drawn. The self-patch is the unpatched recipient and the full patch is at zero, by construction."""
ARM_COLOURS = {
    "patched": PATH_A,
    "unpatched": PATH_B,
    "placebo": FLOOR_LINE,
    "re-roll": SERIES[2],
    "one ulp": SERIES[5],
    "re-rolled patched": SERIES[4],
    "float32 donor": SERIES[6],
}
UNDEFINED = "#7d8590"  # recovery without a denominator
DISTANCES = {"logit_l2": "distance to the donor (centred L2 of the logits)", "kl": "KL(donor‖arm) in nats"}


def check_outcomes(view: str, result: Any) -> None:
    """Refuse what is no result of `kvdrift.patch` or `kvdrift.sweep`."""
    if not isinstance(result, Outcomes):
        raise InputError(
            f"{view} was given a {type(result).__name__}; it shows what kvdrift.patch or kvdrift.sweep returns."
        )


def check_cell(result: Outcomes, cell: int) -> None:
    """Refuse a cell number that this result does not have."""
    if not 0 <= cell < len(result.cells):
        have = f"{len(result.cells)} cell{'s' * (len(result.cells) != 1)}"
        raise InputError(f"cell={cell} is out of range: this result has {have}, counted from 0.")


def check_metric(metric: str) -> None:
    """Refuse what recovery does not go by."""
    if metric not in DISTANCES:
        raise InputError(f"metric={metric!r}: choose {' or '.join(DISTANCES)}.")


def into(result: Outcomes) -> str:
    """Who is patched from whom, as in ``smollm2-135m in bfloat16: cache-ON ← cache-OFF (the donor)``."""
    recipient, donor = result.recipient, result.donor
    if _same(recipient, donor):
        return f"{model_name(recipient.model)} in {recipient.dtype}: {recipient.label} ← {donor.label} (the donor)"
    return f"{_full(recipient)} ← {_full(donor)} (the donor)"


def _same(one: PathInfo, other: PathInfo) -> bool:
    return (one.model, one.dtype) == (other.model, other.dtype)


def _full(path: PathInfo) -> str:
    return f"{path.label} of {model_name(path.model)} in {path.dtype}"


def size(result: Any) -> str:
    """How many prompts and steps, as in ``3 prompts, up to 12 steps``."""
    n, longest = len(result.prompts), int(result.arrays["n_steps"].max(initial=0))
    return f"{n} prompt{'s' * (n != 1)}, {'up to ' * (n > 1)}{longest} step{'s' * (longest != 1)}"


def schedule_words(schedule: Schedule) -> str:
    """A schedule in words, as in ``one-shot at step 3``."""
    if schedule.last is None:
        return "persistent" if schedule.first == 1 else f"persistent from step {schedule.first}"
    if schedule.is_one_shot:
        return f"one-shot at step {schedule.first}"
    return f"steps {schedule.first} to {schedule.last}"


def cell_schedule(cell: Cell) -> str:
    """The schedules of a cell's patches, each once."""
    return " + ".join(dict.fromkeys(schedule_words(patch.schedule) for patch in cell.patches))


def written_spans(cell: Cell, last: int) -> list[tuple[int, int]]:
    """Runs of steps up to ``last`` at which something is written, both ends included.

    Examples
    --------
    >>> from kvdrift.patching.spec import Patch, as_cell
    >>> written_spans(as_cell([Patch("k", schedule="one_shot(2)"), Patch("v", schedule="window(4, 5)")]), 9)
    [(2, 2), (4, 5)]
    """
    spans: list[tuple[int, int]] = []
    for step in range(last + 1):
        if not cell.covers(step):
            continue
        if spans and spans[-1][1] == step - 1:
            spans[-1] = (spans[-1][0], step)
        else:
            spans.append((step, step))
    return spans


def recovery_words(found: Recovery) -> str:
    """A recovery with its interval, as in ``0.62 (95 % interval 0.5 to 0.7)``."""
    if math.isnan(found.value):
        return "undefined"
    if math.isnan(found.low):
        return f"{signed(found.value)} (no interval)"
    return f"{signed(found.value)} (95 % interval {signed(found.low)} to {signed(found.high)})"


def percent(share: float) -> str:
    """A share as on every page: ``12 %``, and never 0 or 100 unless it is exactly that.

    Examples
    --------
    >>> percent(0.123), percent(0.0), percent(0.9999), percent(float("nan"))
    ('12 %', '0 %', '> 99 %', 'none counted')
    """
    if math.isnan(share):
        return "none counted"
    if 0 < share < 0.01 or 0.99 < share < 1:
        return "< 1 %" if share < 0.5 else "> 99 %"
    return f"{100 * share:.0f} %"


def signed(value: float) -> str:
    """A recovery with two decimals and a real minus; large negative ones with three digits.

    Examples
    --------
    >>> signed(0.618), signed(-0.2), signed(-1234.5), signed(-math.inf)
    ('0.62', '−0.20', '−1,234', '−∞')
    """
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    text = f"{value:.2f}" if abs(value) < 100 else number(value)
    text = "0.00" if text == "-0.00" else text
    return text.replace("-", "−")
