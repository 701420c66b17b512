"""Features of LangChain's OpenAI classes with a server.

Knows nothing of the server beyond what ``features`` says.
"""

from __future__ import annotations

import asyncio
from typing import Any

import openai
from features import QUESTION, TOOLS, check_freed, check_refused, crowd, feature, main
from langchain_openai import ChatOpenAI, OpenAI


def _chat(url: str, **more: Any) -> ChatOpenAI:
    options = {"model": "tiny", "temperature": 0.8, "seed": 5, "max_tokens": 12, "max_retries": 0, **more}
    return ChatOpenAI(base_url=f"{url}/v1", api_key="none", **{"extra_body": {"ignore_eos": True}, **options})


def _complete(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", model="tiny", max_tokens=8, temperature=0, max_retries=0)


@feature("chat")
def chat(url: str) -> None:
    answer = _chat(url).invoke("Grüße")
    assert answer.content and answer.response_metadata["finish_reason"] == "length"
    assert answer.usage_metadata["output_tokens"] == 12
    assert [len(each.content) > 0 for each in _chat(url).batch(["Hello", "Bye"])] == [True, True]


@feature("chat, streamed")
def chat_streamed(url: str) -> None:
    chunks = list(_chat(url, stream_usage=True).stream("Grüße"))
    assert "".join(chunk.content for chunk in chunks) == _chat(url).invoke("Grüße").content
    told = [chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata]
    assert sum(told) == 12


@feature("prompts")
def prompts(url: str) -> None:
    found = _complete(url).generate(["Hello", "Bye"])
    assert all(generations[0].text for generations in found.generations)


@feature("prompts, streamed")
def prompts_streamed(url: str) -> None:
    model = _complete(url)
    assert "".join(model.stream("Hello")) == model.invoke("Hello")


@feature("log-probabilities")
def logprobs(url: str) -> None:
    answer = _chat(url, logprobs=True, top_logprobs=2).invoke("Grüße")
    assert len(answer.response_metadata["logprobs"]["content"]) == 12


@feature("parameters")
def parameters(url: str) -> None:
    options: dict[str, Any] = {"logit_bias": {"1": 100}, "extra_body": {"min_tokens": 5, "top_k": 40}}
    answer = _chat(url, n=2, presence_penalty=0.1, frequency_penalty=0.1, top_p=0.9, **options).invoke("Grüße")
    assert answer.response_metadata["finish_reason"] == "stop" and answer.usage_metadata["output_tokens"] == 12
    text = str(_chat(url).invoke("Grüße").content)
    assert _chat(url).invoke("Grüße", stop=[text[4]]).content == text[: text.index(text[4])]


@feature("asyncio")
def asynchronous(url: str) -> None:
    async def ask() -> tuple[str, str]:
        model = _chat(url)
        streamed = "".join([str(chunk.content) async for chunk in model.astream("Grüße")])
        return streamed, str((await model.ainvoke("Grüße")).content)

    streamed, whole = asyncio.run(ask())
    assert streamed == whole != ""


@feature("errors")
def errors(url: str) -> None:
    error = check_refused(lambda: _chat(url).invoke("a " * 5000), openai.BadRequestError)
    assert error.code == "context_length_exceeded", error
    check_refused(lambda: _chat(url, model="nobody").invoke("Hello"), openai.NotFoundError, "nobody")
    check_refused(lambda: list(_chat(url, top_p=7).stream("Hello")), openai.BadRequestError, "top_p")


@feature("errors in a stream")
def errors_in_a_stream(url: str) -> None:
    model, seen = _chat(url, max_tokens=900, extra_body={"timeout": 1_500_000, "ignore_eos": True}), []
    check_refused(lambda: seen.extend(model.stream("Grüße")), openai.APIError, "exceeded its timeout")
    assert seen


@feature("retries")
def retries(url: str) -> None:
    model = _chat(url, model="narrow", max_retries=50, max_tokens=40)
    assert crowd(lambda _: model.invoke(QUESTION).usage_metadata["output_tokens"]) == [40] * 4


@feature("leaving")
def leaving(url: str) -> None:
    def leave() -> None:
        chunks = _chat(url, max_tokens=900).stream("Grüße")
        assert [next(chunks) for _ in range(3)]
        chunks.close()

    check_freed(leave)


@feature("tools, schemas, images")
def what_is_not_implemented(url: str) -> None:
    check_refused(lambda: _chat(url).bind_tools(TOOLS).invoke("Grüße"), openai.BadRequestError, "tools")


main("langchain-openai", "rest")
