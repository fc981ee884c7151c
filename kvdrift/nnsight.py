"""kvdrift's sites inside traces of one's own with nnsight.

`Sites` is made to travel with a remote request: nnsight ships it by value to a server where kvdrift is not
installed, so nothing in that class refers to another module of kvdrift.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor, nn

from kvdrift.errors import InputError, ModelError
from kvdrift.models.sites import ALL_SITES, BLOCK_NAME, FULL_NAMES, GLOBAL_SITES, LOGITS

if TYPE_CHECKING:
    from kvdrift.models.coverage import Coverage
    from kvdrift.models.model import Model

Spots = dict[str, dict[int, tuple[nn.Module, str]]]
"""Site → layer → the module it is at, and what of that module it is."""
Places = dict[str, dict[int, tuple[Any, str]]]
"""The same with nnsight's envoy of the module."""
_INSIDE = ("q", "k", "v", "z", "pattern")


class Sites:
    """Reads and writes kvdrift's sites within an nnsight trace; `sites` makes it.

    ``sites["resid_post", 3]`` reads a site of a layer, ``sites["embed"]`` one that exists once, and
    ``sites["k", 3] = value`` writes it. Full names (``"blocks.3.attn.hook_k"``) and negative layers are accepted. In
    a loop over ``tracer.iter`` each turn reads and writes its own decode step.

    What is read is the live tensor, not a copy: ``[batch, position, d_model]`` at residual sites,
    ``[batch, head, position, feature]`` at ``q k v z`` (``k`` and ``v`` as the kernel reads them, cached positions
    included), ``[batch, head, query, key]`` at ``pattern`` and ``[batch, vocab]`` at ``logits``. Save a clone of
    what is written later in the same step. `attn_out` and `mlp_out` are what their modules return, before a residual
    multiplier.

    What is written replaces the whole value if it has its shape, or the last position if it has that shape without
    the position axis; the cache keeps its own keys and values, as with `kvdrift.patched`.

    Sites are reached in forward order, as everything in nnsight: within a block ``resid_pre``; ``q``, ``k``, ``v``
    (together); ``z`` and ``pattern``; ``attn_out``; ``resid_mid``; ``mlp_out``; ``resid_post``.
    """

    def __init__(
        self, places: Places, n_layers: int, reasons: dict[str, str], names: dict[str, str], block_name: re.Pattern[str]
    ) -> None:
        self._places = places
        self._n_layers = n_layers
        self._reasons = reasons
        self._names = names
        self._block_name = block_name
        self._sites = [site for site, layers in places.items() if layers]

    def __getitem__(self, key: str | tuple[str, int]) -> Tensor:
        """The site's value at this point of the forward pass."""
        envoy, kind, _ = self._find(key)
        return self._read(envoy, kind)

    def __setitem__(self, key: str | tuple[str, int], value: Tensor) -> None:
        """Put another value in its place, for everything that follows."""
        envoy, kind, site = self._find(key)
        if kind in ("logits", "pattern"):
            self._refuse(f"{site!r} can be read but not written.")
        own = self._read(envoy, kind)
        changed = self._changed(site, own, value)
        if kind in ("input", "output"):
            own.copy_(changed)  # into the stream itself: it has readers beside this module
        elif kind == "z":
            operation = self._operation(envoy)
            operation.output = (changed.transpose(1, 2), *operation.output[1:])
        else:
            operation = self._operation(envoy)
            args, kwargs = operation.inputs
            at = 1 + "qkv".index(kind)
            operation.inputs = ((*args[:at], changed, *args[at + 1 :]), kwargs)

    def _read(self, envoy: Any, kind: str) -> Tensor:
        if kind == "input":
            args, kwargs = envoy.inputs
            if "hidden_states" in kwargs:
                return kwargs["hidden_states"]
            found = next((x for x in (*args, *kwargs.values()) if hasattr(x, "shape")), None)
            if found is None:
                raise LookupError("A block was called without a tensor, so that no residual stream can be read there.")
            return found
        if kind == "output":
            output = envoy.output
            return output[0] if isinstance(output, (tuple, list)) else output
        if kind == "logits":
            return envoy.output.logits[:, -1]
        if kind == "pattern":
            return self._operation(envoy).output[1]
        if kind == "z":
            return self._operation(envoy).output[0].transpose(1, 2)
        args, _ = self._operation(envoy).inputs
        return args[1 + "qkv".index(kind)]

    def _operation(self, envoy: Any) -> Any:
        """The call of the attention function, ``attention_interface(self, query, key, value, mask, …)``.

        nnsight names it after the variable in transformers' source, and counts the assignments before it.
        """
        source = envoy.source
        calls = [name for name in source.names if re.fullmatch(r"attention_interface_\d+", name)]
        if not calls:
            self._refuse(
                f"The forward of {type(envoy._module).__name__} calls no attention_interface, so q, k, v and z cannot "
                "be reached through nnsight; kvdrift.tap and kvdrift.patched reach them."
            )
        return getattr(source, calls[-1])

    def _find(self, key: str | tuple[str, int]) -> tuple[Any, str, str]:
        """The envoy of a site, what of it the site is, and the site's short name."""
        name, layer = key if isinstance(key, tuple) and len(key) == 2 else (key, None)
        if layer is None and (full := self._block_name.fullmatch(str(name))):
            name, layer = full[2], int(full[1])
        site = self._names.get(str(name), name)
        if site not in self._places:
            self._refuse(f"There is no site {key!r}; this model gives {', '.join(self._sites)}.")
        layers = self._places[site]
        if not layers:
            self._refuse(f"This model does not give {site!r}: {self._reasons.get(site, 'no layer has it')}.")
        if layer is None and site in self._names.values():
            layer = 0
        if not isinstance(layer, int):
            self._refuse(f"{site!r} is in every layer: name one, as in sites[{site!r}, 3].")
        if not -self._n_layers <= layer < self._n_layers:
            self._refuse(f"There is no layer {layer}: this model has layers 0 to {self._n_layers - 1}.")
        if layer % self._n_layers not in layers:
            self._refuse(
                f"This model does not give {site!r} in layer {layer}: {self._reasons.get(site, 'it has none')}."
            )
        return (*layers[layer % self._n_layers], site)

    def _changed(self, site: str, own: Tensor, value: Tensor) -> Tensor:
        """What the value becomes: all of it, or the last position."""
        if not hasattr(value, "shape"):
            self._refuse(f"{site!r} takes a tensor, not {type(value).__name__}.")
        if value.shape == own.shape:
            return value.to(own.device, own.dtype)
        last = own[..., -1, :]
        if value.shape != last.shape:
            self._refuse(
                f"The tensor for {site!r} has shape {list(value.shape)}; the value has {list(own.shape)}, its last "
                f"position {list(last.shape)}."
            )
        changed = own.clone()
        changed[..., -1, :] = value.to(own.device, own.dtype)
        return changed

    def _refuse(self, sentence: str) -> NoReturn:
        try:
            from kvdrift.errors import SiteError
        except ImportError:  # on a server that was sent this object
            raise LookupError(sentence) from None
        raise SiteError(sentence)

    def __repr__(self) -> str:
        return f"Sites({', '.join(self._sites)})"


