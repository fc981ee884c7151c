"""What a decoder language model is made of, found from its module tree and configuration.

`describe` turns the modules that `kvdrift.models.tree` finds, and the configuration, into an `Architecture`: plain
data that results carry along.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from kvdrift import markup
from kvdrift.errors import FileError
from kvdrift.models.tree import BlockTree, find_blocks, named_kind, text_config

_QK_NORM = re.compile(r"(q|k|qk|query|key)_?(layer)?_?norm")
_POSITION_TABLE = re.compile(r"wpe|.*pos.*")


@dataclass(frozen=True)
class LayerInfo:
    """One decoder layer.

    Attributes
    ----------
    index
        Layer number, 0-based.
    attention
        ``"full"``, ``"sliding"``, ``"chunked"``, ``"linear"``, ``"conv"``, ``"none"`` or another kind that the
        configuration names.
    window
        Positions that a query sees in a sliding or chunked layer, the current one included; else None.
    n_kv_heads
        KV heads as the attention kernel reads them; 0 without attention.
    head_dim
        Size of a query and key head; 0 without attention. Value heads may differ.
    """

    index: int
    attention: str
    window: int | None
    n_kv_heads: int
    head_dim: int

    def first_seen(self, position: int) -> int:
        """The first position that a query at ``position`` may see.

        Examples
        --------
        >>> LayerInfo(0, "sliding", 8, 2, 32).first_seen(20), LayerInfo(0, "chunked", 8, 2, 32).first_seen(20)
        (13, 16)
        """
        if self.window is None:
            return 0
        if self.attention == "chunked":
            return position - position % self.window
        return max(position - self.window + 1, 0)


@dataclass(frozen=True)
class Architecture:
    """Structure of a decoder language model, as plain data.

    Attributes
    ----------
    model_type
        The name that transformers gives the text model, such as ``"llama"``.
    n_layers, d_model, n_heads, n_kv_heads, head_dim, vocab_size
        Sizes; heads are 0 in a model without attention. Where layers differ, the first attention layer's.
    max_positions
        Longest context, or None where the model sets none.
    positional
        ``"rope"``, ``"rope:llama3"`` (a scaled variant), ``"learned"``, ``"alibi"`` or ``"none"`` (none found).
    qk_norm
        Whether queries and keys are normalised per head or as a whole before attention.
    attn_softcap, final_softcap
        Soft-caps of attention scores and logits, or None.
    tied_embeddings
        Whether the LM head is the embedding matrix.
    layers
        One `LayerInfo` per layer.
    n_experts
        Routed experts of a mixture-of-experts model, or None.
    block_prefix
        Where the decoder blocks live in the module tree, such as ``"model.layers"``.

    Examples
    --------
    >>> from kvdrift.models.architecture import describe
    >>> from kvdrift.models.tiny import tiny
    >>> print(describe(tiny("llama")))
    llama: 4 layers (full attention), GQA 8:2, head_dim 32, d_model 256, RoPE, vocab 384, context 256
    """

    model_type: str
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int | None
    positional: str
    qk_norm: bool
    attn_softcap: float | None
    final_softcap: float | None
    tied_embeddings: bool
    layers: tuple[LayerInfo, ...]
    n_experts: int | None = None
    block_prefix: str = ""

    @property
    def grouping(self) -> str:
        """``"MHA"``, ``"GQA"`` or ``"MQA"``; ``"none"`` without attention."""
        if self.n_heads == 0:
            return "none"
        if self.n_kv_heads == self.n_heads:
            return "MHA"
        return "MQA" if self.n_kv_heads == 1 else "GQA"

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold; `from_dict` reads them back."""
        values = asdict(self)
        values["layers"] = [asdict(layer) for layer in self.layers]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Architecture":
        """Rebuild what `to_dict` gave.

        Raises
        ------
        FileError
            If a field is missing or unknown.
        """
        try:
            layers = tuple(LayerInfo(**layer) for layer in values["layers"])
            return cls(**{**values, "layers": layers})
        except (KeyError, TypeError) as error:
            raise FileError(f"This is not an architecture that this version of kvdrift wrote: {error}.") from error

    def __str__(self) -> str:
        return f"{self.model_type}: " + ", ".join(self._phrases())

    __repr__ = __str__

    def _phrases(self) -> Iterator[str]:
        yield f"{self.n_layers} layers ({self._kinds()})"
        if self.n_heads:
            yield f"{self.grouping} {self.n_heads}:{self.n_kv_heads}"
            yield f"head_dim {self.head_dim}"
        yield f"d_model {self.d_model}"
        if self.n_experts:
            yield f"{self.n_experts} experts"
        if self.positional != "none":
            yield _positional_words(self.positional)
        if self.qk_norm:
            yield "QK-norm"
        if self.attn_softcap is not None:
            yield f"attention soft-cap {self.attn_softcap:g}"
        if self.final_softcap is not None:
            yield f"logit soft-cap {self.final_softcap:g}"
        yield f"vocab {self.vocab_size}"
        if self.max_positions is not None:
            yield f"context {self.max_positions}"

    def _kinds(self) -> str:
        counts = Counter((layer.attention, layer.window) for layer in self.layers)
        words = [(_kind_words(kind, window), count) for (kind, window), count in counts.items()]
        if len(words) == 1:
            return words[0][0]
        return ", ".join(f"{count} {word}" for word, count in words)

    def _repr_html_(self) -> str:
        rows = [
            ("model", self.model_type),
            ("layers", f"{self.n_layers}: {self._kinds()}"),
            ("heads", f"{self.grouping} {self.n_heads}:{self.n_kv_heads}, head_dim {self.head_dim}"),
            ("d_model", self.d_model),
            ("positions", _positional_words(self.positional)),
            ("QK-norm", "yes" if self.qk_norm else "no"),
            ("attention soft-cap", _or_none(self.attn_softcap)),
            ("logit soft-cap", _or_none(self.final_softcap)),
            ("experts", _or_none(self.n_experts)),
            ("vocabulary", f"{self.vocab_size}{', tied embeddings' if self.tied_embeddings else ''}"),
            ("context", _or_none(self.max_positions)),
            ("blocks at", self.block_prefix),
        ]
        return markup.table(rows)


