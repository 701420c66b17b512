"""Chats with huggingface_hub's ``InferenceClient``, whole and streamed, a tool loop of three turns, and its error.

Knows nothing of the server beyond its address.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from huggingface_hub import (
    ChatCompletionInputFunctionName,
    ChatCompletionInputToolChoiceClass,
    InferenceClient,
)
from huggingface_hub.errors import HfHubHTTPError

_LOOK = {"type": "object", "properties": {"place": {"enum": ["home", "work"]}, "far": {"type": "boolean"}},
         "required": ["place", "far"], "additionalProperties": False}  # fmt: skip
_TOOL = {"type": "function", "function": {"name": "Look", "parameters": _LOOK}}
_CHOICE = ChatCompletionInputToolChoiceClass(function=ChatCompletionInputFunctionName(name="Look"))


def main(url: str) -> None:
    client = InferenceClient(base_url=url)
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 0.0}
    said = [{"role": "user", "content": "Where is it?"}]
    whole = client.chat_completion(said, **asked)
    stream = client.chat_completion(said, stream=True, **asked)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text and text == whole.choices[0].message.content and whole.usage.completion_tokens
    tool_loop(client)
    try:
        client.chat_completion(said, **{**asked, "top_p": 7})
    except HfHubHTTPError as error:
        assert "top_p" in str(error), error
    else:
        raise AssertionError("top_p: 7 is not refused")


def tool_loop(client: InferenceClient) -> None:
    """Three turns, in which the client's own messages are sent back."""
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "temperature": 1.0, "seed": 4}
    said: list[Any] = [{"role": "user", "content": "Where is it?"}]
    for turn in range(3):
        message = client.chat_completion(said, tools=[_TOOL], tool_choice=_CHOICE, **asked).choices[0].message
        (call,) = message.tool_calls
        assert json.loads(call.function.arguments).keys() == {"place", "far"}
        said += [message, {"role": "tool", "tool_call_id": call.id, "content": f"no, turn {turn}"}]
    assert client.chat_completion(said, **asked).choices[0].message.content


main(sys.argv[1])
