"""llguidance gets the same vocabulary from the model's tokenizer as from a copy of that tokenizer."""

from __future__ import annotations

import pytest
from llguidance import LLTokenizer
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast

from mlserver_torch_stream.engine.constraints.constraint_compiler import read_vocabulary
from tests.engine.tiny_tokenizers import SENTENCES, byte_fallback, byte_level

_TEXTS = (*SENTENCES, "", "</s>", "a</s> b", '{"name": "', "\xa0\x00", "x" * 50)
_BYTES = (b"\xff", b"a\xe2\x82", b"\xf0\x9f\x99", b"\x80abc")


def _with_added_tokens() -> PreTrainedTokenizerFast:
    tokenizer = byte_level(bos=True)
    tokenizer.add_tokens(["<call>", " spaced", "</think>", "<x", "[INST]"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    return tokenizer


def _with_normalizer() -> PreTrainedTokenizerFast:
    tokenizer = byte_level()
    prepend, lower = normalizers.Prepend("x"), normalizers.Lowercase()
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([prepend, lower])  # type: ignore[assignment]
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, _with_added_tokens, _with_normalizer, byte_fallback])
def test_tokens_and_ids_are_those_of_a_copy(make: type[PreTrainedTokenizerFast]) -> None:
    tokenizer = make()
    read = read_vocabulary(tokenizer)
    copy = LLTokenizer(tokenizer.backend_tokenizer.to_str(), eos_token=tokenizer.eos_token_id)
    assert (read.vocab_size, read.eos_tokens) == (copy.vocab_size, copy.eos_tokens)
    for token_id in range(copy.vocab_size):
        assert read.decode_bytes([token_id]) == copy.decode_bytes([token_id])
        assert read.is_special_token(token_id) == copy.is_special_token(token_id)
    for text in (*_TEXTS, "<call>x", "a spaced", "b<|turn|>c", "</think> <x [INST]"):
        for special in (False, True):
            assert read.tokenize_str(text, parse_special=special) == copy.tokenize_str(text, parse_special=special)
    for raw in _BYTES:
        assert read.tokenize_bytes(raw) == copy.tokenize_bytes(raw)
