"""A tool loop of three turns with the openai SDK, whole and streamed, and pydantic's arguments.

Knows nothing of the server beyond its address.
"""

from __future__ import annotations

import sys
from typing import Any

import openai
from typed_answers import Look

_ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "temperature": 1.0, "seed": 4}
_TOOLS: Any = [openai.pydantic_function_tool(Look)]
_CHOICE: Any = {"type": "function", "function": {"name": "Look"}}


def main(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": "Where is it?"}]
    for turn in range(3):
        called = client.chat.completions.create(messages=messages, tools=_TOOLS, tool_choice=_CHOICE, **_ASKED)
        message = called.choices[0].message
        assert called.choices[0].finish_reason == "tool_calls" and message.content is None
        (call,) = message.tool_calls
        Look.model_validate_json(call.function.arguments)
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": f"no, turn {turn}"}]
    text = client.chat.completions.create(messages=messages, **_ASKED).choices[0].message.content
    chunks = client.chat.completions.create(messages=messages, stream=True, **_ASKED)
    assert text == "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) != ""

    helper = client.chat.completions.stream(messages=messages[:1], tools=_TOOLS, tool_choice=_CHOICE, **_ASKED)
    with helper as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0].message.tool_calls[0].function
    pieces = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert len(pieces) > 3 and "".join(piece.arguments_delta for piece in pieces) == final.arguments
    assert [event.type for event in events].count("tool_calls.function.arguments.done") == 1
    assert isinstance(final.parsed_arguments, Look)

    parsed = client.chat.completions.parse(messages=messages[:1], tools=_TOOLS, tool_choice="required",
                                           parallel_tool_calls=False, **_ASKED)  # fmt: skip
    assert isinstance(parsed.choices[0].message.tool_calls[0].function.parsed_arguments, Look)


main(sys.argv[1])
