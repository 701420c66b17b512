"""Tiny random models of many families, a byte-level tokenizer, and transformers' own answers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

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

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 8},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "llama4_text": {"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2, "moe_layers": []},
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
}
# Families that the check at load must hand to the serial engine.
SERIAL_FAMILIES: dict[str, dict[str, Any]] = {
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 8, "head_dim": 8},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8},
}


def tiny_model(family: str = "llama", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random float32 model of the family, with 3 layers of width 32, whose logits are far from ties.

    ``changes`` are copied: some config classes write into what they are given.
    """
    options = {**_BASE, **{**FAMILIES, **SERIAL_FAMILIES}.get(family, {"head_dim": 8}), **copy.deepcopy(changes)}
    if family in ("mamba2", "falcon"):
        options.pop("num_key_value_heads")
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options))
    model = model.float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
    model.generation_config.eos_token_id = None
    return model


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """256 byte tokens and three special ones: every text has tokens, most token sequences are no valid UTF-8."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: number for number, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def reference(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    """transformers' own greedy answer to one prompt alone."""
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        out = model.generate(ids, max_new_tokens=count, do_sample=False, attention_mask=torch.ones_like(ids))
    return [int(token) for token in out[0, len(prompt) :]]


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    """Byte tokens that differ from seed to seed; never a special one."""
    return tuple((seed * 31 + 7 * position) % 250 for position in range(length))
