"""What patched runs did, as plain arrays: every arm of every cell beside the donor, no model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from kvdrift.errors import InputError
from kvdrift.models.architecture import Architecture
from kvdrift.models.labels import PathInfo, Prompt
from kvdrift.patching.recovery import Recovery, recovery
from kvdrift.patching.spec import Cell
from kvdrift.result import Result, Steps, makers_in, table_maker
from kvdrift.statistics.measured import mean_finite

SHARED_ROLES = ("unpatched", "re-roll", "full patch")
"""Arms that all cells share."""
METRICS = ("logit_l2", "kl")


@dataclass(frozen=True)
class Arm:
    """One recipient: what was done to it, for which cell (None: for all), with which seed (None: without)."""

    role: str
    cell: int | None = None
    seed: int | None = None


@dataclass(frozen=True, repr=False)
class Outcomes(Steps, Result):
    """Recipients with and without patches, each compared with the donor at every step on the donor's tokens.

    Attributes
    ----------
    donor, recipient
        How the two paths were executed.
    architecture
        Of the recipient.
    prompts
        The first axis of every array.
    cells
        What was patched: one entry for a single result, one per cell of a sweep.
    arms
        The second axis of every array with arms. Roles: ``unpatched``; ``re-roll`` (the recipient's sums in
        another order, no patch); ``full patch`` (the donor's residual everywhere, the donor's logits by
        construction); and per cell ``patched``; ``placebo`` (noise of the patch's norm at the patch's place);
        ``self-patch`` (the recipient's own values); ``one ulp`` (one entry moved by one ulp, once);
        ``re-rolled patched`` (the patch into a recipient with re-rolled sums); ``float32 donor`` (the patch from
        the donor path in float32; not where the model runs in float32 or wider).
    arrays
        ``logit_l2``, ``kl`` (nats, KL(donor‖arm)), ``flip`` (1 where the top-1 token is not the donor's),
        ``identical`` (1 where all logits equal the donor's bit for bit), ``unchanged`` (1 where they equal the
        unpatched recipient's), ``top1``, ``moved`` (L2 norm of what was
        written minus the unpatched recipient's own values; NaN where nothing was), all ``[prompt, arm, step]``;
        ``signature`` (cosine between the arm's error and the donor's, both against float32; NaN where it was not
        computed) likewise; ``fed`` and ``donor_top1 [prompt, step]``; ``n_steps [prompt]``. Beyond ``n_steps``
        floats are NaN and tokens -1.
    token_texts
        The text of every token id that occurs.
    notes
        Sentences a reader should see: evicted positions, controls that do not apply.
    provenance
        Versions, device, threads, settings.
    extra
        What one kind of result holds beside: `trajectories` of a patch, the axes of a sweep. Plain data.
    """

    saved_as: ClassVar[str] = "outcomes"
    axes: ClassVar[tuple[str, ...]] = ("prompt", "arm", "step")

    donor: PathInfo
    recipient: PathInfo
    architecture: Architecture
    prompts: tuple[Prompt, ...]
    cells: tuple[Cell, ...]
    arms: tuple[Arm, ...]
    arrays: dict[str, np.ndarray]
    token_texts: dict[int, str]
    notes: tuple[str, ...] = ()
    provenance: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    # --- what is in here

    def _lengths(self) -> dict[str, int]:
        return super()._lengths() | {"arm": len(self.arms)}

    def counted(self, cell: int = 0, steps: str = "after") -> NDArray[np.bool_]:
        """The steps that an outcome counts, bool ``[prompt, step]``.

        Parameters
        ----------
        cell
            Which cell.
        steps
            ``"after"``: those that follow the first written step. ``"written"``: those at which the patch is
            written. ``"all"``: every step from 1 on.

        Raises
        ------
        InputError
            If ``steps`` is something else.
        """
        chosen = self.cells[cell]
        if steps == "after":
            wanted = self.steps > chosen.first
        elif steps == "written":
            wanted = np.array([chosen.covers(int(step)) for step in self.steps])
        elif steps == "all":
            wanted = self.steps >= 1
        else:
            raise InputError(f"steps={steps!r}: choose 'after', 'written' or 'all'.")
        return self.ran & wanted

    def find(self, role: str, cell: int = 0) -> list[int]:
        """Places of the arms with this role (of this cell, or shared) on the arm axis; empty if there is none."""
        wanted = None if role in SHARED_ROLES else cell
        return [place for place, arm in enumerate(self.arms) if arm.role == role and arm.cell == wanted]

    def values(self, metric: str, role: str, cell: int = 0) -> np.ndarray:
        """One metric of all arms with a role, ``[seed, prompt, step]``.

        Raises
        ------
        InputError
            If there is no such metric or arm.
        """
        places = self.find(role, cell)
        if metric not in self.arrays or self.arrays[metric].ndim != 3 or not places:
            roles = ", ".join(dict.fromkeys(arm.role for arm in self.arms))
            raise InputError(f"There is no {metric!r} of {role!r} here; the arms are {roles}.")
        return np.moveaxis(self.arrays[metric][:, places], 1, 0)

    # --- the forced outcome

    def distance(self, role: str, cell: int = 0, metric: str = "logit_l2", steps: str = "after") -> np.ndarray:
        """Mean distance to the donor over the counted steps, ``[seed, prompt]``; NaN where none counts."""
        values, counted = self.values(metric, role, cell), self.counted(cell, steps)
        n = counted.sum(axis=1)
        total = np.where(counted, values, 0.0).sum(axis=2)
        return np.divide(total, n, out=np.full(total.shape, np.nan), where=n > 0)

    def recovery(
        self,
        cell: int = 0,
        metric: str = "logit_l2",
        steps: str = "after",
        role: str = "patched",
        against: str | None = None,
    ) -> Recovery:
        """How far an arm is brought to the donor, against the cell's placebos.

        1 − Σ d²(arm, donor) / Σ d²(placebo, donor), summed over the counted steps of all prompts; d is the
        centred logit L2. With ``metric="kl"`` the sums are of KL itself, which is a squared distance already.
        ``against`` names another role as the reference, such as ``"unpatched"`` or ``"re-roll"``. Where a cell
        has no placebo, the unpatched recipient takes its place, and `Recovery.reference` says so.
        """
        if metric not in METRICS:
            raise InputError(f"metric={metric!r}: recovery goes by {' or '.join(METRICS)}.")
        reference = against or self.reference(cell)

        def bootstrap() -> Recovery:
            power = 1 if metric == "kl" else 2
            arm, others = (self.values(metric, name, cell) ** power for name in (role, reference))
            return recovery(arm, others, self.counted(cell, steps), reference)

        return self._once(("recovery", cell, metric, steps, role, reference), bootstrap)

    def reference(self, cell: int = 0) -> str:
        """What a cell's recovery is held against: ``"placebo"``, or ``"unpatched"`` where it has none."""
        return "placebo" if self.find("placebo", cell) else "unpatched"

    def restored(self, cell: int = 0, steps: str = "after", role: str = "patched") -> float:
        """Share of the counted steps at which all logits equal the donor's bit for bit; NaN where none counts."""
        counted = self.counted(cell, steps)
        same = self.values("identical", role, cell)[:, counted]
        return float(same.mean()) if same.size else float("nan")

    def flips(self, cell: int = 0, steps: str = "after", role: str = "patched") -> int:
        """Counted steps at which the arm's top-1 token is not the donor's (summed over prompts, first seed)."""
        return int(self.values("flip", role, cell)[0][self.counted(cell, steps)].sum())

    def signature(self, role: str = "patched", cell: int = 0, steps: str = "after") -> float:
        """Mean cosine between an arm's error and the donor's, both against float32, over the counted steps.

        1: the arm makes the donor's own rounding errors. The same number of ``"re-roll"`` is its null: what two runs
        of the same model share that round independently. NaN where it was not computed.
        """
        values = self.values("signature", role, cell)[:, self.counted(cell, steps)]
        return mean_finite(values)

    # --- the free-running outcome

    def followed(self, role: str, cell: int = 0) -> np.ndarray:
        """Tokens that an arm, feeding itself, has in common with the donor before the first difference.

        Under greedy decoding this is the step of the first flip on the donor's own tokens, so it is NaN if other
        tokens were given. All tokens count, also those before the patch.

        Returns
        -------
        Array ``[seed, prompt]``; equal to ``n_steps`` where no token differs.
        """
        flips = self.values("flip", role, cell) == 1
        own = (self.fed == self.arrays["donor_top1"]) | ~self.ran
        first = np.where(flips.any(axis=2), flips.argmax(axis=2), self.n_steps).astype(float)
        return np.where(own.all(axis=1), first, np.nan)

    def free_recovery(self, cell: int = 0, role: str = "patched", against: str | None = None) -> Recovery:
        """Share of the tokens lost by the placebo that the arm follows: 1 − Σ lost(arm) / Σ lost(placebo).

        A lost token is one from the first difference on. NaN where the placebo loses none.
        """
        reference = against or self.reference(cell)
        total = self.n_steps
        lost, others = (total - self.followed(name, cell) for name in (role, reference))
        known = np.isfinite(lost).all(axis=0)[:, None]
        return recovery(lost[..., None], others[..., None], known, reference)

    def trivial(self, cell: int = 0, steps: str = "after") -> bool:
        """Whether recovery is 1 by construction: the donor's last residual is written at every counted step."""
        counted = np.flatnonzero(self.counted(cell, steps).any(axis=0)).tolist()
        return bool(counted) and self.cells[cell].trivial(self.architecture.n_layers, counted)

    def ends(self, cell: int = 0) -> bool:
        """Whether a cell's patch ends: then the written steps and those that follow are different questions."""
        return all(patch.schedule.last is not None for patch in self.cells[cell].patches)

    def same_as_unpatched(self, cell: int = 0) -> bool:
        """Whether the patched recipient gives the unpatched one's logits, bit for bit, at every counted step."""
        return bool((self.values("unchanged", "patched", cell)[0][self.counted(cell)] == 1).all())

    def wrote_nothing(self, cell: int = 0) -> bool:
        """Whether every value that this cell wrote was the recipient's own already; False if none was written."""
        distances = self.values("moved", "patched", cell)[0][self.counted(cell, "written")]
        known = distances[~np.isnan(distances)]
        return bool(known.size and (known == 0).all())

    # --- tables

    def to_dataframe(self, what: str = "cells") -> Any:
        """A tidy `pandas.DataFrame`.

        Parameters
        ----------
        what
            ``"cells"``: one row per cell with recovery, interval, spread of the placebos, share restored, flips
            (all over the steps that follow the first write; ``…_written``: at the written steps), tokens followed.
            ``"steps"``: one row per prompt, arm and step with every metric.
        """
        return table_maker(what, makers_in("patching.tables", "cells", "steps"))(self)
