"""Maps each supported GGUF architecture to transformers' config and parameter names.

Each key of the file that the config needs is read; any other key is refused. Constants from llama.cpp's code, such as
the query scale of Gemma's largest model, are here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlserver_torch_stream.engine.loading.gguf_file import GgufFile
from mlserver_torch_stream.engine.loading.gguf_rope import rope_parameters
from mlserver_torch_stream.errors import LoadFailed

_SOFTMAX = 1  # a value of the key expert_gating_func
# The texts of control tokens that end an answer, as in llama.cpp, also if no key of the file names them: the keys in
# files of Gemma and Phi name the token that ends a document, but not the token that ends a turn.
_ENDS = frozenset(
    (
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<end_of_utterance>"),
        *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<EOT>"),
    )
)
_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_FOUR_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {"ffn_gate_inp": "mlp.gate"}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
# Parameters of all experts, without ``.weight``.
_STACKED = {
    "ffn_gate_exps": "mlp.experts.gate_up_proj",
    "ffn_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture.

    ``config`` returns the fields of transformers' config. ``modules`` maps the last part of a tensor's name to a module
    of the layer. ``permuted`` has the names of tensors whose rows the converter has reordered within each head.
    ``norm_offset`` is the number that the converter has added to the weights of norms.
    """

    config: Callable[[GgufFile], dict[str, Any]]
    modules: Mapping[str, str]
    permuted: frozenset[str] = field(default_factory=frozenset)
    norm_offset: float = 0.0

    def parameters(self, layers: int) -> dict[str, str]:
        """Returns transformers' parameter name for each tensor name, also for tensors that the file may lack.

        If several tensors map to the same parameter, they are joined in the order of this mapping.
        """
        names = dict(_GLOBAL)
        for layer in range(layers):
            block, place = f"blk.{layer}", f"model.layers.{layer}"
            for suffix in ("weight", "bias"):
                names |= {f"{block}.{leaf}.{suffix}": f"{place}.{name}.{suffix}" for leaf, name in self.modules.items()}
            names |= {f"{block}.{leaf}.weight": f"{place}.{name}" for leaf, name in _STACKED.items()}
        return names


def architecture_of(file: GgufFile) -> Architecture:
    """Returns the architecture of a file. Raises LoadFailed if the architecture is not supported."""
    architecture = ARCHITECTURES.get(file.architecture)
    if architecture is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise LoadFailed(
            f"GGUF files of the architecture {file.architecture} are not supported, only those of {known}; "
            "serve the model's safetensors instead"
        )
    return architecture


def _llama(file: GgufFile) -> dict[str, Any]:
    """Reads the config of Llama and of models with its layout: Mistral, SmolLM and, with experts, Mixtral."""
    if file.take("expert_count", int):
        _refuse_single_experts(file)
        return _decoder(file, "mixtral") | {
            "num_local_experts": file.need("expert_count", int),
            "num_experts_per_tok": _experts_used(file),
            "sliding_window": None,
        }
    return _decoder(file, "llama") | {"attention_bias": _has_bias(file, _ATTENTION), "mlp_bias": _has_bias(file, _MLP)}


def _smollm3(file: GgufFile) -> dict[str, Any]:
    """Reads the config of SmolLM3. The file does not say that every fourth layer lacks rotary positions."""
    return _decoder(file, "smollm3") | {"no_rope_layer_interval": 4}


def _qwen2(file: GgufFile) -> dict[str, Any]:
    return _decoder(file, "qwen2") | {"use_sliding_window": False}


def _qwen3(file: GgufFile) -> dict[str, Any]:
    return _decoder(file, "qwen3") | {"use_sliding_window": False, "attention_bias": _has_bias(file, _ATTENTION)}


def _qwen2_moe(file: GgufFile) -> dict[str, Any]:
    shared = file.take("expert_shared_feed_forward_length", int)
    return (
        _decoder(file, "qwen2_moe")
        | _qwen_experts(file)
        | {
            "shared_expert_intermediate_size": shared or file.shape("blk.0.ffn_gate_shexp.weight")[0],
            "norm_topk_prob": False,
        }
    )


