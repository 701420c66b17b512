"""A tool loop of three turns with LiteLLM, which sends its own reply objects back, over chats and over messages.

Knows nothing of the server beyond its address.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import litellm
from typed_answers import Look

_FUNCTION = {"name": "Look", "description": "Looks.", "parameters": Look.model_json_schema(), "strict": True}
_TOOLS: Any = [{"type": "function", "function": _FUNCTION}]
_CHOICE: Any = {"type": "function", "function": {"name": "Look"}}


def main(url: str) -> None:
    asked: dict[str, Any] = {"api_key": "none", "max_tokens": 200, "temperature": 1.0, "num_retries": 0}
    chat = {**asked, "model": "openai/tiny", "api_base": f"{url}/v1", "seed": 4}
    messages: list[Any] = [{"role": "user", "content": "Where is it?"}]
    for turn in range(3):
        called = litellm.completion(messages=messages, tools=_TOOLS, tool_choice=_CHOICE, **chat)
        message = called.choices[0].message
        (call,) = message.tool_calls
        Look.model_validate_json(call.function.arguments)
        messages += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": f"no, turn {turn}"}]
    assert litellm.completion(messages=messages, **chat).choices[0].message.content
    text = litellm.completion(messages=messages, **chat).choices[0].message
    assert litellm.completion(messages=[*messages, text.model_dump(), messages[0]], **chat).choices[0].message.content
    chunks = list(litellm.completion(messages=messages[:1], tools=_TOOLS, tool_choice=_CHOICE, stream=True, **chat))
    streamed = litellm.stream_chunk_builder(chunks, messages=messages[:1]).choices[0].message
    Look.model_validate_json(streamed.tool_calls[0].function.arguments)

    told = {**asked, "model": "anthropic/tiny", "api_base": url}
    said: list[Any] = [{"role": "user", "content": "Where is it?"}]
    for turn in range(3):
        called = litellm.completion(messages=said, tools=_TOOLS, tool_choice=_CHOICE, **told)
        message = called.choices[0].message
        (call,) = message.tool_calls
        Look.model_validate_json(call.function.arguments)
        said += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": f"no, turn {turn}"}]
    assert litellm.completion(messages=said, tools=_TOOLS, **told).choices[0].message
    body = {"messages": [{"role": "user", "content": "Hello"}], **told}
    assert asyncio.run(litellm.anthropic_messages(**body))["content"]


main(sys.argv[1])
