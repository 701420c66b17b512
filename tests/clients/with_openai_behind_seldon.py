"""Features of the openai SDK through Seldon Core 2's proxy.

Knows nothing of the server beyond what ``features`` says.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import openai
from features import QUESTION, TOOLS, check_freed, check_refused, crowd, feature, main

_ASKED: dict[str, Any] = {"max_tokens": 12, "seed": 5, "temperature": 0.8}
_IGNORE_EOS = {"ignore_eos": True}
_ENDS: dict[str, Any] = {**_ASKED, "logit_bias": {"1": 100}, "extra_body": {"min_tokens": 5}}  # with "stop"


def _completions(url: str, endpoint: str, model: str, **options: Any) -> Any:
    base = f"{url}/v2/models/{model}/{endpoint}"
    return openai.OpenAI(base_url=base, api_key="none", **{"max_retries": 0, **options}).chat.completions


def _once(url: str, *, model: str = "tiny", options: Any = None, **more: Any) -> Any:
    asked = {"messages": QUESTION, "extra_body": _IGNORE_EOS, **_ASKED, **more}
    return _completions(url, "infer", model, **(options or {})).create(model=model, **asked)


def _streamed(url: str, **more: Any) -> Any:
    asked = {"messages": QUESTION, "extra_body": _IGNORE_EOS, **_ASKED, **more}
    return _completions(url, "infer_stream", "tiny").create(model="tiny", stream=True, **asked)


@feature("chat")
def chat(url: str) -> None:
    answer = _once(url, n=3)
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * 3
    assert answer.usage.completion_tokens == 36 and answer.choices[0].message.content


@feature("chat, streamed")
def chat_streamed(url: str) -> None:
    *chunks, last = _streamed(url, stream_options={"include_usage": True})
    assert last.choices == [] and last.usage.completion_tokens == 12
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == _once(url).choices[0].message.content


@feature("chat, streamed")
def stream_helper(url: str) -> None:
    helper = _completions(url, "infer_stream", "tiny").stream(
        model="tiny", messages=QUESTION, logprobs=True, top_logprobs=2, n=2, **_ENDS
    )
    with helper as stream:
        kinds = {event.type for event in stream}
        answer = stream.get_final_completion()
    assert {"content.delta", "content.done", "logprobs.content.delta", "logprobs.content.done"} <= kinds, kinds
    whole = _completions(url, "infer", "tiny").create(model="tiny", messages=QUESTION, n=2, **_ENDS)
    assert [each.message.content for each in answer.choices] == [each.message.content for each in whole.choices]


@feature("chat")
def tool_loop(url: str) -> None:
    """Three turns, in which the client's own messages are sent back."""
    schema = {"type": "object", "properties": {"far": {"type": "boolean"}}, "required": ["far"]}
    function = {"name": "look", "parameters": {**schema, "additionalProperties": False}}
    forced: dict[str, Any] = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    asked = {**forced, "parallel_tool_calls": False, "max_tokens": 200, "temperature": 1.0, "extra_body": {}}
    messages: list[Any] = [*QUESTION]
    for turn in range(3):
        message = _once(url, messages=messages, **asked).choices[0].message
        (call,) = message.tool_calls
        assert json.loads(call.function.arguments)["far"] in (True, False)
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": f"no, turn {turn}"}]
    assert _once(url, messages=messages).choices[0].message.content


@feature("log-probabilities")
def log_probabilities(url: str) -> None:
    body = {"ignore_eos": True, "skip_special_tokens": False}
    [choice] = _once(url, logprobs=True, top_logprobs=2, extra_body=body).choices
    joined = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content)
    broken = re.compile("\ufffd+")  # of bytes that are no character, how many such characters stand for them differs
    assert broken.sub("", joined.decode("utf-8", "replace")) == broken.sub("", choice.message.content)
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)


@feature("errors")
def errors(url: str) -> None:
    for ask in (_once, _streamed):
        try:
            ask(url, temperature=-1)
        except openai.UnprocessableEntityError as error:
            assert (error.param, error.type) == ("temperature", "invalid_request_error"), error.body
        else:
            raise AssertionError("it was accepted")
    try:
        _once(url, model="nobody")
    except openai.NotFoundError as error:
        assert (error.param, error.code) == ("model", "model_not_found"), error.body
    else:
        raise AssertionError("it was found")


@feature("retries")
def retries(url: str) -> None:
    """More requests than fit are refused with 429; the SDK waits as long as the server says, and gets its answers."""
    refused = 0

    def ask(retries: int) -> str:
        nonlocal refused
        try:
            answer = _once(url, model="narrow", options={"max_retries": retries}, max_tokens=40)
            return str(answer.choices[0].message.content)
        except openai.RateLimitError as error:
            assert int(error.response.headers["retry-after"]) >= 1
            refused += 1
            return ""

    crowd(lambda _: ask(0))
    assert refused > 0, "the queue was never full"
    assert all(crowd(lambda _: ask(30)))


@feature("parameters")
def parameters(url: str) -> None:
    more = {"logit_bias": {"1": 100}, "presence_penalty": 0.1, "top_p": 0.9, "user": "me", "stop": ["zz"]}
    answer = _once(url, **more, extra_body={"min_tokens": 5, "top_k": 40})
    assert answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens == 6


@feature("asyncio")
def asynchronous(url: str) -> None:
    async def ask() -> str:
        base = f"{url}/v2/models/tiny/infer_stream"
        async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as client:
            asked = {"messages": QUESTION, "extra_body": _IGNORE_EOS, **_ASKED}
            stream = await client.chat.completions.create(model="tiny", stream=True, **asked)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(ask()) == _once(url).choices[0].message.content


@feature("errors in a stream")
def errors_in_a_stream(url: str) -> None:
    seen: list[Any] = []
    stream = _streamed(url, max_tokens=900, extra_body={"timeout": 1_500_000, **_IGNORE_EOS})
    check_refused(lambda: seen.extend(stream), openai.APIError, "exceeded its timeout")
    assert seen


@feature("leaving")
def leaving(url: str) -> None:
    def leave() -> None:
        with _streamed(url, max_tokens=900) as stream:
            next(iter(stream))

    check_freed(leave)


@feature("tools, schemas, images")
def what_is_not_implemented(url: str) -> None:
    """The model's chat template does not support tools."""
    for param, more in (("tools", {"tools": TOOLS}),):
        error = check_refused(lambda more=more: _once(url, **more), openai.UnprocessableEntityError)
        assert error.param == param, error.body


main("openai", "seldon")
