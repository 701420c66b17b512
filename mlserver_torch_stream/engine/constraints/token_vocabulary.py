"""Gives llguidance the vocabulary of a tokenizer: the bytes of each token, and the ids of a text.

Knows nothing of constraints. From a ``tokenizer.json`` llguidance makes a second tokenizer of its own, which takes 17
MB for 49,000 tokens; here it calls the model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from mlserver_torch_stream.engine.text.token_bytes import TokenBytes

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class TokenVocabulary:
    """What ``llguidance.TokenizerWrapper`` asks of a tokenizer. It may be called from several threads."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, token_bytes: TokenBytes) -> None:
        self._backend = tokenizer.backend_tokenizer
        size = self._backend.get_vocab_size(with_added_tokens=True)
        self.tokens: Sequence[bytes] = [token_bytes.of(token_id) for token_id in range(size)]
        added = tokenizer.added_tokens_decoder.items()
        self.special_token_ids = [token_id for token_id, token in added if _is_special(token)]
        self.eos_token_id = tokenizer.eos_token_id
        self.bos_token_id = tokenizer.bos_token_id

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids


def _is_special(token: Any) -> bool:
    """Whether text cannot contain it for llguidance: a ``</think>`` cannot, whether or not it is marked as special."""
    content = str(token.content)
    return bool(token.special) or (content.startswith("<") and content.endswith(">"))


def read_vocabulary(tokenizer: PreTrainedTokenizerBase) -> LLTokenizer:
    """Reads a fast tokenizer that neither pads nor truncates. Raises ValueError for kinds unknown to llguidance.

    A tokenizer with a normalizer is copied: llguidance leaves the normalizers that add text out of its copy.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    token_bytes = TokenBytes(tokenizer)
    normalizes = tokenizer.backend_tokenizer.normalizer is not None
    if not token_bytes.byte_level or normalizes or tokenizer.eos_token_id is None:
        return LLTokenizer(tokenizer.backend_tokenizer.to_str(), eos_token=tokenizer.eos_token_id)
    vocabulary = TokenVocabulary(tokenizer, token_bytes)
    wrapper = TokenizerWrapper(vocabulary)
    read = LLTokenizer(wrapper, eos_token=tokenizer.eos_token_id)
    wrapper.tokens = vocabulary.tokens = ()  # llguidance has copied them
    return read
