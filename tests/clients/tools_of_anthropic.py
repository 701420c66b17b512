"""A tool loop of three turns with Anthropic's SDK, whole and streamed, its count of tokens, and its errors.

Knows nothing of the server beyond its address.
"""

from __future__ import annotations

import sys
from typing import Any

import anthropic
from typed_answers import Look

_TOOL: Any = {"name": "Look", "description": "Looks.", "input_schema": Look.model_json_schema(), "strict": True}
_CHOICE: Any = {"type": "tool", "name": "Look"}
_ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "extra_body": {"seed": 4, "temperature": 1.0}}
_SYSTEM: Any = [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]


def main(url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": "Where is it?"}]
    for turn in range(3):
        called = client.messages.create(messages=messages, tools=[_TOOL], tool_choice=_CHOICE, system=_SYSTEM, **_ASKED)
        assert called.stop_reason == "tool_use" and called.usage.output_tokens
        (block,) = called.content
        Look.model_validate(block.input)
        result = {"type": "tool_result", "tool_use_id": block.id, "content": f"no, turn {turn}"}
        messages += [{"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(messages=messages, tools=[_TOOL], **_ASKED).content

    with client.messages.stream(messages=messages[:1], tools=[_TOOL], tool_choice=_CHOICE, **_ASKED) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert len(pieces) > 3 and final.stop_reason == "tool_use"
    Look.model_validate(final.content[0].input)
    with client.messages.stream(messages=messages, **_ASKED) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text and final.usage.output_tokens

    counted = client.messages.count_tokens(model="tiny", messages=messages, tools=[_TOOL], system=_SYSTEM)
    assert counted.input_tokens > 20
    beta = client.beta.messages.create(messages=messages[:1], betas=["interleaved-thinking-2025-05-14"], **_ASKED)
    assert beta.content[0].text
    for more, kind, said in (
        ({"model": "nobody"}, anthropic.NotFoundError, "nobody"),
        ({"extra_body": {"temperature": -1}}, anthropic.BadRequestError, "temperature"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            anthropic.BadRequestError,
            "tools[0].type",
        ),
    ):
        try:
            client.messages.create(**{**_ASKED, "messages": messages[:1], **more})
        except kind as error:
            assert said in str(error), error
        else:
            raise AssertionError(f"{more} is not refused")


main(sys.argv[1])
