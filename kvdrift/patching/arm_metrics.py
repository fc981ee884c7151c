"""What is measured of each arm at each step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from kvdrift.bits import same_bits
from kvdrift.drift.metrics import kl_divergence, logit_l2
from kvdrift.shapes import Logits

FLOATS = ("logit_l2", "kl", "flip", "identical", "unchanged", "moved", "signature")
"""The numbers of an arm at a step, beside its top-1 token; `kvdrift.patching.outcome.Outcomes` says what they are."""


def arm_metrics(
    logits: Sequence[tuple[Logits, float]], donor: Logits, own: Logits, wide: Logits | None
) -> list[dict[str, float]]:
    """Every arm against the donor at one step.

    Parameters
    ----------
    logits
        Per arm its logits ``[vocab]`` and how far what was written lies from its own values (NaN: nothing was).
    donor, own, wide
        The donor's logits, the unpatched recipient's, and those of the float32 run, if there is one.

    Returns
    -------
    list
        Per arm `FLOATS` and ``top1``.
    """
    rows: list[dict[str, float]] = []
    donor = donor.to(own.device)
    top = int(donor.argmax())
    error = None if wide is None else _centred(donor, wide)
    for arm, distance in logits:
        row = {"top1": float(int(arm.argmax())), "moved": distance, "unchanged": float(same_bits(arm, own))}
        row["flip"] = float(row["top1"] != top)
        row["identical"] = float(arm.dtype == donor.dtype and same_bits(arm, donor))
        if rows and row["unchanged"]:
            row |= {name: rows[0][name] for name in ("logit_l2", "kl", "signature")}
        else:
            row["logit_l2"] = float(logit_l2(arm, donor))
            row["kl"] = float(kl_divergence(donor, arm))
            row["signature"] = np.nan if error is None or wide is None else _cosine(_centred(arm, wide), error)
        rows.append(row)
    return rows


def _centred(logits: Logits, reference: Logits) -> Float64[Tensor, " vocab"]:
    """The error of some logits, centred over the vocabulary, float64 ``[vocab]``; masked tokens have none."""
    error = logits.double() - reference.to(logits.device).double()
    error = torch.where(error.isfinite(), error, 0.0)
    return error - error.mean()


def _cosine(a: Tensor, b: Tensor) -> float:
    scale = float(a.norm() * b.norm())
    return float(a @ b) / scale if scale else float("nan")
