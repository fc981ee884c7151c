"""A ladder in plain sentences and plain data."""

from __future__ import annotations

import math
from typing import Any

from kvdrift import markup
from kvdrift.ladder.arms import ARMS, FLOOR, HALF
from kvdrift.ladder.result import Ladder
from kvdrift.ladder.rung import Rung
from kvdrift.models.ending import nothing_followed, other_notes
from kvdrift.models.labels import model_name
from kvdrift.statistics.resampling import MIN_PROMPTS
from kvdrift.words.json import json_safe
from kvdrift.words.layout import bullets, columns
from kvdrift.words.numbers import count, decades, number, percent, span, times

PAIRS = (("bfloat16", "float16"), ("bfloat16", "float32"), ("float16", "float32"), ("float32", "float64"))
"""Precisions whose ratios a reading gives, the coarser one first."""
KERNELS = ("eager", *(name for name in ARMS if name.startswith("sdpa-")))
"""Arms that change the attention kernel alone."""


def headline(ladder: Ladder) -> str:
    """What was compared, and over how much."""
    n, steps = len(ladder.prompts), int(ladder.counted.sum())
    return (
        f"{model_name(ladder.model.model)} · cache-ON against cache-OFF in {count(len(ladder.rungs), 'arm')} · base "
        f"{ladder.base}, attention {ladder.model.attn} · {count(n, 'prompt')}, {count(steps, 'counted step')}"
    )


def summary(ladder: Ladder) -> str:
    """The headline, one line per arm, the reading, the notes."""
    measured = ladder.counted.any()
    table = columns([COLUMNS, *(cells(ladder, rung) for rung in ladder.rungs)]) if measured else ()
    return "\n".join([headline(ladder), *table, *bullets(reading(ladder), other_notes(ladder.notes, measured))])


def html(ladder: Ladder) -> str:
    """The same for Jupyter; every text is escaped."""
    measured = ladder.counted.any()
    table = markup.table([cells(ladder, rung) for rung in ladder.rungs if measured], COLUMNS)
    said = markup.listing([*reading(ladder), *other_notes(ladder.notes, measured)])
    return markup.block(headline(ladder), table, said)


def as_dict(ladder: Ladder) -> dict[str, Any]:
    """A ladder as plain data: NaN (no value) as None, infinity as text."""
    return json_safe(
        {
            "model": ladder.model.model,
            "base": ladder.base,
            "prompts": len(ladder.prompts),
            "steps": ladder.n_steps,
            "arms": ladder.to_dataframe().to_dict(orient="records"),
            "ratios": ladder.ratios().to_dict(orient="records"),
            "reading": reading(ladder),
            "notes": ladder.notes,
        },
        none=math.isnan,
    )


# --- the table

COLUMNS = ("arm", "KL (nats)", "± SE", "logit L2", "drift", "flips", "ties", "equal logits")


def cells(ladder: Ladder, rung: Rung) -> list[str]:
    """One row under `COLUMNS`; an arm without numbers says why."""
    if not rung.ran:
        return [rung.name, rung.status, *[""] * (len(COLUMNS) - 2)]
    kl = ladder.mean(rung.name)
    return [
        rung.name,
        "0, bit-identical" if ladder.identical(rung.name) == 1 else number(kl.value),
        number(kl.error, ""),
        number(ladder.mean(rung.name, "logit_l2").value),
        number(ladder.rms_drift(rung.name)),
        str(ladder.count(rung.name, "flip")[0]),
        str(ladder.count(rung.name, "tie")[0]),
        percent(ladder.identical(rung.name), ""),
    ]


# --- the reading


def reading(ladder: Ladder) -> list[str]:
    """What the ladder says about rounding as the cause, prediction by prediction."""
    if not ladder.counted.any():
        return [nothing_followed(ladder)]
    return [
        *_fixed_shape(ladder),
        *(sentence for pair in PAIRS for sentence in _pair(ladder, *pair)),
        *_order(ladder),
        *_wide_sums(ladder),
        *_parts(ladder),
        *_kernels(ladder),
        *_flips(ladder),
        *(f"{arm} has the same numbers as {other} at every step." for arm, other in ladder.twins.items()),
        *_failed(ladder),
        *_few(ladder),
    ]


def _fixed_shape(ladder: Ladder) -> list[str]:
    if not ladder.has("fixed-shape"):
        return []
    same, steps = ladder.identical("fixed-shape"), int(ladder.counted.sum())
    if same == 1:
        return [
            f"With every row computed at one fixed shape the two paths have equal logits at all {steps:,} steps: they "
            "compute the same function, and the shapes at which kernels run are all that tells them apart."
        ]
    return [
        f"With every row computed at one fixed shape the logits still differ at {percent(1 - same)} of the steps: that "
        "is no rounding, or the model has layers that fixed shape does not cover; kd.diagnose tells which."
    ]


