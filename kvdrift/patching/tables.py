"""Outcomes as tidy tables."""

from __future__ import annotations

import pandas as pd

from kvdrift.patching.outcome import Outcomes
from kvdrift.patching.spec import Cell
from kvdrift.statistics.measured import mean_finite
from kvdrift.statistics.multiplicity import holm

_STEP_METRICS = ("logit_l2", "kl", "flip", "identical", "unchanged", "moved", "signature", "top1")


def cells(outcomes: Outcomes, metric: str = "logit_l2", steps: str = "after") -> pd.DataFrame:
    """One row per cell, over the steps that count. ``p_holm`` adjusts for the number of cells that are not trivial."""
    rows = []
    for number, cell in enumerate(outcomes.cells):
        found, kl = (outcomes.recovery(number, name, steps) for name in (metric, "kl"))
        free = outcomes.free_recovery(number)
        rows.append(
            {
                "cell": number,
                "label": cell.label,
                **_place(cell),
                "recovery": found.value,
                "recovery_low": found.low,
                "recovery_high": found.high,
                "recovery_se": found.standard_error,
                "p_value": found.p_value,
                "placebo_low": found.spread[0],
                "placebo_high": found.spread[1],
                "recovery_kl": kl.value,
                "recovery_written": outcomes.recovery(number, metric, "written").value,
                "reference": found.reference,
                "n": found.n,
                "logit_l2": mean_finite(outcomes.distance("patched", number, steps=steps)),
                "logit_l2_reference": mean_finite(outcomes.distance(found.reference, number, steps=steps)),
                "logit_l2_unpatched": mean_finite(outcomes.distance("unpatched", number, steps=steps)),
                "restored": outcomes.restored(number, steps),
                "restored_written": outcomes.restored(number, "written"),
                "flips": outcomes.flips(number, steps),
                "followed": mean_finite(outcomes.followed("patched", number)),
                "followed_unpatched": mean_finite(outcomes.followed("unpatched", number)),
                "free_recovery": free.value,
                "trivial": outcomes.trivial(number, steps),
                "trivial_written": outcomes.trivial(number, "written"),
            }
        )
    table = pd.DataFrame(rows)
    table.insert(list(table).index("p_value") + 1, "p_holm", holm(table["p_value"].where(~table["trivial"])))
    return table


def steps(outcomes: Outcomes) -> pd.DataFrame:
    """One row per prompt, arm and step."""
    rows = []
    for prompt, n in enumerate(outcomes.n_steps):
        for place, arm in enumerate(outcomes.arms):
            cell = -1 if arm.cell is None else arm.cell
            label = "" if arm.cell is None else outcomes.cells[arm.cell].label
            for step in range(int(n)):
                values = {name: outcomes.arrays[name][prompt, place, step] for name in _STEP_METRICS}
                rows.append(
                    {"prompt": prompt, "role": arm.role, "cell": cell, "label": label, "seed": arm.seed, "step": step}
                    | values
                )
    return pd.DataFrame(rows)


def _place(cell: Cell) -> dict[str, object]:
    """Where a cell of one patch is, with None for what it does not single out; sites joined where it has several."""

    def single(name: str) -> int | None:
        chosen = {getattr(patch, name) for patch in cell.patches}
        (only,) = chosen if len(chosen) == 1 else (None,)
        return only[0] if isinstance(only, tuple) and len(only) == 1 else None

    schedules = list(dict.fromkeys(patch.schedule for patch in cell.patches))
    return {
        "site": " + ".join(dict.fromkeys(patch.site for patch in cell.patches)),
        "layer": single("layers"),
        "head": single("heads"),
        "position": single("positions"),
        "schedule": " + ".join(schedule.kind for schedule in schedules),
        "step": schedules[0].first if len(schedules) == 1 and schedules[0].is_one_shot else None,
    }
