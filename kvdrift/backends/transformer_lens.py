"""How a TransformerLens bridge is driven, and how its attention is handed to others.

A bridge replaces the parts of a transformers model by its own components, in place: the model object stays, its
blocks become `BlockBridge`, and its attention is computed by the bridge. So kvdrift drives that model as it drives any
other, reads residual sites at the bridge's hook points, and needs two things more: what the attention function is
given and returns (`rerouted`), and a cache that the attention fills (`repaired`).

transformer_lens is never imported before an object of its own is at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import metadata
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import Cache

from kvdrift.backends.hf import HFBackend
from kvdrift.errors import InputError, ModelError

Output = tuple[Tensor, Tensor | None]
"""``[batch, query, head, feature]`` and the pattern, as an attention function of transformers returns them."""
Attend = Callable[[nn.Module, Tensor, Tensor, Tensor, Tensor | None, dict[str, Any], Callable[..., Output]], Output]
"""``(module, query, key, value, mask, kwargs, native)`` → output."""

_PROBE_TOKENS = 3
_BLOCK_POINTS = {
    "resid_pre": "hook_resid_pre",
    "attn_out": "hook_attn_out",
    "resid_mid": "hook_resid_mid",
    "mlp_out": "hook_mlp_out",
    "resid_post": "hook_resid_post",
}
_FLAGS = ("use_split_qkv_input", "use_attn_in", "use_attn_result")


def is_bridge(x: Any) -> bool:
    """Whether ``x`` is an object of TransformerLens; the library is not imported to find out."""
    return any(cls.__module__.partition(".")[0] == "transformer_lens" for cls in type(x).__mro__)


def is_bridged(module: nn.Module) -> bool:
    """Whether parts of a module have been replaced by a bridge."""
    return any(_is_component(part) for part in module.modules())


def _is_component(part: nn.Module) -> bool:
    return "_original_component" in part._modules and is_bridge(part)


def plain_name(name: str) -> str:
    """The name that transformers has for a module or weight of a bridged model.

    Examples
    --------
    >>> plain_name("model.layers.0._original_component.self_attn")
    'model.layers.0.self_attn'
    """
    return name.replace("._original_component", "")


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
    def driver(self) -> str:
        """What runs the model, with its version, and whether it is repaired."""
        return f"transformer-lens {metadata.version('transformer-lens')}{', repaired' if self.repairs else ''}"

    @property
    def attn(self) -> str:
        """``"eager"``: whatever the config says, the bridge computes attention by itself."""
        return "eager"

    @contextmanager
    def attention(self, name: str | None) -> Iterator[None]:
        """Nothing but the bridge's own eager attention.

        Raises
        ------
        InputError
            If another is asked for.
        """
        if name not in (None, self.attn):
            raise InputError(
                f"A TransformerLens bridge computes its own eager attention, so it cannot run attn={name!r}; load the "
                "Hugging Face model itself a second time for that path."
            )
        yield

    @contextmanager
    def unwrapped(self) -> Iterator[Callable[[nn.Module], nn.Module]]:
        """The model's tree as transformers built it; yields what stands in for each of its modules."""
        standing_in: dict[int, nn.Module] = {}
        changed: list[tuple[nn.Module, str, nn.Module]] = []
        for parent in list(self.module.modules()):
            if _is_component(parent):
                standing_in[id(parent._modules["_original_component"])] = parent
                continue
            for name, child in parent._modules.items():
                if child is not None and _is_component(child):
                    changed.append((parent, name, child))
        for parent, name, child in changed:
            parent._modules[name] = child._modules["_original_component"]
        try:
            yield lambda module: standing_in.get(id(module), module)
        finally:
            for parent, name, child in changed:
                parent._modules[name] = child

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

    @torch.no_grad()
    def layers_without_cache(self) -> list[int]:
        """The layers whose cache is still empty after a pass that should have filled it."""
        if self.input_device.type == "meta":
            return []
        cache = self.new_cache()
        ids = torch.zeros((1, _PROBE_TOKENS), dtype=torch.long, device=self.input_device)
        self.forward(ids, 0, cache)
        layers = {module._layer_idx for module in _attention_components(self.module)} - {None}
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
        for module in _attention_components(model):
            _override(stack, module, "_update_kv_cache", _with_cache(module._update_kv_cache))
        yield


