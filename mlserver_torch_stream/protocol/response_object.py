"""Builds the response object of OpenAI's Responses API: parameters of the request, the output, and the usage.

Knows nothing of how the output was generated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlserver_torch_stream.protocol.chat_completion import TokenCounts
from mlserver_torch_stream.protocol.spelling import JsonObject

# The parameters of its request that a response repeats, with the values for those that the request does not give.
_REPEATED: Mapping[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": None,
}
_FIXED: Mapping[str, Any] = {
    "background": False,
    "max_tool_calls": None,
    "previous_response_id": None,
    "service_tier": "default",
    "store": False,
    "truncation": "disabled",
}


def repeated_values(body: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a body that its response repeats."""
    return {key: body[key] if body.get(key) is not None else default for key, default in _REPEATED.items()}


@dataclass(frozen=True, slots=True)
class ResponseObject:
    """The values that all states of one response have in common. ``created`` is in seconds since the epoch."""

    request_id: str
    model: str
    created: int
    repeated: Mapping[str, Any]

    def state(
        self,
        status: str,
        output: Sequence[JsonObject] = (),
        *,
        usage: TokenCounts | None = None,
        incomplete: str | None = None,
        error: Mapping[str, Any] | None = None,
    ) -> JsonObject:
        """``usage`` None: the answer has not ended. ``incomplete``: the reason why it is not complete."""
        return {
            "id": f"resp_{self.request_id}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": error,
            "incomplete_details": None if incomplete is None else {"reason": incomplete},
            "model": self.model,
            "output": list(output),
            **self.repeated,
            **_FIXED,
            "usage": None if usage is None else response_usage(usage),
        }


def response_usage(counts: TokenCounts) -> JsonObject:
    """``cache_write_tokens`` is there for the SDK, whose type needs it: nothing is charged for writing."""
    return {
        "input_tokens": counts.prompt_tokens,
        "input_tokens_details": {"cached_tokens": counts.cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": counts.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning_tokens},
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
    }
