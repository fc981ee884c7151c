"""Architecture: every tiny family against a table written by hand, variants, refusals, round trips."""

import dataclasses
import json

import pytest
import torch
import transformers
from torch import nn

from kvdrift.errors import FileError, ModelError
from kvdrift.models.architecture import Architecture, LayerInfo, describe
from kvdrift.models.tiny import FAMILIES, tiny
from kvdrift.models.tree import find_blocks

FULL = ["full"] * 4
MODEL = ("model.layers", "model.embed_tokens", "model.norm", "self_attn")
BLOOM_LIKE = ("transformer.h", "transformer.word_embeddings", "transformer.ln_f", "self_attention")

# family: grouping, KV heads, head_dim, layer kinds, positions, QK-norm, soft-caps, tied, experts, context
EXPECTED = {
    "llama": ("GQA", 2, 32, FULL, "rope", False, (None, None), False, None, 256),
    "llama-mha": ("MHA", 8, 32, FULL, "rope", False, (None, None), False, None, 256),
    "llama-mqa": ("MQA", 1, 32, FULL, "rope", False, (None, None), False, None, 256),
    "mistral": ("GQA", 2, 32, ["sliding"] * 4, "rope", False, (None, None), False, None, 256),
    "qwen2": ("GQA", 2, 32, FULL, "rope", False, (None, None), False, None, 256),
    "qwen3": ("GQA", 2, 32, FULL, "rope", True, (None, None), False, None, 256),
    "gemma2": ("GQA", 2, 32, ["sliding", "full"] * 2, "rope", False, (50.0, 30.0), True, None, 256),
    "gemma3": (
        "GQA",
        2,
        32,
        ["sliding", "sliding", "full", "sliding"],
        "rope",
        True,
        (None, None),
        True,
        None,
        256,
    ),
    "phi3": ("GQA", 2, 32, FULL, "rope", False, (None, None), False, None, 256),
    "olmo2": ("GQA", 2, 32, FULL, "rope", True, (None, None), False, None, 256),
    "gpt-neox": ("MHA", 8, 32, FULL, "rope", False, (None, None), False, None, 256),
    "gpt2": ("MHA", 8, 32, FULL, "learned", False, (None, None), True, None, 256),
    "mixtral": ("GQA", 2, 32, FULL, "rope", False, (None, None), False, 4, 256),
    "gpt-oss": ("GQA", 2, 32, ["sliding", "full"] * 2, "rope:yarn", False, (None, None), False, 4, 256),
    "deepseek-v3": ("MHA", 8, 48, FULL, "rope", False, (None, None), False, 4, 256),
    "granite": ("GQA", 2, 32, FULL, "rope", False, (None, None), False, None, 256),
    "falcon": ("MQA", 1, 32, FULL, "rope", False, (None, None), True, None, 256),
    "bloom": ("MHA", 8, 32, FULL, "alibi", False, (None, None), True, None, None),
    "lfm2": ("GQA", 2, 32, ["conv", "full"] * 2, "rope", True, (None, None), True, None, 256),
    "mamba": ("none", 0, 0, ["linear"] * 4, "none", False, (None, None), True, None, None),
}

# family: block list, embedding, final norm, attention inside a block
TREES = {
    **dict.fromkeys(FAMILIES, MODEL),
    "gpt-neox": ("gpt_neox.layers", "gpt_neox.embed_in", "gpt_neox.final_layer_norm", "attention"),
    "gpt2": ("transformer.h", "transformer.wte", "transformer.ln_f", "attn"),
    "falcon": BLOOM_LIKE,
    "bloom": BLOOM_LIKE,
    "lfm2": ("model.layers", "model.embed_tokens", "model.embedding_norm", "self_attn"),
    "mamba": ("backbone.layers", "backbone.embeddings", "backbone.norm_f", "mixer"),
}


