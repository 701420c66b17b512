"""Finds the bytes of each token of a tokenizer. Replies with log-probabilities contain these bytes.

If ``TokenBytes.join_to_text`` is true, the joined bytes of an answer's tokens are the answer's text. Other tokenizers
may drop a leading space or replace bytes when they decode several tokens.
"""

from __future__ import annotations

import json
import re
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how tokenizers with byte fallback write one byte
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece writes a space


class TokenBytes:
    """Finds the bytes of tokens, and looks up each token only once. An id without a token has no bytes.

    ``byte_level`` means that the tokenizer writes bytes in GPT-2's alphabet. ``join_to_text`` means that the
    tokenizer's only decoder is ByteLevel: the text of ids is their bytes, concatenated and decoded as UTF-8.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._added: dict[int, Any] = tokenizer.added_tokens_decoder
        decoders, of = _decoders(tokenizer), type(tokenizer)
        self.byte_level = "ByteLevel" in decoders
        overrides = of.decode is not PreTrainedTokenizerBase.decode or of._decode is not PreTrainedTokenizerFast._decode
        self.join_to_text = decoders == ["ByteLevel"] and not overrides
        self._known: dict[int, bytes] = {}

    def of(self, token_id: int) -> bytes:
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._look_up(token_id)
        return found

    def _look_up(self, token_id: int) -> bytes:
        if token_id in self._added and not self.join_to_text:
            return str(self._added[token_id].content).encode()
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        token = str(token)
        if self.byte_level and all(char in _BYTE_LEVEL for char in token):
            return bytes(_BYTE_LEVEL[char] for char in token)
        if self.join_to_text:
            return token.encode()
        byte = _BYTE.fullmatch(token)
        if byte is not None:
            return bytes.fromhex(byte[1])
        if _SPACE in token:
            return token.replace(_SPACE, " ").encode()
        return str(self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)).encode()


def _decoders(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Returns the types of the decoders that a fast tokenizer applies."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = None if backend is None else backend.decoder
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    return [part["type"] for part in state.get("decoders", [state])]


def _byte_level_alphabet() -> dict[str, int]:
    """Returns GPT-2's alphabet.

    A printable Latin-1 character stands for its own byte. The other bytes are represented by characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}


_BYTE_LEVEL = _byte_level_alphabet()
