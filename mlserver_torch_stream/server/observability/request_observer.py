"""Observes every request, and reports it once, at its end: in counts, one line of the log and one OpenTelemetry span.

Everything here runs on the event loop's thread.

In the log a client's text is quoted as JSON, so that it cannot forge a line or control a terminal. Prompts, answers and
error messages, which may quote them, are left out unless the operator asks for them.

The attributes of a span follow the GenAI semantic conventions (repository open-telemetry/semantic-conventions-genai, in
development). The conventions have no attribute for the time in the queue, so vLLM's name is used,
``gen_ai.latency.time_in_queue``. A span contains neither prompts nor answers.
"""

from __future__ import annotations

import json
import logging
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from urllib.parse import quote

from mlserver.errors import MLServerError, ModelNotReady
from mlserver.settings import Settings
from mlserver.tracing import get_tracer_provider
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.util.types import AttributeValue

from mlserver_torch_stream.errors import GenerationFailed, InvalidInput, NotServing, RequestError
from mlserver_torch_stream.generation import RequestObserver, RequestObservers
from mlserver_torch_stream.protocol.values import unknown_parameters
from mlserver_torch_stream.server.observability.request_metrics import (
    CANCELLED,
    REFUSED,
    ClientLoad,
    ModelRequests,
    RequestMetrics,
)
from mlserver_torch_stream.server.options import ServerOptions
from mlserver_torch_stream.types import ChatPrompt, FinishReason, GenerationRequest, Prompt, TextPrompt, TokenEvent
from mlserver_torch_stream.version import __version__

OK = 200
CLIENT_CLOSED_REQUEST = 499  # nginx's status in its log for a client that disconnected


class EndpointKind(str, Enum):
    """The transport of a request, and whether its reply streams."""

    REST_UNARY = "rest-unary"
    REST_STREAM = "rest-stream"
    GRPC_UNARY = "grpc-unary"
    GRPC_STREAM = "grpc-stream"

    @property
    def streams(self) -> bool:
        """Whether the reply streams."""
        return self in (EndpointKind.REST_STREAM, EndpointKind.GRPC_STREAM)


@dataclass(slots=True)
class RequestRecord:
    """The facts of one request. Times are in seconds since its start; None if it ended before that event."""

    request_id: str
    model: str
    version: str
    endpoint: EndpointKind
    request: GenerationRequest | None = None  # None if the body could not be decoded
    prompts: tuple[Prompt, ...] = ()  # complete, even if the client sent them in pieces
    prompt_tokens: int = 0
    completion_tokens: int = 0  # tokens in the events that were sent
    queue_s: float | None = None
    ttft_s: float | None = None
    e2e_s: float = 0.0
    reasons: list[FinishReason] = field(default_factory=list)  # one for each sequence that has ended
    texts: dict[int, list[str]] = field(default_factory=dict)  # by sequence; kept only if the log shows prompts
    error: BaseException | None = None
    status: int = OK  # the REST status, for requests over gRPC too

    @property
    def sequences(self) -> int:
        """The number of the request's sequences."""
        return len(self.request.prompts) * self.request.sampling.n if self.request is not None else 0

    @property
    def client_disconnected(self) -> bool:
        """Whether the client disconnected before the end."""
        return self.status == CLIENT_CLOSED_REQUEST


_PACKAGE = "mlserver_torch_stream"
_PLAIN = re.compile(r"[-_.:/+@0-9A-Za-z]+")
# Every line has these fields.
_LINE = (
    "request_id=%s model=%s version=%s endpoint=%s status=%s client=%s finish_reason=%s sequences=%s prompt_tokens=%s "
    "completion_tokens=%s queue_time_ms=%s ttft_ms=%s e2e_latency_ms=%s"
)
_MAX_CHARS = 128  # characters of a text that a client chooses

logger = logging.getLogger(f"{_PACKAGE}.requests")


def join_mlservers_log() -> None:
    """Gives our loggers MLServer's level and handlers, unless the operator configures them. Idempotent.

    Without that only warnings would be shown, because our loggers are not below the logger ``mlserver``.
    """
    logging.getLogger(_PACKAGE).parent = logging.getLogger("mlserver")


