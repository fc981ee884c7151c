"""The same function in another architecture: what would drift do if this model were not grouped, or had no windows?

Each function returns a named copy and leaves the original alone. That the copy computes the same function is checked
in float64, every time; only its arithmetic differs.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from kvdrift.controls.precision import cast_copy
from kvdrift.controls.same_function import DECODED, check_same_function
from kvdrift.errors import ModelError
from kvdrift.models.architecture import describe
from kvdrift.models.load import load
from kvdrift.models.model import Model
from kvdrift.models.tree import find_blocks

SHORT = 16
"""Tokens of the float64 check where no short window asks for more."""
_K_NORM = re.compile(r"(k|key)_?(layer)?_?norm")
_NO_LIMIT = 1 << 20


def expand_kv_heads(model: Any) -> Model:
    """Give every query head a KV head of its own (GQA or MQA to MHA), by repeating the K/V weights of each group.

    Weights, biases and norms of K and V are repeated for each query head of the group that shares them, in separate
    ``k_proj`` and ``v_proj`` or in a fused ``qkv_proj`` (Phi-3's layout). Attention kernels then take their MHA path.

    Parameters
    ----------
    model
        Anything `kvdrift.load` takes; it is not touched.

    Returns
    -------
    Model
        A copy, named after what was done: ``smollm2-135m with 9 KV heads``. If a float64 copy does not fit in memory,
        the name says that it was not checked, and why.

    Raises
    ------
    ModelError
        If the model is MHA already, makes its keys and values in another way (latent attention, other fused
        projections, attention outside transformers' interface), or the copy is not the same function in float64.

    Examples
    --------
    >>> import kvdrift as kd
    >>> kd.counterfactual.expand_kv_heads(kd.models.tiny("llama")).architecture.grouping
    'MHA'
    """
    source = _source(model)
    if source.architecture.n_heads == 0:
        raise ModelError(f"{source.name} has no attention heads, so there is nothing to expand.")
    hf = cast_copy(source.hf, source.dtype)
    config = hf.config.get_text_config(decoder=True)
    made: dict[int, nn.Parameter] = {}  # a weight shared by two layers stays shared
    seen: set[int] = set()
    for layer, module in zip(source.architecture.layers, find_blocks(hf).attention_modules, strict=True):
        n_heads = int(config.per_layer_config[layer.index].num_attention_heads)
        if module is None or id(module) in seen or layer.n_kv_heads == n_heads:
            continue
        seen.add(id(module))
        _expand(source.name, module, n_heads, layer.n_kv_heads, made)
    if not seen:
        raise ModelError(f"{source.name} is MHA already: each of its {source.architecture.n_heads} query heads has a "
                         "KV head of its own.")  # fmt: skip
    config.num_key_value_heads = source.architecture.n_heads
    result = describe(hf)
    left = [module for module in hf.modules() if getattr(module, "num_key_value_groups", 1) not in (1, None)]
    if left or any(layer.n_kv_heads not in (0, result.n_heads) for layer in result.layers):
        raise ModelError(
            f"{source.name} has attention that kvdrift does not find, or layers with different numbers of heads, which "
            "one configuration cannot say; its KV heads cannot be expanded."
        )
    beyond = max((layer.window or 0 for layer in result.layers), default=0) + DECODED
    n_tokens = min(beyond if SHORT < beyond <= 4 * SHORT else SHORT, result.max_positions or SHORT)
    return _checked(source, hf, f"{result.n_heads} KV heads", n_tokens)


def widen_window(model: Any) -> Model:
    """Let sliding layers see everything, as full attention does: the same function while a text fits in the window.

    Only the window changes. The kind of each layer stays, for it also chooses the rotary base in some models (Gemma 3).
    A text longer than the (shortest) window would be another function, so the copy's context ends there: every verb
    refuses such a text.

    Parameters
    ----------
    model
        Anything `kvdrift.load` takes; it is not touched.

    Returns
    -------
    Model
        A copy, named after what was done: ``gemma3-270m with windows of 32768``. If a float64 copy does not fit in
        memory, the name says that it was not checked, and why.

    Raises
    ------
    ModelError
        If no layer has a sliding window, a layer limits what it sees in another way (chunks), or the copy is not the
        same function in float64.

    Examples
    --------
    >>> import kvdrift as kd
    >>> copy = kd.counterfactual.widen_window(kd.models.tiny("gemma3"))
    >>> copy.architecture.layers[0].window, copy.architecture.max_positions
    (256, 8)
    """
    source = _source(model)
    limited = [layer for layer in source.architecture.layers if layer.window is not None]
    if not limited:
        raise ModelError(f"No layer of {source.name} has a window, so there is nothing to widen.")
    other = next((layer for layer in limited if "sliding" not in layer.attention), None)
    if other is not None:
        raise ModelError(
            f"Layer {other.index} of {source.name} has {other.attention} attention, which is not a window that slides; "
            "only sliding windows can be widened."
        )
    window = min(layer.window for layer in limited if layer.window is not None)
    context = source.architecture.max_positions
    wide = context if context is not None and context > max(layer.window or 0 for layer in limited) else _NO_LIMIT
    hf = cast_copy(source.hf, source.dtype)
    config = hf.config.get_text_config(decoder=True)
    limit = next((name for name in ("max_position_embeddings", "max_seq_len") if hasattr(config, name)), None)
    if limit is None or getattr(config, "sliding_window", None) is None:
        raise ModelError(f"The configuration of {source.name} names no window or no context, so it cannot be widened.")
    config.sliding_window = wide
    setattr(config, limit, min(window, context or window))
    for module in hf.modules():
        if isinstance(getattr(module, "sliding_window", None), int):
            module.sliding_window = wide
    if any(layer.window not in (None, wide) for layer in describe(hf).layers):
        raise ModelError(f"The windows of {source.name} are set layer by layer in a way that kvdrift cannot rewrite.")
    return _checked(source, hf, f"windows of {wide}", min(window, 4 * SHORT))


def _source(model: Any) -> Model:
    source = load(model, quiet=True)
    source.backend.refuse_rewriting(source.name)
    return source


def _checked(source: Model, hf: Any, what: str, n_tokens: int) -> Model:
    """The copy under its new name, after the float64 check."""
    name = f"{source.name} {'and' if ' with ' in source.name else 'with'} {what}"
    copy = Model(hf, source.tokenizer, name)
    skipped = check_same_function(source, copy, n_tokens)
    return copy if skipped is None else Model(hf, source.tokenizer, f"{name} (not checked: {skipped})")


def _expand(name: str, module: nn.Module, n_heads: int, n_kv_heads: int, made: dict[int, nn.Parameter]) -> None:
    """Repeat what makes K and V in one attention module, for each query head of a group."""
    groups = n_heads // n_kv_heads
    if getattr(module, "num_key_value_groups", None) != groups:
        raise ModelError(
            f"{name}: its attention ({type(module).__name__}) does not share KV heads by transformers' own rule, "
            "so they cannot be expanded."
        )
    children = dict(module.named_children())
    k, v, qkv = (children.get(child) for child in ("k_proj", "v_proj", "qkv_proj"))
    if type(k) is nn.Linear and type(v) is nn.Linear and k.out_features % n_kv_heads == 0:
        head_dim = k.out_features // n_kv_heads
        _repeat(k, 0, n_kv_heads, groups, made)
        _repeat(v, 0, n_kv_heads, groups, made)
        k.out_features, v.out_features = k.weight.shape[0], v.weight.shape[0]
    elif type(qkv) is nn.Linear and qkv.out_features % (n_heads + 2 * n_kv_heads) == 0:
        head_dim = qkv.out_features // (n_heads + 2 * n_kv_heads)
        _repeat(qkv, n_heads * head_dim, 2 * n_kv_heads, groups, made)
        qkv.out_features = qkv.weight.shape[0]
    else:
        raise ModelError(
            f"{name}: its attention ({type(module).__name__}) has no plain k_proj and v_proj nor a qkv_proj whose K/V "
            "weights could be repeated (quantized or latent keys and values, another fused projection)."
        )
    for child, norm in children.items():  # over all K features at once (OLMo 2), or per head and head by head (Cohere)
        weight = getattr(norm, "weight", None)
        if _K_NORM.fullmatch(child) and isinstance(weight, Tensor) and _spans_heads(children, weight, head_dim):
            _repeat(norm, 0, n_kv_heads, groups, made)
    for attribute in ("num_key_value_heads", "num_kv_heads"):
        if isinstance(getattr(module, attribute, None), int):
            setattr(module, attribute, n_heads)
    module.num_key_value_groups = 1  # type: ignore[assignment] # a plain attribute


def _spans_heads(children: dict[str, nn.Module], weight: Tensor, head_dim: int) -> bool:
    """Whether a norm of K has a weight for every head; with one KV head the norm of Q tells."""
    other = next((child for name, child in children.items() if name.startswith("q") and "norm" in name), None)
    of_q = getattr(other, "weight", weight)
    return max(weight.numel(), of_q.numel()) > head_dim


def _repeat(module: nn.Module, start: int, n_heads: int, groups: int, made: dict[int, nn.Parameter]) -> None:
    """Repeat each head's rows ``groups`` times in all parameters of ``module``, from row ``start`` on."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        if id(parameter) not in made:
            rows = parameter.detach()
            heads = rows[start:].unflatten(0, (n_heads, -1)).repeat_interleave(groups, dim=0).flatten(0, 1)
            expanded = torch.cat([rows[:start], heads])
            made[id(parameter)] = nn.Parameter(expanded, requires_grad=parameter.requires_grad)
        setattr(module, name, made[id(parameter)])
