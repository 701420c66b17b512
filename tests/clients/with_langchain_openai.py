"""What LangChain's classes for OpenAI do against a server.

Knows nothing of the server beyond its model ``tiny``.
"""

from __future__ import annotations

from typing import Any

import openai
from features import feature, main
from langchain_openai import ChatOpenAI, OpenAI


def _chat(url: str, **more: Any) -> ChatOpenAI:
    options = {"temperature": 0.8, "seed": 5, "max_tokens": 12, "max_retries": 0, **more}
    return ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="tiny", extra_body={"ignore_eos": True}, **options)


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


@feature("completions")
def completions(url: str) -> None:
    model = OpenAI(base_url=f"{url}/v1", api_key="none", model="tiny", max_tokens=8, temperature=0, max_retries=0)
    assert "".join(model.stream("Hello")) == model.invoke("Hello")


@feature("log-probabilities")
def logprobs(url: str) -> None:
    answer = _chat(url, logprobs=True, top_logprobs=2).invoke("Grüße")
    assert len(answer.response_metadata["logprobs"]["content"]) == 12


@feature("errors")
def errors(url: str) -> None:
    try:
        _chat(url).invoke("a " * 5000)
    except openai.BadRequestError as error:
        assert error.code == "context_length_exceeded", error
    else:
        raise AssertionError("a prompt that is too long was accepted")


main()
