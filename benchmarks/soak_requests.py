"""One short request to each endpoint of a server, in every spelling, each checked. Keeps no state of its own.

Knows neither processes nor memory. A request returns the tokens that it generated. The connections stay open, and are
Python's own ``http.client``: it takes a third of httpx's processor time, which the server has instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from http.client import HTTPConnection
from select import select
from typing import Any

from benchmarks.http_endpoint import HOST
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


class WrongAnswer(Exception):
    """An answer is not what the request asks for. The message has both."""


class SoakClient:
    """One client with its connections, which asks one request after the other."""

    def __init__(self, http_port: int, grpc_port: int) -> None:
        import grpc

        self._http = HTTPConnection(HOST, http_port, timeout=_TIMEOUT_S)
        self._channel = grpc.insecure_channel(f"{HOST}:{grpc_port}")
        unary, stream = self._channel.unary_unary, self._channel.stream_stream
        self._infer, self._live = unary(f"{_METHODS}/ModelInfer"), unary(f"{_METHODS}/ServerLive")
        self._stream = stream(f"{_METHODS}/ModelStreamInfer")
        self.requests: Sequence[Callable[[], int]] = (
            lambda: self._v2("infer"),
            lambda: self._v2("infer_stream"),
            lambda: self._flat("generate"),
            lambda: self._flat("generate_stream"),
            lambda: self._openai("completions", {"prompt": _PROMPT}),
            lambda: self._openai("completions", {"prompt": _PROMPT, "stream": True}),
            lambda: self._openai("chat/completions", {"messages": [{"role": "user", "content": _PROMPT}]}),
            lambda: self._openai("chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "stream": True}),
            lambda: self._openai("completions", {"prompt": _PROMPT, "structured_outputs": {"regex": "[a-z]{9}"}}),
            lambda: self._responses(stream=False),
            lambda: self._responses(stream=True),
            self._grpc_unary,
            self._grpc_stream,
            self._file,
            *(lambda path=path: self._get(path) for path in _READ),
            self._index,
            self._refused,
            self._grpc_live,
        )

    def close(self) -> None:
        self._http.close()
        self._channel.close()

    def _ask(
        self, method: str, path: str, body: bytes | None = None, kind: str = "application/json", status: int = 200
    ) -> str:
        """The text of the answer. Raises WrongAnswer for another status."""
        if self._http.sock is not None and select([self._http.sock], [], [], 0)[0]:
            self._http.close()  # the server has closed it, as it does where a client is silent for some seconds
        self._http.request(method, path, body, {} if body is None else {"Content-Type": kind})
        reply = self._http.getresponse()
        text = reply.read().decode()
        if reply.status != status:
            raise WrongAnswer(f"{method} {path}: {reply.status} {text[:300]}")
        return text

    def _post(self, path: str, body: dict[str, Any], status: int = 200) -> str:
        return self._ask("POST", path, json.dumps(body).encode(), status=status)

    def _get(self, path: str) -> int:
        self._ask("GET", path)
        return 0

    def _v2(self, verb: str) -> int:
        tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [_PROMPT]}
        parameters = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
        text = self._post(f"/v2/models/{MODEL}/{verb}", {"inputs": [tensor], "parameters": parameters})
        return _checked(text, text.count(_FINAL) == 1)

    def _flat(self, verb: str) -> int:
        body = {"text_input": _PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
        text = self._post(f"/v2/models/{MODEL}/{verb}", body)
        return _checked(text, '"text_output"' in text)

    def _openai(self, path: str, body: dict[str, Any]) -> int:
        given = {**body, "model": MODEL, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        text = self._post(f"/v1/{path}", given)
        return _checked(text, "[DONE]" in text if "stream" in body else f'"completion_tokens":{TOKENS}' in text)

    def _responses(self, stream: bool) -> int:
        body = {"model": MODEL, "input": _PROMPT, "max_output_tokens": TOKENS, "temperature": 0, "stream": stream}
        text = self._post("/v1/responses", {**body, "ignore_eos": True})
        return _checked(text, f'"output_tokens":{TOKENS}' in text and '"incomplete"' in text)

    def _file(self) -> int:
        """Four requests that leave nothing behind, counted as one."""
        path = f"/v1/files/{json.loads(self._ask('POST', '/v1/files', _UPLOAD, _FORM))['id']}"
        self._get(path)
        content = self._ask("GET", f"{path}/content")
        self._ask("DELETE", path)
        return _checked(f"{path}: {content!r}", content == _LINE.decode(), 0)

    def _index(self) -> int:
        text = self._post("/v2/repository/index", {})
        return _checked(text, MODEL in text, 0)

    def _refused(self) -> int:
        text = self._post(f"/v2/models/{MODEL}/generate", {"text_input": _PROMPT, "unheard_of": 1}, 422)
        return _checked(text, "unheard_of" in text, 0)

    def _message(self) -> bytes:
        from mlserver.grpc.dataplane_pb2 import ModelInferRequest

        message = ModelInferRequest(model_name=MODEL)
        tensor = message.inputs.add(name="text_input", datatype="BYTES", shape=[1])
        tensor.contents.bytes_contents.append(_PROMPT.encode())
        message.parameters["max_tokens"].int64_param = TOKENS
        message.parameters["temperature"].int64_param = 0
        message.parameters["ignore_eos"].bool_param = True
        return bytes(message.SerializeToString())

    def _grpc_unary(self) -> int:
        reply = self._infer(self._message(), timeout=_TIMEOUT_S)
        return _checked(repr(reply[:300]), b"triton_final_response" in reply)

    def _grpc_stream(self) -> int:
        replies = list(self._stream(iter([self._message()]), timeout=_TIMEOUT_S))
        return _checked(repr(replies[:3]), bool(replies) and b"finish_reason" in replies[-1])

    def _grpc_live(self) -> int:
        return _checked("ServerLive", self._live(b"", timeout=_TIMEOUT_S) == b"\x08\x01", 0)


_READ = (
    "/v2/health/live",
    "/v2/health/ready",
    "/health",
    "/ping",
    "/metrics",
    "/v2",
    f"/v2/models/{MODEL}",
    f"/v2/models/{MODEL}/ready",
    f"/v2/models/{MODEL}/config",
    f"/v2/models/{MODEL}/stats",
    "/v1/models",
    f"/v1/models/{MODEL}",
    "/v1/files",
    "/v1/batches",
    "/openai/v1/models",
)


def _checked(shown: str, holds: bool, tokens: int = TOKENS) -> int:
    if not holds:
        raise WrongAnswer(shown[:300])
    return tokens
