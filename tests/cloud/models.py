"""A scripted model server: V2 and OpenAI, streamed and unary. It reverses its prompts and records its requests.

Uses none of our code. Answers 429 if more than ``most`` requests are in flight, and fails as a test defines.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.scripted_http import Handler, serving


@dataclass
class ModelServer:
    """``trouble`` is called with each prompt and how often it came before.

    It returns a status to answer, an error object for a 400, "cut", or None. ``script`` replaces the events of every
    answer, or its body.
    """

    url: str = ""
    delay: float = 0.0
    most: int = 10_000
    trouble: Callable[[str, int], int | str | dict[str, Any] | None] = lambda prompt, before: None
    script: list[dict[str, Any]] | None = None
    asked: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    answered: list[str] = field(default_factory=list)
    refused: int = 0
    flying: int = 0
    peak: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


def _prompt(body: dict[str, Any]) -> str:
    if "inputs" in body:
        data = body["inputs"][0]["data"][0]
        return str(json.loads(data)[-1]["content"] if body["inputs"][0]["name"] == "messages" else data)
    if "messages" in body:
        content = body["messages"][-1]["content"]
        return content if isinstance(content, str) else json.dumps(content)
    return str(body["prompt"])


def _v2(text: str, last: bool) -> dict[str, Any]:
    outputs = [{"name": "text_output", "datatype": "BYTES", "shape": [1], "data": [text]}]
    if last:
        outputs.append({"name": "finish_reason", "datatype": "BYTES", "shape": [1], "data": ["stop"]})
        outputs.append({"name": "num_input_tokens", "datatype": "UINT32", "shape": [1], "data": [3]})
        outputs.append({"name": "num_output_tokens", "datatype": "UINT32", "shape": [1], "data": [2]})
    return {"model_name": "m", "outputs": outputs, "parameters": {"index": 0, "triton_final_response": last}}


def _openai(text: str, last: bool, chat: bool, stream: bool) -> dict[str, Any]:
    said: dict[str, Any] = {"delta" if stream else "message": {"content": text}} if chat else {"text": text}
    kind = ("chat.completion.chunk" if stream else "chat.completion") if chat else "text_completion"
    found: dict[str, Any] = {
        "object": kind,
        "choices": [{"index": 0, **said, "finish_reason": "stop" if last else None}],
    }
    if last:
        found["usage"] = {"prompt_tokens": 3, "completion_tokens": 2}
    return found


def _handler(server: ModelServer) -> type[Handler]:
    class Model(Handler):
        def do_GET(self) -> None:
            self._json(200, {"data": [{"id": "m"}]})

        def do_POST(self) -> None:
            body = json.loads(self.received())
            if self.path == "/v2/repository/index":
                return self._json(200, [{"name": "m", "state": "READY"}])
            prompt = _prompt(body)
            with server.lock:
                before = server.asked.count(prompt)
                server.asked.append(prompt)
                server.bodies.append(body)
                server.flying += 1
                server.peak = max(server.peak, server.flying)
                trouble = 429 if server.flying > server.most else server.trouble(prompt, before)
                server.refused += trouble in (429, 503)
            try:
                time.sleep(server.delay)
                if isinstance(trouble, int):
                    return self._json(trouble, {"error": f"trouble {trouble}"})
                if isinstance(trouble, dict):
                    return self._json(400, {"error": trouble})
                self._answer(prompt[::-1], body, cut=trouble == "cut")
                with server.lock:
                    server.answered.append(prompt)
            finally:
                with server.lock:
                    server.flying -= 1

        def _answer(self, text: str, body: dict[str, Any], cut: bool) -> None:
            openai, chat = self.path.startswith("/v1/"), self.path.endswith("chat/completions")
            stream = body.get("stream", False) if openai else self.path.endswith("_stream")
            pieces = [(text[: len(text) // 2], False), (text[len(text) // 2 :], True)] if stream else [(text, True)]
            events = [_openai(*piece, chat, stream) if openai else _v2(*piece) for piece in pieces]
            events = events if server.script is None else server.script
            if not stream:
                return self._json(200, events[0])
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            self.close_connection = True
            for event in events[: 1 if cut else None]:
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            if openai and not cut:
                self.wfile.write(b"data: [DONE]\n\n")

        def _json(self, status: int, value: Any) -> None:
            self.answer(status, json.dumps(value).encode())

    return Model


@contextmanager
def model_server(**settings: Any) -> Iterator[ModelServer]:
    server = ModelServer(**settings)
    with serving(_handler(server)) as server.url:
        yield server
