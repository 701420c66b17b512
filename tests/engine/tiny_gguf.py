"""A GGUF file of a random two-layer Llama with a byte-level tokenizer, written in milliseconds."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from transformers.convert_slow_tokenizer import bytes_to_unicode

HIDDEN, LAYERS, HEADS, CONTEXT = 64, 2, 4, 128
TOKENS = ["<|start|>", "<|end|>", *bytes_to_unicode().values(), "Ġt", "he", "Ġthe"]
MERGES = ["Ġ t", "h e", "Ġt he"]


def write_tiny_gguf(path: Path, seed: int = 0, quantized: bool = True) -> Path:
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(2 * HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(TOKENS))
    kind = gguf.GGMLQuantizationType.Q8_0 if quantized else gguf.GGMLQuantizationType.F32
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if quantized else gguf.LlamaFileType.ALL_F32)
    _add_tokenizer(writer)
    for name, shape in _shapes().items():
        tensor = np.ones(shape) if name.endswith("norm.weight") else random.standard_normal(shape) * 0.2
        if len(shape) == 1:
            writer.add_tensor(name, tensor.astype(np.float32))
        else:
            writer.add_tensor(name, gguf.quantize(tensor.astype(np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control, control, *[normal] * (len(TOKENS) - 2)])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(1)
    writer.add_chat_template("{% for message in messages %}<|start|>{{ message['content'] }}<|end|>{% endfor %}")


def _shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(TOKENS), HIDDEN),
        "output.weight": (len(TOKENS), HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        shapes |= {f"{block}.{name}.weight": (HIDDEN, HIDDEN) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
        shapes |= {f"{block}.{name}.weight": (2 * HIDDEN, HIDDEN) for name in ("ffn_gate", "ffn_up")}
        shapes |= {f"{block}.ffn_down.weight": (HIDDEN, 2 * HIDDEN)}
        shapes |= {f"{block}.{name}.weight": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
    return shapes
