"""How a TransformerLens bridge is driven.

A bridge replaces the parts of a transformers model by its own components, in place: the model object stays, its
blocks become `BlockBridge`, and its attention is computed by the bridge. So kvdrift drives that model as it drives any
other, reads residual sites at the bridge's hook points, and needs two things more: what the attention function is
given and returns (`kvdrift.backends.bridge_attention`), and a cache that the attention fills (`repaired`).

transformer_lens is never imported before an object of its own is at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from kvdrift.backends.backend import Attend, AttentionFunction
from kvdrift.backends.bridge_attention import (
    attention_components,
    attentions,
    eager_attention,
    is_component,
    is_understood,
    override,
    rerouted,
)
from kvdrift.backends.hf import HFBackend
from kvdrift.errors import InputError, ModelError

_PROBE_TOKENS = 3
_BLOCK_POINTS = {
    "resid_pre": "hook_resid_pre",
    "attn_out": "hook_attn_out",
    "resid_mid": "hook_resid_mid",
    "mlp_out": "hook_mlp_out",
    "resid_post": "hook_resid_post",
}
_FLAGS = ("use_split_qkv_input", "use_attn_in", "use_attn_result")


class BridgeBackend(HFBackend):
    """Drives the transformers model that a `TransformerBridge` has rebuilt.

    Parameters
    ----------
    module
        The model: ``bridge.original_model``, or a copy of it.
    bridge
        The bridge, if ``module`` is its model.
    repairs
        Hand the cache to the attention while the model runs here; see `repaired`.
    defect
        One sentence on cached decoding that does not work by itself, or None.
    """

    def __init__(self, module: Any, bridge: Any = None, repairs: bool = False, defect: str | None = None) -> None:
        super().__init__(module)
        self.bridge, self.repairs, self.defect = bridge, repairs, defect

    def as_it_is(self) -> BridgeBackend:
        """The backend that runs the bridge without any repair."""
        return BridgeBackend(self.module, self.bridge) if self.repairs else self

    def around(self, module: Any) -> BridgeBackend:
        """The backend of a copy of the model, repaired if this one is."""
        return BridgeBackend(module, repairs=self.repairs)

    def around_plain(self, module: Any) -> BridgeBackend:
        """The backend of another model of the same class, fresh from transformers, in a bridge of its own."""
        from transformer_lens.model_bridge.sources import build_bridge_from_module

        bridge = build_bridge_from_module(module, type(module).__name__, hf_config=module.config)
        return BridgeBackend(module, bridge, self.repairs)

    def call(self, arguments: dict[str, Any]) -> Any:
        """Run the model once, and return what it returns."""
        if not self.repairs:
            return super().call(arguments)
        with repaired(self.module):
            return super().call(arguments)

    @property
    def name(self) -> str:
        """The model's name, and that it runs in TransformerLens."""
        given, own = getattr(self.bridge.cfg, "model_name", None), getattr(self.module.config, "name_or_path", None)
        name = own or (given if given not in (None, "", "external") else self.module.config.model_type)
        return f"{name} (TransformerLens)"

    @property
    def tokenizer(self) -> Any:
        """The bridge's tokenizer, or None."""
        return getattr(self.bridge, "tokenizer", None)

    @property
    def driver(self) -> str:
        """What runs the model, with its version, and whether it is repaired."""
        return f"transformer-lens {metadata.version('transformer-lens')}{', repaired' if self.repairs else ''}"

    @property
    def attn(self) -> str:
        """``"eager"``: whatever the config says, the bridge computes attention by itself."""
        return "eager"

    @contextmanager
    def attention(self, name: str | None) -> Iterator[None]:
        """Nothing but the bridge's own eager attention."""
        if name not in (None, self.attn):
            self.refuse_switching(name)
        yield

    def refuse_switching(self, name: str) -> None:
        """Refuse: the bridge computes attention by itself."""
        raise InputError(
            f"A TransformerLens bridge computes its own eager attention, so it cannot run attn={name!r}; load the "
            "Hugging Face model itself a second time for that path."
        )

    def refuse_rewriting(self, name: str) -> None:
        """Refuse: the bridge's parts are its own."""
        raise ModelError(
            f"{name} is a TransformerLens bridge, whose parts cannot be rewritten; give the Hugging Face model "
            "itself, loaded a second time."
        )

    @contextmanager
    def unwrapped(self) -> Iterator[Callable[[nn.Module], nn.Module]]:
        """The model's tree as transformers built it; yields what stands in for each of its modules."""
        standing_in: dict[int, nn.Module] = {}
        changed: list[tuple[nn.Module, str, nn.Module]] = []
        for parent in list(self.module.modules()):
            if is_component(parent):
                standing_in[id(parent._modules["_original_component"])] = parent
                continue
            for name, child in parent._modules.items():
                if child is not None and is_component(child):
                    changed.append((parent, name, child))
        for parent, name, child in changed:
            parent._modules[name] = child._modules["_original_component"]
        try:
            yield lambda module: standing_in.get(id(module), module)
        finally:
            for parent, name, child in changed:
                parent._modules[name] = child

    def plain_name(self, name: str) -> str:
        """The name that transformers has for a module or weight: without the components of the bridge."""
        return name.replace("._original_component", "")

    def hook_points(
        self, blocks: tuple[nn.Module, ...], final_norm: nn.Module | None
    ) -> dict[tuple[str, int], nn.Module]:
        """Site and layer → the hook point that TransformerLens has for it."""
        found: dict[tuple[str, int], nn.Module] = {}
        for layer, block in enumerate(blocks):
            for site, name in _BLOCK_POINTS.items():
                point = _resolve(block, getattr(block, "hook_aliases", {}).get(name, name))
                if point is not None:
                    found[site, layer] = point
        for site, module in (("embed", self.module.get_input_embeddings()), ("final_norm", final_norm)):
            if (point := _resolve(module, "hook_out")) is not None:
                found[site, 0] = point
        return found

    def notes(self) -> tuple[str, ...]:
        """Sentences on what the bridge computes otherwise than the model that it wraps."""
        split = [m for m in attentions(self.module) if "q" in m._modules and "qkv" in m._modules]
        said = [] if self.defect is None else [self.defect]
        if split:
            said.append(
                "This bridge computes queries, keys and values by three products where the model has one fused product "
                f"({type(split[0]).__name__}), so its bits differ from transformers' while the function is the same "
                "(they agree in float64)."
            )
        return tuple(said)

    @staticmethod
    def attention_of(module: nn.Module) -> AttentionFunction | None:
        """The bridge's own eager attention, for a component whose computation can be handed to others."""
        return eager_attention if is_understood(module) else None

    @staticmethod
    def rerouted(model: nn.Module, attend: Attend) -> AbstractContextManager[None]:
        """Hand every attention computation of the bridge to ``attend`` for a while."""
        return rerouted(model, attend)

    @torch.no_grad()
    def layers_without_cache(self) -> list[int]:
        """The layers whose cache is still empty after a pass that should have filled it."""
        if self.input_device.type == "meta":
            return []
        cache = self.new_cache()
        ids = torch.zeros((1, _PROBE_TOKENS), dtype=torch.long, device=self.input_device)
        self.forward(ids, 0, cache)
        layers = {module._layer_idx for module in attention_components(self.module)} - {None}
        return [x for x in sorted(layers) if x < len(cache.layers) and not int(cache.layers[x].get_seq_length())]


