"""Tiny random models of many families, a byte-level tokenizer, and transformers' answers. Does not use the engine."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

torch.set_num_threads(1)  # models of this size only lose time to a second core
EOS = 258
VOCAB = 259
CONTEXT = 256
_LAYERS = 3
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 256,
    "bos_token_id": 257,
    "eos_token_id": EOS,
}
_GPT = {"n_embd": 32, "n_layer": _LAYERS, "n_head": 4, "n_positions": CONTEXT}
_WINDOW = {"sliding_window": 6}
_MIXED = {**_WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_SHARING = {
    **{"head_dim": 8, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 6},
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    **{"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8},
}

# The last of four layers has no rope, and scales its queries anew every eight tokens.
_LLAMA4 = {
    **{"head_dim": 8, "num_hidden_layers": 4, "intermediate_size_mlp": 48, "num_local_experts": 2},
    **{"attn_scale": 0.5, "floor_scale": 8},
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 8},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "llama4_text": _LLAMA4,
    "llama4_chunked": {**_LLAMA4, "attention_chunk_size": 6},
    "mistral": {"head_dim": 8, **_WINDOW},
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, **_WINDOW},
    "gemma3_text": {"head_dim": 8, "query_pre_attn_scalar": 8, **_MIXED},
    "phi3": {},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, **_MIXED},
    "olmo2": {},
    "granite": {},
    "cohere2": {"head_dim": 8, **_MIXED},
    "gpt2": _GPT,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt_neox": {},
    "bloom": {"n_layer": _LAYERS, "n_head": 4},
    "gptj": {**_GPT, "rotary_dim": 4},
    "mpt": {"d_model": 32, "n_layers": _LAYERS, "n_heads": 4, "max_seq_len": CONTEXT},
    "falcon": {"num_kv_heads": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "expand": 2, "chunk_size": 8},
    "qwen3_next": {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3},
    "jamba": {
        **{"attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
        **{"num_experts": 2, "num_experts_per_tok": 1, "mamba_d_state": 8, "mamba_dt_rank": 4},
    },
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention", "mamba"],
        **{"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8, "mamba_n_groups": 1},
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16},
    },
    "nemotron_h": {
        **{"head_dim": 8, "layers_block_type": ["mamba", "mlp", "attention", "moe"], "mamba_num_heads": 4},
        **{"mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8, "n_routed_experts": 4},
        **{"moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16},
    },
    # Layers with states and attention both.
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8},
    "inkling_text": {
        **{"head_dim": 8, "swa_head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2},
        **{"sliding_window_size": 6, "d_rel": 4, "rel_extent": 32, "local_layer_ids": [0, 2]},
        **{"num_hidden_layers": 4, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2},
    },
    # Keys and values are one latent a token, which is expanded after the cache.
    "deepseek_v3": {
        **{"num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 16, "qk_rope_head_dim": 4},
        **{"qk_nope_head_dim": 8, "v_head_dim": 6, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2},
        **{"topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
    },
    # Later layers use the keys and values of earlier ones.
    "gemma3n_text": {**_SHARING, "laurel_rank": 4},
    # Layers that see all have wider heads, as in all Gemma 4, and fewer of them in the large ones.
    "gemma4_text": {**_SHARING, "global_head_dim": 16, "use_double_wide_mlp": True},
    "gemma4_moe": {
        **{**_SHARING, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "global_head_dim": 16},
        **{"attention_k_eq_v": True, "num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 4},
        **{"top_k_experts": 2, "moe_intermediate_size": 16},
    },
    "cohere": {},
    "ernie4_5_moe": {
        **{"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 1},
    },
    "exaone4": {**_MIXED},
    "glm4": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "nemotron": {},
    "olmo3": {**_MIXED},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {**_WINDOW},
    "gpt_neo": {
        **{"num_layers": 3, "num_heads": 4, "attention_types": [[["global", "local", "global"], 1]]},
        "window_size": 6,
    },
    "jetmoe": {"kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2},
    "diffllama": {},
}
# One for each kind of cache and each way to take a batch; what sets the others apart is in their layers.
KINDS = (
    *("llama", "mistral", "gemma3_text", "llama4_chunked", "gpt_oss", "deepseek_v3", "gemma4_text"),  # packed
    *("bloom", "qwen3_next", "mamba2", "jamba"),  # rows with masks, rows with states and pages, states alone, whole
)
# Families that the check at load must hand to the serial engine.
SERIAL_FAMILIES: dict[str, dict[str, Any]] = {
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 8, "head_dim": 8},
}
_MODEL_TYPES = {"llama4_chunked": "llama4_text", "gemma4_moe": "gemma4_text"}


def tiny_model(family: str = "llama", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random float32 model of the family, with 3 layers of width 32, whose logits are far from ties.

    ``changes`` are copied, as some config classes change the values they get.
    """
    options = {**_BASE, **{**FAMILIES, **SERIAL_FAMILIES}.get(family, {"head_dim": 8}), **copy.deepcopy(changes)}
    if family in ("mamba2", "falcon"):
        options.pop("num_key_value_heads")
    return random_model(AutoConfig.for_model(_MODEL_TYPES.get(family, family), **options), seed)


def random_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A random float32 model, whose answers do not end by themselves."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    model = model.float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
    model.generation_config.eos_token_id = None
    return model


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 256 byte tokens and three special ones; most token sequences are not valid UTF-8."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: number for number, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def reference(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    """transformers' own greedy answer to a single prompt."""
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        out = model.generate(ids, max_new_tokens=count, do_sample=False, attention_mask=torch.ones_like(ids))
    return [int(token) for token in out[0, len(prompt) :]]


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    """Returns byte tokens that depend on the seed and are never special."""
    return tuple((seed * 31 + 7 * position) % 250 for position in range(length))
