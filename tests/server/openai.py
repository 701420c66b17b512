"""Sends requests of OpenAI's API and reads their answers."""

from __future__ import annotations

import json
from typing import Any

import httpx

from mlserver_torch_stream.client import EventParser
from tests import plain_http
from tests.server import v2
from tests.server.harness import Server

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
DONE = "[DONE]"


def talk(content: Any = "Hello", **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], **more}


def prompt(text: Any = "Hello", **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": text, **more}


def post(server: Server, path: str, body: Any, **headers: str) -> httpx.Response:
    return plain_http.post(f"{server.url}{path}", json=body, headers=headers, timeout=v2.TIMEOUT_S)


def whole(server: Server, path: str, body: Any) -> dict[str, Any]:
    response = post(server, path, body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def events(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return list(EventParser().feed(response.content))


def stream(server: Server, path: str, body: Any) -> list[dict[str, Any]]:
    """Returns the chunks of a stream, which must end with ``[DONE]``."""
    *chunks, end = events(post(server, path, {**body, "stream": True}))
    assert end == DONE
    return [json.loads(chunk) for chunk in chunks]


def refused(response: httpx.Response) -> dict[str, Any]:
    """Returns the error object of a reply, which must have nothing else."""
    body = response.json()
    assert body.keys() == {"error"} and body["error"].keys() == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


def texts(answer: dict[str, Any]) -> list[str]:
    """Returns the texts of a whole answer, by index."""
    choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    return [choice["message"]["content"] if "message" in choice else choice["text"] for choice in choices]


def joined(chunks: list[dict[str, Any]]) -> list[str]:
    """Returns the texts of a stream, by index."""
    found: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            text = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            found[choice["index"]] = found.get(choice["index"], "") + text
    return [found[index] for index in sorted(found)]