def _qwen3_moe(file: GgufFile) -> dict[str, Any]:
    own = {"norm_topk_prob": True, "attention_bias": _has_bias(file, _ATTENTION)}
    return _decoder(file, "qwen3_moe") | _qwen_experts(file) | own


def _qwen_experts(file: GgufFile) -> dict[str, Any]:
    _refuse_single_experts(file)
    size = file.take("expert_feed_forward_length", int)
    return {
        "num_experts": file.need("expert_count", int),
        "num_experts_per_tok": _experts_used(file),
        "moe_intermediate_size": size or file.shape("blk.0.ffn_gate_exps.weight")[1],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
    }


def _gemma2(file: GgufFile) -> dict[str, Any]:
    config = _decoder(file, "gemma2")
    caps = (file.take(f"{kind}_logit_softcapping", float) for kind in ("attn", "final"))
    attention_cap, final_cap = (
        default if cap is None else cap for cap, default in zip(caps, (50.0, 30.0), strict=True)
    )
    return config | {
        "query_pre_attn_scalar": _query_scalar(config, largest=46),
        "attn_logit_softcapping": attention_cap or None,
        "final_logit_softcapping": final_cap or None,
        "sliding_window": file.take("attention.sliding_window", int) or 4096,
        "layer_types": _layer_types(file, config["num_hidden_layers"], every=2),
    }


def _gemma3(file: GgufFile) -> dict[str, Any]:
    config = _decoder(file, "gemma3_text")
    window = file.take("attention.sliding_window", int)
    local = {"rope_type": "default", "rope_theta": file.take("rope.freq_base_swa", float) or 10000.0}
    return config | {
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
        "query_pre_attn_scalar": _query_scalar(config, largest=62),
        "final_logit_softcapping": file.take("final_logit_softcapping", float) or None,
        "sliding_window": window or config["max_position_embeddings"],
        "layer_types": _layer_types(file, config["num_hidden_layers"], every=6 if window else 1),
    }


def _phi3(file: GgufFile) -> dict[str, Any]:
    config = _decoder(file, "phi3", partial=True)
    rope = config["rope_parameters"]
    return config | {
        "original_max_position_embeddings": rope.get(
            "original_max_position_embeddings", config["max_position_embeddings"]
        ),
        "sliding_window": file.take("attention.sliding_window", int) or None,
    }


def _decoder(file: GgufFile, model_type: str, partial: bool = False) -> dict[str, Any]:
    """Returns the config fields that all architectures share."""
    hidden, heads = file.need("embedding_length", int), file.need("attention.head_count", int)
    context = file.need("context_length", int)
    if min(hidden, heads, context) < 1:
        raise file.refused(
            "attention.head_count",
            f"is {heads} with embedding_length {hidden} and context_length {context}; each must be at least 1",
        )
    head_dim = file.take("attention.key_length", int) or hidden // heads
    if (values := file.take("attention.value_length", int) or head_dim) != head_dim:
        raise file.refused(
            "attention.value_length", f"is {values}, but must equal the length of the keys, which is {head_dim}"
        )
    named = (file.token_id(role) for role in ("eos", "eot", "eom"))
    ends = [*(token for token in named if token is not None), *file.control_tokens(_ENDS)]
    return {
        "model_type": model_type,
        "vocab_size": file.shape("token_embd.weight")[0],
        "hidden_size": hidden,
        "intermediate_size": file.need("feed_forward_length", int),
        "num_hidden_layers": _layers(file),
        "num_attention_heads": heads,
        "num_key_value_heads": file.take("attention.head_count_kv", int) or heads,
        "head_dim": head_dim,
        "rms_norm_eps": file.need("attention.layer_norm_rms_epsilon", float),
        "max_position_embeddings": context,
        "rope_parameters": rope_parameters(file, head_dim, context, partial),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.token_id("bos"),
        "eos_token_id": _one_or_all(dict.fromkeys(ends)),
        "pad_token_id": file.token_id("padding"),
    }


