"""Seeded random models of many families, small enough for tests and large enough to drift.

A tiny model is built from a transformers configuration: nothing is downloaded. The weights are drawn in
float32 from the seed alone and then loaded the way ``from_pretrained(dtype=...)`` loads a checkpoint, so the
same seed gives the same base weights in every dtype and with every attention implementation, and buffers
that transformers keeps in float32 (rotary frequencies, router biases) stay there.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers.utils import logging as transformers_logging

from kvdrift.errors import InputError

_SHAPE = {
    "vocab_size": 384,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "initializer_range": 0.08,  # activations of order 10: rounding shows, float16 stays finite
    "bos_token_id": None,
    "eos_token_id": None,  # a random model never stops by itself
    "pad_token_id": None,
}
_HEADS = {"num_attention_heads": 8}
_CONTEXT = {"max_position_embeddings": 256}
_MLP = {"intermediate_size": 512}
_DENSE = {**_HEADS, **_CONTEXT, **_MLP}
_GQA = {**_DENSE, "num_key_value_heads": 2}
_MOE = {"num_experts_per_tok": 2}
_GEMMA = {**_GQA, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8}
_MLA = {
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}

# name: (transformers model type, configuration values beside _SHAPE)
_CONFIGS: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "llama": ("llama", _GQA),
        "llama-mha": ("llama", {**_DENSE, "num_key_value_heads": 8}),
        "llama-mqa": ("llama", {**_DENSE, "num_key_value_heads": 1}),
        "mistral": ("mistral", {**_GQA, "sliding_window": 8}),
        "qwen2": ("qwen2", _GQA),
        "qwen3": ("qwen3", {**_GQA, "head_dim": 32}),
        "gemma2": ("gemma2", _GEMMA),
        "gemma3": ("gemma3_text", {**_GEMMA, "sliding_window_pattern": 3}),
        "phi3": ("phi3", _GQA),
        "olmo2": ("olmo2", _GQA),
        "gpt-neox": ("gpt_neox", _DENSE),
        "gpt2": ("gpt2", {**_HEADS, **_CONTEXT, "n_inner": 512}),
        "mixtral": ("mixtral", {**_GQA, **_MOE, "num_local_experts": 4}),
        "gpt-oss": (
            "gpt_oss",
            {**_GQA, **_MOE, "num_local_experts": 4, "head_dim": 32, "sliding_window": 8, "rope_parameters": _YARN},
        ),
        "deepseek-v3": (
            "deepseek_v3",
            {
                **_DENSE,
                **_MOE,
                **_MLA,
                "num_key_value_heads": 8,
                "moe_intermediate_size": 128,
                "n_routed_experts": 4,
                "n_group": 1,
                "topk_group": 1,
                "first_k_dense_replace": 1,
                "num_mtp_layers": 0,
            },
        ),
        "granite": (
            "granite",
            {
                **_GQA,
                "embedding_multiplier": 2.0,
                "attention_multiplier": 0.2,
                "residual_multiplier": 0.5,
                "logits_scaling": 2.0,
            },
        ),
        "falcon": ("falcon", {**_HEADS, **_CONTEXT, "ffn_hidden_size": 512}),
        "bloom": ("bloom", _HEADS),
        "lfm2": ("lfm2", {**_GQA, "block_auto_adjust_ff_dim": False, "full_attn_idxs": [1, 3]}),
        "mamba": ("mamba", {}),
    }
)

FAMILIES: tuple[str, ...] = tuple(_CONFIGS)
"""Names that `tiny` knows, spelled like presets."""


def tiny(
    family: str,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    attn: str = "auto",
    **overrides: Any,
) -> transformers.PreTrainedModel:
    """Build a small random model: four layers, d_model 256, 384 tokens, windows of 8 where there are any.

    In float32 cache-ON and cache-OFF differ in every family. In half precision they differ in most families
    under sdpa; under eager attention on a CPU they are often equal in every bit, and ``intermediate_size=2048``
    or a longer prompt makes a difference more likely.

    Parameters
    ----------
    family
        One of `FAMILIES`.
    dtype
        Floating dtype of the weights. The base weights are the same in every dtype. Experts run as transformers runs
        them by default, in float64 one by one (grouped products have no float64 kernel).
    seed
        Decides the weights. The global random state is neither read nor moved.
    attn
        ``"auto"`` (the first of `supported_attn`), or a name that transformers knows.
    **overrides
        Values for the transformers configuration, such as ``num_hidden_layers=2``.

    Returns
    -------
    PreTrainedModel
        On the CPU, in evaluation mode, without gradients.

    Raises
    ------
    InputError
        If the family, a configuration value or the attention implementation is not known.

    Examples
    --------
    >>> import torch
    >>> from kvdrift.models.tiny import tiny
    >>> model = tiny("llama", dtype=torch.bfloat16)
    >>> model(torch.tensor([[5, 7, 11]])).logits.shape
    torch.Size([1, 3, 384])
    """
    _check_family(family)
    if not dtype.is_floating_point:
        raise InputError(f"dtype {dtype} cannot hold weights: give torch.float32, torch.bfloat16 or torch.float16.")
    if attn == "auto":
        attn = supported_attn(family)[0]
    if dtype == torch.float64:
        overrides = {"experts_implementation": "eager", **overrides}
    weights = _weights(family, seed, overrides)
    config = _config(family, overrides)
    # initialising what the weights then replace draws random numbers in some families
    with _quiet(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
        try:
            model = _model_class(config).from_pretrained(
                None, config=config, state_dict=weights, dtype=dtype, attn_implementation=attn
            )
        except (ValueError, ImportError) as error:
            raise InputError(
                f"tiny({family!r}) cannot use attn={attn!r}; it supports "
                f"{', '.join(supported_attn(family))}: {_one_line(error)}"
            ) from error
    model.config.name_or_path = f"tiny-{family}"  # what figures and tables call it
    return model.eval().requires_grad_(False)


def supported_attn(family: str) -> tuple[str, ...]:
    """Attention implementations of a tiny family, the one that ``attn="auto"`` takes first.

    Raises
    ------
    InputError
        If the family is not known.

    Examples
    --------
    >>> from kvdrift.models.tiny import supported_attn
    >>> supported_attn("llama"), supported_attn("gemma2")
    (('sdpa', 'eager'), ('eager',))
    """
    _check_family(family)
    return ("sdpa", "eager") if _model_class(_config(family, {}))._supports_sdpa else ("eager",)


def _check_family(family: str) -> None:
    if family not in _CONFIGS:
        raise InputError(f"Unknown tiny family {family!r}: choose one of {', '.join(FAMILIES)}.")


def _config(family: str, overrides: Mapping[str, Any]) -> transformers.PreTrainedConfig:
    """A fresh configuration: transformers writes into the one it builds from."""
    model_type, values = _CONFIGS[family]
    base = transformers.AutoConfig.for_model(model_type, **{**_SHAPE, **values})
    known = {*values, "experts_implementation"}
    unknown = sorted(name for name in overrides if name not in known and not hasattr(base, name))
    if unknown:
        raise InputError(f"{type(base).__name__} has no {', '.join(unknown)}: check the spelling of the override.")
    try:
        return transformers.AutoConfig.for_model(model_type, **{**_SHAPE, **values, **overrides})
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise InputError(f"tiny({family!r}) cannot be configured with {dict(overrides)}: {_one_line(error)}") from error


def _model_class(config: transformers.PreTrainedConfig) -> Any:
    return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def _weights(family: str, seed: int, overrides: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Float32 base weights, a function of family, seed and overrides alone.

    Biases and norm weights start at exact zeros and ones, which would hide them: they are moved by noise.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.random.default_generator.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(
            _config(family, overrides), dtype=torch.float32, attn_implementation="eager"
        )
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2 or name.endswith("bias"):
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return model.state_dict()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the loading bar of transformers for a moment."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
