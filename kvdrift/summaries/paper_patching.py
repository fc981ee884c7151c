"""What the paper's patching experiment says about the paper's inference."""

from __future__ import annotations

import math
from typing import Any

from kvdrift.experiments.paper_patching import CONDITIONS, PaperPatching
from kvdrift.models.ending import nothing_followed
from kvdrift.patching.recovery import loses
from kvdrift.patching.result import Sweep
from kvdrift.summaries.patch import nothing_written
from kvdrift.summaries.recovery import short

CAME_BACK = 0.9
"""From this recovery on a reading says that the donor's trajectory came back."""
_ONCE = {
    (
        False,
        False,
    ): "neither the residual nor K/V, patched once, brings the donor's trajectory back: failing alike, the "
    "one's failure says nothing about the other, and the paper's inference does not follow",
    (False, True): "K/V patched once bring the donor's trajectory back and the residual does not, as the paper infers",
    (True, False): "the residual patched once brings the donor's trajectory back and K/V do not, against the paper",
    (True, True): "either of residual and K/V, patched once, brings the donor's trajectory back, against the paper",
}
"""What one-shot patches of (residual, K/V) show."""


def reading(result: PaperPatching) -> list[str]:
    """What the table says about the paper's inference, in sentences."""
    return [
        f"{direction}: {sentence}"
        for direction, sweep in result.sweeps.items()
        for sentence in _reading(sweep, keeps=sweep is result.on_from_off)
    ]


def _reading(sweep: Sweep, keeps: bool) -> list[str]:
    """What one sweep says, whose recipient ``keeps`` something from step to step: it has a cache."""
    if not any(sweep.counted(cell).any() for cell in range(len(sweep.cells))):
        what = f"no step follows the first write at step {min(cell.first for cell in sweep.cells)}"
        return [nothing_followed(sweep, what)]
    cells = {cell.label: place for place, cell in enumerate(sweep.cells)}

    def gain(label: str) -> Any:
        return sweep.recovery(cells[label], against="unpatched")

    once = {name: gain(f"{name}, one-shot") for name in ("residual", "KV")}
    lasting = gain("KV, persistent")
    if math.isnan(lasting.value):
        return ["the unpatched recipient has the donor's logits already; there is nothing to recover"]
    said = [
        f"against no patch: residual once {short(once['residual'])}, K/V once {short(once['KV'])}, "
        f"K/V persistently {short(lasting)}"
    ]
    idle = [name for name in CONDITIONS if sweep.wrote_nothing(cells[f"{name}, one-shot"])]
    if idle:
        said.append(f"{', '.join(idle)} once: {nothing_written(sweep, cells[f'{idle[0]}, one-shot'])}")
    if all(sweep.same_as_unpatched(cells[f"{name}, one-shot"]) for name in once):
        why = "" if keeps else ": a recipient without a cache keeps nothing"
        said.append(f"no bit of a one-shot patch is left after its step{why}")
    elif not set(idle) & set(once):  # a patch that wrote nothing was not tried
        said.append(_ONCE[tuple(found.value >= CAME_BACK for found in once.values())])
    again = sweep.recovery(cells["KV, persistent"], role="re-rolled patched", against="re-roll")
    if math.isnan(lasting.low):
        said.append("too few prompts for an interval: take at least 8")
    elif lasting.low > 0:
        rest = ", so the rest of it is the two paths' kernels rounding alike" if loses(again, lasting) else ""
        said.append(
            "reading the donor's K/V at every step brings the recipient nearer; with the recipient's sums re-rolled "
            f"the gain is {short(again)}{rest}"
        )
    else:
        said.append("not even the donor's K/V at every step brings the recipient nearer")
    said.append("a persistent residual patch recovers 1 by construction and proves nothing")
    return said
