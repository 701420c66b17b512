"""Every token has the bytes that it adds to a text, even if they are only a part of a character."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from mlserver_torch_stream.engine.text.tokenizer import TextCodec
from mlserver_torch_stream.types import TextPrompt
from tests.engine.tiny_tokenizers import SENTENCES, byte_fallback, byte_level, word_piece

_BYTE_LEVEL, _BYTE_FALLBACK = TextCodec(byte_level()), TextCodec(byte_fallback())


@pytest.mark.parametrize("text", SENTENCES)
def test_bytes_join_to_the_text(text: str) -> None:
    for codec, leading in ((_BYTE_LEVEL, ""), (_BYTE_FALLBACK, "<s> ")):
        ids = codec.encode(TextPrompt(text))
        assert b"".join(map(codec.token_bytes, ids)).decode() == leading + text


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(2, _BYTE_LEVEL.vocab_size - 1), min_size=1, max_size=8))
def test_any_tokens_join_to_their_decode(ids: list[int]) -> None:
    joined = b"".join(map(_BYTE_LEVEL.token_bytes, ids))
    assert joined.decode(errors="replace") == _BYTE_LEVEL.decode(ids, skip_special_tokens=False)


def test_a_part_of_a_character_is_its_bytes() -> None:
    codec = _BYTE_FALLBACK
    assert [codec.token_bytes(token_id) for token_id in codec.encode(TextPrompt("🙂"))[-4:]] == [
        bytes([byte]) for byte in "🙂".encode()
    ]


@pytest.mark.parametrize("build", [byte_level, byte_fallback, word_piece])
def test_special_tokens_have_their_names_and_unknown_ids_nothing(build: Callable[[], PreTrainedTokenizerBase]) -> None:
    tokenizer = build()
    codec = TextCodec(tokenizer)
    assert codec.token_bytes(tokenizer.eos_token_id).decode() == tokenizer.eos_token
    assert codec.token_bytes(codec.vocab_size + 7) == b""
    assert all(codec.token_bytes(token_id) for token_id in range(codec.vocab_size))