def _one_or_all(tokens: Mapping[int, None]) -> int | list[int] | None:
    return list(tokens) if len(tokens) > 1 else next(iter(tokens), None)


def _layers(file: GgufFile) -> int:
    """Returns the number of layers. Raises LoadFailed if the tensors show another number."""
    count = file.need("block_count", int)
    blocks = {name.split(".")[1] for name in file.tensors if name.startswith("blk.")}
    if blocks != set(map(str, range(len(blocks)))) or count != len(blocks):
        raise file.refused("block_count", f"is {count}, but the file has tensors of {len(blocks)} blocks")
    return count


def _has_bias(file: GgufFile, modules: Mapping[str, str]) -> bool:
    """Returns whether one of these modules has a bias in any layer. If the file lacks a bias, the bias is zero."""
    return any(f".{leaf}.bias" in name for name in file.tensors for leaf in modules)


def _experts_used(file: GgufFile) -> int:
    if (function := file.take("expert_gating_func", int)) not in (None, _SOFTMAX):
        raise file.refused("expert_gating_func", f"is {function}, which is not supported here")
    used, count = file.need("expert_used_count", int), file.need("expert_count", int)
    if not 1 <= used <= count:
        raise file.refused("expert_used_count", f"is {used}, but must be from 1 to {count}, the number of experts")
    return used


def _refuse_single_experts(file: GgufFile) -> None:
    if "blk.0.ffn_gate.0.weight" in file.tensors:
        raise LoadFailed(
            "the tensor blk.0.ffn_gate.0.weight belongs to an old layout with one tensor per expert; convert the model "
            "to GGUF again"
        )


def _query_scalar(config: Mapping[str, Any], largest: int) -> int:
    """Returns ``query_pre_attn_scalar``; queries are divided by its square root.

    The value is the size of a head, except for the family's 27B model, which has ``largest`` layers.
    """
    whole: int = config["hidden_size"] // config["num_attention_heads"]
    head: int = config["head_dim"]
    return whole if config["num_hidden_layers"] == largest else head


def _layer_types(file: GgufFile, count: int, every: int) -> list[str]:
    """Returns the types of the layers.

    Unless the file says otherwise, every ``every``-th layer attends to all tokens.
    """
    slides = file.flags("attention.sliding_window_pattern")
    if slides is None:
        every = file.take("attention.sliding_window_pattern", int) or every
        slides = [bool((layer + 1) % every) for layer in range(count)]
    return ["sliding_attention" if slide else "full_attention" for slide in slides[:count]]


ARCHITECTURES = {
    "llama": Architecture(_llama, _ATTENTION | _MLP | _NORMS | _EXPERTS, frozenset(("attn_q", "attn_k"))),
    "smollm3": Architecture(_smollm3, _ATTENTION | _MLP | _NORMS, frozenset(("attn_q", "attn_k"))),
    "qwen2": Architecture(_qwen2, _ATTENTION | _MLP | _NORMS),
    "qwen2moe": Architecture(_qwen2_moe, _ATTENTION | _EXPERTS | _SHARED_EXPERT | _NORMS),
    "qwen3": Architecture(_qwen3, _ATTENTION | _QK_NORMS | _MLP | _NORMS),
    "qwen3moe": Architecture(_qwen3_moe, _ATTENTION | _QK_NORMS | _EXPERTS | _NORMS),
    "gemma2": Architecture(_gemma2, _ATTENTION | _MLP | _FOUR_NORMS, norm_offset=1.0),
    "gemma3": Architecture(_gemma3, _ATTENTION | _QK_NORMS | _MLP | _FOUR_NORMS, norm_offset=1.0),
    "phi3": Architecture(
        _phi3,
        {"attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj"}
        | {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
        | _NORMS,
    ),
}
