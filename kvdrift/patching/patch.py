"""`patch`: one set of patches with its controls, on forced tokens and in free running."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from kvdrift.drift.stacking import pad_stack
from kvdrift.fingerprint import one_job
from kvdrift.patching.arm_metrics import FLOATS
from kvdrift.patching.outcome import Arm
from kvdrift.patching.result import PatchResult
from kvdrift.patching.setup import Setup, read
from kvdrift.patching.spec import Cell, Patch, as_cell
from kvdrift.patching.state import State
from kvdrift.patching.walk import Company, Rows, Walk
from kvdrift.paths.path import Path
from kvdrift.paths.sampling import greedy
from kvdrift.paths.stepper import started
from kvdrift.paths.text import write
from kvdrift.renamed import renamed
from kvdrift.shapes import Logits
from kvdrift.tracing.trace import Trace


@renamed(controls="checks")
@one_job()
def patch(
    model: Any,
    prompts: Any,
    patches: Patch | str | Iterable[Patch | str],
    *,
    donor: Path | Trace | Sequence[Trace] | None = None,
    recipient: Path | None = None,
    max_new_tokens: int = 32,
    tokens: Any = None,
    placebos: int = 3,
    checks: bool = True,
    trajectories: bool = True,
    chat: bool = False,
    ignore_eos: bool = False,
    seed: int = 0,
    progress: bool = True,
) -> PatchResult:
    """Write the donor path's values into the recipient path, and see how near that brings it to the donor.

    All runs consume the donor's tokens and step in lockstep: the donor first, then the recipient without a patch,
    then with the patch, then the placebos and controls. Nothing is batched, padded or folded. Beyond the forced
    outcome, the donor, the unpatched and the patched recipient also run free, each on its own tokens; the donor of
    a patched run then consumes the patched run's tokens, so that what is written belongs to the same context.

    Parameters
    ----------
    model
        Anything `kvdrift.load` takes.
    prompts
        Text, token ids or a tensor (one prompt), or a list of those.
    patches
        One or several `Patch`, written together; a bare site name is a persistent patch at all layers.
    donor
        A path that steps in lockstep, or a recorded `Trace` (one per prompt) of this model, dtype and prompt that
        holds the sites and ``logits``. By default ``CacheOff()``, or ``CacheOn()`` if the recipient is a `CacheOff`.
    recipient
        The path that is patched; ``CacheOn()`` by default.
    max_new_tokens
        Steps per prompt, step 0 included.
    tokens
        Token ids that all consume instead of the donor's own (one list per prompt); then there is no free outcome.
    placebos
        How many noise placebos.
    checks
        Run the controls beside the placebos: re-roll with and without the patch, full patch, self-patch, one ulp,
        float32 donor (a float32 copy of the weights is made for it).
    trajectories
        Also run free.
    chat
        Put text prompts into the chat template.
    ignore_eos
        Go on past an end-of-sequence token.
    seed
        Of the noise and the re-roll.
    progress
        Show a progress bar.

    Raises
    ------
    InputError, SiteError
        If an argument does not fit the model, the prompt or the donor.
    NonFiniteError
        If a run leaves the finite numbers.

    Examples
    --------
    >>> import kvdrift as kd
    >>> model = kd.load(kd.models.tiny("llama"), quiet=True)
    >>> result = kd.patch(model, [1, 2, 3], kd.Patch("kv"), max_new_tokens=4, placebos=1, progress=False)
    >>> [arm.role for arm in result.arms][:4]
    ['unpatched', 're-roll', 'full patch', 'patched']
    """
    setup = read(
        model, prompts, donor=donor, recipient=recipient, max_new_tokens=max_new_tokens, tokens=tokens,
        chat=chat, ignore_eos=ignore_eos, progress=progress,
    )  # fmt: skip
    cell = as_cell(patches)
    trajectories = trajectories and setup.follow is None
    walk = Walk(setup.model, setup.donor, setup.recipient, Company(placebos, checks, checks, seed), setup.trace(0))
    try:
        arms = [*walk.shared_arms(), *walk.cell_arms(0)]
        for prompt, length in zip(setup.prompts, setup.lengths, strict=True):
            walk.check([cell], len(prompt.ids), length)
        found: list[Rows] = []
        texts: list[dict[str, list[int]]] = []
        with tqdm(total=sum(setup.lengths) * len(arms), desc="patch", unit="step", disable=not progress) as bar:
            for number in range(len(setup.prompts)):
                found.append(one_prompt(setup, walk, number, {0: cell}, arms, bar.update))
                if trajectories:
                    texts.append(_free(setup, walk, number, cell, arms, found[-1]))
                bar.n = sum(setup.lengths[: number + 1]) * len(arms)
                bar.refresh()
    finally:
        walk.close()
    return PatchResult(
        **common(setup, [cell], arms, found),
        notes=(*setup.notes, *walk.notes),
        provenance=setup.provenance(seed=seed),
        extra={"trajectories": texts} if texts else {},
    )


def one_prompt(
    setup: Setup, walk: Walk, number: int, cells: dict[int, Cell], arms: Sequence[Arm], tick: Any = lambda n: None
) -> Rows:
    """The arms of some cells over one prompt, on the donor's tokens or those given."""
    walk.trace = setup.trace(number)

    def choose(donor: State, patched: Logits, step: int) -> int:
        return greedy(donor.logits, step) if setup.follow is None else setup.follow[number][step]

    return walk.over(setup.prompts[number].ids, cells, arms, choose, setup.lengths[number], setup.stop, tick)


def common(setup: Setup, cells: Sequence[Cell], arms: Sequence[Arm], found: Sequence[Rows]) -> dict[str, Any]:
    """The fields that all results share, from the rows of each prompt."""
    names = (*FLOATS, "top1", "fed", "donor_top1")
    arrays = {name: pad_stack([rows[name] for rows in found]) for name in names}
    arrays["n_steps"] = np.array([len(rows["fed"]) for rows in found])
    ids = np.unique(np.concatenate([arrays[name].ravel() for name in ("top1", "fed", "donor_top1")]))
    return {
        "donor": setup.donor_info,
        "recipient": setup.recipient_info,
        "architecture": (setup.recipient.model or setup.model).architecture,
        "prompts": setup.prompts,
        "cells": tuple(cells),
        "arms": tuple(arms),
        "arrays": arrays,
        "token_texts": setup.token_texts(*ids.tolist()),
    }


def _free(setup: Setup, walk: Walk, number: int, cell: Cell, arms: Sequence[Arm], rows: Rows) -> dict[str, list[int]]:
    """What donor, unpatched and patched recipient write when each feeds itself."""
    ids, length = setup.prompts[number].ids, len(rows["fed"])
    donor = rows["fed"].tolist()
    unpatched, patched = (
        next(i for i, arm in enumerate(arms) if arm.role == role) for role in ("unpatched", "patched")
    )
    texts = {"donor": donor, "unpatched": donor, "patched": donor}
    if rows["flip"][unpatched].any():
        texts["unpatched"] = _alone(setup, ids, length)
    if rows["flip"][patched].any():
        own = walk.over(
            ids, {0: cell}, [arms[unpatched], arms[patched]], lambda _, logits, step: greedy(logits, step), length,
            setup.stop,
        )  # fmt: skip
        texts["patched"] = own["fed"].tolist()
    return texts


def _alone(setup: Setup, ids: Sequence[int], length: int) -> list[int]:
    with started(setup.recipient, setup.model, ids) as stepper:
        return [token for _, token in islice(write(stepper, greedy, setup.stop), length)]
