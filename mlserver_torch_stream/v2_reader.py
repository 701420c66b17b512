"""Reads a V2 reply in JSON, a unary one or one event of a stream: what each sequence got, and whether it is the last.

Knows nothing of HTTP and nothing of requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SequenceReply:
    """What one reply says about one sequence. None: the reply does not say."""

    index: int
    text: str | None = None
    finish_reason: str | None = None
    logprobs: str | None = None  # JSON: a list of {"token_id", "logprob", "top"}
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ServerReply:
    """``sequences``: at least one; ``final``: the stream's last event; ``error``: the error of a failed generation."""

    sequences: tuple[SequenceReply, ...]
    final: bool
    error: Any = None


def read_reply(body: Mapping[str, Any]) -> ServerReply:
    """A body that is no V2 reply raises KeyError, TypeError, ValueError or AttributeError."""
    parameters = body.get("parameters") or {}
    tensors = {tensor["name"]: tensor["data"] for tensor in body.get("outputs", ())}
    first = int(parameters.get("index", 0))
    names = ("text_output", "finish_reason", "logprobs", "num_input_tokens", "num_output_tokens")
    columns = [tensors.get(name) or () for name in names]
    count = max(1, *map(len, columns))
    rows = ((column[place] if place < len(column) else None for column in columns) for place in range(count))
    sequences = tuple(
        SequenceReply(first + place, text, reason or None, *rest) for place, (text, reason, *rest) in enumerate(rows)
    )
    error = body.get("error") or parameters.get("error") or None
    return ServerReply(sequences, bool(parameters.get("triton_final_response", False)), error)
