"""Builds OpenAI's chat.completion and chat.completion.chunk objects.

Knows nothing of how they travel, and no tokenizer: a token is named ``token_id:<id>``, as vLLM can do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mlserver_torch_stream.types import FinishReason, TokenLogprob


class TokenCounts(Protocol):
    """How many tokens a request has used."""

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def completion_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ChatChoice:
    """One sequence's answer, or a part of it. A finish reason that is no FinishReason is another server's."""

    index: int
    text: str
    finish_reason: FinishReason | str | None
    logprobs: Sequence[TokenLogprob] | None = None  # None: not asked for


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """What all the objects of one request have in common. ``created`` is in seconds since the epoch."""

    request_id: str
    model: str
    created: int

    def whole(self, choices: Sequence[ChatChoice], tally: TokenCounts) -> dict[str, Any]:
        return {
            **self._head("chat.completion"),
            "choices": [
                _choice(choice, "message", {"role": "assistant", "content": choice.text}) for choice in choices
            ],
            "usage": usage_of(tally),
        }

    def chunk(self, choice: ChatChoice, *, first: bool, usage: TokenCounts | None) -> dict[str, Any]:
        """``first``: the choice's first chunk; ``usage``: given on the request's last."""
        delta = _message(choice) if first else {"content": choice.text}
        head = {**self._head("chat.completion.chunk"), "choices": [_choice(choice, "delta", delta)]}
        return head if usage is None else {**head, "usage": usage_of(usage)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self.request_id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
        }


def _message(choice: ChatChoice) -> dict[str, str]:
    return {"role": "assistant", "content": choice.text}


def _choice(choice: ChatChoice, key: str, value: dict[str, str]) -> dict[str, Any]:
    return {
        "index": choice.index,
        key: value,
        "logprobs": None if choice.logprobs is None else {"content": [_logprob(entry) for entry in choice.logprobs]},
        "finish_reason": reason_of(choice),
    }


def _logprob(entry: TokenLogprob) -> dict[str, Any]:
    top = [_named(token_id, logprob) for token_id, logprob in entry.top]
    return {**_named(entry.token_id, entry.logprob), "top_logprobs": top}


def reason_of(choice: ChatChoice) -> str | None:
    reason = choice.finish_reason
    return reason.value if isinstance(reason, FinishReason) else reason


def token_name(token_id: int) -> str:
    return f"token_id:{token_id}"


def _named(token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": token_name(token_id), "logprob": finite(logprob), "bytes": None}


def finite(logprob: float) -> float:
    """A log-probability that JSON can carry: OpenAI writes -9999.0 for impossible tokens."""
    return logprob if math.isfinite(logprob) else -9999.0


def usage_of(tally: TokenCounts) -> dict[str, int]:
    return {
        "prompt_tokens": tally.prompt_tokens,
        "completion_tokens": tally.completion_tokens,
        "total_tokens": tally.prompt_tokens + tally.completion_tokens,
    }
