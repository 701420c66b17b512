"""Tiny random models of the families whose GGUF files are served, and GGUF files as llama.cpp's converter writes them.

Tensors are named as in the package gguf; keys and converted values are those of the converter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.engine.tiny_gguf import TOKENS, add_tiny_tokenizer, blocks_of

CONTEXT = 128
_BASE = {
    "vocab_size": len(TOKENS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 32,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.3, 2.0, 2.5],
    "long_factor": [1.5, 3.0, 5.0, 9.0],
}
ORIGINALS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama 3.1": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama, linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama, yarn": ("llama", {"rope_parameters": YARN | {"beta_fast": 16.0, "beta_slow": 2.0}}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2, yarn": ("qwen2", {"rope_parameters": YARN | {"attention_factor": 1.3}}),
    "qwen2 with experts": ("qwen2_moe", {**_EXPERTS, "shared_expert_intermediate_size": 64}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3 with experts": ("qwen3_moe", {**_EXPERTS, "head_dim": 32, "norm_topk_prob": True}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "num_hidden_layers": 6,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 8,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
    "phi3": ("phi3", {"sliding_window": 8, "original_max_position_embeddings": CONTEXT}),
    "phi3, long": ("phi3", {"rope_parameters": _LONG, "original_max_position_embeddings": 32}),
}

# Those that transformers' own loader reads.
BY_TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": (
        "lfm2",
        {
            "layer_types": ["conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
            "conv_L_cache": 3,
            "norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "qwen3.5": (
        "qwen3_5_text",
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.25,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        },
    ),
}


def make_original(name: str, **sizes: Any) -> Any:
    """Returns a model whose weights Q8_0 stores exactly, and are large enough for every part to change the logits."""
    model_type, own = (ORIGINALS | BY_TRANSFORMERS)[name]
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **_BASE | own | sizes)).eval().float()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            random = torch.randn(weight.shape) * (0.2 if weight.dim() > 1 else 0.3)
            if key.endswith("norm.weight"):
                random = random + weight
            elif weight.dim() > 1 and weight.shape[-1] % 32 == 0:
                random = torch.from_numpy(_rounded(random.numpy()))
            weight.copy_(random)
    return model


def write_original(model: Any, path: Path, kind: str = "F32", change: Callable[[Any], None] | None = None) -> Path:
    """Writes the model's GGUF file, with matrices in the format ``kind``.

    ``change`` is called with the writer before it writes.
    """
    config = model.config
    name = {"mistral": "llama", "mixtral": "llama", "gemma3_text": "gemma3"}.get(config.model_type, config.model_type)
    architecture = name.replace("_moe", "moe")
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in _keys(config).items():
        if isinstance(value, str):
            writer.add_string(f"{architecture}.{key}", value)
        else:
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{architecture}.{key}", value)
    add_tiny_tokenizer(writer)
    random = np.random.default_rng(0)
    for tensor, weight in _tensors(model, architecture):
        stored = gguf.GGMLQuantizationType[kind if weight.ndim > 1 and ".weight" in tensor else "F32"]
        writer.add_tensor(tensor, blocks_of(weight, stored, random), raw_dtype=stored)
    if change is not None:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _keys(config: Any) -> Mapping[str, Any]:
    rope = config.rope_parameters
    full = rope.get("full_attention", rope)
    found: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }
    if config.model_type != "gemma2":
        found["rope.freq_base"] = float(full["rope_theta"])
    if (head_dim := getattr(config, "head_dim", None)) is not None:
        found |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if full["rope_type"] in ("linear", "yarn"):
        found |= {"rope.scaling.type": full["rope_type"], "rope.scaling.factor": float(full["factor"])}
    if full["rope_type"] == "yarn":
        found["rope.scaling.original_context_length"] = full["original_max_position_embeddings"]
        names = {"attention_factor": "attn_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow"}
        found |= {f"rope.scaling.yarn_{ours}": full[name] for name, ours in names.items() if name in full}
    return found | _OWN_KEYS.get(config.model_type, lambda _: {})(config)


def _llama_keys(config: Any) -> dict[str, Any]:
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    found = {"vocab_size": config.vocab_size, "rope.dimension_count": dim}
    if config.model_type == "mixtral":
        found |= {"expert_count": config.num_local_experts, "expert_used_count": config.num_experts_per_tok}
    return found


def _moe_keys(config: Any) -> dict[str, Any]:
    found = {
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
    }
    if (shared := getattr(config, "shared_expert_intermediate_size", None)) is not None:
        found["expert_shared_feed_forward_length"] = shared
    return found


def _gemma2_keys(config: Any) -> dict[str, Any]:
    return {
        "attn_logit_softcapping": config.attn_logit_softcapping,
        "final_logit_softcapping": config.final_logit_softcapping,
        "attention.sliding_window": config.sliding_window,
    }


def _gemma3_keys(config: Any) -> dict[str, Any]:
    local = config.rope_parameters["sliding_attention"]["rope_theta"]
    return {"attention.sliding_window": config.sliding_window, "rope.freq_base_swa": float(local)}


def _phi3_keys(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    original, head_dim = config.original_max_position_embeddings, config.hidden_size // config.num_attention_heads
    found = {
        "rope.scaling.original_context_length": original,
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "attention.sliding_window": config.sliding_window or 0,
    }
    if rope["rope_type"] == "longrope":
        scale = config.max_position_embeddings / original
        found["rope.scaling.attn_factor"] = float(np.sqrt(1 + np.log(scale) / np.log(original)))
    return found


_OWN_KEYS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "llama": _llama_keys,
    "mistral": _llama_keys,
    "smollm3": _llama_keys,
    "mixtral": _llama_keys,
    "qwen2_moe": _moe_keys,
    "qwen3_moe": _moe_keys,
    "gemma2": _gemma2_keys,
    "gemma3_text": _gemma3_keys,
    "phi3": _phi3_keys,
}


def _tensors(model: Any, architecture: str) -> Iterator[tuple[str, np.ndarray]]:
    config = model.config
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for key, parameter in model.named_parameters():
        weight = parameter.detach().numpy()
        if architecture in ("llama", "smollm3") and (".q_proj." in key or ".k_proj." in key):
            weight = _side_by_side(
                weight, config.num_attention_heads if ".q_proj." in key else config.num_key_value_heads
            )
        if architecture.startswith("gemma") and key.endswith("norm.weight"):
            weight = weight + 1
        if key.endswith("shared_expert_gate.weight"):
            weight = weight[0]
        if key.endswith("experts.gate_up_proj"):
            place = key.removesuffix("gate_up_proj")
            for name, half in zip(("gate_proj", "up_proj"), np.split(weight, 2, axis=1), strict=True):
                yield f"{names.get_name(place + name)}.weight", np.ascontiguousarray(half)
            continue
        stem, _, suffix = key.rpartition(".") if key.endswith((".weight", ".bias")) else (key, "", "weight")
        yield f"{names.get_name(stem)}.{suffix}", np.ascontiguousarray(weight)
    yield from _rope_tensors(model)


def _rope_tensors(model: Any) -> Iterator[tuple[str, np.ndarray]]:
    rope = model.config.rope_parameters
    if rope.get("rope_type") == "llama3":
        plain = rope["rope_theta"] ** -(np.arange(0, 16, 2) / 16)
        yield "rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    if rope.get("rope_type") == "longrope":
        for name in ("short", "long"):
            yield f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32)


def _side_by_side(weight: np.ndarray, heads: int) -> np.ndarray:
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _rounded(weight: np.ndarray) -> np.ndarray:
    kind = gguf.GGMLQuantizationType.Q8_0
    return gguf.dequantize(gguf.quantize(weight, kind), kind).reshape(weight.shape)
