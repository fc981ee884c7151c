"""Every causal language model of the installed transformers, tiny, from its configuration class alone.

Each is built as transformers builds it by default: no attention or experts implementation is chosen here. General
rules make most of them small (`SHAPE`, cut to what a configuration knows); `OVERRIDES` holds what single
ones need beside, and `LEFT_OUT` those that cannot be built or driven, each with its reason in one sentence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

NAMES: tuple[str, ...] = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
"""The model types that ``AutoModelForCausalLM`` knows."""

MAX_PARAMETERS = 2e7
"""A model with more is not tiny: one of its sizes has another name than those in `SHAPE`."""

SHAPE: Mapping[str, Any] = {
    # sizes
    "vocab_size": 384,
    "unpadded_vocab_size": 384,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
    "intermediate_size": 128,
    "ffn_dim": 128,
    "ffn_hidden_size": 128,
    "word_embed_proj_dim": 64,
    "max_position_embeddings": 256,
    "sliding_window": 8,
    "initializer_range": 0.08,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    # mixtures of experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_mtp_layers": 0,
    "num_nextn_predict_layers": 0,
    # sparse attention, beyond what it selects
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 16,  # a score of exactly 0, and so a tie, is rare
    # recurrent parts
    "state_size": 16,
    "ssm_state_size": 16,
    "mamba_d_state": 16,
    "mamba_d_ssm": 64,
    "mamba_d_head": 16,
    "mamba_n_heads": 4,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_mamba_heads": 4,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "chunk_size": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    # latent attention
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
"""Configuration values for all; each configuration takes those that it knows."""

ENCODER_DECODER: Mapping[str, Any] = {
    "d_model": 64,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "init_std": 0.08,
}
"""In their place for the decoders of encoder-decoders."""

_SLIDING_AND_FULL = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_RECURRENT_AND_FULL = {"layer_types": ["linear_attention", "full_attention"] * 2}
_CONV_AND_FULL = {"layer_types": ["conv", "full_attention"] * 2}
_HYBRID = {"layer_types": ["hybrid_sliding", "hybrid"] * 2}
_GEMMA_4 = {
    **_SLIDING_AND_FULL,
    "vocab_size_per_layer_input": 384,
    "hidden_size_per_layer_input": 16,
    "global_head_dim": 32,
}
_QWEN_4 = {
    "num_key_value_heads": 2,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "hc_lowrank": 16,
}
_DOTS_3 = {
    "shared_experts_intermediate_size": 32,
    "head_dim": 24,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 32,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 24,
    "swa_qk_nope_head_dim": 16,
    "swa_v_head_dim": 16,
}

OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "bailing_hybrid": _RECURRENT_AND_FULL,
    "bamba": {"mamba_n_heads": 8, "attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": 500, "local_attention_window_len": 8},
    "cohere_compass_text": {
        **_SLIDING_AND_FULL,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "dbrx": {
        "attn_config": {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 10000.0},  # none of its defaults would run
        "d_model": 64,
        "ffn_config": {"moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_shared_experts": 1},
    "deepseek_v4": {
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"] * 2,
        "num_hidden_layers": 6,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    },
    "dory": {"n_input_layers": 1, "n_output_layers": 1, "sliding_window": 8},
    "dots3_note": {
        "text_config": _DOTS_3,
        "vision_config": {"mlp_layer_types": ["dense"] * 4, "adapter_in_dim": 64, "adapter_out_dim": 64},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
    },
    "dots3_note_text": _DOTS_3,
    "gemma3": {"text_config": _SLIDING_AND_FULL},
    "gemma3_text": _SLIDING_AND_FULL,
    "gemma3n_text": {
        **_SLIDING_AND_FULL,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 384,
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
    },
    "gemma4": {"text_config": _GEMMA_4},
    "gemma4_text": _GEMMA_4,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "granitemoehybrid": {**_RECURRENT_AND_FULL, "mamba_n_heads": 8},
    "inkling2_loop_text": _HYBRID,
    "inkling2_text": _HYBRID,
    "inkling_text": _HYBRID,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "longcat_flash": {"head_dim": 8, "expert_ffn_hidden_size": 32, "zero_expert_num": 2},
    "kimi_linear": {**_RECURRENT_AND_FULL, "linear_head_dim": 16, "linear_num_heads": 4},
    "kolibri1": _SLIDING_AND_FULL,
    "lfm2": _CONV_AND_FULL,
    "lfm2_moe": _CONV_AND_FULL,
    "lfm3": {"layer_types": ["conv", "full_attention", "conv", "sliding_attention"]},
    "mamba2": {"num_heads": 8, "n_groups": 2},
    "minimax": {"sliding_window": None},  # as by default: its full attention would have a window else
    "mllama": {"text_config": {"cross_attention_layers": []}},  # those run with images alone
    "nemotron_h": {"n_groups": 1},
    "qwen4_exp": {"text_config": _QWEN_4},
    "qwen4_exp_text": _QWEN_4,
    "reformer": {
        "axial_pos_shape": [16, 16],
        "axial_pos_embds_dim": [16, 48],
        "attn_layers": ["local", "lsh"] * 2,
        "attention_head_size": 16,
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "hash_seed": 0,
        "num_buckets": 2,
    },
    "xlstm": {"num_heads": 4, "qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 32},
}
"""What single ones need beside: model type → configuration values."""

LEFT_OUT: Mapping[str, str] = {
    "cpmant": "expects the whole sequence at every cached step, and puts prompt tokens of its own before it",
    "gemma3n": "its vision tower needs timm; its decoder is gemma3n_text",
    "gemma4_assistant": "a drafter that reads its target's keys and values: it has no cache of its own",
    "gemma4_unified_assistant": "a drafter that reads its target's keys and values: it has no cache of its own",
    "musicgen": "its class takes another configuration than the one it is mapped from, and decodes audio codes",
    "musicgen_melody": "as musicgen",
    "openai-gpt": "has no cache",
    "prophetnet": "refuses explicit position ids, which decoding with a cache is driven by here",
    "recurrent_gemma": "recurrent, and keeps its state in the modules instead of a cache",
    "reformer": "hashes into buckets and keeps those instead of keys and values",
    "rwkv": "recurrent, with a state of its own instead of a cache",
    "xlm": "expects the whole sequence at every cached step and cuts it by itself",
    "xlnet": "keeps hidden states of earlier segments instead of keys and values",
    "xlstm": "recurrent, with a cache class of its own that has not the interface of transformers' caches",
}
"""What is not tried: model type → why, in one sentence. None of these can decode from a transformers cache."""

_CHUNKED = "upstream: every chunk of a prefill but the first starts from an empty recurrent state"
_STEP_SIZE = (
    "upstream: the scan of many tokens bounds step sizes from below by `time_step_min`, the decoding step does not"
)
_PADDING_OFFSET = (
    "upstream: positions begin at the padding index + 1 where none are passed, and at 0 where `generate` passes them"
)
NOTES: Mapping[str, str] = {
    "bamba": "upstream: where no positions are passed they count the tokens of the pass, whatever the cache holds",
    "blt": "kvdrift finds no single list of blocks: several stacks run over bytes and over patches of them",
    "camembert": _PADDING_OFFSET,
    "data2vec-text": _PADDING_OFFSET,
    "deepseek_v4": "upstream: its cache says that it can be cropped and keeps compressed entries, so that steps fail",
    "falcon_mamba": _CHUNKED,
    "git": "upstream: a cached step puts an image before the text into the mask, always, which moves left padding",
    "hrm_text": "kvdrift finds no single list of blocks: two stacks run in turns, several times for each token",
    "jamba": _CHUNKED,
    "mamba": _CHUNKED,
    "minimax": "its decay tables are kept in float32, where the one for many tokens and the one for a step fit to 1e-8",
    "moshi": "upstream: the mask has no window and the cache has one, so that cached steps see fewer keys",
    "nemotron_h": _STEP_SIZE,
    "roberta": _PADDING_OFFSET,
    "roberta-prelayernorm": _PADDING_OFFSET,
    "xglm": "upstream: its mask is filled by way of float32, which overflows in float64",
    "xlm-roberta": _PADDING_OFFSET,
    "xlm-roberta-xl": _PADDING_OFFSET,
    "xmod": _PADDING_OFFSET,
    "zamba": _CHUNKED,
    "zamba2": _STEP_SIZE,
}
"""What was found where one looked into it by hand: model type → the cause, in one sentence."""


def build(name: str) -> PreTrainedModel:
    """A tiny random model in float32 on the CPU, in evaluation mode.

    Raises
    ------
    ValueError
        If it has more than `MAX_PARAMETERS`.
    """
    with _quiet(), torch.random.fork_rng(devices=[]), torch.no_grad():
        config = configure(name)
        with torch.device("meta"):
            size = sum(p.numel() for p in _from_config(config).parameters())
        if size > MAX_PARAMETERS:
            raise ValueError(f"{size / 1e6:.0f} million parameters are not tiny")
        torch.random.default_generator.manual_seed(0)
        model = _from_config(configure(name))
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() < 2 or parameter_name.endswith("bias"):  # zeros and ones would hide them
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return model.eval().requires_grad_(False)


def _from_config(config: PreTrainedConfig) -> PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def configure(name: str) -> PreTrainedConfig:
    """The configuration of a tiny model."""
    kind = transformers.CONFIG_MAPPING[name]
    return kind(**_values(kind, OVERRIDES.get(name, {})))


def _values(kind: type[PreTrainedConfig], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """What a configuration class is called with, those of its parts (text, vision, …) included."""
    default = kind()
    default.allow_global_per_layer_attribute_access = True  # values that vary by layer too
    shape = {**SHAPE, **ENCODER_DECODER} if default.is_encoder_decoder else dict(SHAPE)
    if _takes(default, "kv_lora_rank"):
        shape["num_key_value_heads"] = shape["num_attention_heads"]
        del shape["head_dim"]  # follows from the parts that are rotated and not
    known = {key: value for key, value in shape.items() if _takes(default, key)}
    parts: dict[str, Any] = {}
    for part in kind.sub_configs:
        own = getattr(default, part, None)
        if isinstance(own, PreTrainedConfig):
            extra = {"model_type": own.model_type} if own.model_type else {}
            if "text" not in part:
                extra["num_hidden_layers"] = 2  # fewer than the decoder's, which are found by their number
            parts[part] = _values(type(own), extra | dict(overrides.get(part, {})))
    values = {**known, **parts, **{k: v for k, v in overrides.items() if k not in parts}}
    if _takes(default, "is_decoder") and not default.is_encoder_decoder:
        values.setdefault("is_decoder", True)
    return values


def _takes(config: PreTrainedConfig, name: str) -> bool:
    """Whether a configuration knows a value and lets it be set."""
    try:
        setattr(config, name, getattr(config, name))
    except (AttributeError, NotImplementedError):
        return False
    return True


@contextmanager
def _quiet() -> Iterator[None]:
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
