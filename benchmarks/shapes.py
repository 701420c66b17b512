"""Makes models of a given size: Llama decoders with random weights, written to disk once and removed after the run.

Speed depends on the shape, not on the values. The tokenizer and the vocabulary are those of another model.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from transformers import LlamaConfig

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
BITS = {"bf16": 16.0, "q8_0": 8.5, "q4_0": 4.5, "q4_k": 4.6, "q4_k_m": 4.9, "q6_k": 6.6}  # for each weight


@contextmanager
def written(name: str, folder: Path, tokenizer: Path) -> Iterator[Path]:
    """Yields the folder of a bf16 model of the shape; then removes it, and the files that peers made from it."""
    place = folder / "models" / f"llama-{name}"
    try:
        if not (place / "model.safetensors.index.json").is_file():
            _write(SHAPES[name], place, tokenizer)
        yield place
    finally:
        for made in folder.glob(f"*/llama-{name}*"):
            shutil.rmtree(made) if made.is_dir() else made.unlink()


def llama_config(shape: Shape, vocabulary: int, **more: Any) -> LlamaConfig:
    """Returns the config of a model of the shape in bf16, with further fields."""
    from transformers import LlamaConfig  # imported here, as the measuring process should not need its memory

    return LlamaConfig(
        vocab_size=vocabulary, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        max_position_embeddings=4096, tie_word_embeddings=shape.tied, dtype=torch.bfloat16,
        architectures=["LlamaForCausalLM"], **more,
    )  # fmt: skip


def _write(shape: Shape, place: Path, tokenizer: Path) -> None:
    """Writes one file for each layer, so that no more than one layer is in memory."""
    from accelerate import init_empty_weights
    from transformers import LlamaForCausalLM

    place.mkdir(parents=True, exist_ok=True)
    for file in _TOKENIZER:
        if (tokenizer / file).is_file():
            shutil.copy(tokenizer / file, place)
    base = json.loads((tokenizer / "config.json").read_text())
    ids = {name: base[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in base}
    config = llama_config(shape, base["vocab_size"], rope_theta=100000.0, **ids)
    config.save_pretrained(place)
    with init_empty_weights():
        sizes = {name: weight.shape for name, weight in LlamaForCausalLM(config).named_parameters()}
    if shape.tied:
        sizes.pop("lm_head.weight", None)
    generator = torch.Generator().manual_seed(0)
    head = "model.embed_tokens.weight" if shape.tied else "lm_head.weight"
    where, total = {}, 0
    for layer, names in groupby(sizes, lambda name: ".".join(name.split(".")[:3])):
        tensors = {name: _random(sizes[name], generator) for name in names}
        if head in tensors:
            tensors[head][_without_text(place, base["vocab_size"])] = 0
        save_file(tensors, str(place / f"{layer}.safetensors"), metadata={"format": "pt"})
        where.update(dict.fromkeys(tensors, f"{layer}.safetensors"))
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))


def _without_text(place: Path, vocabulary: int) -> torch.Tensor:
    """Returns the tokens that are not only letters. No answer gets them, because a token without text has no event."""
    without = torch.ones(vocabulary, dtype=torch.bool)
    tokens = Tokenizer.from_file(str(place / "tokenizer.json")).get_vocab().items()
    without[[number for text, number in tokens if re.fullmatch("[Ġ▁]?[A-Za-z]+", text)]] = False
    return without


def _random(size: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Returns random weights; those of norms (one dimension) are ones."""
    if len(size) == 1:
        return torch.ones(size, dtype=torch.bfloat16)
    return (torch.randn(size, generator=generator) * _SPREAD).to(torch.bfloat16)
