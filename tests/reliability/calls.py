"""A request through any of the endpoints, including Triton's port: answered at once, read slowly, or left.

Knows no model. The REST endpoints use plain sockets, so that a client leaves exactly when the test says so.
"""

from __future__ import annotations

import http.client
import json
import queue
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, Protocol

import grpc
from mlserver.grpc import dataplane_pb2 as pb
from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub as Stub

from tests.server import raw, triton_wire, v2
from tests.server.harness import HOST, Server

BOUND_S = 90.0
BIDI_MESSAGES = 2


class Endpoint(str, Enum):
    REST_UNARY = "rest-unary"
    GRPC_UNARY = "grpc-unary"
    REST_STREAM = "rest-stream"
    GRPC_STREAM = "grpc-stream"
    GRPC_BIDI = "grpc-bidi"  # several messages, and the client's side stays open
    TRITON_STREAM = "triton-stream"
    TRITON_BIDI = "triton-bidi"
    GENERATE = "generate"  # flat JSON, whose replies are not read here
    GENERATE_STREAM = "generate_stream"

    @property
    def streams(self) -> bool:
        return self not in (Endpoint.REST_UNARY, Endpoint.GRPC_UNARY, Endpoint.GENERATE)

    @property
    def rest(self) -> bool:
        return self in (Endpoint.REST_UNARY, Endpoint.REST_STREAM) or self.flat

    @property
    def flat(self) -> bool:
        return self in (Endpoint.GENERATE, Endpoint.GENERATE_STREAM)

    @property
    def path(self) -> str:
        """Returns the last part of a REST path."""
        return self.value if self.flat else "infer_stream" if self.streams else "infer"

    @property
    def bidirectional(self) -> bool:
        return self in (Endpoint.GRPC_BIDI, Endpoint.TRITON_BIDI)

    @property
    def requests(self) -> int:
        return BIDI_MESSAGES if self.bidirectional else 1


ENDPOINTS = [
    *(Endpoint.REST_UNARY, Endpoint.GRPC_UNARY, Endpoint.REST_STREAM, Endpoint.GRPC_STREAM),
    Endpoint.GRPC_BIDI,
]
PLAIN_ENDPOINTS = ENDPOINTS[:4]
TRITON_ENDPOINTS = [Endpoint.TRITON_STREAM, Endpoint.TRITON_BIDI]  # of a server that has Triton's port


@dataclass
class Result:
    """The result of a call. ``code`` is the REST or gRPC status of a refusal; None if the call was answered."""

    endpoint: Endpoint
    replies: list[v2.Reply] = field(default_factory=list)
    code: int | grpc.StatusCode | None = None
    said: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)  # of a REST stream

    @property
    def texts(self) -> list[str]:
        return [v2.joined(part) for part in self._parts()]

    @property
    def text(self) -> str:
        (text,) = self.texts
        return text

    @property
    def reasons(self) -> list[str | None]:
        """Returns the finish reason of each request, whose last response must be its only final one."""
        for part in self._parts():
            assert [reply.final for reply in part] == [False] * (len(part) - 1) + [True], part[-3:]
        return [part[-1].finish_reason for part in self._parts()]

    def _parts(self) -> list[list[v2.Reply]]:
        if not self.endpoint.bidirectional:
            return [self.replies]
        index = "request_index"
        return [[each for each in self.replies if each.parameters[index] == part] for part in range(BIDI_MESSAGES)]


class Call(Protocol):
    """A request that has been sent."""

    def read(self, replies: int) -> None:
        """Waits for the first ``replies`` replies of a stream."""

    def end(self) -> Result:
        """Reads to the end."""

    def leave(self) -> None:
        """Cancels the call, or closes its connection."""


@contextmanager
def calling(endpoint: Endpoint, server: Server, model: str, text: str = "Hello", **parameters: Any) -> Iterator[Call]:
    if endpoint.rest:
        body = {"text_input": text, **parameters} if endpoint.flat else v2.rest_body(text, **parameters)
        call: _Rest | _GrpcUnary | _GrpcStream = _Rest(endpoint, server, model, body)
    else:
        channel = grpc.insecure_channel(server.triton_target if endpoint in TRITON_ENDPOINTS else server.grpc_target)
        request = v2.grpc_request(model, text, **parameters)
        call = (_GrpcStream if endpoint.streams else _GrpcUnary)(endpoint, channel, request)
    try:
        yield call
    finally:
        call.leave()
        call.close()


