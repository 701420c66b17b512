"""A chat with huggingface_hub's ``InferenceClient``, whole and streamed, and its error.

Knows nothing of the server beyond its address.
"""

from __future__ import annotations

import sys
from typing import Any

from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError


def main(url: str) -> None:
    client = InferenceClient(base_url=url)
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 0.0}
    said = [{"role": "user", "content": "Where is it?"}]
    whole = client.chat_completion(said, **asked)
    stream = client.chat_completion(said, stream=True, **asked)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text and text == whole.choices[0].message.content and whole.usage.completion_tokens
    try:
        client.chat_completion(said, **{**asked, "top_p": 7})
    except HfHubHTTPError as error:
        assert "top_p" in str(error), error
    else:
        raise AssertionError("top_p: 7 is not refused")


main(sys.argv[1])
