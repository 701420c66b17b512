"""What LiteLLM does against a server, as one of its OpenAI-compatible providers.

Knows nothing of the server beyond its model ``tiny``.
"""

from __future__ import annotations

from typing import Any

import litellm
from features import QUESTION, feature, main


def _chat(url: str, **more: Any) -> Any:
    asked = {"messages": QUESTION, "temperature": 0.8, "seed": 5, "max_tokens": 12, "num_retries": 0, **more}
    extra = {"ignore_eos": True}
    return litellm.completion("openai/tiny", api_base=f"{url}/v1", api_key="none", extra_body=extra, **asked)


@feature("chat")
def chat(url: str) -> None:
    answer = _chat(url)
    assert answer.choices[0].message.content and answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 12


@feature("chat, streamed")
def chat_streamed(url: str) -> None:
    chunks = list(_chat(url, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == _chat(url).choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 12


@feature("completions")
def completions(url: str) -> None:
    answer = litellm.text_completion(
        model="text-completion-openai/tiny", prompt="Hello", max_tokens=8, api_base=f"{url}/v1", api_key="none"
    )
    assert answer.choices[0].text and answer.usage.completion_tokens <= 8


@feature("log-probabilities")
def logprobs(url: str) -> None:
    assert len(_chat(url, logprobs=True, top_logprobs=2).choices[0].logprobs.content) == 12


@feature("errors")
def errors(url: str) -> None:
    for more, kind in (
        ({"messages": [{"role": "user", "content": "a " * 5000}]}, litellm.ContextWindowExceededError),
        ({"n": 10**9}, litellm.BadRequestError),
    ):
        try:
            _chat(url, **more)
        except kind:
            continue
        raise AssertionError(f"{more} was accepted")


main()
