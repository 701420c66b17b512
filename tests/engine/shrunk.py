"""Tiny random models of every causal language model type in transformers, with the structure of its default config.

A type's default config is that of a published model. Only its sizes change here: kinds of layers and their order,
windows, scalings and heads that differ from layer to layer stay. Does not use the engine.
"""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from tests.engine.tiny_models import CONTEXT, EOS, VOCAB

_LAYERS = 8
# The largest value of the fields whose whole name an expression matches; the first one counts.
_SIZES: list[tuple[str, int]] = [
    (r"original_max_position_embeddings", 64),
    (r"max_position_embeddings|n_positions|max_seq_len|seq_length|n_ctx|max_target_positions|context_length", CONTEXT),
    (r".*vocab_size.*|.*_vocab", VOCAB),
    (r"n_layers?|num_(hidden_|decoder_|encoder_)?layers|(decoder|encoder)_layers|num_blocks|depth", _LAYERS),
    (r"(embedding|emb|hidden|ple_embed)_(size|dim)_per_layer_input|ple_embed_dim", 8),
    (r".*intermediate_size(_mlp)?|.*ffn_(dim|hidden_size)|dim_ff|dff|d_inner|feed_forward_size", 48),
    (r".*hidden_size(_global)?|d_model|n_embd|lru_width|word_embed_proj_dim|.*embedding_size|emb(edding)?_dim", 32),
    (r"mamba_d_ssm|attention_hidden_size|backbone_hidden_size|output_proj_dims|.*_embed_dim", 32),
    (r"(swa_)?num_(global_)?key_value_heads|num_kv_heads|linear_num_key_heads", 2),
    (r"n_heads?|.*num_heads|.*attention_heads(_per_layer)?|.*_n_heads|mamba_num_heads|linear_num_value_heads", 4),
    (r"qk_rope_head_dim|rotary_dim", 4),
    (r".*head_dim|kv_channels|dim_head|d_head|mamba_d_head|attention_head_(size|dim)", 8),
    (r".*_rank|hc_lowrank|mamba_d_state|(ssm_)?state_size", 8),
    (r"(n_routed|num|num_local|moe_num)_experts|zero_expert_num", 4),
    (r"num_experts_per_tok|moe_topk|moe_k|top_k_experts|n_groups?|topk_group|o_groups|n_mamba_heads", 2),
    (r".*window.*|local_attention", 6),
    (r".*chunk_(size|length)|floor_scale|.*block_size|index_topk|.*n_floor|rel_extent|prompt_length", 8),
]
_IDS = {"pad_token_id": 256, "bos_token_id": 257, "eos_token_id": EOS}
_SUB_CONFIGS = {"text_config": "llama", "qformer_config": "bert"}  # where a config class says "any"
_PAD_BEFORE_POSITIONS = (
    *("camembert", "data2vec-text", "prophetnet", "roberta", "roberta-prelayernorm"),
    *("xlm-roberta", "xlm-roberta-xl"),
)
# What follows from other sizes, what a default config leaves open, and lists with an entry for each layer.
_MORE: dict[str, dict[str, Any]] = {
    **{each: {"pad_token_id": 1} for each in _PAD_BEFORE_POSITIONS},
    "bamba": {"attn_layer_indices": [2, 5]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "max_window_layers": 4},
    "dots3_note_text": {
        **{"swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_q_lora_rank": 8, "swa_kv_lora_rank": 8},
        **{"swa_head_dim": 12, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8},
    },
    "gemma3n_text": {"num_hidden_layers": 10, "num_kv_shared_layers": 5},
    "gemma4_text": {"global_head_dim": 16, "num_kv_shared_layers": 2},
    "gemma4_unified_text": {"global_head_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 4]]},
    "granitemoehybrid": {"layer_types": ["mamba", "mamba", "mamba", "attention"] * 2},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 2},
    "longcat_flash": {"head_dim": 4, "num_layers": 4},
    "mamba2": {"num_heads": 8},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"layers_block_type": ["mamba", "mlp", "mamba", "moe", "mamba", "attention", "mlp"]},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 4},
    "qwen4_exp_text": {
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8},
        "indexer_compress_ratio": 2,
    },
    "reformer": {"axial_pos_shape": [16, 16], "axial_pos_embds_dim": [16, 16]},
    "xmod": {"pad_token_id": 1, "default_language": "en_XX"},
    "zamba2": {"layers_block_type": ["linear_attention", "linear_attention", "hybrid", "linear_attention"] * 2},
}


def shrunk_config(model_type: str) -> PreTrainedConfig:
    """Returns a shrunk config. Raises what the config's class raises for sizes that are inconsistent."""
    config: PreTrainedConfig = AutoConfig.for_model(model_type, **_shrunk(CONFIG_MAPPING[model_type]))
    return config


def _shrunk(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    defaults = {each.name: each.default for each in fields(config_class)}
    given: dict[str, Any] = {name: _smaller(name, value) for name, value in defaults.items() if type(value) is int}
    given |= {name: value for name, value in _IDS.items() if name in defaults}
    if defaults.get("is_decoder") is False:
        given["is_decoder"] = True  # as the checkpoints whose class is one for causal language models
    if "head_dim" in defaults:
        given["head_dim"] = 8
    heads = ("num_attention_heads", "num_key_value_heads")
    if defaults.get(heads[0]) == defaults.get(heads[1]) and heads[0] in given:
        given[heads[1]] = given[heads[0]]
    for name, sub_class in config_class.sub_configs.items():
        known = (
            sub_class if issubclass(sub_class, PreTrainedConfig) else CONFIG_MAPPING[_SUB_CONFIGS.get(name, "llama")]
        )
        given[name] = _shrunk(known)
    return {**given, **_MORE.get(config_class.model_type, {})}


def _smaller(name: str, value: int) -> int:
    found = (size for pattern, size in _SIZES if re.fullmatch(pattern, name))
    return min(value, next(found, value))
