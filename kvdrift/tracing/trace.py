"""Recorded tensors with labelled axes, and their file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import psutil
import torch
from torch import Tensor

from kvdrift import markup
from kvdrift.errors import SiteError
from kvdrift.models.architecture import Architecture
from kvdrift.models.labels import PathInfo, Prompt
from kvdrift.models.load import load
from kvdrift.result import Saved
from kvdrift.shapes import Shaped
from kvdrift.tracing.activation_cache import Axes, from_cache, to_cache


@dataclass(frozen=True)
class Trace(Saved):
    """What one path computed at chosen sites over one prompt.

    ``trace[site]`` is a plain tensor whose axes are, in order and absent ones left out, ``step, layer, head``
    (``kv_head`` for keys and values)``, position, feature``; ``trace.axes(site)`` names them with their
    coordinates and ``trace.valid(site)`` says which entries were computed (the others are zero, never NaN).

    Attributes
    ----------
    tensors
        Site → tensor, or layer → tensor where layers differ in shape.
    coordinates
        Site → axes.
    masks
        Site → bool, over the axes of the tensor without the feature axis.
    path, prompt, fed, architecture, provenance
        How it was made: the path, the prompt, the token chosen after each step, the model, the environment.
    """

    saved_as: ClassVar[str] = "trace"
    in_tensors: ClassVar[tuple[str, ...]] = ("tensors", "masks")

    tensors: dict[str, Tensor | dict[int, Tensor]]
    coordinates: dict[str, Axes]
    masks: dict[str, Tensor]
    path: PathInfo
    prompt: Prompt
    fed: tuple[int, ...]
    architecture: Architecture
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def sites(self) -> tuple[str, ...]:
        """The recorded sites."""
        return tuple(self.tensors)

    @property
    def n_bytes(self) -> int:
        """Size of all tensors, in bytes."""
        return sum(x.numel() * x.element_size() for x in self._flat().values())

    def __getitem__(self, site: str) -> Tensor | dict[int, Tensor]:
        """The tensor of a site.

        Raises
        ------
        SiteError
            If it was not recorded.
        """
        return self.tensors[self._known(site)]

    def axes(self, site: str) -> Axes:
        """Names and coordinates of the axes of ``trace[site]``, in order."""
        return self.coordinates[self._known(site)]

    def valid(self, site: str) -> Tensor:
        """Which entries were computed: bool over every axis of ``trace[site]`` but the last."""
        return self.masks[self._known(site)]

    def _known(self, site: str) -> str:
        if site not in self.tensors:
            raise SiteError(f"This trace has no {site!r}; it recorded {', '.join(self.tensors)}.")
        return site

    def __repr__(self) -> str:
        return "\n".join([self._headline(), *(f"  {site}: [{self._sizes(site)}]" for site in self.sites)])

    def _repr_html_(self) -> str:
        return markup.block(self._headline(), markup.table([(site, self._sizes(site)) for site in self.sites]))

    def _headline(self) -> str:
        return (
            f"Trace of {self.path.model} · {self.path.label} · {self.path.dtype} · {self.path.attn} · "
            f"{len(self.prompt.ids)} prompt tokens, {len(self.fed)} steps, {self.n_bytes / 1e6:.1f} MB"
        )

    def _sizes(self, site: str) -> str:
        return ", ".join(f"{name} {len(values)}" for name, values in self.axes(site).items())

    # --- TransformerLens

    def to_activation_cache(self, step: int | None = None, model: Any = None) -> Any:
        """This trace as an ``ActivationCache`` of TransformerLens, under its hook names and in its shapes.

        Residual sites are ``[1, position, d_model]``, ``q k v z`` ``[1, position, head, d_head]``, the pattern
        ``[1, head, position, key]``. What stands on the position axis depends on how the trace was recorded:

        - ``positions="current"``: one entry per step, the position that the step predicts from (the last prompt
          token, then each token consumed). ``k`` and ``v`` hold that position alone.
        - ``positions="all"`` or a list: the recorded positions in order, each as the latest step up to ``step``
          computed it, or read it (``k``, ``v``). On the cache-ON path that is the prefill's value for the prompt and
          the decoded one for every later token; on the cache-OFF path the pass of ``step`` alone. Logits are left out.

        Parameters
        ----------
        step
            The last step that counts; by default the last one of the trace.
        model
            The bridge, which some methods of the cache need; with it the cache also holds what its norms divide by.
            ``accumulated_resid`` asks for the sites ``embed``, ``resid_pre`` and ``resid_post``, ``decompose_resid``
            for ``embed``, ``attn_out`` and ``mlp_out``, and ``logit_attrs`` for ``resid_post`` of the last layer.

        Raises
        ------
        InputError
            If TransformerLens is not installed, or there is no such step.

        Examples
        --------
        >>> import kvdrift as kd
        >>> trace = kd.record(kd.models.tiny("llama"), [1, 2, 3], positions="all", max_new_tokens=2, progress=False)
        >>> trace.to_activation_cache()["blocks.0.attn.hook_v"].shape  # doctest: +SKIP
        torch.Size([1, 4, 2, 32])
        """
        return to_cache(self.tensors, self.coordinates, self.masks, self.fed, self.architecture, step, model)

    @classmethod
    def from_activation_cache(cls, cache: Any, model: Any, prompt: Any, fed: Sequence[int] | None = None) -> Trace:
        """A trace from an ``ActivationCache`` (or a dict) of TransformerLens; the way back of `to_activation_cache`.

        Entries that hold no site of kvdrift are left out: among them ``hook_q`` and ``hook_k`` of a model with RoPE,
        which are not what the kernel reads (``hook_rot_q`` and ``hook_rot_k`` are).

        Parameters
        ----------
        cache
            For one sequence.
        model, prompt
            The model that made it (anything `kvdrift.load` takes) and its prompt.
        fed
            The token chosen after each step, if the position axis is one of steps (``positions="current"``). Without
            it, the cache is one pass over all positions: the trace has one step.

        Raises
        ------
        InputError
            If its shapes do not fit.
        SiteError
            If it holds no site.
        """
        model = load(model, quiet=True)
        label = model.label(prompt, model.encode(prompt))
        return cls(**from_cache(cache, model, label, None if fed is None else tuple(int(token) for token in fed)))

    def _shapes(self) -> Iterator[Shaped]:
        for site, names in self.coordinates.items():
            value, axes = self.tensors[site], [f"{name} of {site}" for name in names]
            yield f"valid/{site}", self.masks[site].shape, axes[:-1]
            if not isinstance(value, Mapping):
                yield site, value.shape, axes
                continue
            for layer, tensor in value.items():  # layers may differ in heads and features
                alike = {"step": f"step of {site}", "position": f"position of {site}"}
                own = [alike.get(name, f"{name} of {site}, layer {layer}") for name in names if name != "layer"]
                yield f"{site} of layer {layer}", tensor.shape, own

    def _lengths(self) -> dict[str, int]:
        every = self.coordinates.items()
        return {f"{name} of {site}": len(numbers) for site, axes in every for name, numbers in axes.items()}

    # --- its file

    def _to_tensors(self) -> dict[str, Tensor]:
        return self._flat() | {f"valid/{site}": mask for site, mask in self.masks.items()}

    @classmethod
    def _from_tensors(cls, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> dict[str, Any]:
        sites: dict[str, Any] = {}
        for site in manifest["coordinates"]:
            prefix = f"layer/{site}/"
            by_layer = {int(n.removeprefix(prefix)): x for n, x in tensors.items() if n.startswith(prefix)}
            sites[site] = dict(sorted(by_layer.items())) if by_layer else tensors[f"site/{site}"]
        return {"tensors": sites, "masks": {site: tensors[f"valid/{site}"] for site in sites}}

    def _flat(self) -> dict[str, Tensor]:
        flat: dict[str, Tensor] = {}
        for site, value in self.tensors.items():
            if isinstance(value, Mapping):
                flat |= {f"layer/{site}/{layer}": tensor for layer, tensor in value.items()}
            else:
                flat[f"site/{site}"] = value
        return flat


def free_memory(device: torch.device) -> int:
    """Free memory of a device, in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)
