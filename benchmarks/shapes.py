"""Models of a size: decoders of Llama's form with random weights, written to disk once and removed after the run.

Speed depends on the shape, not on the values. The tokenizer is that of another model, whose tokens the head has.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

_SPREAD = 0.02
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt")


@dataclass(frozen=True)
class Shape:
    """The sizes of a dense decoder with grouped keys."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    tied: bool = True

    def parameters(self, vocabulary: int) -> int:
        keys = self.hidden // self.heads * self.kv_heads
        layer = 2 * self.hidden * (self.hidden + keys) + 3 * self.hidden * self.intermediate
        return self.layers * layer + (1 if self.tied else 2) * vocabulary * self.hidden


SHAPES = {
    "0.1B": Shape(576, 1536, 12, 9, 3),
    "0.5B": Shape(1024, 4096, 28, 16, 8),
    "1.1B": Shape(2048, 8192, 16, 32, 8),
    "1.5B": Shape(2048, 8192, 23, 32, 8),
    "3B": Shape(3072, 8192, 28, 24, 8),
    "8B": Shape(4096, 14336, 32, 32, 8, tied=False),
}
BITS = {"bf16": 16.0, "q8_0": 8.5, "q4_0": 4.5, "q4_k": 4.6}  # of a weight, in each format


@contextmanager
def written(name: str, folder: Path, tokenizer: Path) -> Iterator[Path]:
    """The folder of a model of the shape in bf16, below ``folder``; it and what peers made of it are removed after."""
    place = folder / "models" / f"llama-{name}"
    try:
        if not (place / "model.safetensors.index.json").is_file():
            _write(SHAPES[name], place, tokenizer)
        yield place
    finally:
        for made in folder.glob(f"*/llama-{name}*"):
            shutil.rmtree(made) if made.is_dir() else made.unlink()


def _write(shape: Shape, place: Path, tokenizer: Path) -> None:
    """One file for each layer: no more than one is in memory."""
    place.mkdir(parents=True, exist_ok=True)
    for file in _TOKENIZER:
        if (tokenizer / file).is_file():
            shutil.copy(tokenizer / file, place)
    base = json.loads((tokenizer / "config.json").read_text())
    names = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
    config = {
        **{name: base[name] for name in names if name in base},
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate, "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.hidden // shape.heads, "hidden_act": "silu",
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 100000.0,
        "tie_word_embeddings": shape.tied, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (place / "config.json").write_text(json.dumps(config, indent=1))
    generator = torch.Generator().manual_seed(0)
    where, total, hidden = {}, 0, shape.hidden
    keys = hidden // shape.heads * shape.kv_heads
    parts = [{"model.embed_tokens.weight": (base["vocab_size"], hidden), "model.norm.weight": (hidden,)}]
    parts += [_layer(f"model.layers.{index}.", shape, keys) for index in range(shape.layers)]
    if not shape.tied:
        parts.append({"lm_head.weight": (base["vocab_size"], hidden)})
    for number, sizes in enumerate(parts):
        file = f"model-{number:05}.safetensors"
        tensors = {name: _random(size, generator) for name, size in sizes.items()}
        if (head := "model.embed_tokens.weight" if shape.tied else "lm_head.weight") in tensors:
            tensors[head][_without_text(place, base["vocab_size"])] = 0
        save_file(tensors, str(place / file), metadata={"format": "pt"})
        where.update(dict.fromkeys(tensors, file))
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))


def _without_text(place: Path, vocabulary: int) -> torch.Tensor:
    """The tokens that are not letters alone. No answer has them: servers send no event for a token without text."""
    without = torch.ones(vocabulary, dtype=torch.bool)
    tokens = Tokenizer.from_file(str(place / "tokenizer.json")).get_vocab().items()
    without[[number for text, number in tokens if re.fullmatch("[Ġ▁]?[A-Za-z]+", text)]] = False
    return without


def _layer(prefix: str, shape: Shape, keys: int) -> dict[str, tuple[int, ...]]:
    hidden, middle = shape.hidden, shape.intermediate
    sizes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (middle, hidden), "mlp.up_proj": (middle, hidden),
        "mlp.down_proj": (hidden, middle),
    }  # fmt: skip
    return {f"{prefix}{name}.weight": size for name, size in sizes.items()}


def _random(size: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Norms are ones."""
    if len(size) == 1:
        return torch.ones(size, dtype=torch.bfloat16)
    return (torch.randn(size, generator=generator) * _SPREAD).to(torch.bfloat16)
