"""`patched`: writing into a model in a loop of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from kvdrift.errors import InputError, SiteError
from kvdrift.models.load import load
from kvdrift.models.model import Model
from kvdrift.models.sites import GLOBAL_SITES, parse_sites
from kvdrift.patching.spec import PATCH_SITES
from kvdrift.tracing.writer import SiteEditor

Edit = Tensor | Callable[[Tensor], Tensor]
"""What a site becomes: a tensor, or a function of its value."""
Edits = dict[tuple[str, int], Edit]


@contextmanager
def patched(model: Any, edits: Mapping[str, Edit]) -> Iterator[None]:
    """Write into a model during every forward pass inside the ``with`` block.

    Parameters
    ----------
    model
        Anything `kvdrift.load` takes.
    edits
        Site name → what it becomes. A name is short (``"resid_post"``: every layer that has it) or full
        (``"blocks.5.attn.hook_v"``). A function takes the site's value and returns the new one, of the same shape:
        ``[batch, position, d_model]`` at residual sites, ``[batch, head, position, feature]`` at ``q``, ``k``, ``v``,
        ``z``. A tensor of that shape replaces the whole value, one without the position axis the last position.
        Keys and values are changed as the kernel reads them; the cache keeps its own. ``attn_out`` and ``mlp_out``
        are what their modules return, before a residual multiplier.

    Raises
    ------
    SiteError
        If the model does not give a site.
    InputError
        If an edit is neither, or changes the shape.

    Examples
    --------
    >>> import kvdrift as kd, torch
    >>> hf = kd.models.tiny("llama")
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> with kd.tap(hf, ["resid_post"]) as taps:
    ...     given = hf(ids).logits
    >>> with kd.patched(hf, {"blocks.3.hook_resid_post": taps.steps[0]["resid_post"][3]}):
    ...     found = hf(torch.tensor([[7, 8, 9]])).logits
    >>> torch.equal(found[0, -1], given[0, -1])
    True
    """
    wrapped = load(model, quiet=True)
    wanted = _edits(wrapped, edits)
    with _Edits(wrapped, wanted):
        yield


class _Edits(SiteEditor):
    """Applies what a user gave for each site and layer."""

    def __init__(self, model: Model, edits: Edits) -> None:
        super().__init__(model, {site: [x for name, x in edits if name == site] for site, _ in edits})
        self.edits = edits

    def edit(self, site: str, layer: int, own: Tensor) -> Tensor:
        """The user's tensor or function at work."""
        return _new(site, own, self.edits[site, layer])


def _edits(model: Model, edits: Mapping[str, Edit]) -> Edits:
    if not edits:
        raise InputError("There is nothing to write; give a mapping from site names to tensors or functions.")
    found: Edits = {}
    for name, edit in edits.items():
        if not isinstance(edit, Tensor) and not callable(edit):
            raise InputError(f"{name}: give a tensor or a function of the site's value, not {type(edit).__name__}.")
        ((site, layers),) = parse_sites(name).items()
        if site not in PATCH_SITES:
            raise SiteError(f"{site!r} cannot be patched; choose among {', '.join(PATCH_SITES)}.")
        if layers is not None and max(layers) >= model.architecture.n_layers:
            raise SiteError(f"{name}: this model has layers 0 to {model.architecture.n_layers - 1}.")
        for layer in model.coverage.resolve(site, None if site in GLOBAL_SITES else layers):
            found[site, layer] = edit
    return found


def _new(site: str, own: Tensor, edit: Edit) -> Tensor:
    """What a value becomes."""
    if not isinstance(edit, Tensor):
        changed = edit(own.clone())
        if not isinstance(changed, Tensor) or changed.shape != own.shape:
            shape = list(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
            raise InputError(f"The function at {site!r} made {shape} of a value of shape {list(own.shape)}.")
        return changed
    if edit.shape == own.shape:
        return edit.to(own.device, own.dtype)
    last = own[..., -1, :]
    if edit.shape != last.shape:
        raise InputError(
            f"The tensor for {site!r} has shape {list(edit.shape)}; the value has {list(own.shape)}, its last position "
            f"{list(last.shape)}."
        )
    changed = own.clone()
    changed[..., -1, :] = edit.to(own.device, own.dtype)
    return changed
