"""Features of LiteLLM with a server, which it calls as one of its OpenAI-compatible providers.

Knows nothing of the server beyond what ``features`` says.
"""

from __future__ import annotations

import asyncio
from typing import Any

import litellm
from features import QUESTION, TOOLS, check_refused, crowd, feature, main


def _asked(url: str, **more: Any) -> dict[str, Any]:
    asked = {"model": "openai/tiny", "messages": QUESTION, "temperature": 0.8, "seed": 5, "max_tokens": 12, **more}
    return {"api_base": f"{url}/v1", "api_key": "none", "extra_body": {"ignore_eos": True}, "max_retries": 0, **asked}


def _chat(url: str, **more: Any) -> Any:
    return litellm.completion(**_asked(url, **more))


def _complete(url: str, **more: Any) -> Any:
    return litellm.text_completion(
        model="text-completion-openai/tiny", prompt="Hello", max_tokens=8, api_base=f"{url}/v1", api_key="none", **more
    )


@feature("chat")
def chat(url: str) -> None:
    answer = _chat(url)
    assert answer.choices[0].message.content and answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 12


@feature("chat")
def several_turns(url: str) -> None:
    """One of the answers is a call. Each answer is sent back as this client has parsed it.

    The client parses calls without the package ``mcp``, which it needs for an argument ``tools``.
    """
    messages: list[Any] = [*QUESTION]
    for turn in range(3):
        tools = {"extra_body": {"tools": TOOLS, "tool_choice": "required"}, "max_tokens": 200} if turn == 1 else {}
        message = _chat(url, messages=messages, **tools).choices[0].message
        messages.append(message)
        messages += [{"role": "tool", "tool_call_id": each.id, "content": "4"} for each in message.tool_calls or ()]
        messages += QUESTION if turn == 0 else []
    assert [dict(message)["role"] for message in messages] == ["user", "assistant"] * 2 + ["tool", "assistant"]


@feature("chat, streamed")
def chat_streamed(url: str) -> None:
    chunks = list(_chat(url, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == _chat(url).choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 12


@feature("prompts")
def prompts(url: str) -> None:
    answer = _complete(url)
    assert answer.choices[0].text and answer.usage.completion_tokens <= 8


@feature("prompts, streamed")
def prompts_streamed(url: str) -> None:
    chunks = list(_complete(url, temperature=0, stream=True))
    text = "".join(chunk.choices[0].text or "" for chunk in chunks)
    assert text == _complete(url, temperature=0).choices[0].text


@feature("log-probabilities")
def logprobs(url: str) -> None:
    assert len(_chat(url, logprobs=True, top_logprobs=2).choices[0].logprobs.content) == 12


@feature("parameters")
def parameters(url: str) -> None:
    extra = {"min_tokens": 5, "top_k": 40}
    answer = _chat(url, n=2, logit_bias={"1": 100}, presence_penalty=0.1, top_p=0.9, user="me", extra_body=extra)
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 2
    assert answer.usage.completion_tokens == 12
    text = _chat(url).choices[0].message.content
    assert _chat(url, stop=[text[4]]).choices[0].message.content == text[: text.index(text[4])]


@feature("asyncio")
def asynchronous(url: str) -> None:
    async def ask() -> str:
        stream = await litellm.acompletion(**_asked(url, stream=True))
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(ask()) == _chat(url).choices[0].message.content


@feature("errors")
def errors(url: str) -> None:
    long = [{"role": "user", "content": "a " * 5000}]
    check_refused(lambda: _chat(url, messages=long), litellm.ContextWindowExceededError)
    check_refused(lambda: _chat(url, n=10**9), litellm.BadRequestError, "n: ")
    check_refused(lambda: _chat(url, model="openai/nobody"), litellm.NotFoundError, "nobody")


@feature("errors in a stream")
def errors_in_a_stream(url: str) -> None:
    seen: list[Any] = []
    extra = {"timeout": 1_500_000, "ignore_eos": True}
    stream = _chat(url, max_tokens=900, stream=True, extra_body=extra)
    check_refused(lambda: seen.extend(stream), litellm.exceptions.MidStreamFallbackError, "exceeded its timeout")
    assert seen


@feature("retries")
def retries(url: str) -> None:
    answers = crowd(lambda _: _chat(url, model="openai/narrow", max_tokens=40, max_retries=50))
    assert [answer.usage.completion_tokens for answer in answers] == [40] * 4


@feature("tools, schemas, images")
def what_is_not_implemented(url: str) -> None:
    """The argument ``tools`` would need the package ``mcp``."""
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}]}]
    check_refused(lambda: _chat(url, messages=image), litellm.BadRequestError, "content")


main("litellm", "rest")
