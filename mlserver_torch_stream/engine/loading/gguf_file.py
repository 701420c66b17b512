"""Reads a GGUF file's metadata and tensors, and records which of them a model uses.

A file with an unused key or tensor is refused, because ignoring it would change answers; the error names the key or
tensor. The module is imported only when a file is read: the package gguf takes 5 MB.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any, TypeVar

import gguf

from mlserver_torch_stream.errors import LoadFailed

T = TypeVar("T", bool, int, float, str)

# Keys of an architecture that change no result, whatever their value.
_HARMLESS = frozenset(("vocab_size", "rope.scaling.finetuned", "tensor_data_layout"))
# Values of keys that mean the same as the key's absence.
_NEUTRAL = {
    "attention.causal": True,
    "attention.sliding_window": 0,
    "attn_logit_softcapping": 0.0,
    "expert_count": 0,
    "expert_used_count": 0,
    "expert_weights_scale": 1.0,
    "final_logit_softcapping": 0.0,
    "pooling_type": 0,
}
# Formats that llama.cpp has removed, whose rows were interleaved for some CPUs.
_REMOVED = {31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"}


class GgufFile:
    """The header of a GGUF file. In its methods ``key`` is a key without the architecture's prefix."""

    def __init__(self, path: Path) -> None:
        """Raises LoadFailed for a part of a model or an unknown format, and gguf's own errors for a damaged header."""
        reader = _read(path)
        self._fields = reader.fields
        self.tensors: dict[str, gguf.ReaderTensor] = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture = self._text("general.architecture")
        prefix = f"{self.architecture}."
        self._keys = {name.removeprefix(prefix) for name in self._fields if name.startswith(prefix)}
        self._keys_left = self._keys - _HARMLESS
        self._tensors_left = set(self.tensors)
        if (kind := self._text("general.type", "model")) != "model":
            raise LoadFailed(f"general.type is {kind!r}, but must be 'model': the file does not contain a whole model")
        if (parts := self._contents("split.count") or 1) != 1:
            raise LoadFailed(
                f"split.count is {parts}: merge the {parts} parts into one file (llama-gguf-split --merge)"
            )

    def take(self, key: str, kind: type[T]) -> T | None:
        """Returns the value of a key; None if it is absent.

        A list that has the same value for each layer counts as that value. Raises LoadFailed if the value is of another
        type, negative, infinite or NaN.
        """
        if key not in self._keys:
            return None
        self._keys_left.discard(key)
        value = self._contents(f"{self.architecture}.{key}")
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        whole = isinstance(value, int) and not isinstance(value, bool)
        if whole if kind is int else (whole or isinstance(value, float)) if kind is float else isinstance(value, kind):
            if kind in (int, float) and not 0 <= value < math.inf:
                raise self.refused(key, f"is {value}, but must be finite and not negative")
            return kind(value)
        raise self.refused(key, f"is {str(value)[:80]}, but must be a single {kind.__name__}")

    def need(self, key: str, kind: type[T]) -> T:
        """Returns the value of a key. Raises LoadFailed if the key is absent or has another type."""
        value = self.take(key, kind)
        if value is None:
            raise self.refused(key, "is missing")
        return value

    def flags(self, key: str) -> list[bool] | None:
        """Returns a list of booleans, one for each layer; None if the key is absent or has another type."""
        value = self._contents(f"{self.architecture}.{key}") if key in self._keys else None
        if not isinstance(value, list) or not all(isinstance(flag, bool) for flag in value):
            return None
        self._keys_left.discard(key)
        return value

    def token_id(self, role: str) -> int | None:
        """Returns the id of a special token, such as ``eos``. Raises LoadFailed if no token has this id."""
        name = f"tokenizer.ggml.{role}_token_id"
        value = self._contents(name)
        tokens = self.shape("token_embd.weight")[0]
        if value is None or (isinstance(value, int) and 0 <= value < tokens):
            return value
        raise LoadFailed(f"the key {name} is {str(value)[:80]}, which is not one of the file's {tokens:,} token ids")

    def control_tokens(self, texts: Container[str]) -> list[int]:
        """Returns the ids of the control tokens that are written as one of ``texts``."""
        tokens, kinds = (self._contents(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
        if not isinstance(tokens, list) or not isinstance(kinds, list):
            return []
        ids = range(self.shape("token_embd.weight")[0])
        known = zip(ids, tokens, kinds, strict=False)
        return [number for number, token, kind in known if kind == gguf.TokenType.CONTROL and token in texts]

    def tensor(self, name: str) -> gguf.ReaderTensor | None:
        """Returns a tensor and marks it as used; None if the file does not have it."""
        self._tensors_left.discard(name)
        return self.tensors.get(name)

    def vector(self, name: str) -> list[float] | None:
        """Returns the values of a tensor of one dimension; None if the file does not have it."""
        tensor = self.tensor(name)
        if tensor is None:
            return None
        return [float(value) for value in gguf.dequantize(tensor.data, tensor.tensor_type).reshape(-1)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor in torch's order. Raises LoadFailed if the tensor is missing."""
        if name not in self.tensors:
            raise LoadFailed(f"the file lacks the tensor {name}")
        return shape_of(self.tensors[name])

    def mark_taken(self, names: Iterable[str], tensors: Iterable[str]) -> None:
        """Marks keys and tensors as used. ``names`` are whole keys, with their prefix."""
        self._keys_left -= {name.removeprefix(f"{self.architecture}.") for name in names}
        self._tensors_left -= set(tensors)

    def check_all_taken(self) -> None:
        """Raises LoadFailed if a key or tensor was not used; the error names the first of them."""
        left = (key for key in sorted(self._keys_left) if key not in _NEUTRAL or self._value(key) != _NEUTRAL[key])
        if (key := next(left, None)) is not None:
            raise self.refused(key, f"is {str(self._value(key))[:80]}, which is not supported here")
        if self._tensors_left:
            name, more = min(self._tensors_left), len(self._tensors_left) - 1
            also = f" (and {more} more)" if more else ""
            raise LoadFailed(f"the tensor {name}{also} is not supported here for the architecture {self.architecture}")

    def refused(self, key: str, why: str) -> LoadFailed:
        """Returns the error for a key of this architecture whose value is not supported."""
        return LoadFailed(f"the key {self.architecture}.{key} {why}")

    def _value(self, key: str) -> Any:
        return self._contents(f"{self.architecture}.{key}")

    def _contents(self, name: str) -> Any:
        field = self._fields.get(name)
        return None if field is None else field.contents()

    def _text(self, name: str, default: str | None = None) -> str:
        value = self._contents(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise LoadFailed(f"the key {name} is missing, or is not a string")
        return value


class BoundedReader(gguf.GGUFReader):  # type: ignore[misc]
    """Raises ValueError if a value of the header begins behind the end of the file.

    gguf itself would read empty values there, as many as the header says, until no memory is left.
    """

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if orig_offs >= len(self.data):
            raise ValueError("the header goes on behind the end of the file")
        return super()._get_field_parts(orig_offs, raw_type)


def _read(path: Path) -> gguf.GGUFReader:
    try:
        reader = gguf.GGUFReader(str(path))
    except ValueError as error:
        kind = re.search(r"(\d+)\)? is not a valid GGMLQuantizationType", str(error))
        if kind is None:
            raise
        number = int(kind[1])
        name = _REMOVED.get(number, f"the format with the number {number}")
        raise LoadFailed(
            f"it has tensors in {name}, which is not supported; use a file of the model in another format, such as Q4_0"
        ) from error
    if reader.byte_order != "I":
        raise LoadFailed(f"its numbers have the byte order of other machines; run 'gguf-convert-endian {path} native'")
    return reader


def shape_of(tensor: gguf.ReaderTensor) -> tuple[int, ...]:
    """Returns the shape in torch's order; a GGUF file lists the sizes in reverse."""
    return tuple(int(size) for size in reversed(tensor.shape))
