"""One short request to each endpoint of a server, in the format of each API, each checked. Keeps no state of its own.

Knows neither processes nor memory. A request returns the tokens that it generated. The connections stay open, and use
Python's own ``http.client``: it needs a third of httpx's CPU time, which is left for the server.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from http.client import HTTPConnection
from select import select
from typing import Any

import grpc

from benchmarks.answers import Ask
from benchmarks.endpoints import HOST, GrpcEndpoint, V2Spelling
from benchmarks.servers import Ours

MODEL = Ours.model
TOKENS = 2
_METHODS = "/inference.GRPCInferenceService"
_TIMEOUT_S = 120.0
_FINAL = '"triton_final_response":true'
_PROMPT = "Once upon a time"
_LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}\n'
_FORM = "multipart/form-data; boundary=soak"
_UPLOAD = (
    b'--soak\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--soak\r\n'
    b'Content-Disposition: form-data; name="file"; filename="rows.jsonl"\r\n\r\n%s\r\n--soak--\r\n' % _LINE
)
_ASK = Ask(_PROMPT, 0, TOKENS)
_GREEDY: dict[str, Any] = {"ignore_eos": True, "temperature": 0}
_OPENAI = {"model": MODEL, "max_tokens": TOKENS, **_GREEDY}
_CHAT = {**_OPENAI, "messages": [{"role": "user", "content": _PROMPT}]}
_TEXT = {**_OPENAI, "prompt": _PROMPT}
_FLAT = {"text_input": _PROMPT, "max_tokens": TOKENS, **_GREEDY}
_RESPONSES = {"model": MODEL, "input": _PROMPT, "max_output_tokens": TOKENS, **_GREEDY}
_COUNTED, _DONE, _STREAMED = f'"completion_tokens":{TOKENS}', "[DONE]", {"stream": True}
_RESPONDED = [f'"output_tokens":{TOKENS}', '"incomplete"']
# What is posted where, and what the answer says.
_GENERATING: Sequence[tuple[str, Mapping[str, Any], Sequence[str]]] = (
    (f"/v2/models/{MODEL}/infer", V2Spelling(MODEL).body(_ASK), [_FINAL]),
    (f"/v2/models/{MODEL}/infer_stream", V2Spelling(MODEL).body(_ASK), [_FINAL]),
    (f"/v2/models/{MODEL}/generate", _FLAT, ['"text_output"']),
    (f"/v2/models/{MODEL}/generate_stream", _FLAT, ['"text_output"']),
    ("/v1/completions", _TEXT, [_COUNTED]),
    ("/v1/completions", _TEXT | _STREAMED, [_DONE]),
    ("/v1/chat/completions", _CHAT, [_COUNTED]),
    ("/v1/chat/completions", _CHAT | _STREAMED, [_DONE]),
    ("/v1/completions", {**_TEXT, "structured_outputs": {"regex": "[a-z]{9}"}}, [_COUNTED]),
    ("/v1/responses", _RESPONSES, _RESPONDED),
    ("/v1/responses", _RESPONSES | _STREAMED, _RESPONDED),
)
_READ = (
    *("/v2/health/live", "/v2/health/ready", "/health", "/ping", "/metrics", "/v2"),
    *(f"/v2/models/{MODEL}{part}" for part in ("", "/ready", "/config", "/stats")),
    *("/v1/models", f"/v1/models/{MODEL}", "/v1/files", "/v1/batches", "/openai/v1/models"),
)


class WrongAnswer(Exception):
    """An answer is not what the request asked for. The message has both."""


class SoakClient:
    """One client with its connections. It sends one request after the other."""

    def __init__(self, http_port: int, grpc_port: int) -> None:
        self._http = HTTPConnection(HOST, http_port, timeout=_TIMEOUT_S)
        self._channel = grpc.insecure_channel(f"{HOST}:{grpc_port}")
        self._message = GrpcEndpoint(grpc_port, MODEL).request(_ASK)
        self.requests: Sequence[Callable[[], int]] = (
            *(partial(self._generate, *each) for each in _GENERATING),
            *(partial(self._read, path) for path in _READ),
            self._grpc_unary,
            self._grpc_stream,
            self._grpc_live,
            self._file,
            self._index,
            self._refused,
        )

    def close(self) -> None:
        self._http.close()
        self._channel.close()

    def _ask(self, method: str, path: str, body: Any = None, kind: str = "application/json", status: int = 200) -> str:
        """Returns the text of the answer.

        ``body`` is bytes, or an object for JSON. Raises WrongAnswer for another status.
        """
        if self._http.sock is not None and select([self._http.sock], [], [], 0)[0]:
            self._http.close()  # the server has closed it, as it does where a client is silent for some seconds
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        self._http.request(method, path, content, {} if body is None else {"Content-Type": kind})
        reply = self._http.getresponse()
        text = reply.read().decode()
        if reply.status != status:
            raise WrongAnswer(f"{method} {path}: {reply.status} {text[:300]}")
        return text

    def _generate(self, path: str, body: Mapping[str, Any], expected: Sequence[str]) -> int:
        text = self._ask("POST", path, body)
        return _checked(text, all(each in text for each in expected) and text.count(_FINAL) <= 1)

    def _read(self, path: str) -> int:
        self._ask("GET", path)
        return 0

    def _file(self) -> int:
        """Uploads, reads and deletes a file in four requests, counted as one; nothing remains on the server."""
        path = f"/v1/files/{json.loads(self._ask('POST', '/v1/files', _UPLOAD, _FORM))['id']}"
        self._ask("GET", path)
        content = self._ask("GET", f"{path}/content")
        self._ask("DELETE", path)
        return _checked(f"{path}: {content!r}", content == _LINE.decode(), 0)

    def _index(self) -> int:
        text = self._ask("POST", "/v2/repository/index", {})
        return _checked(text, MODEL in text, 0)

    def _refused(self) -> int:
        text = self._ask("POST", f"/v2/models/{MODEL}/generate", {**_FLAT, "unheard_of": 1}, status=422)
        return _checked(text, "unheard_of" in text, 0)

    def _grpc_unary(self) -> int:
        reply = self._channel.unary_unary(f"{_METHODS}/ModelInfer")(self._message, timeout=_TIMEOUT_S)
        return _checked(repr(reply[:300]), b"triton_final_response" in reply)

    def _grpc_stream(self) -> int:
        call = self._channel.stream_stream(f"{_METHODS}/ModelStreamInfer")
        replies = list(call(iter([self._message]), timeout=_TIMEOUT_S))
        return _checked(repr(replies[:3]), bool(replies) and b"finish_reason" in replies[-1])

    def _grpc_live(self) -> int:
        reply = self._channel.unary_unary(f"{_METHODS}/ServerLive")(b"", timeout=_TIMEOUT_S)
        return _checked(repr(reply), reply == b"\x08\x01", 0)


def _checked(shown: str, holds: bool, tokens: int = TOKENS) -> int:
    if not holds:
        raise WrongAnswer(shown[:300])
    return tokens