def describe(hf_model: PreTrainedModel) -> Architecture:
    """Describe a loaded decoder language model.

    Raises
    ------
    ModelError
        If the model is an encoder-decoder, or has no list of decoder blocks.

    Examples
    --------
    >>> from kvdrift.models.architecture import describe
    >>> from kvdrift.models.tiny import tiny
    >>> [layer.attention for layer in describe(tiny("gemma3")).layers]
    ['sliding', 'sliding', 'full', 'sliding']
    """
    tree = find_blocks(hf_model)
    config = text_config(hf_model)
    d_model = int(config.hidden_size)
    attention = [module for module in tree.attention_modules if module is not None]
    layers = tuple(_layer(index, module, config) for index, module in enumerate(tree.attention_modules))
    first = next((layer for layer in layers if layer.n_kv_heads), None)
    return Architecture(
        model_type=config.model_type,
        n_layers=len(layers),
        d_model=d_model,
        n_heads=_n_heads(config.per_layer_config[first.index]) if first else 0,
        n_kv_heads=first.n_kv_heads if first else 0,
        head_dim=first.head_dim if first else 0,
        vocab_size=int(config.vocab_size),
        max_positions=_first_int(config, "max_position_embeddings", "max_seq_len"),
        positional=_positional(hf_model, tree, config),
        qk_norm=any(_has_qk_norm(module) for module in attention),
        attn_softcap=getattr(config, "attn_logit_softcapping", None),
        final_softcap=getattr(config, "final_logit_softcapping", getattr(config, "logits_soft_cap", None)),
        tied_embeddings=_tied(tree),
        layers=layers,
        n_experts=_first_int(config, "num_local_experts", "num_experts", "n_routed_experts"),
        block_prefix=tree.prefix,
    )


