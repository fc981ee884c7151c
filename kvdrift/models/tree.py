"""The modules of a decoder that sites hang on, found in its module tree.

No list of class names is involved: a new model whose tree is shaped like the known ones works without a change here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from kvdrift.errors import ModelError

_EMBEDDING_NORM = re.compile(r"layer_?norm_emb.*|.*emb.*_layer_?norm")
_NO_ATTENTION = frozenset({"linear", "conv", "mlp", "moe"})  # layers without a softmax over keys
_LEGACY_KINDS = {"global": "full", "local": "sliding"}  # GPT-Neo's words


@dataclass(frozen=True, eq=False)
class BlockTree:
    """The modules of a decoder that sites hang on.

    Attributes
    ----------
    blocks
        The decoder blocks, in order.
    prefix
        Their name in the module tree, such as ``"model.layers"``: block i is ``f"{prefix}.{i}"``.
    embed
        Token embedding, or None where the model does not name one.
    head
        LM head, or None where the model does not name one.
    final_norm
        Norm after the last block, or None where there is none beside the blocks.
    attention_modules
        The attention module of each block, None in blocks without one.
    """

    blocks: tuple[nn.Module, ...]
    prefix: str
    embed: nn.Module | None
    head: nn.Module | None
    final_norm: nn.Module | None
    attention_modules: tuple[nn.Module | None, ...]

    def through(self, stand_in: Callable[[nn.Module], nn.Module]) -> BlockTree:
        """The same tree with each module replaced by what stands in for it."""

        def found(module: nn.Module | None) -> nn.Module | None:
            return None if module is None else stand_in(module)

        return replace(
            self,
            blocks=tuple(stand_in(block) for block in self.blocks),
            embed=found(self.embed),
            head=found(self.head),
            final_norm=found(self.final_norm),
            attention_modules=tuple(found(module) for module in self.attention_modules),
        )


def find_blocks(hf_model: PreTrainedModel) -> BlockTree:
    """Find the decoder blocks of a model, and the modules around them.

    The block list is the ``nn.ModuleList`` that has as many entries as the configuration has layers (or, where there
    is none, as its ``num_layers`` says: a block may hold two attention sublayers) and shares the deepest common
    parent with the token embedding (so that neither a vision tower nor a list of experts is taken for it); among
    several, the one with the most parameters.

    Raises
    ------
    ModelError
        If the model is an encoder-decoder, or has no such list.

    Examples
    --------
    >>> from kvdrift.models.tree import find_blocks
    >>> from kvdrift.models.tiny import tiny
    >>> find_blocks(tiny("gpt2")).prefix
    'transformer.h'
    """
    config = text_config(hf_model)
    n_layers = int(getattr(config, "num_hidden_layers", 0) or 0)
    embed = _embeddings(hf_model, "get_input_embeddings")
    embed_path = next((name for name, module in hf_model.named_modules() if module is embed), "")
    found = [(name, module) for name, module in hf_model.named_modules() if isinstance(module, nn.ModuleList)]
    # decoders of encoder-decoders count theirs apart; the last where a block holds several of the first
    depths = (getattr(config, "decoder_layers", None), n_layers, getattr(config, "num_layers", None))
    same = ([pair for pair in found if len(pair[1]) == depth] for depth in depths if depth)
    lists = next((pairs for pairs in same if pairs), [])
    if not lists:
        raise ModelError(
            f"{type(hf_model).__name__} has no list of {n_layers} decoder blocks in its module tree: "
            "give a decoder language model whose blocks are an nn.ModuleList."
        )
    prefix, blocks = max(lists, key=lambda item: (_common_depth(item[0], embed_path), _size(item[1])))
    parent = hf_model.get_submodule(prefix.rpartition(".")[0])
    return BlockTree(
        blocks=tuple(blocks),
        prefix=prefix,
        embed=embed,
        head=_embeddings(hf_model, "get_output_embeddings"),
        final_norm=_final_norm(parent, blocks, int(config.hidden_size)),
        attention_modules=tuple(
            None if named_kind(config, index) in _NO_ATTENTION else _attention(block)
            for index, block in enumerate(blocks)
        ),
    )


def text_config(hf_model: PreTrainedModel) -> PreTrainedConfig:
    """The configuration of the decoder.

    Raises
    ------
    ModelError
        If there is none, or the model is an encoder-decoder.
    """
    config = getattr(hf_model, "config", None)
    if not isinstance(config, PreTrainedConfig):
        raise ModelError(f"{type(hf_model).__name__} is no transformers model: give a loaded causal language model.")
    if config.is_encoder_decoder:
        raise ModelError(
            f"{type(hf_model).__name__} is an encoder-decoder ({config.model_type}): "
            "kvdrift traces decoder-only language models."
        )
    return config.get_text_config(decoder=True)


def named_kind(config: PreTrainedConfig, index: int) -> str | None:
    """The kind that the configuration names for a layer, or None where it names none."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    return _LEGACY_KINDS.get(kinds[index], kinds[index].removesuffix("_attention")) if kinds else None


def _embeddings(hf_model: PreTrainedModel, getter: str) -> nn.Module | None:
    try:
        return getattr(hf_model, getter)()
    except NotImplementedError:
        return None


def _common_depth(path: str, other: str) -> int:
    """Number of leading names that two dotted paths share."""
    depth = 0
    for a, b in zip(path.split("."), other.split("."), strict=False):
        if a != b:
            break
        depth += 1
    return depth


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _final_norm(parent: nn.Module, blocks: nn.ModuleList, d_model: int) -> nn.Module | None:
    """The first norm registered after the block list, else the last one before it."""
    before: list[nn.Module] = []
    after: list[nn.Module] = []
    side = before
    for name, child in parent.named_children():
        if child is blocks:
            side = after
        elif _is_norm(child, d_model) and not _EMBEDDING_NORM.fullmatch(name):
            side.append(child)
    return after[0] if after else before[-1] if before else None


def _is_norm(module: nn.Module, d_model: int) -> bool:
    """A leaf with a weight per feature, or one without weights that calls itself a norm."""
    if any(True for _ in module.children()):
        return False
    shapes = {tuple(parameter.shape) for parameter in module.parameters()}
    return shapes == {(d_model,)} or (not shapes and "norm" in type(module).__name__.lower())


def _attention(block: nn.Module) -> nn.Module | None:
    """The module of a block that knows its layer number and attends causally."""
    for module in block.modules():
        number = getattr(module, "layer_idx", getattr(module, "layer_id", None))
        if module is block or not isinstance(number, int):
            continue
        if hasattr(module, "is_causal") or "attention" in type(module).__name__.lower():
            return module
    return None
