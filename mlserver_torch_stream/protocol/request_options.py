"""Reads the options of a request that every spelling shares, once its parameters are merged.

Knows nothing of tensors nor of OpenAI's objects. Every function raises InvalidInput, which names the field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol.chat import check_template_arguments
from mlserver_torch_stream.protocol.parameters import Merged
from mlserver_torch_stream.types import ChatPrompt, ModelInfo, Prompt, StreamMode, TextPrompt

_CHAT_ONLY = ("chat_template_kwargs", "tool_choice", "parallel_tool_calls")

Objects = tuple[Mapping[str, Any], ...]


def chat_prompt(messages: Objects, tools: Objects | None, given: Merged) -> ChatPrompt:
    """A conversation as its template is to get it: without the tools when the client chose none of them."""
    arguments = given.get("chat_template_kwargs")
    chosen = None if "tool_choice" in given and given["tool_choice"].value == "none" else tools
    return ChatPrompt(
        messages=messages,
        tools=chosen,
        template_kwargs=check_template_arguments(arguments.spelling, arguments.value) if arguments else {},
    )


def require_template(field: str, info: ModelInfo) -> None:
    if not info.has_chat_template:
        raise InvalidInput(field, "the model has no chat template")


def refuse_chat_options(tools: bool, given: Merged) -> None:
    """For a prompt that is no conversation. ``tools``: it came with some."""
    spellings = ["tools"] if tools else []
    spellings += [given[name].spelling for name in _CHAT_ONLY if name in given]
    if spellings:
        raise InvalidInput(spellings[0], "only a conversation takes it; send messages")


def read_priority(given: Merged) -> int | None:
    return _positive(given, "priority")


def read_timeout(given: Merged) -> float | None:
    """Seconds; the request gives microseconds."""
    timeout = _positive(given, "timeout")
    return None if timeout is None else timeout / 1e6


def read_stream_mode(given: Merged, streaming: bool) -> StreamMode:
    mode = StreamMode(given["stream_mode"].value) if "stream_mode" in given else StreamMode.EACH
    if mode is StreamMode.PROMPT and not streaming:
        raise InvalidInput("stream_mode", "prompt needs a stream, this endpoint is unary")
    return mode


def read_flag(given: Merged, name: str) -> bool | None:
    return bool(given[name].value) if name in given else None


def read_echo(given: Merged) -> bool:
    echo, exclude = read_flag(given, "echo"), read_flag(given, "exclude_input_in_output")
    if echo is not None and echo == exclude:
        raise InvalidInput("echo", "contradicts exclude_input_in_output")
    return bool(echo) or exclude is False


def check_echo(given: Merged, prompts: Sequence[Prompt], *, streaming: bool) -> None:
    """For a request whose reply is to begin with its prompt."""
    spelling = "echo" if "echo" in given else "exclude_input_in_output"
    if streaming:
        raise InvalidInput(spelling, "the prompt cannot be part of a streamed reply")
    if not all(isinstance(prompt, TextPrompt) for prompt in prompts):
        raise InvalidInput(spelling, "only a text prompt can be part of the reply")


def _positive(given: Merged, name: str) -> int | None:
    """0 asks for the default, as Triton has it."""
    return int(given[name].value) or None if name in given else None
