"""Writes a GGUF file of a random two-layer Llama with a byte-level tokenizer, in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import gguf
import numpy as np
from transformers.convert_slow_tokenizer import bytes_to_unicode

HIDDEN, LAYERS, HEADS, CONTEXT = 64, 2, 4, 128
TOKENS = ["<|start|>", "<|end|>", *bytes_to_unicode().values(), "Ġt", "he", "Ġthe"]
MERGES = ["Ġ t", "h e", "Ġt he"]


def write_tiny_gguf(
    path: Path,
    seed: int = 0,
    quantized: bool = True,
    kinds: Sequence[str] = ("Q8_0",),
    hidden: int = HIDDEN,
    layers: int = LAYERS,
) -> Path:
    """``kinds`` are the formats of the matrices, in turn.

    Formats named *_K need a ``hidden`` that is a multiple of 256.
    """
    random = np.random.default_rng(seed)
    turn = cycle(kinds if quantized else ("F32",))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(2 * hidden)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(hidden // HEADS)
    writer.add_vocab_size(len(TOKENS))
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if quantized else gguf.LlamaFileType.ALL_F32)
    add_tiny_tokenizer(writer)
    for name, shape in _shapes(hidden, layers).items():
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
            continue
        kind = gguf.GGMLQuantizationType[next(turn)]
        # Of standard deviation 0.2 at a width of 64, so that no format is left with logits that are all alike.
        tensor = (random.standard_normal(shape) * 1.6 / hidden**0.5).astype(np.float32)
        writer.add_tensor(name, blocks_of(tensor, kind, random), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def blocks_of(tensor: np.ndarray, kind: gguf.GGMLQuantizationType, random: np.random.Generator) -> np.ndarray:
    """Quantises the tensor. In a format that gguf only reads, makes up blocks of random codes with fitting scales."""
    try:
        return gguf.quantize(tensor, kind)
    except NotImplementedError:
        weights, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (tensor.size // weights, size), dtype=np.uint8)
    halves = {"Q3_K": (108,), "Q6_K": (208,)}.get(kind.name, (0, 2))
    for at in halves:
        blocks[:, at : at + 2] = np.full((len(blocks), 1), 1.0, np.float16).view(np.uint8)
    ratio = tensor.std() / gguf.dequantize(blocks, kind).std()
    for at, share in zip(halves, (1.0, 4.0), strict=False):  # the minima in the middle of the codes
        blocks[:, at : at + 2] = np.full((len(blocks), 1), ratio * share, np.float16).view(np.uint8)
    return blocks.reshape(len(tensor), -1)


def add_tiny_tokenizer(writer: gguf.GGUFWriter) -> None:
    """Adds a byte-level tokenizer with ``TOKENS``, and a chat template."""
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


def _shapes(hidden: int, layers: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(TOKENS), hidden),
        "output.weight": (len(TOKENS), hidden),
        "output_norm.weight": (hidden,),
    }
    for layer in range(layers):
        block = f"blk.{layer}"
        shapes |= {f"{block}.{name}.weight": (hidden, hidden) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
        shapes |= {f"{block}.{name}.weight": (2 * hidden, hidden) for name in ("ffn_gate", "ffn_up")}
        shapes |= {f"{block}.ffn_down.weight": (hidden, 2 * hidden)}
        shapes |= {f"{block}.{name}.weight": (hidden,) for name in ("attn_norm", "ffn_norm")}
    return shapes
