"""Tiny models whose layers do not all run every token, or do not hand on ``[batch, token, feature]``."""

import functools

import torch
import transformers

import kvdrift as kd

_SHAPE = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": 8,
    "initializer_range": 0.08,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_PER_LAYER = {"vocab_size_per_layer_input": 384, "hidden_size_per_layer_input": 16}
_CONFIGS = {
    # the last two layers read the keys of earlier ones, and run the last token of a prompt alone
    "gemma4_text": {
        **_PER_LAYER,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 2,
        "global_head_dim": 32,
    },
    # blocks hand on [stream, batch, token, feature]
    "gemma3n_text": {
        **_PER_LAYER,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
    },
    # blocks hand on [batch, token, stream, feature]
    "deepseek_v4": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "num_key_value_heads": 1,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "num_nextn_predict_layers": 0,
        "num_hash_layers": 0,
        "index_topk": 8,
        "index_head_dim": 16,
        "index_n_heads": 16,
        "q_lora_rank": 32,
        "o_lora_rank": 16,
        "o_groups": 2,
        "qk_rope_head_dim": 8,
    },
}


@functools.cache
def unusual(name, attn="eager", dtype=torch.float32):
    """A loaded model, shared: do not change it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(name, **{**_SHAPE, **_CONFIGS[name]})
        hf = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attn, dtype=dtype)
    return kd.load(hf.eval().requires_grad_(False), quiet=True)