def ask(endpoint: Endpoint, server: Server, model: str, text: str = "Hello", **parameters: Any) -> Result:
    with calling(endpoint, server, model, text, **parameters) as call:
        return call.end()


class _Rest:
    def __init__(self, endpoint: Endpoint, server: Server, model: str, body: dict[str, Any]) -> None:
        self._result = Result(endpoint)
        self._socket = socket.create_connection((HOST, server.http_port), BOUND_S)
        self._socket.sendall(raw.post(f"/v2/models/{model}/{endpoint.path}", body, "Connection: close"))
        self._response = http.client.HTTPResponse(self._socket, method="POST")
        self._begun = False

    def read(self, replies: int) -> None:
        self._begin()
        while len(self._result.replies) < replies and (line := self._response.readline()):
            self._take(line)

    def end(self) -> Result:
        self._begin()
        if self._result.endpoint.streams and self._result.code is None:
            while line := self._response.readline():
                self._take(line)
            return self._result
        body = self._response.read().decode()
        if self._result.code is None:
            self._result.replies.append(v2.rest_reply(json.loads(body)))
        else:
            self._result.said = json.loads(body)["error"]
        return self._result

    def leave(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._response.close()
        self._socket.close()

    def close(self) -> None:
        """Does nothing, as nothing remains after leaving."""

    def _begin(self) -> None:
        if self._begun:
            return
        self._begun = True
        self._response.begin()
        self._result.headers = {name.lower(): value for name, value in self._response.getheaders()}
        self._result.code = None if self._response.status == 200 else self._response.status

    def _take(self, line: bytes) -> None:
        if line.startswith(b"data: "):
            self._result.events.append(json.loads(line[6:]))
            self._result.replies.append(v2.rest_reply(self._result.events[-1]))


class _GrpcUnary:
    def __init__(self, endpoint: Endpoint, channel: grpc.Channel, request: pb.ModelInferRequest) -> None:
        self._endpoint = endpoint
        self._channel = channel
        self._future = Stub(channel).ModelInfer.future(request, timeout=BOUND_S)

    def read(self, replies: int) -> None:
        raise AssertionError("not a stream")

    def end(self) -> Result:
        try:
            return Result(self._endpoint, [v2.grpc_reply(self._future.result())])
        except grpc.RpcError as error:
            return Result(self._endpoint, code=error.code(), said=error.details() or "")
        except grpc.FutureCancelledError:
            return Result(self._endpoint, code=grpc.StatusCode.CANCELLED)

    def leave(self) -> None:
        self._future.cancel()

    def close(self) -> None:
        self._channel.close()


class _GrpcStream:
    def __init__(self, endpoint: Endpoint, channel: grpc.Channel, request: pb.ModelInferRequest) -> None:
        self._channel = channel
        self._result = Result(endpoint)
        self._outgoing: queue.SimpleQueue[pb.ModelInferRequest | None] = queue.SimpleQueue()
        for message in [request] * endpoint.requests:
            self._outgoing.put(message)
        if not endpoint.bidirectional:
            self._outgoing.put(None)
        self._triton = endpoint in TRITON_ENDPOINTS
        start = partial(triton_wire.stream, channel) if self._triton else Stub(channel).ModelStreamInfer
        self._call = start(iter(self._outgoing.get, None), timeout=BOUND_S)

    def read(self, replies: int) -> None:
        while len(self._result.replies) < replies and self._next():
            pass

    def end(self) -> Result:
        while self._next():
            if sum(reply.final for reply in self._result.replies) == self._result.endpoint.requests:
                self._outgoing.put(None)
        return self._result

    def leave(self) -> None:
        self._outgoing.put(None)
        self._call.cancel()

    def close(self) -> None:
        self._channel.close()

    def _read(self, message: Any) -> v2.Reply:
        if not self._triton:
            return v2.grpc_reply(message)
        streamed = triton_wire.streamed(message)
        self._result.said = streamed.error or self._result.said
        return streamed.reply

    def _next(self) -> bool:
        try:
            message = next(self._call)
            self._result.replies.append(self._read(message))
        except StopIteration:
            return False
        except grpc.RpcError as error:
            self._result.code, self._result.said = error.code(), error.details() or ""
            return False
        return True
