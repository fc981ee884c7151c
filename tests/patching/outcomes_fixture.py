"""Seeded, made-up results of patching with everything a figure may meet: no model runs here."""

from __future__ import annotations

import numpy as np

from kvdrift.models.architecture import Architecture, LayerInfo
from kvdrift.models.labels import PathInfo, Prompt
from kvdrift.patching.factorial_result import PAIRS, Factorial
from kvdrift.patching.outcome import Arm
from kvdrift.patching.result import PatchResult, Sweep
from kvdrift.patching.spec import Cell, Patch, as_cell

WORDS = [" The", " cat", " <b>bold</b>", "\n", " sat", " on", " $18", " and", " $20", "</script>", ".", " &amp"]
ON = PathInfo("cache-ON", "made-up-135m", "bfloat16", "sdpa", "cpu")
OFF = PathInfo("cache-OFF", "made-up-135m", "bfloat16", "sdpa", "cpu")
LEVEL = {"unpatched": 13.4, "placebo": 15.8, "re-roll": 14.5, "full patch": 0.0, "one ulp": 13.9}
CONTROLS = ("self-patch", "one ulp", "re-rolled patched", "float32 donor")


def architecture(n_layers: int = 6) -> Architecture:
    layers = tuple(
        LayerInfo(index=i, attention="full", window=None, n_kv_heads=3, head_dim=64) for i in range(n_layers)
    )
    return Architecture(
        model_type="tiny", n_layers=n_layers, d_model=256, n_heads=6, n_kv_heads=3, head_dim=64,
        vocab_size=len(WORDS), max_positions=4096, positional="rope", qk_norm=False, attn_softcap=None,
        final_softcap=None, tied_embeddings=True, layers=layers,
    )  # fmt: skip


def prompts(n: int) -> tuple[Prompt, ...]:
    made = []
    for p in range(n):
        ids = tuple(range(p % 3, p % 3 + 4))
        made.append(Prompt(ids, tuple(WORDS[i] for i in ids), f"made-up <i>prompt</i> {p}"))
    return tuple(made)


def layer_cells(
    sites=("resid_post", "k", "v", "kv"), layers=range(6), schedules=("persistent",), heads=(None,), positions=(None,)
) -> tuple[Cell, ...]:
    """One cell per site × layer × head × position × schedule, as a sweep makes them."""
    return tuple(
        as_cell(Patch(site, layers=layer, heads=head, positions=position, schedule=schedule))
        for site in sites for schedule in schedules for layer in layers for head in heads for position in positions
    )  # fmt: skip


def outcomes(
    kind, cells, remains, *, n_prompts=6, n_steps=12, placebos=2, controls=False, rerolled=True, given=False,
    recipient=ON, donor=OFF, n_layers=6, seed=0, extra=None,
):  # fmt: skip
    """A result whose patched arm keeps the share ``remains[cell]`` of the unpatched distance after its first write."""
    rng = np.random.default_rng(seed)
    n = np.array([max(2, n_steps - 2 * (p % 3)) for p in range(n_prompts)])
    steps = np.arange(n_steps)
    ran = steps < n[:, None]
    arms = [Arm("unpatched"), Arm("full patch")] + [Arm("re-roll", seed=1)] * rerolled
    for place in range(len(cells)):
        arms.append(Arm("patched", place))
        arms += [Arm("placebo", place, s) for s in range(placebos)]
        arms += [Arm(role, place) for role in CONTROLS if controls]

    def noise():
        return np.exp(0.15 * rng.standard_normal((n_prompts, n_steps)))

    unpatched = np.where(steps >= 1, LEVEL["unpatched"] * noise(), 0.0)
    distance = np.zeros((n_prompts, len(arms), n_steps))
    for place, arm in enumerate(arms):
        began = steps >= (1 if arm.cell is None else cells[arm.cell].first)
        level = LEVEL.get(arm.role, 0.0)
        if arm.role in ("unpatched", "self-patch"):
            distance[:, place] = unpatched
        elif arm.role in ("patched", "re-rolled patched", "float32 donor"):
            share = remains[arm.cell] + 0.5 * (arm.role == "re-rolled patched")
            distance[:, place] = np.where(began, unpatched * share * noise(), unpatched)
        else:
            distance[:, place] = np.where(began & (steps >= 1), level * noise(), unpatched)
        if arm.role == "placebo" and np.isnan(remains[arm.cell]):  # the placebo has the donor's logits too
            distance[:, place], distance[:, place - 1 - arm.seed] = 0.0, 0.0
    donor_top1 = rng.integers(0, len(WORDS), (n_prompts, n_steps))
    flip = (rng.random(distance.shape) < 0.02 * distance / 2) & (distance > 0)
    flip[:, arms.index(Arm("unpatched")), 3] = True
    top1 = np.where(flip, (donor_top1[:, None] + 1) % len(WORDS), donor_top1[:, None])
    fed = (donor_top1 + 1) % len(WORDS) if given else donor_top1
    written = np.array([arm.cell is not None for arm in arms])[:, None]

    def blank(values, fill=np.nan):
        return np.where(ran[:, None], values, fill)

    same = (distance == distance[:, :1]).astype(float)
    arrays = {
        "logit_l2": blank(distance), "kl": blank(distance**2 / 2e3), "flip": blank(flip.astype(float)),
        "identical": blank((distance == 0).astype(float)), "unchanged": blank(same),
        "moved": blank(np.where(written, 2.0, np.nan)), "signature": blank(np.full(distance.shape, 0.1)),
        "top1": blank(top1, -1), "fed": np.where(ran, fed, -1), "donor_top1": np.where(ran, donor_top1, -1),
        "n_steps": n,
    }  # fmt: skip
    return kind(
        donor=donor, recipient=recipient, architecture=architecture(n_layers), prompts=prompts(n_prompts), cells=cells,
        arms=tuple(arms), arrays=arrays, token_texts=dict(enumerate(WORDS)), notes=("Two positions were evicted.",),
        provenance={"versions": {"kvdrift": "0"}, "command": "kvdrift patch made-up"}, extra=extra or {},
    )  # fmt: skip


