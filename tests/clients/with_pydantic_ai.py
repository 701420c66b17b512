"""Features of pydantic-ai with a server, which it calls by OpenAI's chat completions.

Knows nothing of the server beyond what ``features`` says.
"""

from __future__ import annotations

import asyncio
from typing import Any

import openai
from features import check_freed, check_refused, crowd, feature, main
from pydantic_ai import Agent
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

_SETTINGS: dict[str, Any] = {
    "temperature": 0.8, "seed": 5, "max_tokens": 12, "logit_bias": {"1": 100}, "extra_body": {"min_tokens": 5}
}  # fmt: skip


def _agent(url: str, name: str = "tiny", retries: int = 0, **more: Any) -> Any:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=retries)
    model = OpenAIChatModel(name, provider=OpenAIProvider(openai_client=client))
    return Agent(model, model_settings={**_SETTINGS, **more}, instructions="Be short.")


def _long(url: str, **extra: Any) -> Any:
    return _agent(url, max_tokens=900, logit_bias={}, extra_body={"ignore_eos": True, **extra})


@feature("chat")
def chat(url: str) -> None:
    result = _agent(url).run_sync("Grüße")
    assert result.output and result.usage.output_tokens == 6


async def _streamed(agent: Any, most: int = 10**6) -> str:
    pieces: list[str] = []
    async with agent.run_stream("Grüße") as result:
        async for piece in result.stream_text(delta=True, debounce_by=None):
            pieces.append(piece)
            if len(pieces) == most:
                break
    return "".join(pieces)


@feature("chat, streamed")
def chat_streamed(url: str) -> None:
    assert asyncio.run(_streamed(_agent(url))) == _agent(url).run_sync("Grüße").output


@feature("parameters")
def parameters(url: str) -> None:
    more = {"top_p": 0.9, "presence_penalty": 0.1, "frequency_penalty": 0.1, "parallel_tool_calls": True}
    result = _agent(url, **more, extra_body={"min_tokens": 3, "top_k": 40}, openai_user="me").run_sync("Grüße")
    assert result.usage.output_tokens == 4


@feature("asyncio")
def asynchronous(url: str) -> None:
    async def ask() -> list[str]:
        return await asyncio.gather(*(_streamed(_agent(url)) for _ in range(3)))

    first, *others = asyncio.run(ask())
    assert first and others == [first] * 2


@feature("errors")
def errors(url: str) -> None:
    for agent, status, said in ((_agent(url, top_p=7), 400, "top_p"), (_agent(url, "nobody"), 404, "nobody")):
        error = check_refused(lambda agent=agent: agent.run_sync("Grüße"), ModelHTTPError)
        assert error.status_code == status and said in str(error.body)


@feature("errors in a stream")
def errors_in_a_stream(url: str) -> None:
    check_refused(lambda: asyncio.run(_streamed(_long(url, timeout=1_500_000))), Exception, "exceeded its timeout")


@feature("retries")
def retries(url: str) -> None:
    assert all(crowd(lambda _: _agent(url, "narrow", 50, extra_body={"min_tokens": 40}, max_tokens=60).run_sync("Hi")))


@feature("leaving")
def leaving(url: str) -> None:
    check_freed(lambda: asyncio.run(_streamed(_long(url), most=3)))


@feature("tools, schemas, images")
def what_is_not_implemented(url: str) -> None:
    agent = _agent(url)

    @agent.tool_plain
    def clock() -> str:
        return "noon"

    error = check_refused(lambda: agent.run_sync("Grüße"), ModelHTTPError)
    assert error.status_code == 400 and "tools" in str(error.body)


main("pydantic-ai-slim", "rest")
