"""Observes every request, and reports it once, at its end, to the metrics, the log and the trace.

All of it runs on the event loop's thread.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from mlserver.errors import MLServerError, ModelNotReady
from opentelemetry.trace import Span

from mlserver_torch_stream.errors import GenerationFailed, NotServing, RequestError
from mlserver_torch_stream.generation import RequestObserver, RequestObservers
from mlserver_torch_stream.server.observability import request_log
from mlserver_torch_stream.server.observability.client_load import ClientLoad
from mlserver_torch_stream.server.observability.request_log import (
    CLIENT_CLOSED_REQUEST,
    EndpointKind,
    RequestRecord,
    RequestSinks,
)
from mlserver_torch_stream.server.observability.request_metrics import CANCELLED, REFUSED, ModelRequests, RequestMetrics
from mlserver_torch_stream.types import FinishReason, GenerationRequest, Prompt, TokenEvent

# The outcome of a request whose sequences ended differently is the first of these.
_GRAVEST = (
    FinishReason.ERROR,
    FinishReason.TIMEOUT,
    FinishReason.ABORT,
    FinishReason.LENGTH,
    FinishReason.TOOL_CALLS,
    FinishReason.STOP,
)


@dataclass(frozen=True)
class RequestReports:
    """Where requests are reported: their metrics, log and trace, and the load that clients make."""

    metrics: RequestMetrics
    sinks: RequestSinks
    clients: ClientLoad


class ModelRequestObservers(RequestObservers):
    """Makes the observers of the requests to one model through one kind of endpoint."""

    def __init__(self, reports: RequestReports, model: str, version: str | None, endpoint: EndpointKind) -> None:
        self._reports = reports
        self._model = model
        self._version = version or ""
        self._endpoint = endpoint

    def started(self, request: GenerationRequest) -> ServerRequestObserver:
        streaming = self._endpoint.streams and request.stream is not False
        return ServerRequestObserver(self._record(request.request_id, request), self._reports, streaming=streaming)

    def refused(self, request_id: str, error: BaseException) -> None:
        record = self._record(request_id, None)
        ServerRequestObserver(record, self._reports, streaming=self._endpoint.streams).failed(error)

    def _record(self, request_id: str, request: GenerationRequest | None) -> RequestRecord:
        return RequestRecord(request_id, self._model, self._version, self._endpoint, request)


class TimedRequest(ABC):
    """Measures one request, and reports it once. A subclass says in ``count`` which counters of the model grow."""

    def __init__(self, record: RequestRecord, reports: RequestReports) -> None:
        self.record = record
        self.reports = reports
        self.metrics: ModelRequests = reports.metrics.of(record.model, record.version)
        self.ended = False
        self._began = time.monotonic()

    def closed(self) -> None:
        """The reply is closed. Before the request's end, and without an error, the client has disconnected."""
        if self.record.error is None and not self.ended:
            self.record.status = CLIENT_CLOSED_REQUEST
        self.end()

    def failed(self, error: BaseException) -> None:
        """The request ends with this error, which its client gets."""
        self.record.error = self.record.error or error
        self.end()

    def first_event(self, now: float) -> None:
        self.record.ttft_s = now - self._began
        self.metrics.first_token.observe(self.record.ttft_s)

    def end(self) -> None:
        """Idempotent."""
        if self.ended:
            return
        self.ended = True
        record = self.record
        record.e2e_s = time.monotonic() - self._began
        if record.error is not None:
            record.status = status_of(record.error)
            self.metrics.count_error(record.status)
        self.count()
        if self.reports.sinks.log is not None:
            self.reports.sinks.log.write(record)
        record.error = None  # its frames hold this observer: a cycle would keep the request's prompts

    @abstractmethod
    def count(self) -> None:
        """Called once, when the record is complete."""


class ServerRequestObserver(TimedRequest, RequestObserver):
    """Observes one request. ``streaming``: after the first event, an error does not change the status."""

    def __init__(self, record: RequestRecord, reports: RequestReports, *, streaming: bool) -> None:
        super().__init__(record, reports)
        self._streaming = streaming
        self._unfinished = record.sequences
        self._accepted = False
        self._prompted = False
        self._seen = False
        self._last: dict[int, float] = {}  # by sequence: the time of its last tokens
        sinks = reports.sinks
        self._keeps_text = sinks.log is not None and sinks.log.prompts
        self._span: Span | None = None
        if sinks.tracer is not None:
            self._span = request_log.start_span(sinks.tracer, record)

    def accepted(self) -> None:
        self._accepted = True

    def prompted(self, prompts: Sequence[Prompt], tokens: int) -> None:
        self.record.prompts = tuple(prompts)
        self.record.prompt_tokens = tokens
        if not self.ended:
            self._prompted = True
            self.reports.clients.prompted(self.record.model, self.record.sequences)

    def event(self, event: TokenEvent) -> None:
        count = len(event.token_ids)
        if count:
            now = time.monotonic()
            last = self._last.get(event.index)
            if last is not None:
                self.metrics.inter_token.observe((now - last) / count, count)
            elif self.record.ttft_s is None:
                self.first_event(now)
            self._last[event.index] = now
            self.record.completion_tokens += count
        if self._keeps_text:
            self.record.texts.setdefault(event.index, []).append(_said(event))
        if event.finish_reason is not None:
            self._finished(event, event.finish_reason)
        self._seen = True

    def first_event(self, now: float) -> None:
        super().first_event(now)
        self.reports.clients.first_token()
        if self._span is not None:
            self._span.add_event(request_log.FIRST_TOKEN)

    def _finished(self, event: TokenEvent, reason: FinishReason) -> None:
        record = self.record
        record.reasons.append(reason)
        if event.usage is not None:
            record.queue_s = max(record.queue_s or 0.0, event.usage.queue_s)
        has_output = self._streaming and (self._seen or event.size > 0)  # the client has been sent something before
        if event.error is not None and (reason is FinishReason.ERROR or not has_output):
            record.error = record.error or event.error
        self._unfinished -= 1
        if not self._unfinished:
            self.end()

    def count(self) -> None:
        record, metrics = self.record, self.metrics
        if self._prompted:
            self.reports.clients.ended(record.model, record.sequences, answered=record.ttft_s is not None)
        if self._span is not None:
            request_log.end_span(self._span, record)
        metrics.ended(self._outcome(), record.e2e_s, record.queue_s or 0.0, record.sequences)
        if not self._accepted:
            return
        for reason in record.reasons:
            metrics.sequences[reason.value] += 1
        metrics.sequences[FinishReason.ABORT.value] += self._unfinished
        if record.queue_s is not None:
            metrics.queue.observe(record.queue_s)
        if not record.client_disconnected:
            metrics.request.observe(record.e2e_s)

    def _outcome(self) -> str:
        record = self.record
        if record.client_disconnected:
            return CANCELLED
        if not self._accepted:
            return REFUSED
        if record.error is not None and not record.reasons:
            return FinishReason.ERROR.value
        return next(reason.value for reason in _GRAVEST if reason in record.reasons)


def _said(event: TokenEvent) -> str:
    calls = "".join(f"{call.name or ''}{call.arguments}" for call in event.tool_calls)
    return f"{event.reasoning}{event.text}{calls}"


def status_of(error: BaseException) -> int:
    """The REST status of an error, from our error table."""
    if isinstance(error, RequestError):
        return error.status
    if isinstance(error, ModelNotReady):
        return NotServing.status
    return int(error.status_code) if isinstance(error, MLServerError) else GenerationFailed.status
