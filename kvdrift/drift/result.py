"""What a comparison of two paths found, as plain arrays: everything a figure or a table needs, no model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from kvdrift.drift import profile
from kvdrift.drift.layout import FLOORS, Views, axes_of, is_known
from kvdrift.errors import SiteError
from kvdrift.models.architecture import Architecture
from kvdrift.models.labels import PathInfo, Prompt
from kvdrift.result import Result, Saved, makers_in, table_maker
from kvdrift.shapes import Shaped

_CONTROL = "control/"
"""Before the names of the control's arrays, in a file."""


@dataclass(frozen=True, repr=False)
class Drift(Saved, Result, Views):
    """The drift between path *a* (under test) and path *b* (reference), over prompts, steps and layers.

    Attributes
    ----------
    a, b
        How each path was executed.
    architecture
        Layers, heads and windows of the model.
    prompts
        The prompts, in order; ``prompt`` is the first axis of every array.
    arrays
        Flat mapping from a name to an array, as `kvdrift.drift.layout.Views` describes it; ask for them by the
        properties and `values`.
    token_texts
        The text of every token id that occurs.
    control
        The same comparison with another dtype, on the same tokens, or None.
    provenance
        Versions, device, threads, flags and settings.
    notes
        Sentences a reader should see: what could not be measured and why.

    Examples
    --------
    >>> import kvdrift as kd
    >>> model = kd.load(kd.models.tiny("llama"))
    >>> drift = kd.compare(model, [1, 2, 3], max_new_tokens=4, floor=0, progress=False)
    >>> drift.values("resid_post").shape
    (1, 4, 4)
    """

    saved_as: ClassVar[str] = "drift"
    in_tensors: ClassVar[tuple[str, ...]] = ("arrays", "control")

    a: PathInfo
    b: PathInfo
    architecture: Architecture
    prompts: tuple[Prompt, ...]
    arrays: dict[str, np.ndarray]
    token_texts: dict[int, str]
    control: Drift | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def _shapes(self) -> Iterator[Shaped]:
        return ((name, array.shape, axes_of(name)) for name, array in self.arrays.items() if is_known(name))

    def _lengths(self) -> dict[str, int]:
        return {"prompt": len(self.prompts)}

    # --- statistics

    def per_prompt(self, site: str, metric: str = "rel_l2", of: str = "drift") -> np.ndarray:
        """Median over the counted steps (and seeds, for a floor), ``[prompt, layer]`` or ``[prompt]``."""
        values = self.values(site, metric, of)
        if of in FLOORS:
            values = np.median(values, axis=0)
        return np.stack(
            [
                np.median(row[keep], axis=0) if keep.any() else np.full(row.shape[1:], np.nan)
                for row, keep in zip(values, self.counted, strict=True)
            ]
        )

    def growth(self, site: str = "resid_post", **options: Any) -> profile.Growth:
        """How drift changes from layer to layer; see `kvdrift.drift.profile.growth`.

        Raises
        ------
        SiteError
            If the site was not measured or has no layers alone (``embed``, ``k``, …).
        """
        if self.values(site).ndim != 3:
            raise SiteError(f"Growth goes along the layers of a residual site such as 'resid_post'; {site!r} is none.")
        return self._once(("growth", site, *sorted(options.items())), lambda: self._growth(site, options))

    def _growth(self, site: str, options: Mapping[str, Any]) -> profile.Growth:
        floor = self.per_prompt(site, of="floor") if self.has(site, of="floor") else None
        return profile.growth(self.per_prompt(site), floor, self.layers(site), **options)

    def onset(self, site: str = "resid_post", **options: Any) -> profile.Onset:
        """The first layer that makes drift by itself; see `kvdrift.drift.profile.onset`.

        Its attention and MLP outputs count too, where they were measured: a bit that differs there can round away where
        the output is added, so that the layer named can be bit-identical at ``site`` and drift show there higher up.

        Raises
        ------
        SiteError
            If local drift was not measured (``local=False``) or not at this site.
        """
        return self._once(("onset", site, *sorted(options.items())), lambda: self._onset(site, options))

    def _onset(self, site: str, options: Mapping[str, Any]) -> profile.Onset:
        names = [name for name in ("attn_out", "mlp_out") if name != site and self.has(name, of="local")]
        local = {
            name: np.where(self.counted[..., None], self.values(name, of="local"), np.nan) for name in [site, *names]
        }
        return profile.onset(local, self.floor(site, "local"), self.layers(site, "local"), site=site, **options)

    @property
    def first_flip(self) -> tuple[int | None, ...]:
        """The first measured step at which the paths' top-1 tokens differ, per prompt."""
        return tuple(int(self.steps[row.argmax()]) if row.any() else None for row in self.flips)

    @property
    def free_steps(self) -> tuple[int, ...]:
        """Per prompt, how many steps the fed tokens are also those that path *a* chooses by itself.

        Within them forced and free running are the same thing; with ``tokens="a"`` that is every step. Only steps
        from 0 on without a gap count: where steps between were not measured, nothing is known about them.
        """
        gapless = int((self.steps == np.arange(len(self.steps))).sum())
        lengths = []
        for fed, chosen, measured in zip(self.fed, self.top1("a"), self.measured, strict=True):
            n = min(gapless, int(measured.sum()))
            left = np.flatnonzero(fed[:n] != chosen[:n])
            lengths.append(int(left[0]) + 1 if left.size else n)
        return tuple(lengths)

    @property
    def free_divergence(self) -> tuple[int | None, ...]:
        """Step of the first token that differs when each path feeds itself, per prompt.

        Under greedy decoding this is the first flip, as long as the tokens fed are path *a*'s own choice; a
        flip that comes after `free_steps` is censored (None), as is no flip at all.
        """
        return tuple(
            flip if flip is not None and flip < free else None
            for flip, free in zip(self.first_flip, self.free_steps, strict=True)
        )

    # --- tables

    def to_dataframe(self, what: str = "layers") -> Any:
        """A tidy `pandas.DataFrame`.

        Parameters
        ----------
        what
            ``"layers"``: one row per prompt, step, site and layer with every metric, the floor's median and
            the local drift beside it. ``"logits"``: one row per prompt and step. ``"heads"``: one row per
            prompt, step, site, layer and head. ``"positions"``: one row per prompt, kept step, layer, head
            and absolute position, for K and V.
        """
        return table_maker(what, makers_in("drift.tables", "layers", "logits", "heads", "positions"))(self)

    # --- its file: that of the control lies in the same one

    def _to_parts(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, manifest = super()._to_parts()
        if self.control is None:
            return tensors, manifest | {"control": None}
        inner, manifest["control"] = self.control._to_parts()
        return tensors | {f"{_CONTROL}{name}": tensor for name, tensor in inner.items()}, manifest

    @classmethod
    def _from_tensors(cls, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> dict[str, Any]:
        inner = {name.removeprefix(_CONTROL): x for name, x in tensors.items() if name.startswith(_CONTROL)}
        control = None if manifest["control"] is None else cls._from_parts(inner, manifest["control"])
        outer = {name: x for name, x in tensors.items() if not name.startswith(_CONTROL)}
        return super()._from_tensors(outer, manifest) | {"control": control}