def _pair(ladder: Ladder, coarse: str, fine: str) -> list[str]:
    """One step of the ladder, measured and predicted."""
    if not (ladder.has(coarse) and ladder.has(fine)):
        return []
    row = _ratio(ladder, fine, coarse)
    if not (row["kl"] > 0 and math.isfinite(row["kl"])):
        zero = [arm for arm in (coarse, fine) if ladder.mean(arm).value == 0]
        return [f"From {coarse} to {fine} no ratio can be told: KL is exactly zero in {' and '.join(zero)}."]
    said = f"From {coarse} to {fine} KL shrinks by {decades(1 / row['kl'])}"
    low, high = row["kl_high"], row["kl_low"]
    if _many(ladder) and low > 0 and high > 0:
        said += f" (95 % interval {span(1 / low, 1 / high, decades)})"
    if row["drift_squared"] > 0:
        said += f"; the measured drift, squared, predicts {decades(1 / row['drift_squared'])}"
    said += f", the unit roundoff, squared, {decades(1 / row['roundoff_squared'])}"
    if row["kl_float32_head"] > 0:
        said += f". Without the LM heads' own rounding KL shrinks by {decades(1 / row['kl_float32_head'])}"
    return [f"{said}."]


def _order(ladder: Ladder) -> list[str]:
    said = []
    if ladder.has(FLOOR) and _moves(ladder, ladder.base):
        said.append(
            f"Cache-ON against itself with its sums in another order, without any cache-OFF, moves KL by "
            f"{_times(ladder, FLOOR, ladder.base)} what cache-ON against cache-OFF does."
        )
    if ladder.has("re-roll") and _moves(ladder, ladder.base):
        said.append(
            f"With the sums of both paths reordered alike, KL between them is {_times(ladder, 're-roll', ladder.base)} "
            "that of the usual order."
        )
    return said


def _wide_sums(ladder: Ladder) -> list[str]:
    """Whether the error of accumulating sums is what drifts."""
    if not (ladder.has("wide-sums") and _moves(ladder, ladder.base)):
        return []
    same = ladder.identical("wide-sums")
    said = f"With every sum in float64, and every number stored in {ladder.rung('wide-sums').stored} as before, "
    if same == 1:
        return [
            f"{said}the logits are equal at every step: storage rounds both paths' numbers alike, and what sets them "
            "apart is the order in which sums accumulate their error."
        ]
    rest = _times(ladder, "wide-sums", ladder.base)
    return [f"{said}the logits are equal at {percent(same)} of the steps and KL is {rest} that of {ladder.base}."]


def _parts(ladder: Ladder) -> list[str]:
    """What float32 in one part alone does."""
    found = []
    for rung in ladder.rungs:
        if rung.ran and ARMS[rung.name].dtype == HALF and ladder.has(rung.dtype) and _moves(ladder, rung.dtype):
            what = ARMS[rung.name].what.removeprefix("16 bits, ")
            found.append((rung.dtype, f"{_times(ladder, rung.name, rung.dtype)} with {what}"))
    return [f"Beside {found[0][0]}, KL is {'; '.join(words for _, words in found)}."] if found else []


def _kernels(ladder: Ladder) -> list[str]:
    base = ladder.base
    found = [
        f"{_times(ladder, name, base)} with {ARMS[name].what}"
        for name in KERNELS
        if ladder.has(name) and _moves(ladder, base) and ladder.twins.get(name) != base
    ]
    return [f"With another attention kernel KL is {'; '.join(found)}."] if found else []


def _flips(ladder: Ladder) -> list[str]:
    n = int(ladder.counted.any(axis=1).sum())
    said = []
    for arm in dict.fromkeys((ladder.base, "float32", "float64")):
        if not ladder.has(arm):
            continue
        steps, prompts, bound = ladder.count(arm, "flip")
        ties = ladder.count(arm, "tie")[0]
        tied = f", {count(ties, 'exact tie')}" if ties else ""
        said.append(f"{arm} {steps} in {prompts} of {n} prompts (below {percent(bound, '')} of such prompts{tied})")
    return [f"Flips: {'; '.join(said)}; the bounds hold with 95 % confidence."] if said else []


def _failed(ladder: Ladder) -> list[str]:
    return [
        f"{rung.name} {'is not finite' if rung.status == 'not finite' else 'was not run'}: {rung.reason}"
        for rung in ladder.rungs
        if not rung.ran
    ]


def _few(ladder: Ladder) -> list[str]:
    if _many(ladder):
        return []
    return [f"Fewer than {MIN_PROMPTS} prompts: ratios come without intervals and say little about other prompts."]


def _moves(ladder: Ladder, arm: str) -> bool:
    return ladder.mean(arm).value > 0


def _many(ladder: Ladder) -> bool:
    return int(ladder.counted.any(axis=1).sum()) >= MIN_PROMPTS


def _ratio(ladder: Ladder, arm: str, reference: str) -> dict[str, Any]:
    rows = ladder.ratios(reference)
    return dict(rows[rows["arm"] == arm].iloc[0])


def _times(ladder: Ladder, arm: str, reference: str) -> str:
    row = _ratio(ladder, arm, reference)
    if row["kl"] == 0:
        return "exactly 0×"
    interval = ""
    if _many(ladder) and not math.isnan(row["kl_low"]):
        interval = f" ({span(row['kl_low'], row['kl_high'], times)})"
    return f"{times(row['kl'])}{interval}"