def sweep(cells=None, remains=None, over=("layer",), **options) -> Sweep:
    cells = layer_cells() if cells is None else cells
    if remains is None:
        share = {"resid_post": 1.05, "k": 0.95, "v": 0.85, "kv": 0.5}
        remains = [
            0.0 if cell.trivial(options.get("n_layers", 6), range(2, 12)) else share.get(cell.patches[0].site, 1.0)
            for cell in cells
        ]
    return outcomes(Sweep, cells, remains, extra={"over": list(over)}, **options)


def patch_result(patch="kv", remains=0.6, trajectories=True, **options) -> PatchResult:
    made = outcomes(PatchResult, (as_cell(patch),), [remains], controls=True, placebos=3, **options)
    if trajectories:
        made.extra["trajectories"] = [_texts(made, p) for p in range(len(made.prompts))]
    return made


def _texts(made: PatchResult, prompt: int) -> dict[str, list[int]]:
    """Free-running token ids: unpatched leaves at step 3, patched at step 5 (not at all in prompt 1)."""
    donor = made.arrays["donor_top1"][prompt][made.ran[prompt]]

    def leaving(step: int) -> list[int]:
        return np.where(np.arange(len(donor)) >= step, (donor + 2) % len(WORDS), donor).tolist()

    return {"donor": donor.tolist(), "unpatched": leaving(3), "patched": leaving(99 if prompt == 1 else 5)}


def factorial(*, n_prompts=3, n_steps=12, levels=None, seed=0) -> Factorial:
    """Distances by pair at the given levels; a level of 0 is equal in every bit at every step."""
    rng = np.random.default_rng(seed)
    level = dict.fromkeys(PAIRS, 12.0) | {"y10-y00": 11.0} | (levels or {})
    n = np.array([max(1, n_steps - 2 * p) for p in range(n_prompts)])
    steps = np.arange(n_steps)
    ran = steps < n[:, None]
    arrays = {"n_steps": n, "fed": np.where(ran, rng.integers(0, len(WORDS), ran.shape), -1)}
    for pair in PAIRS:
        distance = np.where(steps >= 1, level[pair] * np.exp(0.2 * rng.standard_normal(ran.shape)), 0.0)
        distance[:, 4:5] = 0.0
        arrays[f"logit_l2/{pair}"] = np.where(ran, distance, np.nan)
        arrays[f"kl/{pair}"] = np.where(ran, distance**2 / 2e3, np.nan)
        arrays[f"identical/{pair}"] = np.where(ran, (distance == 0).astype(float), np.nan)
    return Factorial(
        off=OFF, on=ON, architecture=architecture(), prompts=prompts(n_prompts), arrays=arrays,
        token_texts=dict(enumerate(WORDS)), notes=("A note about <b>.",),
        provenance={"versions": {"kvdrift": "0"}, "command": "kvdrift factorial made-up"},
    )  # fmt: skip
