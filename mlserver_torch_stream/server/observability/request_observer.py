"""Observes every request: counts it by model and version and, when it ends, reports it once to the log and the trace.

Everything here runs on the event loop's thread. A reload of a model does not reset a counter. A scrape in another
thread may see one request in some counts and not yet in others. prometheus_client's histogram takes a lock and visits
all buckets for each observation, and writes a file if MLServer has inference workers; ``Histogram`` needs none of that,
because it has one writer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import Protocol
from urllib.parse import quote

from mlserver.errors import MLServerError, ModelNotReady

from mlserver_torch_stream.errors import GenerationFailed, NotServing, RequestError
from mlserver_torch_stream.generation import RequestObserver, RequestObservers
from mlserver_torch_stream.protocol.values import unknown_parameters
from mlserver_torch_stream.server.options import ServerOptions
from mlserver_torch_stream.types import FinishReason, GenerationRequest, Prompt, TokenEvent

logger = logging.getLogger("mlserver_torch_stream.requests")

Labels = tuple[str, str]
"""A model's name and its version, which may be empty."""

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
    """The data about one request. Times are in seconds since its start. A time is None if the request ended before that
    event.
    """

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


class Histogram:
    """Counts values in buckets with the ascending upper ``bounds``, which are inclusive."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value ``times`` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Returns the cumulative counts, each with its upper bound as Prometheus writes it."""
        total, cumulative = 0, []
        for bound, count in zip((*self._bounds, inf), self._counts, strict=True):
            total += count
            cumulative.append(("+Inf" if bound == inf else str(float(bound)), float(total)))
        return cumulative


CANCELLED = "cancelled"  # the outcome of a request whose client disconnected
REFUSED = "refused"  # the outcome of a request that did not reach the engine
SEQUENCE_REASONS = tuple(reason.value for reason in FinishReason)
REQUEST_REASONS = (*SEQUENCE_REASONS, CANCELLED, REFUSED)
_SUCCESSES = frozenset({FinishReason.STOP.value, FinishReason.LENGTH.value, FinishReason.TOOL_CALLS.value})
OTHER_ERROR = "other"
ERRORS = ("413", "415", "422", "429", "500", "503", "504", OTHER_ERROR)

# Bounds in seconds, for models that take from half a millisecond to seconds for a token.
_FIRST_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300)
_INTER_TOKEN = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)
_QUEUE = (0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_REQUEST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600, 1800)