def _with_cache(update: Callable[..., Any]) -> Callable[..., Any]:
    def find_and_update(key: Tensor, value: Tensor, **kwargs: Any) -> Any:
        if kwargs.get("past_key_values") is None and isinstance(kwargs.get("cache"), Cache):
            kwargs["past_key_values"] = kwargs["cache"]
        return update(key, value, **kwargs)

    return find_and_update


def _override(stack: ExitStack, module: nn.Module, name: str, value: Any) -> None:
    """Give one object another attribute until the stack is left."""
    own = vars(module)
    if name in own:
        stack.callback(own.__setitem__, name, own[name])
    else:
        stack.callback(own.pop, name, None)
    own[name] = value


# --- attention


def attentions(model: nn.Module) -> list[nn.Module]:
    """The attention components of a bridged model whose computation can be handed to others."""
    return [module for module in _attention_components(model) if is_understood(module)]


def _attention_components(model: nn.Module) -> list[Any]:
    return [part for part in model.modules() if _is_component(part) and hasattr(type(part), "_update_kv_cache")]


def is_understood(module: nn.Module) -> bool:
    """Whether an attention component computes what `eager_attention` asks it to compute again.

    That is plain attention over keys and values right after its cache update, projected by ``o`` right after.
    """
    if not _is_component(module):
        return False
    from transformer_lens.model_bridge.generalized_components import (
        joint_qkv_attention,
        joint_qkv_position_embeddings_attention,
        position_embeddings_attention,
    )

    rotary = position_embeddings_attention.PositionEmbeddingsAttentionBridge
    joint = joint_qkv_attention.JointQKVAttentionBridge
    both = joint_qkv_position_embeddings_attention.JointQKVPositionEmbeddingsAttentionBridge
    kind: Any = type(module)
    if not {"o", "hook_pattern", "hook_attn_scores"} <= set(module._modules):
        return False
    if isinstance(module, rotary):
        gated = "gate" in module._modules or getattr(module.config, "gated_q_proj", False)
        plain = kind._pre_output_projection is rotary._pre_output_projection
        return "hook_rot_q" in module._modules and plain and not gated
    return isinstance(module, joint) and kind._reconstruct_attention in (
        joint._reconstruct_attention,
        both._reconstruct_attention,
    )


def eager_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
) -> Output:
    """The bridge's own attention, as a function of what its kernel reads.

    The component's forward runs once more with every part before the scores and after the weighted sum standing
    still, so that no other arithmetic than the bridge's is involved, and ``hook_attn_scores`` and ``hook_pattern``
    fire. Scaling, soft-cap and sinks are the component's own; ``kwargs`` are not read.

    Parameters
    ----------
    module
        An attention component for which `is_understood` holds.
    query, key, value
        ``[batch, head, query, feature]``, ``[batch, kv_head, key, feature]``.
    attention_mask
        Added to the scores, ``[batch, head, query, key]``; without one each query sees the keys up to its own.
    """
    batch, n_heads, n_queries, width = query.shape
    flat = query.transpose(1, 2).reshape(batch, n_queries, n_heads * width)
    kept = {"hook_attn_scores", "hook_pattern"}
    still: dict[str, Any] = {name: part if name in kept else nn.Identity() for name, part in module._modules.items()}
    still["_original_component"] = module._modules["_original_component"]
    still["hook_rot_q"] = _Give(query)
    reshaped = (query, key, value, batch, n_queries, width)
    with ExitStack() as stack:
        _override(stack, module, "_modules", still)
        _override(stack, module, "_update_kv_cache", lambda *_, **__: (key, value))
        _override(stack, module, "_reshape_qkv_to_heads", lambda *_, **__: reshaped)
        _override(stack, module, "rope_optional", True)
        output, pattern = type(module).forward(module, flat, attention_mask=attention_mask, position_embeddings=None)
    return output.view(batch, n_queries, n_heads, value.shape[-1]), pattern


