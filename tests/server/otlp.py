"""A collector of OpenTelemetry spans: the real gRPC service, which keeps the spans it receives."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service
from opentelemetry.proto.trace.v1 import trace_pb2

from tests.server.harness import HOST


@dataclass(frozen=True)
class Span:
    name: str
    span_id: bytes
    parent_id: bytes
    trace_id: bytes
    attributes: dict[str, Any]
    events: tuple[str, ...]
    failed: bool
    message: str


class Collector(service.TraceServiceServicer):
    def __init__(self) -> None:
        self.port = 0
        self._spans: list[Span] = []
        self._arrived = threading.Condition()

    def Export(self, request: messages.ExportTraceServiceRequest, context: Any) -> messages.ExportTraceServiceResponse:
        with self._arrived:
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    self._spans.extend(_read(span) for span in scope.spans)
            self._arrived.notify_all()
        return messages.ExportTraceServiceResponse()

    @property
    def spans(self) -> list[Span]:
        with self._arrived:
            return list(self._spans)

    def wait_for(self, condition: Callable[[list[Span]], bool], seconds: float = 30.0) -> list[Span]:
        """Waits until the spans meet the condition, and returns all of them."""
        end = time.monotonic() + seconds
        with self._arrived:
            while not condition(self._spans):
                assert self._arrived.wait(end - time.monotonic()), self._spans
            return list(self._spans)


def _read(span: trace_pb2.Span) -> Span:
    return Span(
        name=span.name,
        span_id=span.span_id,
        parent_id=span.parent_span_id,
        trace_id=span.trace_id,
        attributes={each.key: _value(each.value) for each in span.attributes},
        events=tuple(event.name for event in span.events),
        failed=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
        message=span.status.message,
    )


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@contextmanager
def collector() -> Iterator[Collector]:
    collecting = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    service.add_TraceServiceServicer_to_server(collecting, server)  # type: ignore[no-untyped-call]
    collecting.port = server.add_insecure_port(f"{HOST}:0")
    server.start()
    try:
        yield collecting
    finally:
        server.stop(None).wait()
