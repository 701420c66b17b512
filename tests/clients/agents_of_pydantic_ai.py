"""Agents of pydantic-ai, over chat completions and over responses: typed output, and a tool before it.

Knows nothing of the server beyond its address. A random model answers; grammars give its answers the required form.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import openai
from pydantic_ai import Agent, NativeOutput, Tool
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from typed_answers import Look, Place

_MAX_TRIES = 20


def main(url: str) -> None:
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        asyncio.run(_agents(url, kind))


async def _agents(url: str, kind: Any) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        model = kind("tiny", provider=OpenAIProvider(openai_client=client))
        await typed(model)
        await streamed(model)
        await with_a_tool(model)


def _agent(model: Any, seed: int, temperature: float = 1.0, **more: Any) -> Any:
    settings: dict[str, Any] = {"max_tokens": 300, "temperature": temperature, "parallel_tool_calls": False}
    settings["extra_body"] = {"seed": seed}
    return Agent(model, model_settings=settings, instructions="Be short.", **more)


async def typed(model: Any) -> None:
    for output in (Look, NativeOutput(Look)):
        result = await _agent(model, 4, output_type=output).run("Where is it?")
        assert isinstance(result.output, Look) and result.usage.output_tokens


async def streamed(model: Any) -> None:
    async with _agent(model, 4, output_type=Look).run_stream("Where is it?") as result:
        assert isinstance(await result.get_output(), Look)
    async with _agent(model, 4).run_stream("Where is it?") as result:
        assert "".join([piece async for piece in result.stream_text(delta=True, debounce_by=None)])


def _clock(called: list[Place]) -> Tool:
    """A tool that is offered until it has been called."""

    async def once(context: Any, definition: Any) -> Any:
        return None if called else definition

    def clock(place: Place) -> str:
        called.append(place)
        return f"noon at {place.value}"

    return Tool(clock, prepare=once)


async def with_a_tool(model: Any) -> None:
    """With some seeds the model calls the tool first, which is then no longer offered."""
    for seed in range(_MAX_TRIES):
        called: list[Place] = []
        tools = [_clock(called)]
        result = await _agent(model, seed, 20.0, output_type=Look, tools=tools).run("Where is it?")
        assert isinstance(result.output, Look)
        if called:
            for _ in range(2):  # the further turns send the calls and the answers of the turns before
                history = result.all_messages()
                result = await _agent(model, seed, output_type=Look).run("And now?", message_history=history)
                assert isinstance(result.output, Look)
            return
    raise AssertionError("the tool was never called")


main(sys.argv[1])