class _Give(nn.Module):
    """Returns what it was made with, whatever it is called on."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.value


class _Route:
    """One attention component whose computation goes through ``attend``.

    Its forward runs as ever up to the cache update. There the queries, keys and values go to ``attend``, whose
    result takes the place of what the component then computes itself (its hook points silenced, as they fired
    already), at the input of the output projection.
    """

    def __init__(self, module: Any, attend: Attend) -> None:
        self.module, self.attend = module, attend
        self.users = 0
        self._query: Tensor | None = None
        self._mask: Tensor | None = None
        self._output: Tensor | None = None
        self._stack = ExitStack()
        original = module._modules["_original_component"]
        arguments = {
            "scaling": getattr(original, "scaling", None),
            "softcap": getattr(original, "attn_logit_softcapping", None),
        }
        self._kwargs = {name: value for name, value in arguments.items() if value is not None}

    def enter(self) -> None:
        module, kind = self.module, type(self.module)
        with ExitStack() as stack:
            for name in ("hook_rot_q", "hook_q_normed"):
                if name in module._modules:
                    stack.callback(module._modules[name].register_forward_hook(self._saw_query).remove)
            for name in ("_reshape_qkv_to_heads", "_apply_rotary_pos_emb"):
                if hasattr(kind, name):
                    _override(stack, module, name, self._seeing_query(getattr(module, name)))
            into = module._modules["o"]._modules["hook_in"]
            stack.callback(into.register_forward_hook(self._put_output, prepend=True).remove)
            _override(stack, module, "_update_kv_cache", self._updating(module._update_kv_cache))
            _override(stack, module, "forward", self._forward)
            self._stack = stack.pop_all()

    def leave(self) -> None:
        self._stack.close()

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        self._mask = kwargs.get("attention_mask")
        silenced = dict(self.module._modules)
        try:
            return type(self.module).forward(self.module, *args, **kwargs)
        finally:
            self.module._modules.update(silenced)
            self._query = self._mask = self._output = None

    def _saw_query(self, _module: nn.Module, _args: Any, output: Tensor) -> None:
        self._query = output

    def _seeing_query(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def seen(*args: Any, **kwargs: Any) -> Any:
            found = method(*args, **kwargs)
            self._query = found[0]
            return found

        return seen

    def _updating(self, update: Callable[..., Any]) -> Callable[..., Any]:
        def update_and_attend(key: Tensor, value: Tensor, **kwargs: Any) -> Any:
            key, value = update(key, value, **kwargs)
            query = self._query
            if query is None:
                raise ModelError(f"{self.module.name} has no query where its cache is updated.")
            output, pattern = self.attend(
                self.module, query, key, value, self._mask, dict(self._kwargs), eager_attention
            )
            self._output = output
            self.module._modules["hook_attn_scores"] = nn.Identity()
            self.module._modules["hook_pattern"] = nn.Identity() if pattern is None else _Give(pattern)
            return key, value

        return update_and_attend

    def _put_output(self, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return output if self._output is None else self._output.reshape(output.shape)


_ROUTES: WeakKeyDictionary[nn.Module, _Route] = WeakKeyDictionary()


@contextmanager
def rerouted(model: nn.Module, attend: Attend) -> Iterator[None]:
    """Hand every attention computation of a bridged model to ``attend``; a model without a bridge is left alone.

    Nested use is fine; everything is put back when the last user leaves.
    """
    modules = attentions(model)
    for module in modules:
        route = _ROUTES.setdefault(module, _Route(module, attend))
        if route.users == 0:
            route.enter()
        route.users += 1
    try:
        yield
    finally:
        for module in modules:
            route = _ROUTES[module]
            route.users -= 1
            if route.users == 0:
                del _ROUTES[module]
                route.leave()
