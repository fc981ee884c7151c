"""All conditions together: does one path score higher in too many of them?

"8 of 9 conditions" counts conditions as if they were independent; the same items stand in all of them. So items are the
unit: each item's differences are averaged over its conditions, and their signs are flipped item by item.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kvdrift.errors import InputError
from kvdrift.evaluation.conditions import Overall
from kvdrift.evaluation.records import Recorded
from kvdrift.evaluation.tabulate import accuracy_differences
from kvdrift.statistics.detectable import enough_to_tell
from kvdrift.statistics.null import null_share
from kvdrift.statistics.paired import sign_flip


def overall(evaluations: Sequence[Recorded]) -> Overall:
    """Put several evaluations of the same items together.

    Raises
    ------
    InputError
        If they have no item in common, or other items under the same ids.
    """
    ids = [[record.item for record in each.records] for each in evaluations]
    shared = [item for item in ids[0] if all(item in some for some in map(set, ids))]
    if not shared:
        raise InputError("These evaluations have no item in common; evaluate the same task.")
    if len({_prompts(each, shared) for each in evaluations}) > 1:
        raise InputError("These evaluations have other prompts under the same ids; evaluate the same task.")
    rows = [each.rows(shared) for each in evaluations]

    def columns(replicate: int | None) -> list[np.ndarray]:
        return [
            np.array([_mean(row) for row in grid[at]])
            for each, at in zip(evaluations, rows, strict=True)
            for grid in accuracy_differences(each, replicate).values()
        ]

    observed = columns(None)
    per_item = np.array([_mean(row) for row in np.stack(observed, axis=1)])
    per_item = per_item[~np.isnan(per_item)]
    higher, lower = _favoured(observed)
    replicates = min(each.replicates for each in evaluations)
    null = [_favoured(columns(replicate)) for replicate in range(replicates)]
    return Overall(
        n_conditions=len(observed),
        n_items=len(shared),
        a_higher=higher,
        b_higher=lower,
        discordant=int((per_item != 0).sum()),
        p=sign_flip(per_item) if len(per_item) else math.nan,
        enough=enough_to_tell(per_item),
        null_a_higher=tuple(count for count, _ in null),
        null_share=null_share(max(higher, lower), [max(pair) for pair in null]) if null else math.nan,
    )


def _prompts(evaluation: Recorded, items: list[str]) -> tuple[str, ...]:
    """The text of each prompt, which models share; the hash of its ids where it was given as ids."""
    records = [evaluation.records[row] for row in evaluation.rows(items)]
    return tuple(record.prompt_hash if record.prompt is None else record.prompt for record in records)


def _mean(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else math.nan


def _favoured(columns: Sequence[np.ndarray]) -> tuple[int, int]:
    """In how many conditions the mean difference is above, and below, zero."""
    means = [_mean(column) for column in columns]
    return sum(mean > 0 for mean in means), sum(mean < 0 for mean in means)
