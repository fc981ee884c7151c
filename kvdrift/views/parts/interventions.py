"""What the figures of patching share: their words, the look of each arm, and what they refuse."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from kvdrift.errors import InputError
from kvdrift.models.labels import PathInfo, model_name
from kvdrift.patching.outcome import Outcomes
from kvdrift.patching.recovery import Recovery
from kvdrift.patching.schedule import Schedule
from kvdrift.patching.spec import Cell
from kvdrift.views.parts.theme import FLOOR_LINE, PATH_A, PATH_B, SERIES
from kvdrift.words.numbers import count, interval, percent, plural, signed

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
of_steps = partial(percent, below_ten="whole", unknown="none counted")
"""A share of counted steps in per cent, as on every page."""
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
        have = f"{count(len(result.cells), 'cell', thousands='')}"
        raise InputError(f"cell={cell} is out of range: this result has {have}, counted from 0.")


def check_metric(metric: str) -> None:
    """Refuse what recovery does not go by."""
    if metric not in DISTANCES:
        raise InputError(f"metric={metric!r}: choose {' or '.join(DISTANCES)}.")


def into(result: Outcomes) -> str:
    """Who is patched from whom, as in ``smollm2-135m in bfloat16: cache-ON ← cache-OFF (the donor)``."""
    recipient, donor = result.recipient, result.donor
    if (recipient.model, recipient.dtype) == (donor.model, donor.dtype):
        return f"{model_name(recipient.model)} in {recipient.dtype}: {recipient.label} ← {donor.label} (the donor)"
    return f"{_full(recipient)} ← {_full(donor)} (the donor)"


def _full(path: PathInfo) -> str:
    return f"{path.label} of {model_name(path.model)} in {path.dtype}"


def size(result: Any) -> str:
    """How many prompts and steps, as in ``3 prompts, up to 12 steps``."""
    n, longest = len(result.prompts), int(result.n_steps.max(initial=0))
    return f"{n} {plural(n, 'prompt')}, {'up to ' * (n > 1)}{longest} {plural(longest, 'step')}"


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
        return signed(found.value)
    return f"{signed(found.value)} ({interval(found.low, found.high, signed, '95 % interval ')})"
