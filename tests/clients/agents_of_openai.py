"""Conversations of three turns with openai-agents, each with a call, over chats and over responses, whole and streamed.

Knows nothing of the server beyond its address. A random model answers; grammars give its answers the required form.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from typed_answers import Look

_SETTINGS = ModelSettings(tool_choice="look", temperature=1.0, max_tokens=300, parallel_tool_calls=False)


async def main(url: str) -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    for model in (OpenAIChatCompletionsModel("tiny", client), OpenAIResponsesModel("tiny", client)):
        await converse(model)


async def converse(model: Any) -> None:
    looks: list[str] = []

    @function_tool
    def look(place: Literal["home", "work"], far: bool) -> str:
        """Looks at a place."""
        looks.append(place)
        return "no"

    agent = Agent(name="finder", model=model, tools=[look], output_type=Look, model_settings=_SETTINGS)
    said: Any = "Where is it?"
    for turn in range(3):
        result = Runner.run_streamed(agent, said) if turn % 2 else await Runner.run(agent, said)
        if turn % 2:
            assert [event.type async for event in result.stream_events()].count("raw_response_event") > 3
        assert len(looks) > turn and isinstance(result.final_output, Look)  # the model may also call once more
        said = [*result.to_input_list(), {"role": "user", "content": "And now?"}]


asyncio.run(main(*sys.argv[1:]))
