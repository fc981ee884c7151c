"""What the paper's drift experiment says about the paper's two claims."""

from __future__ import annotations

from kvdrift.drift.result import Drift
from kvdrift.experiments.paper_drift import PaperDrift, profile_row
from kvdrift.models.ending import nothing_followed


def reading(result: PaperDrift) -> list[str]:
    """One sentence per model: where drift jumps, and how it stands to the rounding floor."""
    return [_sentence(drift) for drift in result.drifts]


def _sentence(drift: Drift) -> str:
    row = profile_row(drift)
    sliding = f"{row['sliding_layers']} of {row['layers']} layers sliding"
    name = f"{row['model']} in {row['dtype']} ({row['grouping']}, {sliding})"
    if not drift.counted.any():
        return f"{name}. {nothing_followed(drift)}"
    share, quarter = row["first_layer_share"], row["first_quarter_share"]
    if share is None or quarter is None:
        return f"{name}: no drift at the last layer, so there is no profile"
    even = 1 / row["layers"]
    shape = (
        "it jumps at the first layer"
        if share > 0.5
        else f"the first layer holds {share:.1%} of the final drift (an even course would give {even:.1%})"
    )
    floor = row["plateau_over_floor"]
    beside = "" if floor is None else f"; the last quarter lies at {floor:.2f} times the rounding floor"
    return f"{name}: {shape}, the first quarter of the layers {quarter:.1%}{beside}"