def sites(model: Any) -> Sites:
    """Reach kvdrift's sites by name within your own nnsight traces.

    Call it before the trace: it finds the sites by a probe pass. For a model that is not dispatched (one that runs
    on NDIF) they are those of kvdrift's tiny model of the same class, and no weights are loaded.

    Parameters
    ----------
    model
        An nnsight model around a causal LM of transformers, or what `kvdrift.load` made of one.

    Returns
    -------
    Sites
        ``sites[name, layer]`` reads, ``sites[name, layer] = tensor`` writes.

    Raises
    ------
    InputError
        If it is no nnsight model, or a trace of it is running.
    ModelError
        If the sites of an undispatched model cannot be known.

    Examples
    --------
    >>> import kvdrift as kd, nnsight, torch
    >>> model = nnsight.NNsight(kd.models.tiny("llama"))
    >>> sites = kd.nnsight.sites(model)
    >>> with model.trace(torch.tensor([[1, 2, 3]])):
    ...     keys = sites["k", 1].save()
    ...     sites["resid_post", 3] = torch.zeros(1, 256)
    ...     logits = sites["logits"].save()
    >>> keys.shape, logits.shape
    (torch.Size([1, 2, 3, 32]), torch.Size([1, 384]))
    """
    import nnsight

    from kvdrift.backends.nnsight import NNsightBackend, is_nnsight
    from kvdrift.models.model import Model
    from kvdrift.tracing import load

    if isinstance(model, Model) and isinstance(model.backend, NNsightBackend):
        wrapper = model.backend.wrapper
    elif is_nnsight(model):
        wrapper = model
    else:
        raise InputError(
            f"kd.nnsight.sites takes an nnsight model (TransformersModel, NNsight), not {type(model).__name__}."
        )
    if wrapper.interleaver.interleaving:
        raise InputError("Call kd.nnsight.sites(model) before the trace: it runs the model to find its sites.")
    if getattr(wrapper, "dispatched", True):
        coverage, spots = _loaded(load(model, quiet=True))
    else:
        coverage, spots = _undispatched(wrapper._module)
    envoys = {id(envoy._module): envoy for envoy in wrapper.modules()}
    places = {
        site: {layer: (envoys[id(module)], kind) for layer, (module, kind) in spots.get(site, {}).items()}
        for site in ALL_SITES
    }
    places[LOGITS] = {0: (wrapper, "logits")}
    nnsight.register("kvdrift.nnsight")  # a remote request carries this file's class along
    names = {name: name for name in (*GLOBAL_SITES, LOGITS)} | FULL_NAMES
    return Sites(places, coverage.n_layers, dict(coverage.reasons), names, BLOCK_NAME)


