"""Requests that are in flight while a test does something to the server, and how each of them ended.

Knows nothing of what the test does.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from mlserver.grpc import dataplane_pb2 as pb
from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub

from mlserver_torch_stream.client import EventParser
from tests import plain_http
from tests.server import v2
from tests.server.harness import Server

BOUND_S = 60.0


@dataclass
class Ending:
    """The result of one request. ``code`` is the REST status, or the gRPC code unless it is OK."""

    replies: list[v2.Reply] = field(default_factory=list)
    code: int | grpc.StatusCode | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def reason(self) -> str | None:
        """Returns the finish reason of a request, whose last response must be its only final one."""
        finals = [reply for reply in self.replies if reply.final]
        assert len(finals) == 1 and finals[0] is self.replies[-1], self.replies[-3:]
        return finals[0].finish_reason


@dataclass
class Flight:
    """A running request. If it streams, its first response has arrived."""

    ending: Future[Ending]

    def end(self) -> Ending:
        return self.ending.result(BOUND_S)


class Flights:
    """Starts requests in threads; each method returns once the server runs the request or has refused it."""

    def __init__(self, server: Server, pool: ThreadPoolExecutor, stub: GRPCInferenceServiceStub) -> None:
        self._server = server
        self._pool = pool
        self._stub = stub

    def rest_stream(self, model: str, **parameters: Any) -> Flight:
        return self._begin(lambda begun: _rest_stream(self._server, model, parameters, begun))

    def grpc_stream(self, model: str, *, linger: bool = False, **parameters: Any) -> Flight:
        """With ``linger``, the client keeps its side open for further messages."""
        return self._begin(lambda begun: _grpc_stream(self._stub, model, parameters, begun, linger))

    def grpc_prompt(self, model: str, text: str) -> Flight:
        """Starts a prompt whose end never comes. Returns at once, as nothing shows that it has begun."""
        parameters = {"stream_mode": "prompt", "max_tokens": 4}
        work = lambda: _grpc_stream(self._stub, model, parameters, lambda: None, True, text)  # noqa: E731
        return Flight(self._pool.submit(work))

    def rest_unary(self, model: str, **parameters: Any) -> Flight:
        return Flight(self._pool.submit(rest_unary, self._server, model, **parameters))

    def grpc_unary(self, model: str, **parameters: Any) -> Flight:
        return Flight(self._pool.submit(grpc_unary, self._stub, model, **parameters))

    def _begin(self, work: Callable[[Callable[[], None]], Ending]) -> Flight:
        begun = threading.Event()
        ending = self._pool.submit(work, begun.set)
        ending.add_done_callback(lambda _: begun.set())
        assert begun.wait(BOUND_S)
        return Flight(ending)


@contextmanager
def flights(server: Server) -> Iterator[Flights]:
    with ThreadPoolExecutor(64) as pool, grpc.insecure_channel(server.grpc_target) as channel:
        yield Flights(server, pool, GRPCInferenceServiceStub(channel))


def rest_unary(server: Server, model: str, **parameters: Any) -> Ending:
    body = v2.rest_body("Hello", **parameters)
    response = plain_http.post(f"{server.url}/v2/models/{model}/infer", json=body, timeout=BOUND_S)
    replies = [v2.rest_reply(response.json())] if response.status_code == 200 else []
    return Ending(replies, response.status_code, dict(response.headers))


def grpc_unary(stub: GRPCInferenceServiceStub, model: str, **parameters: Any) -> Ending:
    try:
        response = stub.ModelInfer(v2.grpc_request(model, "Hello", **parameters), timeout=BOUND_S)
    except grpc.RpcError as error:
        return Ending(code=error.code())
    return Ending([v2.grpc_reply(response)])


def grpc_refusal(stub: GRPCInferenceServiceStub, model: str) -> grpc.StatusCode | None:
    """Returns the code with which a stream is refused."""
    return _grpc_stream(stub, model, {"max_tokens": 1}, lambda: None, False).code


def _rest_stream(server: Server, model: str, parameters: dict[str, Any], begun: Callable[[], None]) -> Ending:
    body = v2.rest_body("Hello", **parameters)
    parser, replies = EventParser(), []
    with plain_http.stream(
        "POST", f"{server.url}/v2/models/{model}/infer_stream", json=body, timeout=BOUND_S
    ) as response:
        for chunk in response.iter_bytes():
            if response.status_code == 200:
                replies += [v2.rest_reply(json.loads(event)) for event in parser.feed(chunk)]
            begun()
        return Ending(replies, response.status_code, dict(response.headers))


def _grpc_stream(
    stub: GRPCInferenceServiceStub,
    model: str,
    parameters: dict[str, Any],
    begun: Callable[[], None],
    linger: bool,
    text: str = "Hello",
) -> Ending:
    outgoing: queue.SimpleQueue[pb.ModelInferRequest | None] = queue.SimpleQueue()
    outgoing.put(v2.grpc_request(model, text, **parameters))
    if not linger:
        outgoing.put(None)
    ending = Ending()
    try:
        for response in stub.ModelStreamInfer(iter(outgoing.get, None), timeout=BOUND_S):
            ending.replies.append(v2.grpc_reply(response))
            begun()
    except grpc.RpcError as error:
        ending.code = error.code()
    finally:
        outgoing.put(None)
    return ending
