"""Requests that ask for too much: how soon they are refused, and what they do to the server and to a stream beside.

Knows our server's OpenAI endpoints and its bound on files; the bytes of a file are made while they are sent.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from benchmarks.breaking import MODEL, Broken
from benchmarks.flood import HOST, ask
from benchmarks.stream_gaps import beside_a_stream

_BYTES = 10 * 10**9
_PIECE = b"x" * 65536
_CHUNK = b"%x\r\n%b\r\n" % (len(_PIECE), _PIECE)
_PARTS = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="large.jsonl"\r\n\r\n'
)
_IDLE_S = 5.0
# A chat template that the model's author has made to never end, as loops that neither Python nor jinja2 bounds.
ENDLESS_TEMPLATE = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
_LONG_PROMPT = "Tokens and more tokens. " * (15_000_000 // 24)
_CLIENTS, _LEAVE_AFTER_S = 6, 3.0
_TENSORS = 60_000


async def oversized_requests(server: Broken) -> dict[str, Any]:
    """By name; ``none`` is the stream alone. The file is sent once with its size in the head, and once in chunks
    without it, where the connection ends as soon as the server stops reading."""
    length = b"Content-Length: %d\r\n\r\n%b" % (_BYTES, _PARTS)
    chunked = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(_PARTS), _PARTS)
    strings = _request({"stop": [str(number) for number in range(1_000_000)]})  # made before anything is timed
    long_strings = _request({"stop": [f"{number:x}" * 600_000 for number in range(16)], "n": 16})
    prompt = _completion(_LONG_PROMPT)
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["Hello"]}
    inputs = _post(f"/v2/models/{MODEL}/infer", {"inputs": [tensor] * _TENSORS})
    return {
        "none": await _beside(server, _nothing()),
        "stop": await _beside(server, _refused_field(server, "stop", strings)),
        "long_stop": await _beside(server, _refused_field(server, "stop", long_strings)),
        "inputs": await _beside(server, _refused_inputs(server, inputs)),
        "n": await _beside(server, _refused_field(server, "n", _request({"n": 1_000_000_000}))),
        "prompts": await _beside(server, _refused_prompts(server, prompt)),
        "prompts_left": await _beside(server, _prompts_left(server, prompt)),
        "template": await _beside(server, _rendered(server)),
        "file_announced": await _beside(server, _refused_file(server, length, _PIECE)),
        "file_unannounced": await _beside(server, _refused_file(server, chunked, _CHUNK)),
    }


async def _beside(server: Broken, happening: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    one, beside = await beside_a_stream(server, happening)
    return {**one, **beside}


async def _nothing() -> dict[str, Any]:
    await asyncio.sleep(_IDLE_S)
    return {}


def _request(field: dict[str, Any]) -> bytes:
    messages = [{"role": "user", "content": "Hello"}]
    return _post("/v1/chat/completions", {"model": MODEL, "messages": messages, **field})


def _post(path: str, content: dict[str, Any]) -> bytes:
    body = json.dumps(content).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + body


async def _refused_inputs(server: Broken, request: bytes) -> dict[str, Any]:
    began = time.perf_counter()
    answered = await ask(server.port, request)
    seconds = time.perf_counter() - began
    named = answered.status == 422 and json.loads(answered.body)["error"].startswith("inputs: ")
    return {"status": answered.status, "named": named, "seconds": seconds, "sent_mib": len(request) / 2**20}


async def _refused_field(server: Broken, name: str, request: bytes) -> dict[str, Any]:
    began = time.perf_counter()
    answered = await ask(server.port, request)
    seconds = time.perf_counter() - began
    named = answered.status == 400 and json.loads(answered.body)["error"]["param"] == name
    return {"status": answered.status, "named": named, "seconds": seconds, "sent_mib": len(request) / 2**20}


def _completion(prompt: str) -> bytes:
    return _post("/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": 1})


async def _refused_prompts(server: Broken, request: bytes) -> dict[str, Any]:
    """Several clients send a prompt of 15 MB at the same time."""
    began = time.perf_counter()
    answered = await asyncio.gather(*(ask(server.port, request) for _ in range(_CLIENTS)))
    seconds = time.perf_counter() - began
    named = all(each.status == 400 and json.loads(each.body)["error"]["param"] == "prompt" for each in answered)
    sent_mib = _CLIENTS * len(request) / 2**20
    return {"status": answered[0].status, "named": named, "seconds": seconds, "sent_mib": sent_mib}


async def _prompts_left(server: Broken, request: bytes) -> dict[str, Any]:
    """The clients leave; ``seconds`` pass until a prompt that is tokenized in a thread, too, has its answer."""
    began = time.perf_counter()
    await asyncio.gather(*(_leave(server, request) for _ in range(_CLIENTS)))
    answered = await ask(server.port, _completion("Hello there. " * 400))
    seconds = time.perf_counter() - began - _LEAVE_AFTER_S
    return {"status": answered.status, "seconds": seconds, "sent_mib": _CLIENTS * len(request) / 2**20}


async def _leave(server: Broken, request: bytes) -> None:
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(ask(server.port, request), _LEAVE_AFTER_S)


async def _rendered(server: Broken) -> dict[str, Any]:
    """Several chats with a template that never ends."""
    request, began = _request({}), time.perf_counter()
    answered = await asyncio.gather(*(ask(server.port, request) for _ in range(_CLIENTS)))
    seconds = time.perf_counter() - began
    return {"status": answered[0].status, "seconds": seconds, "sent_mib": _CLIENTS * len(request) / 2**20}


async def _refused_file(server: Broken, rest_of_head: bytes, piece: bytes) -> dict[str, Any]:
    """By a socket of its own: a stream of asyncio drops an answer that came before the connection broke."""
    loop, sent = asyncio.get_running_loop(), 0
    with socket.socket() as connection:
        connection.setblocking(False)
        await loop.sock_connect(connection, (HOST, server.port))
        began = time.perf_counter()
        answer = asyncio.ensure_future(loop.sock_recv(connection, 4096))
        with suppress(ConnectionError):  # the server has closed its side: its answer is there
            head = b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n"
            await loop.sock_sendall(connection, head + rest_of_head)
            while not answer.done() and sent < _BYTES:
                await loop.sock_sendall(connection, piece)
                sent += len(_PIECE)
                await asyncio.sleep(0)  # sending alone would not wait, nor see the answer
        status = int((await answer).split()[1])
        seconds = time.perf_counter() - began
    return {"status": status, "seconds": seconds, "sent_mib": sent / 2**20}
