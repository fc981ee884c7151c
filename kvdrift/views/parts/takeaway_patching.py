"""The one sentence that leads a figure of patching, computed from the data it shows."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from kvdrift.patching.factorial_result import PLACEBOS, WHOLE, Factorial
from kvdrift.patching.outcome import Outcomes
from kvdrift.patching.result import PatchResult
from kvdrift.statistics.measured import mean_finite
from kvdrift.views.parts.interventions import recovery_words
from kvdrift.words.numbers import number, signed


def patched(result: Outcomes, cell: int, metric: str = "logit_l2") -> str:
    """How far the patched arm stays from the donor over the steps after the first write, beside the others."""
    if not result.counted(cell).any():
        return "No step follows the first write, so there is nothing to show of what it did"
    donor = f"{result.donor.label}'s logits"
    if result.trivial(cell):
        return f"By construction: the donor's last residual is written at every step, so {donor} follow"
    if result.restored(cell) == 1:
        return f"The patch gives {donor} bit for bit at every step that follows"
    reference = result.reference(cell)
    far = {role: mean_finite(result.distance(role, cell, metric)) for role in ("patched", "unpatched", reference)}
    rest = [f"{role} {number(far[role])}" for role in far if role != "patched"]
    found = result.recovery(cell, metric)
    if math.isnan(found.value):
        return f"Nothing to recover: the {reference} has {donor} at every step that follows"
    what = "nats of KL" if metric == "kl" else "away"
    recovered = f"recovery {recovery_words(found)}{_where_written(result, cell, metric)}"
    return f"Patched, {donor} are {number(far['patched'])} {what}; {', '.join(rest)}: {recovered}"


def _where_written(result: Outcomes, cell: int, metric: str) -> str:
    """Recovery at the written steps, as in ``, 1.00 where it is written``; empty for a patch that does not end."""
    if not result.ends(cell):
        return ""
    if result.trivial(cell, "written"):
        return ", 1 by construction where it is written"
    value = result.recovery(cell, metric, "written").value
    return ", undefined where it is written" if math.isnan(value) else f", {signed(value)} where it is written"


def recovery(result: Outcomes, table: pd.DataFrame, metric: str = "logit_l2", steps: str = "after") -> str:
    """The best cell that is not trivial, beside the unpatched recipient on the same scale.

    Parameters
    ----------
    table
        One row per cell with ``name``, ``recovery``, its interval and ``trivial``, as the figure shows them.
    """
    open_rows = table[~table["trivial"].astype(bool)]
    known = open_rows[open_rows["recovery"].notna()]
    if open_rows.empty:
        return "Every cell recovers 1 by construction: the donor's last residual is written at every step"
    if known.empty:
        return "Nothing to recover: what the patches are held against has the donor's logits already"
    row = known.loc[known["recovery"].idxmax()]
    cell = int(row["cell"])
    found = result.recovery(cell, metric, steps)
    of = f", best of {len(known)} cells" if len(known) > 1 else ""
    text = f"{row['name']}: recovery {recovery_words(found)}{of}"
    if steps == "after":
        text += _where_written(result, cell, metric)
    if found.reference == "unpatched":
        return f"{text} against no patch (no placebo was run)"
    plain = result.recovery(cell, metric, steps, against="unpatched")
    bare = result.recovery(cell, metric, steps, role="unpatched")
    text += f"; without a patch: {signed(bare.value)}"
    if math.isnan(plain.low):
        return text
    return text if plain.low > 0 else f"{text}, so the patch is not surely of use"


def factorial(result: Factorial, metric: str = "logit_l2") -> str:
    """What one factor alone does, beside both and a one-ulp placebo; never as shares of a whole."""
    if not result.counted.any():
        return "No step follows the prompt, so there is nothing to compare"
    whole = mean_finite(result.per_prompt(WHOLE, metric))
    if whole == 0:
        return "Cache-ON and cache-OFF agree bit for bit at every step: there is no drift to take apart"
    kernel, state = (
        mean_finite(np.stack([result.per_prompt(pair, metric) for pair in pairs]))
        for pairs in (("y10-y00", "y01-y11"), ("y01-y00", "y10-y11"))
    )
    if kernel == 0 or state == 0:
        silent, other, far = ("kernel", "K/V", state) if kernel == 0 else ("K/V", "kernel", kernel)
        return (
            f"Changing the {silent} alone changes no bit; changing the {other} alone moves the logits by "
            f"{number(far)}, both together {number(whole)}"
        )
    moved = f"the kernel alone moves the logits by {number(kernel)}, K/V alone {number(state)}, both {number(whole)}"
    if metric == "kl":
        moved = f"KL is {number(kernel)} with the kernel changed, {number(state)} with K/V, {number(whole)} with both"
    placebo = max(mean_finite(result.per_prompt(pair, metric)) for pair in PLACEBOS)
    if placebo > whole / 2:
        return f"One ulp in one entry does as much ({number(placebo)}): {moved}, so lengths do not divide the drift"
    return f"{moved[0].upper()}{moved[1:]}; one ulp in one entry {number(placebo)}"


def trajectories(result: PatchResult, prompt: int) -> str:
    """How many tokens of the donor's own text each arm writes before it leaves it."""
    texts = result.trajectories[prompt]
    n = len(texts["donor"])
    left = {name: leaves(texts["donor"], texts[name]) for name in ("unpatched", "patched")}
    donor = result.donor.label
    if left["patched"] is None and left["unpatched"] is None:
        return f"Patched or not, the recipient writes {donor}'s text to the end ({n} tokens): nothing to bring back"
    words = {name: "all" if step is None else str(step) for name, step in left.items()}
    text = f"Patched, the text is {donor}'s for {words['patched']} of {n} tokens"
    if left["patched"] == left["unpatched"]:
        return f"{text}, as long as unpatched"
    return f"{text}; unpatched, for {words['unpatched']}"


def leaves(donor: tuple[int, ...], text: tuple[int, ...]) -> int | None:
    """The first step at which a text is not the donor's; None if there is none.

    Examples
    --------
    >>> leaves((1, 2, 3), (1, 2, 4)), leaves((1, 2), (1, 2)), leaves((1, 2, 3), (1, 2))
    (2, None, 2)
    """
    for step in range(max(len(donor), len(text))):
        if donor[step : step + 1] != text[step : step + 1]:
            return step
    return None
