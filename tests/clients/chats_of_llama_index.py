"""Chats and prompts with LlamaIndex's ``OpenAILike``, whole and streamed, and a tool loop of three turns.

Knows nothing of the server beyond its address.
"""

from __future__ import annotations

import sys
from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from typed_answers import Look


def main(url: str) -> None:
    asked: dict[str, Any] = {
        "model": "tiny", "api_base": f"{url}/v1", "api_key": "none", "max_tokens": 12, "temperature": 0.0,
        "context_window": 1024, "max_retries": 0,
    }  # fmt: skip
    said = [ChatMessage(role="user", content="Where is it?")]
    chats = OpenAILike(is_chat_model=True, **asked)
    whole = chats.chat(said).message.content
    assert whole and "".join(piece.delta or "" for piece in chats.stream_chat(said)) == whole
    tool_loop(OpenAILike(is_chat_model=True, is_function_calling_model=True, **{**asked, "max_tokens": 200}))
    prompts = OpenAILike(is_chat_model=False, **asked)
    text = prompts.complete("Hello").text
    assert text and "".join(piece.delta or "" for piece in prompts.stream_complete("Hello")) == text


def tool_loop(model: OpenAILike) -> None:
    """Three turns, in which the client's own messages are sent back."""
    tool = FunctionTool.from_defaults(lambda **_: "no", name="Look", description="Looks.", fn_schema=Look)
    said = [ChatMessage(role="user", content="Where is it?")]
    for turn in range(3):
        answer = model.chat_with_tools([tool], chat_history=said, tool_required=True, allow_parallel_tool_calls=False)
        (call,) = model.get_tool_calls_from_response(answer)
        Look.model_validate(call.tool_kwargs)
        result = ChatMessage(role="tool", content=f"no, turn {turn}", additional_kwargs={"tool_call_id": call.tool_id})
        said += [answer.message, result]
    assert model.chat(said).message.content


main(sys.argv[1])