def _loaded(model: Model) -> tuple[Coverage, Spots]:
    """Where the sites of a loaded model are."""
    coverage = model.coverage
    spots: Spots = {
        site: {layer: (place.module, place.kind) for layer, place in layers.items()}
        for site, layers in coverage.places.items()
    }
    for site in _INSIDE if coverage.has_pattern else _INSIDE[:-1]:
        spots[site] = {
            layer: (module, site)
            for layer in coverage.attention_layers
            if (module := model.tree.attention_modules[layer]) is not None
        }
    return coverage, spots


def _undispatched(hf: Any) -> tuple[Coverage, Spots]:
    """Where they are in a model without weights: at the modules of the same names as in a tiny model of its class."""
    from kvdrift.models.tiny import FAMILIES, tiny
    from kvdrift.models.tree import find_blocks
    from kvdrift.tracing import load

    small = next((built for name in FAMILIES if type(built := tiny(name)) is type(hf)), None)
    if small is None:
        raise ModelError(
            f"This model has no weights yet, and kvdrift has no tiny {type(hf).__name__} to find its sites with; call "
            "model.dispatch() first."
        )
    small.set_attn_implementation(hf.config._attn_implementation)
    coverage, found = _loaded(load(small, quiet=True))
    tree = find_blocks(hf)
    path = {id(module): name for name, module in small.named_modules()}
    every = range(len(tree.blocks))
    spots: Spots = {}
    for site, layers in found.items():
        if site in GLOBAL_SITES:
            spots[site] = {layer: (hf.get_submodule(path[id(x)]), kind) for layer, (x, kind) in layers.items()}
            continue
        inside = {
            (path[id(module)].removeprefix(f"{tree.prefix}.{layer}"), kind) for layer, (module, kind) in layers.items()
        }
        if len(inside) > 1 or 0 < len(layers) < coverage.n_layers:
            raise ModelError(
                f"The blocks of {type(hf).__name__} differ in where {site!r} is, so it must be found in the model "
                "itself; call model.dispatch() first."
            )
        for name, kind in inside:
            spots[site] = {layer: (hf.get_submodule(f"{tree.prefix}.{layer}{name}"), kind) for layer in every}
    return dataclasses.replace(coverage, n_layers=len(every)), spots