class RequestLog:
    """Writes one line for each request. With ``prompts`` it adds prompts, answers and error messages.

    ``structured`` says that MLServer puts the lines into JSON strings.
    """

    def __init__(self, *, prompts: bool = False, structured: bool = False) -> None:
        self.prompts = prompts
        self._structured = structured

    def write(self, record: RequestRecord) -> None:
        """Writes the line of a request that has ended."""
        if not logger.isEnabledFor(logging.INFO):
            return
        line = _LINE % self._values(record)
        line += "".join(f" {key}={value}" for key, value in self._further(record))
        # MLServer's structured format does not escape the text of `"message"`.
        logger.info("%s", json.dumps(line)[1:-1] if self._structured else line)

    def _values(self, record: RequestRecord) -> tuple[str | int, ...]:
        return (
            _quoted(record.request_id),
            _quoted(record.model),
            _quoted(record.version),
            record.endpoint.value,
            record.status,
            "disconnected" if record.client_disconnected else "connected",
            ",".join(reason.value for reason in record.reasons) or "-",
            record.sequences,
            record.prompt_tokens,
            record.completion_tokens,
            _milliseconds(record.queue_s),
            _milliseconds(record.ttft_s),
            _milliseconds(record.e2e_s),
        )

    def _further(self, record: RequestRecord) -> Iterator[tuple[str, str]]:
        if record.error is not None:
            yield "error", type(record.error).__name__
        if isinstance(record.error, InvalidInput):
            yield "field", _quoted(record.error.field)
        if self.prompts:
            yield from _contents(record)


def _contents(record: RequestRecord) -> Iterator[tuple[str, str]]:
    if record.prompts:
        yield "prompts", _json([_prompt(prompt) for prompt in record.prompts])
    if record.texts:
        yield "outputs", _json(["".join(record.texts[index]) for index in sorted(record.texts)])
    if record.error is not None:
        yield "error_message", _json(str(record.error))


def _prompt(prompt: Prompt) -> Any:
    if isinstance(prompt, TextPrompt):
        return prompt.text
    if isinstance(prompt, ChatPrompt):
        return prompt.messages
    return prompt.token_ids


def _quoted(text: str) -> str:
    """Returns the text if it is unambiguous in a line; otherwise a JSON string of ASCII characters."""
    if len(text) > _MAX_CHARS:
        text = f"{text[:_MAX_CHARS]}..."
    return text if _PLAIN.fullmatch(text) else _json(text)


def _json(value: Any) -> str:
    return json.dumps(value, default=str)


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f}"


_NAME = "mlserver_torch_stream"
FIRST_TOKEN = "gen_ai.first_token"


def tracer_of(settings: Settings) -> Tracer | None:
    """Returns the tracer; None if MLServer's tracing is off."""
    if not settings.tracing_server:
        return None
    tracer: Tracer = get_tracer_provider(settings).get_tracer(_NAME, __version__)
    return tracer


def start_span(tracer: Tracer, record: RequestRecord) -> Span:
    """Starts a span whose parent is the span of the calling task's context."""
    request = record.request
    chat = request is not None and isinstance(request.prompts[0], ChatPrompt)
    operation = "chat" if chat else "text_completion"
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": _NAME,
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.model,
        "gen_ai.response.id": record.request_id,
        "mlserver_torch_stream.model.version": record.version,
        "mlserver_torch_stream.endpoint": record.endpoint.value,
    }
    if request is not None:
        attributes.update(_request_attributes(request))
    return tracer.start_span(f"{operation} {record.model}", kind=SpanKind.INTERNAL, attributes=attributes)


def _request_attributes(request: GenerationRequest) -> dict[str, AttributeValue]:
    sampling = request.sampling
    attributes: dict[str, AttributeValue] = {
        "gen_ai.request.choice.count": sampling.n,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
    }
    if sampling.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = sampling.max_tokens
    if sampling.seed is not None:
        attributes["gen_ai.request.seed"] = sampling.seed
    return attributes