def _layer(index: int, module: nn.Module | None, config: PreTrainedConfig) -> LayerInfo:
    own = config.per_layer_config[index]
    kind, window = _kind(index, module, config, own)
    if module is None:
        return LayerInfo(index, kind, window, 0, 0)
    n_heads = _n_heads(own)
    head_dim = _first_int(module, "qk_head_dim") or _first_int(own, "head_dim") or _first_int(module, "head_dim")
    return LayerInfo(index, kind, window, _kv_heads(module, own, n_heads), head_dim or own.hidden_size // n_heads)


def _kind(
    index: int, module: nn.Module | None, config: PreTrainedConfig, own: PreTrainedConfig
) -> tuple[str, int | None]:
    """Attention kind and window of a layer, read the way transformers' own cache reads them."""
    named = named_kind(config, index)
    window = _first_int(module, "sliding_window") or _first_int(own, "sliding_window", "window_size")
    chunk = _first_int(own, "attention_chunk_size")
    if named is not None:
        kind = named
    elif module is None:
        kind = "none"
    elif window and getattr(own, "use_sliding_window", True):
        kind = "sliding"
    else:
        kind = "chunked" if chunk else "full"
    return kind, window if "sliding" in kind else chunk if kind == "chunked" else None


def _kv_heads(module: nn.Module, own: PreTrainedConfig, n_heads: int) -> int:
    heads = _first_int(module, "num_key_value_heads", "num_kv_heads")
    groups = _first_int(module, "num_key_value_groups")
    if heads is None and groups is not None:
        heads = n_heads // groups
    return heads or _first_int(own, "num_key_value_heads") or n_heads


def _has_qk_norm(module: nn.Module) -> bool:
    return any(
        _QK_NORM.fullmatch(name) and not isinstance(child, nn.Identity) for name, child in module.named_children()
    )


def _positional(hf_model: PreTrainedModel, tree: BlockTree, config: PreTrainedConfig) -> str:
    parent = hf_model.get_submodule(tree.prefix.rpartition(".")[0])
    alibi_source = getattr(config, "attn_config", config)
    if getattr(alibi_source, "alibi", any(name.startswith("build_alibi") for name in dir(parent))):
        return "alibi"
    rope = getattr(config, "rope_parameters", None)
    if rope:
        scaled = sorted(_rope_types(rope) - {"default"})
        return "rope:" + "+".join(scaled) if scaled else "rope"
    if getattr(config, "rotary_dim", None):
        return "rope"
    learned = any(
        isinstance(module, nn.Embedding) and _POSITION_TABLE.fullmatch(name.rpartition(".")[2])
        for name, module in hf_model.named_modules()
        if module is not tree.embed and not name.startswith(tree.prefix)
    )
    return "learned" if learned else "none"


def _rope_types(rope: Mapping[str, Any]) -> set[str]:
    """Types of the whole model, or of each layer kind where they are nested."""
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    return {str(part.get("rope_type", "default")) for part in nested or [rope]}


def _tied(tree: BlockTree) -> bool:
    weight = getattr(tree.embed, "weight", None)
    return weight is not None and getattr(tree.head, "weight", None) is weight


def _n_heads(config: Any) -> int:
    """Query heads; decoders of encoder-decoders count theirs apart."""
    return _first_int(config, "decoder_attention_heads") or int(config.num_attention_heads)


def _first_int(source: object, *names: str) -> int | None:
    """The first of these attributes that holds a whole number above zero."""
    for name in names:
        value = getattr(source, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _kind_words(kind: str, window: int | None) -> str:
    words = {"conv": "convolution", "none": "no attention"}.get(kind, f"{kind} attention")
    return words if window is None else f"{words} of window {window}"


def _positional_words(positional: str) -> str:
    scheme, _, variant = positional.partition(":")
    words = {"rope": "RoPE", "alibi": "ALiBi", "learned": "learned positions"}.get(scheme, scheme)
    return f"{words} ({variant})" if variant else words


def _or_none(value: object) -> object:
    return "none" if value is None else value
