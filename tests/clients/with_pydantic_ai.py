"""What pydantic-ai does against a server, which it asks as OpenAI's chat completions.

Knows nothing of the server beyond its model ``tiny``.
"""

from __future__ import annotations

import asyncio
from typing import Any

from features import feature, main
from pydantic_ai import Agent
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

_SETTINGS: dict[str, Any] = {
    "temperature": 0.8, "seed": 5, "max_tokens": 12, "logit_bias": {"1": 100}, "extra_body": {"min_tokens": 5}
}  # fmt: skip


def _agent(url: str, **more: Any) -> Any:
    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    return Agent(model, model_settings={**_SETTINGS, **more}, instructions="Be short.")


@feature("chat")
def chat(url: str) -> None:
    result = _agent(url).run_sync("Grüße")
    assert result.output and result.usage.output_tokens == 6


@feature("chat, streamed")
def chat_streamed(url: str) -> None:
    async def ask() -> str:
        async with _agent(url).run_stream("Grüße") as result:
            return "".join([piece async for piece in result.stream_text(delta=True, debounce_by=None)])

    assert asyncio.run(ask()) == _agent(url).run_sync("Grüße").output


@feature("errors")
def errors(url: str) -> None:
    try:
        _agent(url, top_p=7).run_sync("Grüße")
    except ModelHTTPError as error:
        assert error.status_code == 400 and "top_p" in str(error.body)
    else:
        raise AssertionError("a top_p of 7 was accepted")


main()