def backend_of(bridge: Any, repair: bool) -> BridgeBackend:
    """The backend of what a user gave.

    Raises
    ------
    ModelError
        If it is no bridge around a transformers model, or its weights or attention were rewritten.
    """
    module = getattr(bridge, "original_model", None)
    if type(bridge).__name__ != "TransformerBridge" or not hasattr(module, "get_input_embeddings"):
        raise ModelError(
            f"{type(bridge).__name__} is no bridge around a model of transformers; give a TransformerBridge made by "
            "TransformerBridge.boot_transformers."
        )
    if getattr(bridge, "compatibility_mode", False):
        raise ModelError(
            "This bridge is in compatibility mode, which folds and centres weights (another function's numbers) and "
            "masks otherwise; boot it again and do not call enable_compatibility_mode()."
        )
    flags = [name for name in _FLAGS if getattr(bridge.cfg, name, False)]
    if flags:
        raise ModelError(
            f"This bridge runs with {', '.join(flags)}, which computes attention head by head; switch it off, for "
            f"example with bridge.set_{flags[0]}(False)."
        )
    backend = BridgeBackend(module, bridge)
    lost = backend.layers_without_cache()
    if lost:
        mended = BridgeBackend(module, bridge, repairs=True)
        mends = not mended.layers_without_cache()
        backend = mended if repair and mends else backend
        backend.defect = _defect(lost, mends, backend.repairs)
    return backend


def _defect(layers: list[int], mends: bool, repairs: bool) -> str:
    found = (
        f"The attention of this TransformerLens bridge never updates the cache (_update_kv_cache in layers "
        f"{_ranges(layers)} does not find it), so cached decoding sees the newest token alone"
    )
    if not mends:
        return f"{found}; kvdrift knows no repair: run its cache-free path, or the Hugging Face model itself."
    if repairs:
        return (
            f"{found}; repair=True, the default, hands the cache over during kvdrift's own calls only, and "
            "kd.load(bridge, repair=False) runs the bridge as it is."
        )
    return f"{found}; it runs as it is, and kd.load(bridge, repair=True) hands the cache over during kvdrift's calls."


def _resolve(owner: Any, path: str) -> nn.Module | None:
    for name in path.split("."):
        owner = getattr(owner, name, None)
    return owner if isinstance(owner, nn.Module) else None


def _ranges(layers: list[int]) -> str:
    return f"{layers[0]} to {layers[-1]}" if len(layers) > 2 else ", ".join(map(str, layers))


# --- the repair


@contextmanager
def repaired(model: nn.Module) -> Iterator[None]:
    """Hand the cache to the bridge's attention under the name that it looks for, for a while.

    TransformerLens 4.3 looks for ``past_key_values`` or ``layer_past`` among what a layer passes to its attention;
    transformers calls it ``cache`` from 5.24 on.
    """
    with ExitStack() as stack:
        for module in attention_components(model):
            override(stack, module, "_update_kv_cache", _with_cache(module._update_kv_cache))
        yield


def _with_cache(update: Callable[..., Any]) -> Callable[..., Any]:
    def find_and_update(key: Tensor, value: Tensor, **kwargs: Any) -> Any:
        if kwargs.get("past_key_values") is None and isinstance(kwargs.get("cache"), Cache):
            kwargs["past_key_values"] = kwargs["cache"]
        return update(key, value, **kwargs)

    return find_and_update
