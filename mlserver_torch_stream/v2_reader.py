"""Reads a V2 reply in JSON, either a whole reply or one event of a stream: the part of each sequence, and the final
flag.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlserver_torch_stream.tool_calls import ToolCallDelta, calls_of
from mlserver_torch_stream.types import TokenLogprob

_ONE_ELEMENT_EACH = {  # the output's name -> the field
    "text_output": "text",
    "reasoning": "reasoning",
    "finish_reason": "finish_reason",
    "num_input_tokens": "num_input_tokens",
    "num_output_tokens": "num_output_tokens",
    "cumulative_logprob": "cumulative_logprob",
}


@dataclass(frozen=True, slots=True)
class SequenceReply:
    """The part of one sequence in a reply. None means that the reply does not have the value."""

    index: int
    text: str | None = None
    finish_reason: str | None = None
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None
    cumulative_logprob: float | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    token_ids: tuple[int, ...] = ()
    reasoning: str | None = None
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerReply:
    """One reply, or one event of a stream.

    ``sequences`` has at least one entry; ``final`` marks the stream's last event; ``error`` is the error of a failed
    generation. The counts are those of the whole request; None means that the reply does not have them.
    """

    sequences: tuple[SequenceReply, ...]
    final: bool
    error: Any = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


def read_reply(body: Mapping[str, Any]) -> ServerReply:
    """Returns the reply in a decoded JSON body.

    Raises KeyError, TypeError, ValueError or AttributeError if the body is not a V2 reply.
    """
    parameters = body.get("parameters") or {}
    tensors = {tensor["name"]: tensor for tensor in body.get("outputs", ())}
    columns: dict[str, list[Any]] = {
        field: tensors[name]["data"] for name, field in _ONE_ELEMENT_EACH.items() if name in tensors
    }
    if "finish_reason" in columns:
        columns["finish_reason"] = [reason or None for reason in columns["finish_reason"]]
    if "token_ids" in tensors:
        columns["token_ids"] = _ids_of_each(tensors["token_ids"])
    if "tool_calls" in tensors:
        columns["tool_calls"] = [calls_of(json.loads(text)) for text in tensors["tool_calls"]["data"]]
    if "logprobs" in tensors:
        columns["logprobs"] = [_logprobs(text) for text in tensors["logprobs"]["data"]]
    first = int(parameters.get("index", 0))
    count = max((len(column) for column in columns.values()), default=0) or 1
    sequences = (
        SequenceReply(
            first + place, **{field: column[place] for field, column in columns.items() if place < len(column)}
        )
        for place in range(count)
    )
    return ServerReply(
        tuple(sequences),
        bool(parameters.get("triton_final_response", False)),
        body.get("error") or parameters.get("error") or None,
        parameters.get("usage_prompt_tokens"),
        parameters.get("usage_completion_tokens"),
    )


def _ids_of_each(tensor: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """Returns the ids of each sequence; with several sequences, rows are padded with -1."""
    data, shape = tensor["data"], tensor["shape"]
    width = max(1, shape[-1])
    return [
        tuple(token_id for token_id in data[start : start + width] if token_id >= 0)
        for start in range(0, len(data), width)
    ]


def _logprobs(text: str) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(entry["token_id"], entry["logprob"], tuple((token_id, value) for token_id, value in entry["top"]))
        for entry in json.loads(text)
    )
