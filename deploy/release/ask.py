"""Asks the server at an address for streams: over V2 with plain HTTP, and with the openai SDK.

It needs an interpreter whose environment has the package and the SDK: ``ask.py http://127.0.0.1:8080``.
"""

from __future__ import annotations

import json
import sys

import httpx
from openai import OpenAI

_QUESTION = "What is the capital of France? Answer in one long sentence."


def main() -> None:
    url = sys.argv[1]
    (name,) = (model.id for model in OpenAI(base_url=f"{url}/v1", api_key="none").models.list())
    for label, pieces in (("V2", _by_v2(url, name)), ("openai SDK", _by_openai(url, name))):
        if len(pieces) < 2 or "Paris" not in "".join(pieces):
            sys.exit(f"{label}: expected several pieces that name Paris, got {pieces!r}")
        print(f"{label}: {len(pieces)} pieces: {''.join(pieces)[:60]!r}")


def _by_v2(url: str, name: str) -> list[str]:
    tensor = {"name": "messages", "datatype": "BYTES", "shape": [1], "data": [json.dumps(_messages())]}
    body = {"inputs": [tensor], "parameters": {"max_tokens": 64}}
    pieces: list[str] = []
    with httpx.stream("POST", f"{url}/v2/models/{name}/infer_stream", json=body, timeout=120) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if line.startswith("data: "):
                outputs = json.loads(line.removeprefix("data: "))["outputs"]
                pieces += [text for output in outputs if output["name"] == "text_output" for text in output["data"]]
    return pieces


def _by_openai(url: str, name: str) -> list[str]:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    stream = client.chat.completions.create(model=name, messages=_messages(), max_tokens=64, stream=True)
    return [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]


def _messages() -> list[dict[str, str]]:
    return [{"role": "user", "content": _QUESTION}]


if __name__ == "__main__":
    main()
