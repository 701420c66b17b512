"""Builds OpenAI's text_completion objects, or whichever object answers a request.

Knows nothing of transports or tokenizers: a token whose bytes are unknown is named ``token_id:<id>``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from mlserver_torch_stream.protocol.chat_completion import (
    ChatChoice,
    ChatCompletion,
    CompletionBuilder,
    TokenCounts,
    alternatives,
    finite,
    reason_of,
    token_name,
    usage_of,
)
from mlserver_torch_stream.types import TokenLogprob


def completion(chat: bool, model: str, choices: Sequence[ChatChoice], counts: TokenCounts) -> dict[str, Any]:
    """The object of an answer without its id, its time and the number of cached tokens."""
    whole = (ChatCompletion if chat else TextCompletion)("", model, 0).whole(choices, counts)
    whole["usage"].pop("prompt_tokens_details", None)
    return whole


class TextCompletion(CompletionBuilder):
    id_prefix = "cmpl"
    chunk_kind = "text_completion"  # also of the whole answer

    def whole(self, choices: Sequence[ChatChoice], counts: TokenCounts) -> dict[str, Any]:
        answers = [_choice(choice, 0) for choice in choices]
        return {**self._head(self.chunk_kind), "choices": answers, "usage": usage_of(counts)}

    def chunk(self, choice: ChatChoice, offset: int) -> dict[str, Any]:
        """``offset``: characters of the tokens that earlier chunks of the choice have shown."""
        return {**self._head(self.chunk_kind), "choices": [_choice(choice, offset)]}


def shown_length(entries: Sequence[TokenLogprob]) -> int:
    """The number of characters of these tokens, which ``text_offset`` counts."""
    return sum(len(_name(entry)) for entry in entries)


def _choice(choice: ChatChoice, offset: int) -> dict[str, Any]:
    return {
        "index": choice.index,
        "text": choice.text,
        "logprobs": None if choice.logprobs is None else _logprobs(choice.logprobs, offset),
        "finish_reason": reason_of(choice),
    }


def _logprobs(entries: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    tokens = [_name(entry) for entry in entries]
    ends = accumulate(map(len, tokens), initial=offset)
    return {
        "tokens": tokens,
        "token_logprobs": [finite(entry.logprob) for entry in entries],
        "top_logprobs": [dict(_top(entry)) for entry in entries] if any(entry.top for entry in entries) else None,
        "text_offset": [start for start, _ in zip(ends, tokens, strict=False)],
    }


def _top(entry: TokenLogprob) -> Iterator[tuple[str, float]]:
    """The alternatives and, as OpenAI has it, the chosen token, which may be none of them."""
    for token_id, logprob, token in alternatives(entry):
        yield token_name(token_id, token), finite(logprob)
    yield _name(entry), finite(entry.logprob)


def _name(entry: TokenLogprob) -> str:
    return token_name(entry.token_id, entry.token)
