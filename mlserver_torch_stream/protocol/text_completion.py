"""Builds OpenAI's text_completion object, or whichever object answers a request.

Knows nothing of how it travels, and no tokenizer: a token is named ``token_id:<id>``, and there is no ``text_offset``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlserver_torch_stream.protocol.chat_completion import (
    ChatChoice,
    ChatCompletion,
    TokenCounts,
    finite,
    reason_of,
    token_name,
    usage_of,
)
from mlserver_torch_stream.types import TokenLogprob


def completion(chat: bool, model: str, choices: Sequence[ChatChoice], counts: TokenCounts) -> dict[str, Any]:
    """The object of an answer that has no id and no time yet."""
    if chat:
        return ChatCompletion("", model, 0).whole(choices, counts)
    return text_completion("", model, 0, choices, counts)


def text_completion(
    request_id: str, model: str, created: int, choices: Sequence[ChatChoice], counts: TokenCounts
) -> dict[str, Any]:
    """``created`` is in seconds since the epoch."""
    return {
        "id": f"cmpl-{request_id}",
        "object": "text_completion",
        "created": created,
        "model": model,
        "choices": [
            {
                "index": choice.index,
                "text": choice.text,
                "logprobs": None if choice.logprobs is None else _logprobs(choice.logprobs),
                "finish_reason": reason_of(choice),
            }
            for choice in choices
        ],
        "usage": usage_of(counts),
    }


def _logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {
        "tokens": [token_name(entry.token_id) for entry in entries],
        "token_logprobs": [finite(entry.logprob) for entry in entries],
        "top_logprobs": [{token_name(token): finite(logprob) for token, logprob in entry.top} for entry in entries],
    }