def test_the_tables_cover_every_family():
    assert set(EXPECTED) == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_describes_every_family(family):
    grouping, n_kv_heads, head_dim, kinds, positional, qk_norm, caps, tied, n_experts, context = EXPECTED[family]
    found = describe(tiny(family))
    assert (found.grouping, found.n_kv_heads, found.head_dim) == (grouping, n_kv_heads, head_dim)
    assert found.n_heads == (8 if n_kv_heads else 0)
    assert (found.n_layers, found.d_model, found.vocab_size) == (4, 256, 384)
    assert (found.positional, found.qk_norm) == (positional, qk_norm)
    assert (found.attn_softcap, found.final_softcap) == caps
    assert (found.tied_embeddings, found.n_experts, found.max_positions) == (tied, n_experts, context)
    assert found.block_prefix == TREES[family][0]
    assert found.layers == tuple(
        LayerInfo(
            index=index,
            attention=kind,
            window=8 if kind == "sliding" else None,
            n_kv_heads=0 if kind in ("conv", "linear") else n_kv_heads,
            head_dim=0 if kind in ("conv", "linear") else head_dim,
        )
        for index, kind in enumerate(kinds)
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_finds_the_modules_of_every_family(family):
    prefix, embed, final_norm, attention = TREES[family]
    model = tiny(family)
    tree = find_blocks(model)
    assert tree.prefix == prefix
    assert tree.blocks == tuple(model.get_submodule(prefix))
    assert tree.embed is model.get_submodule(embed)
    assert tree.head is model.lm_head
    assert tree.final_norm is model.get_submodule(final_norm)
    kinds = EXPECTED[family][3]
    for kind, block, module in zip(kinds, tree.blocks, tree.attention_modules, strict=True):
        if kind in ("conv", "linear"):
            assert module is None
        else:
            assert module is block.get_submodule(attention)


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_and_final_norm_run_in_that_order(family):
    model = tiny(family)
    tree = find_blocks(model)
    seen = []
    modules = [tree.embed, *tree.blocks, tree.final_norm, tree.head]
    handles = [
        module.register_forward_pre_hook(lambda _, args, kwargs, i=i: seen.append((i, args, kwargs)), with_kwargs=True)
        for i, module in enumerate(modules)
    ]
    outputs = []
    tree.blocks[-1].register_forward_hook(lambda _m, _a, out: outputs.append(out))
    model(torch.arange(5, 15)[None])
    for handle in handles:
        handle.remove()
    assert [i for i, _, _ in seen] == list(range(len(modules)))
    last = outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0]
    norm_input = seen[-2][1][0] if seen[-2][1] else next(iter(seen[-2][2].values()))
    assert torch.equal(norm_input.flatten(), last.flatten())


@pytest.mark.parametrize(
    ("family", "overrides", "kinds", "windows"),
    [
        ("mistral", {"sliding_window": None}, FULL, [None] * 4),
        ("phi3", {"sliding_window": 6}, ["sliding"] * 4, [6] * 4),
        ("qwen2", {"sliding_window": 6, "use_sliding_window": False}, FULL, [None] * 4),
        (
            "qwen2",
            {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 2},
            ["full", "full", "sliding", "sliding"],
            [None, None, 6, 6],
        ),
    ],
)
def test_windows_follow_the_configuration(family, overrides, kinds, windows):
    layers = describe(tiny(family, **overrides)).layers
    assert [layer.attention for layer in layers] == kinds
    assert [layer.window for layer in layers] == windows


def test_chunked_layers_carry_their_chunk():
    config = transformers.AutoConfig.for_model(
        "llama4_text",
        hidden_size=64,
        intermediate_size=64,
        intermediate_size_mlp=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=64,
        num_local_experts=2,
        attention_chunk_size=16,
        pad_token_id=None,
    )
    found = describe(transformers.AutoModelForCausalLM.from_config(config))
    assert [(layer.attention, layer.window) for layer in found.layers] == [("chunked", 16)] * 3 + [("full", None)]
    assert found.n_experts == 2


@pytest.mark.parametrize(
    ("family", "overrides", "positional"),
    [
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "rope:linear"),
        (
            "gemma3",
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                }
            },
            "rope:linear",
        ),
        ("falcon", {"alibi": True}, "alibi"),
    ],
)
def test_positional_schemes(family, overrides, positional):
    assert describe(tiny(family, **overrides)).positional == positional


@pytest.mark.parametrize(
    ("overrides", "n_kv_heads", "grouping"),
    [
        ({"multi_query": False}, 8, "MHA"),
        ({"new_decoder_architecture": True, "num_kv_heads": 2}, 2, "GQA"),
    ],
)
def test_kv_heads_of_falcon_variants(overrides, n_kv_heads, grouping):
    found = describe(tiny("falcon", **overrides))
    assert (found.n_kv_heads, found.grouping) == (n_kv_heads, grouping)


def test_gpt_neo_names_its_windows_in_its_own_words():
    config = transformers.AutoConfig.for_model(
        "gpt_neo",
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=8,
        vocab_size=64,
        max_position_embeddings=32,
    )
    found = describe(transformers.AutoModelForCausalLM.from_config(config))
    assert [(layer.attention, layer.window, layer.n_kv_heads) for layer in found.layers] == [
        ("full", None, 4),
        ("sliding", 8, 4),
    ]


def test_multimodal_wrapper_gives_its_text_decoder():
    text = tiny("gemma3").config
    vision = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": text.num_hidden_layers,
        "num_attention_heads": 4,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(text_config=text.to_dict(), vision_config=vision, mm_tokens_per_image=4)
    model = transformers.Gemma3ForConditionalGeneration(config)
    found = describe(model)
    assert found.block_prefix == "model.language_model.layers"
    assert found.layers == describe(tiny("gemma3")).layers
    assert find_blocks(model).final_norm is model.model.language_model.norm


def test_a_list_of_experts_as_long_as_the_model_is_deep_is_not_taken_for_the_blocks():
    model = tiny("llama")
    for block in model.model.layers:
        block.mlp.experts = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))
    assert find_blocks(model).prefix == "model.layers"


