"""Chats and prompts with LlamaIndex's ``OpenAILike``, whole and streamed.

Knows nothing of the server beyond its address.
"""

from __future__ import annotations

import sys
from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike


def main(url: str) -> None:
    asked: dict[str, Any] = {
        "model": "tiny", "api_base": f"{url}/v1", "api_key": "none", "max_tokens": 12, "temperature": 0.0,
        "context_window": 1024, "max_retries": 0,
    }  # fmt: skip
    said = [ChatMessage(role="user", content="Where is it?")]
    chats = OpenAILike(is_chat_model=True, **asked)
    whole = chats.chat(said).message.content
    assert whole and "".join(piece.delta or "" for piece in chats.stream_chat(said)) == whole
    prompts = OpenAILike(is_chat_model=False, **asked)
    text = prompts.complete("Hello").text
    assert text and "".join(piece.delta or "" for piece in prompts.stream_complete("Hello")) == text


main(sys.argv[1])
