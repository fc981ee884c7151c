"""How the attention of a TransformerLens bridge, which it computes by itself, is handed to others.

transformer_lens is never imported before an object of its own is at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from kvdrift.backends.backend import Attend, Output
from kvdrift.errors import ModelError


def is_bridge(x: Any) -> bool:
    """Whether ``x`` is an object of TransformerLens; the library is not imported to find out."""
    return any(cls.__module__.partition(".")[0] == "transformer_lens" for cls in type(x).__mro__)


def is_bridged(module: nn.Module) -> bool:
    """Whether parts of a module have been replaced by a bridge."""
    return any(is_component(part) for part in module.modules())


def is_component(part: nn.Module) -> bool:
    """Whether a module is a component of a bridge around one of transformers."""
    return "_original_component" in part._modules and is_bridge(part)


def override(stack: ExitStack, module: nn.Module, name: str, value: Any) -> None:
    """Give one object another attribute until the stack is left."""
    own = vars(module)
    if name in own:
        stack.callback(own.__setitem__, name, own[name])
    else:
        stack.callback(own.pop, name, None)
    own[name] = value


def attentions(model: nn.Module) -> list[nn.Module]:
    """The attention components of a bridged model whose computation can be handed to others."""
    return [module for module in attention_components(model) if is_understood(module)]


def attention_components(model: nn.Module) -> list[Any]:
    """The attention components of a bridged model, whatever they compute."""
    return [part for part in model.modules() if is_component(part) and hasattr(type(part), "_update_kv_cache")]


def is_understood(module: nn.Module) -> bool:
    """Whether an attention component computes what `eager_attention` asks it to compute again.

    That is plain attention over keys and values right after its cache update, projected by ``o`` right after.
    """
    if not is_component(module):
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
        override(stack, module, "_modules", still)
        override(stack, module, "_update_kv_cache", lambda *_, **__: (key, value))
        override(stack, module, "_reshape_qkv_to_heads", lambda *_, **__: reshaped)
        override(stack, module, "rope_optional", True)
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
                    override(stack, module, name, self._seeing_query(getattr(module, name)))
            into = module._modules["o"]._modules["hook_in"]
            stack.callback(into.register_forward_hook(self._put_output, prepend=True).remove)
            override(stack, module, "_update_kv_cache", self._updating(module._update_kv_cache))
            override(stack, module, "forward", self._forward)
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