def test_blocks_that_hold_two_attention_sublayers_each():
    config = transformers.LongcatFlashConfig(
        vocab_size=64,
        hidden_size=32,
        num_layers=3,
        num_attention_heads=2,
        ffn_hidden_size=64,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        head_dim=8,
        v_head_dim=8,
        n_routed_experts=4,
        zero_expert_num=2,
        moe_topk=2,
        expert_ffn_hidden_size=16,
    )
    model = transformers.LongcatFlashForCausalLM(config)
    assert config.num_hidden_layers == 6
    assert find_blocks(model).blocks == tuple(model.model.layers)
    assert describe(model).n_layers == 3


def test_a_decoder_of_another_size_than_its_encoder():
    sizes = {"d_model": 32, "encoder_layers": 3, "encoder_attention_heads": 4, "vocab_size": 64}
    sizes |= {"decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 32}
    for kind in ("Bart", "Blenderbot"):
        model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes))
        found = describe(model)
        assert (found.n_layers, found.n_heads, found.n_kv_heads, found.head_dim) == (2, 2, 2, 16)


def test_encoder_decoder_is_refused():
    config = transformers.T5Config(d_model=32, d_ff=32, d_kv=8, num_layers=2, num_heads=4, vocab_size=64)
    model = transformers.T5ForConditionalGeneration(config)
    for function in (describe, find_blocks):
        with pytest.raises(ModelError, match="T5ForConditionalGeneration is an encoder-decoder"):
            function(model)


def test_model_without_block_list_is_refused():
    model = tiny("llama")
    model.model.layers = model.model.layers[:3]
    with pytest.raises(ModelError, match="no list of 4 decoder blocks"):
        describe(model)


def test_plain_module_is_refused():
    with pytest.raises(ModelError, match="Linear is no transformers model"):
        describe(nn.Linear(2, 2))


def test_norm_is_none_where_nothing_follows_the_blocks():
    config = transformers.OPTConfig(
        hidden_size=32,
        ffn_dim=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=64,
        word_embed_proj_dim=32,
        do_layer_norm_before=False,
    )
    assert find_blocks(transformers.OPTForCausalLM(config)).final_norm is None
    config.do_layer_norm_before = True
    model = transformers.OPTForCausalLM(config)
    assert find_blocks(model).final_norm is model.model.decoder.final_layer_norm


def test_norm_of_the_embeddings_is_not_the_final_norm():
    config = transformers.BartConfig(
        d_model=32,
        decoder_layers=2,
        encoder_layers=2,
        decoder_ffn_dim=32,
        vocab_size=64,
        max_position_embeddings=32,
    )
    assert find_blocks(transformers.BartForCausalLM(config)).final_norm is None


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trips_through_json(family):
    found = describe(tiny(family))
    assert Architecture.from_dict(json.loads(json.dumps(found.to_dict()))) == found


@pytest.mark.parametrize("change", [{"n_layers": None}, {"surprise": 1}, {"layers": [{"index": 0}]}])
def test_foreign_dictionaries_are_refused(change):
    values = describe(tiny("llama")).to_dict()
    values.update(change)
    if change == {"n_layers": None}:
        del values["n_layers"]
    with pytest.raises(FileError, match="not an architecture"):
        Architecture.from_dict(values)


@pytest.mark.parametrize(
    ("family", "sentence"),
    [
        (
            "llama",
            "llama: 4 layers (full attention), GQA 8:2, head_dim 32, d_model 256, RoPE, vocab 384, context 256",
        ),
        (
            "gemma2",
            "gemma2: 4 layers (2 sliding attention of window 8, 2 full attention), GQA 8:2, head_dim 32, "
            "d_model 256, RoPE, attention soft-cap 50, logit soft-cap 30, vocab 384, context 256",
        ),
        (
            "gpt-oss",
            "gpt_oss: 4 layers (2 sliding attention of window 8, 2 full attention), GQA 8:2, head_dim 32, "
            "d_model 256, 4 experts, RoPE (yarn), vocab 384, context 256",
        ),
        ("bloom", "bloom: 4 layers (full attention), MHA 8:8, head_dim 32, d_model 256, ALiBi, vocab 384"),
        ("mamba", "mamba: 4 layers (linear attention), d_model 256, vocab 384"),
    ],
)
def test_reads_as_one_sentence(family, sentence):
    assert str(describe(tiny(family))) == sentence


def test_html_is_a_table_with_escaped_text():
    found = dataclasses.replace(describe(tiny("llama")), model_type="<script>")
    page = found._repr_html_()
    assert page.startswith("<table>")
    assert "&lt;script&gt;" in page
    assert "<script>" not in page
    assert "GQA 8:2, head_dim 32" in page


def test_is_frozen():
    found = describe(tiny("llama"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.n_layers = 3
