"""LangChain's structured output and bound tools, over chat completions and over responses.

Knows nothing of the server beyond its address. A random model answers; grammars give its answers the required form.
"""

from __future__ import annotations

import sys
from typing import Any

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from typed_answers import Look


def main(url: str) -> None:
    for responses in (False, True):
        model = ChatOpenAI(
            base_url=f"{url}/v1", api_key="none", model="tiny", temperature=1.0, max_retries=0, max_tokens=300,
            use_responses_api=responses, extra_body={"seed": 4},
        )  # fmt: skip
        for method in ("json_schema", "function_calling"):
            assert isinstance(model.with_structured_output(Look, method=method).invoke("Where is it?"), Look)
        tool_loop(model)
        text = model.bind(max_tokens=8)
        assert "".join(chunk.text for chunk in text.stream("Where is it?"))


def tool_loop(model: Any) -> None:
    bound = model.bind_tools([Look], tool_choice="Look", strict=True)
    said: list[Any] = [HumanMessage("Where is it?")]
    for turn in range(3):
        answer = bound.invoke(said)
        (call,) = answer.tool_calls
        Look.model_validate(call["args"])
        said += [answer, ToolMessage(f"no, turn {turn}", tool_call_id=call["id"])]
    assert model.invoke(said).usage_metadata["output_tokens"]
    chunks = list(bound.stream("Where is it?"))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    (call,) = whole.tool_calls
    Look.model_validate(call["args"])


main(sys.argv[1])
