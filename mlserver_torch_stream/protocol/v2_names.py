"""The names of V2's tensors and headers, and of the parallel tensors in which Seldon Core 2 sends a conversation.

TorchServe's sequence headers become V2 parameters; environment variables may change the headers' names. Seldon's tensor
``role`` has one element for each message. If there is one message, each element of the other tensors is one of its
parts. If there are several, each element is a JSON list of one message's parts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol.chat import check_messages
from mlserver_torch_stream.protocol.parameters import TENSORS
from mlserver_torch_stream.protocol.values import named, parse_json, shown

MESSAGE_TENSORS = ("role", "content", "type", "tool_calls", "tool_call_id")

Columns = Mapping[str, Sequence[str]]


def read_messages(columns: Columns, most: int) -> tuple[Mapping[str, Any], ...]:
    """Returns the conversation in Seldon's tensors. Raises InvalidInput.

    ``columns`` holds the elements of the MESSAGE_TENSORS that were sent, by name; ``role`` is required. ``most`` bounds
    the number of messages and parts.
    """
    roles = columns.get("role", ())
    if not roles:
        raise InvalidInput("role", f"is needed in addition to {', '.join(columns)}")
    if len(roles) == 1:
        rows: list[Columns] = [{name: columns.get(name, ()) for name in MESSAGE_TENSORS}]
    else:
        rows = _each_message(columns, len(roles))
    return check_messages("role", [_message(role, row) for role, row in zip(roles, rows, strict=True)], most)


def _each_message(columns: Columns, count: int) -> list[Columns]:
    for name, elements in columns.items():
        if len(elements) != count:
            raise InvalidInput(name, f"has {len(elements)} elements for {count} messages")
    return [{name: _cell(columns, name, row) for name in MESSAGE_TENSORS} for row in range(count)]


def _cell(columns: Columns, name: str, row: int) -> list[str]:
    """Returns one message's part of a tensor; the translator writes an empty list as an empty string."""
    if name not in columns or columns[name][row] == "":
        return []
    text = columns[name][row]
    plain_content = name == "content" and "type" in columns and columns["type"][row] == "text"
    if name in ("role", "tool_call_id") or plain_content or (name == "type" and text == "text"):
        return [text]
    parts = named(name, parse_json, text)
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise InvalidInput(name, f"element {row} must be a JSON list of strings, got {shown(text)}")
    return parts


def _message(role: str, row: Columns) -> dict[str, Any]:
    for kind in row["type"]:
        if kind not in ("text", ""):
            raise InvalidInput("type", f"{shown(kind)} is not implemented; only text is")
    if row["type"] and row["content"] and len(row["type"]) != len(row["content"]):
        raise InvalidInput("type", f"names {len(row['type'])} parts, but content has {len(row['content'])}")
    message: dict[str, Any] = {"role": role, "content": "".join(row["content"])}
    if row["tool_calls"]:
        message["tool_calls"] = [named("tool_calls", parse_json, call) for call in row["tool_calls"]]
    if row["tool_call_id"]:
        message["tool_call_id"] = row["tool_call_id"][0]
    return message


TEXT_INPUT = "text_input"
TEXT_ALIASES = ("prompt", "text_inputs", "inputs", "args", "array_inputs")
TEXT_TENSORS = (TEXT_INPUT, *TEXT_ALIASES)
INPUT_IDS = "input_ids"
MESSAGES = "messages"
TOOLS = "tools"
SAMPLING_PARAMETERS = "sampling_parameters"

PROMPT_TENSORS = (*TEXT_TENSORS, INPUT_IDS, MESSAGES, *MESSAGE_TENSORS)
INPUT_TENSORS = frozenset({*PROMPT_TENSORS, TOOLS, SAMPLING_PARAMETERS, *TENSORS})

TEXT_OUTPUT = "text_output"
FINISH_REASON = "finish_reason"
NUM_INPUT_TOKENS = "num_input_tokens"
NUM_OUTPUT_TOKENS = "num_output_tokens"
CUMULATIVE_LOGPROB = "cumulative_logprob"
LOGPROBS = "logprobs"
PROMPT_LOGPROBS = "prompt_logprobs"
TOKEN_IDS = "token_ids"
REASONING = "reasoning"
TOOL_CALLS = "tool_calls"
ROLE = "role"
CONTENT = "content"
TYPE = "type"
OUTPUT_ALL = "output_all"

OUTPUT_DATATYPES = {
    TEXT_OUTPUT: "BYTES",
    FINISH_REASON: "BYTES",
    NUM_INPUT_TOKENS: "UINT32",
    NUM_OUTPUT_TOKENS: "UINT32",
    CUMULATIVE_LOGPROB: "FP64",
    LOGPROBS: "BYTES",
    PROMPT_LOGPROBS: "BYTES",
    TOKEN_IDS: "INT64",
    REASONING: "BYTES",
    TOOL_CALLS: "BYTES",
}
CHAT_OUTPUT_DATATYPES = {ROLE: "BYTES", CONTENT: "BYTES", TYPE: "BYTES", OUTPUT_ALL: "BYTES"}

# The header that names the client of a request; clients get fair shares of the server.
CLIENT_HEADER = "x-client-id"

# V2's parameters of a sequence, and the endings of TorchServe's variables and headers for them.
SEQUENCE_PARAMETERS = {"sequence_id": "ID", "sequence_start": "START", "sequence_end": "END"}


@cache
def sequence_header(parameter: str) -> str:
    """Returns the header's name in lower case, since headers are case-insensitive. The environment is read once."""
    kind = SEQUENCE_PARAMETERS[parameter]
    return os.environ.get(f"TS_REQUEST_SEQUENCE_{kind}", f"ts_request_sequence_{kind}").lower()
