"""The results of `kvdrift.patch` and `kvdrift.sweep`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kvdrift.patching import tables
from kvdrift.patching.outcome import Outcomes


@dataclass(frozen=True, repr=False)
class PatchResult(Outcomes):
    """One set of patches, its controls and its placebos, over prompts; made by `kvdrift.patch`.

    Everything of `Outcomes`, with one cell. ``extra["trajectories"]`` holds one dictionary per prompt with the
    free-running token ids of ``donor``, ``unpatched`` and ``patched``; see `trajectories`.

    Examples
    --------
    >>> import kvdrift as kd
    >>> model = kd.load(kd.models.tiny("llama"), quiet=True)
    >>> result = kd.patch(model, [1, 2, 3], kd.Patch("kv"), max_new_tokens=4, progress=False)
    >>> result.restored(role="full patch")
    1.0
    """

    saved_as: ClassVar[str] = "patch"

    @property
    def trajectories(self) -> tuple[dict[str, tuple[int, ...]], ...]:
        """Per prompt, the token ids that donor, unpatched and patched recipient write when each feeds itself."""
        return tuple({name: tuple(ids) for name, ids in texts.items()} for texts in self.extra.get("trajectories", ()))


@dataclass(frozen=True, repr=False)
class Sweep(Outcomes):
    """One patch at many places in turn; made by `kvdrift.sweep`.

    Everything of `Outcomes`, with one cell per place. ``extra["over"]`` names the axes that were swept.
    """

    saved_as: ClassVar[str] = "sweep"

    @property
    def over(self) -> tuple[str, ...]:
        """What was swept: ``layer``, ``head``, ``position``, ``step``; sites and schedules are always crossed."""
        return tuple(self.extra.get("over", ()))

    def best(self, n: int = 1, metric: str = "logit_l2", steps: str = "after") -> Any:
        """The ``n`` cells with the highest recovery that is not 1 by construction, as rows of `to_dataframe`.

        Parameters
        ----------
        n
            How many.
        metric
            ``"logit_l2"`` or ``"kl"``.
        steps
            What the order and every number of the rows go by: ``"after"``, the steps that follow the first write;
            ``"written"``, those at which the patch is written; or ``"all"``.

        Raises
        ------
        InputError
            If there is no such metric or choice of steps.

        Examples
        --------
        >>> import kvdrift as kd
        >>> model = kd.load(kd.models.tiny("llama"), quiet=True)
        >>> found = kd.sweep(model, [1, 2, 3], sites=["kv"], schedule="one_shot(2)", max_new_tokens=5, progress=False)
        >>> len(found.best(3, steps="written"))
        3
        """
        table = tables.cells(self, metric, steps)
        chosen = table[~table["trivial"]]
        return chosen.sort_values("recovery", ascending=False, kind="stable").head(n).reset_index(drop=True)