class Duration:
    """A count of occurrences, and their total duration in seconds."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        """Adds one occurrence of this duration."""
        self.count += 1
        self.seconds += seconds


class ModelRequests:
    """The requests to one model. Every label value starts at 0, so that a rate includes its first request."""

    def __init__(self) -> None:
        self.requests = dict.fromkeys(REQUEST_REASONS, 0)
        self.sequences = dict.fromkeys(SEQUENCE_REASONS, 0)
        self.errors = dict.fromkeys(ERRORS, 0)
        self.first_token = Histogram(_FIRST_TOKEN)
        self.inter_token = Histogram(_INTER_TOKEN)
        self.queue = Histogram(_QUEUE)
        self.request = Histogram(_REQUEST)
        self.success = Duration()
        self.fail = Duration()
        self.queued = Duration()  # the time in the queue of successful requests
        self.computed = Duration()  # the remaining time of successful requests
        self.inferences = 0  # the number of sequences of successful requests
        self.last_request = 0.0  # the end of the last request, in seconds since the epoch

    def ended(self, outcome: str, seconds: float, queued: float = 0.0, sequences: int = 1) -> None:
        """Counts a request that has ended with an ``outcome`` of ``REQUEST_REASONS`` after ``seconds``."""
        self.requests[outcome] += 1
        self.last_request = time.time()
        if outcome not in _SUCCESSES:
            self.fail.add(seconds)
            return
        self.success.add(seconds)
        self.queued.add(queued)
        self.computed.add(max(0.0, seconds - queued))
        self.inferences += sequences

    def count_error(self, status: int) -> None:
        """Counts an error by its REST status."""
        error = str(status)
        self.errors[error if error in self.errors else OTHER_ERROR] += 1


class RequestMetrics:
    """The counts of requests by model and version. Only loaded models are counted, so a client cannot add a label."""

    def __init__(self) -> None:
        self._models: dict[Labels, ModelRequests] = {}

    def of(self, model: str, version: str | None) -> ModelRequests:
        """Returns the counts of one version of a model; they are created at the first call."""
        labels = (model, version or "")
        found = self._models.get(labels)
        if found is None:
            found = self._models[labels] = ModelRequests()
        return found

    def items(self) -> list[tuple[Labels, ModelRequests]]:
        """Returns the counts of all models."""
        return list(self._models.items())


_QUIET_S = 10.0


class ClientLoad:
    """The load that clients cause. Batches give way to it.

    ``waiting_prompts`` is the number of complete prompts, of all models, that wait or are prefilled. ``active`` is true
    if a request is in flight, or if the last one ended less than ``quiet_s`` seconds ago, so that another one is
    likely.
    """

    def __init__(self, quiet_s: float = _QUIET_S) -> None:
        self.waiting_prompts = 0
        self.active = False
        self._quiet_s = quiet_s
        self._timer: asyncio.TimerHandle | None = None
        self._sequences: Counter[str] = Counter()
        self._listeners: list[Callable[[], None]] = []

    def sequences(self, model: str) -> int:
        """Returns the number of sequences in flight in clients' requests to this model."""
        return self._sequences[model]

    def listen(self, listener: Callable[[], None]) -> None:
        """Calls ``listener`` whenever the load decreases."""
        self._listeners.append(listener)

    def unlisten(self, listener: Callable[[], None]) -> None:
        """Ends the calls of ``listener``."""
        self._listeners.remove(listener)

    def prompted(self, model: str, sequences: int) -> None:
        """Called when a request with this number of sequences is submitted."""
        self.waiting_prompts += 1
        self._sequences[model] += sequences
        self.active = True
        if self._timer is not None:
            self._timer.cancel()

    def first_token(self) -> None:
        """Called when a request has got its first token."""
        self.waiting_prompts -= 1
        self._tell()

    def ended(self, model: str, sequences: int, *, answered: bool) -> None:
        """Called when a request has ended. ``answered`` says whether it had its first token."""
        self.waiting_prompts -= not answered
        self._sequences[model] -= sequences
        if not any(self._sequences.values()):
            self._timer = asyncio.get_running_loop().call_later(self._quiet_s, self._quiet)
        self._tell()

    def _quiet(self) -> None:
        self.active = False
        self._tell()

    def _tell(self) -> None:
        for listener in list(self._listeners):
            listener()


class RequestLog(Protocol):
    """Receives the record of each request that has ended. If ``prompts`` is true, records contain the answers."""

    prompts: bool

    def write(self, record: RequestRecord) -> None: ...


class RequestSpan(Protocol):
    """The trace of one request."""

    def first_token(self) -> None:
        """Called when the request has got its first token."""

    def end(self, record: RequestRecord) -> None:
        """Called when the request has ended."""


@dataclass
class RequestSinks:
    """The log of requests, and the function that starts a span for a request. Each is None if it is switched off."""

    log: RequestLog | None = None
    start_span: Callable[[RequestRecord], RequestSpan] | None = None


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
    """Everything to which requests are reported: metrics, log, trace, and the load that clients cause."""

    metrics: RequestMetrics
    sinks: RequestSinks
    clients: ClientLoad


class ModelRequestObservers(RequestObservers):
    """Makes the observers for requests to one model through one kind of endpoint."""

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
    """Observes one request that generates tokens. If the reply is ``streaming``, the status stays 200 for an error
    after the first event.
    """

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
        self._span = None if sinks.start_span is None else sinks.start_span(record)

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
            self._span.first_token()

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
            self._span.end(record)
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
    """Collects the unknown parameters that are ignored while the block decodes a request, and then logs them."""
    with unknown_parameters(ignored=options.unknown_parameters == "ignore") as names:
        yield names
    if names:
        said = ", ".join(map(quote, names))
        logger.warning("model %s: unknown parameters of request %s are ignored: %s", model, quote(request_id), said)