def end_span(span: Span, record: RequestRecord) -> None:
    """Writes a request's tokens, times in seconds and error into its span, and ends the span."""
    span.set_attribute("gen_ai.usage.input_tokens", record.prompt_tokens)
    span.set_attribute("gen_ai.usage.output_tokens", record.completion_tokens)
    span.set_attribute("gen_ai.response.finish_reasons", [reason.value for reason in record.reasons])
    if record.ttft_s is not None:
        span.set_attribute("gen_ai.response.time_to_first_chunk", record.ttft_s)
    if record.queue_s is not None:
        span.set_attribute("gen_ai.latency.time_in_queue", record.queue_s)
    if record.error is not None:
        span.set_attribute("error.type", type(record.error).__name__)
        # The message of a client's error may quote its prompt.
        span.set_status(Status(StatusCode.ERROR, str(record.error) if record.status >= 500 else None))
    elif record.client_disconnected:
        span.set_attribute("error.type", "client_disconnected")
        span.set_status(Status(StatusCode.ERROR, "the client disconnected"))
    span.end()


@dataclass
class RequestSinks:
    """The log and the tracer to which requests are reported; one that is None is switched off."""

    log: RequestLog | None = None
    tracer: Tracer | None = None


# If the sequences of a request ended differently, its outcome is the first of these.
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
    """The places to which requests are reported: metrics, log, trace, and the load that clients make."""

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
        """Reports a request that was refused before it had a reply."""
        record = self._record(request_id, None)
        ServerRequestObserver(record, self._reports, streaming=self._endpoint.streams).failed(error)

    def _record(self, request_id: str, request: GenerationRequest | None) -> RequestRecord:
        return RequestRecord(request_id, self._model, self._version, self._endpoint, request)


class TimedRequest(ABC):
    """Measures one request, and reports it once. A subclass counts it in ``count``."""

    def __init__(self, record: RequestRecord, reports: RequestReports) -> None:
        self.record = record
        self.reports = reports
        self.metrics: ModelRequests = reports.metrics.of(record.model, record.version)
        self.ended = False
        self._began = time.monotonic()

    def closed(self) -> None:
        """Called when the reply is closed. If the request has neither ended nor failed, its client has disconnected."""
        if self.record.error is None and not self.ended:
            self.record.status = CLIENT_CLOSED_REQUEST
        self.end()

    def failed(self, error: BaseException) -> None:
        """Called when the request ends with an error, which its client gets."""
        self.record.error = self.record.error or error
        self.end()

    def first_event(self, now: float) -> None:
        """Records the time of the first event."""
        self.record.ttft_s = now - self._began
        self.metrics.first_token.observe(self.record.ttft_s)

    def end(self) -> None:
        """Reports the request. Idempotent."""
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
        record.error = None  # its frames refer to this observer, and the cycle would keep the prompts in memory

    @abstractmethod
    def count(self) -> None:
        """Adds the request to the model's counters. Called once, when the record is complete."""


class ServerRequestObserver(TimedRequest, RequestObserver):
    """Observes one request that generates tokens. If it is ``streaming``, an error after its first event leaves the
    status at 200."""

    def __init__(self, record: RequestRecord, reports: RequestReports, *, streaming: bool) -> None:
        super().__init__(record, reports)
        self._streaming = streaming
        self._unfinished = record.sequences
        self._accepted = False
        self._prompted = False
        self._seen = False
        self._last: dict[int, float] = {}  # sequence -> the time of its last tokens
        sinks = reports.sinks
        self._keeps_text = sinks.log is not None and sinks.log.prompts
        self._span: Span | None = None
        if sinks.tracer is not None:
            self._span = start_span(sinks.tracer, record)

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
            self._span.add_event(FIRST_TOKEN)

    def _finished(self, event: TokenEvent, reason: FinishReason) -> None:
        record = self.record
        record.reasons.append(reason)
        if event.usage is not None:
            record.queue_s = max(record.queue_s or 0.0, event.usage.queue_s)
        has_output = self._streaming and (self._seen or event.size > 0)  # tokens have been sent to the client
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
            end_span(self._span, record)
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
    """Returns the REST status of an error, from our error table."""
    if isinstance(error, RequestError):
        return error.status
    if isinstance(error, ModelNotReady):
        return NotServing.status
    return int(error.status_code) if isinstance(error, MLServerError) else GenerationFailed.status


@contextmanager
def ignored_parameters(options: ServerOptions, model: str, request_id: str) -> Iterator[list[str]]:
    """Collects the unknown parameters that are ignored while the block decodes a request, and logs them at its end."""
    with unknown_parameters(ignored=options.unknown_parameters == "ignore") as names:
        yield names
    if names:
        said = ", ".join(map(quote, names))
        logger.warning("model %s: unknown parameters of request %s are ignored: %s", model, quote(request_id), said)
