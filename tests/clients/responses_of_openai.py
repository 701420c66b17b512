"""Responses with the openai SDK: created, streamed with typed events, parsed with pydantic, and a tool loop.

Knows nothing of the server beyond its address. A random model answers; grammars give its answers the required form.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import openai
from openai.types import responses as types
from typed_answers import Look

_ASKED: dict[str, Any] = {"model": "tiny", "max_output_tokens": 300, "temperature": 1.0}
_SEED: dict[str, Any] = {"extra_body": {"seed": 4}}
_TOOLS: Any = [openai.pydantic_responses_function_tool(Look)]
_CHOICE: Any = {"type": "function", "name": "Look"}
_HELLO = "Where is it?"


def main(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    created(client)
    streamed(client)
    parsed(client)
    tool_loop(client)
    asyncio.run(asynchronous(url))
    refused(client)


def created(client: openai.OpenAI) -> None:
    response = client.responses.create(
        input=_HELLO, **{**_ASKED, "max_output_tokens": 12}, extra_body={"ignore_eos": True}
    )
    types.Response.model_validate(response.model_dump())  # nothing that the SDK's types need is missing
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    assert response.output_text and response.usage.output_tokens == 12


def streamed(client: openai.OpenAI) -> None:
    with client.responses.stream(input=_HELLO, text_format=Look, **_ASKED, **_SEED) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert {type(event).__name__.split("[")[0] for event in events} == {
        "ResponseCreatedEvent", "ResponseInProgressEvent", "ResponseOutputItemAddedEvent",
        "ResponseContentPartAddedEvent", "ResponseTextDeltaEvent", "ResponseTextDoneEvent",
        "ResponseContentPartDoneEvent", "ResponseOutputItemDoneEvent", "ResponseCompletedEvent",
    }  # fmt: skip
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == final.output_text and isinstance(final.output_parsed, Look)


def parsed(client: openai.OpenAI) -> None:
    response = client.responses.parse(input=_HELLO, text_format=Look, **_ASKED, **_SEED)
    assert response.status == "completed" and isinstance(response.output_parsed, Look)
    hello: Any = {"role": "user", "content": _HELLO}
    asked: Any = {"model": "tiny", "response_format": Look, "max_tokens": 300, "seed": 4}
    message = client.chat.completions.parse(messages=[hello], **asked).choices[0].message
    assert isinstance(message.parsed, Look)
    message = client.chat.completions.parse(messages=[hello, message, hello], **asked).choices[0].message
    assert isinstance(message.parsed, Look)


def tool_loop(client: openai.OpenAI) -> None:
    said: list[Any] = [{"role": "user", "content": _HELLO}]
    for turn in range(3):
        response = client.responses.create(input=said, tools=_TOOLS, tool_choice=_CHOICE, **_ASKED, **_SEED)
        (call,) = response.output
        Look.model_validate_json(call.arguments)
        said += [*response.output, {"type": "function_call_output", "call_id": call.call_id, "output": f"no, {turn}"}]
    assert client.responses.create(input=said, **_ASKED, **_SEED).output_text
    with client.responses.stream(input=_HELLO, tools=_TOOLS, tool_choice=_CHOICE, **_ASKED) as stream:
        pieces = [event for event in stream if event.type == "response.function_call_arguments.delta"]
        (call,) = stream.get_final_response().output
    assert len(pieces) > 3 and pieces[-1].snapshot == call.arguments
    (call,) = client.responses.parse(input=_HELLO, tools=_TOOLS, tool_choice=_CHOICE, **_ASKED).output
    assert isinstance(call.parsed_arguments, Look)


async def asynchronous(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/openai/v1", api_key="none") as client:
        stream = await client.responses.create(input=_HELLO, stream=True, **{**_ASKED, "max_output_tokens": 6})
        kinds = [event.type async for event in stream]
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")


def refused(client: openai.OpenAI) -> None:
    for more, param in (
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ):
        try:
            client.responses.create(input=_HELLO, **_ASKED, **more)
        except openai.BadRequestError as error:
            assert error.param == param, error
        else:
            raise AssertionError(f"{more} was accepted")
    seen = 0
    extra = {"timeout": 300_000, "ignore_eos": True}
    try:
        for event in client.responses.create(
            input=_HELLO, model="tiny", max_output_tokens=900, stream=True, extra_body=extra
        ):
            seen += event.type == "response.failed"
    except openai.APIError as error:
        assert seen and error.type == "server_error" and "exceeded its timeout" in error.message, error
    else:
        raise AssertionError("the stream ended well")


main(sys.argv[1])
