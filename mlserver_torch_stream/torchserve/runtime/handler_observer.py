"""What is noticed of one request to a handler, told once, at its end, to the metrics and the log.

Knows nothing of how requests are answered. All of it runs on the event loop's thread.
"""

from __future__ import annotations

import time

from mlserver_torch_stream.errors import NotServing, QueueFull
from mlserver_torch_stream.server.observability.request_metrics import CANCELLED, REFUSED
from mlserver_torch_stream.server.observability.request_observer import status_of
from mlserver_torch_stream.server.observability.request_record import CLIENT_CLOSED_REQUEST, EndpointKind, RequestRecord
from mlserver_torch_stream.server.process_state import REQUEST_METRICS, REQUEST_SINKS
from mlserver_torch_stream.torchserve.handler_metrics import HandlerMetrics
from mlserver_torch_stream.types import FinishReason


class HandlerRequestObserver:
    """One request, from when it has been read. ``queue`` and tokens mean nothing here, and stay empty in the log."""

    def __init__(
        self, request_id: str, model: str, version: str | None, entrance: EndpointKind, figures: HandlerMetrics
    ) -> None:
        self._record = RequestRecord(request_id, model, version or "", entrance)
        self._figures = figures
        self._began = time.monotonic()
        self._ended = False

    def piece(self) -> None:
        if self._record.ttft_s is None:
            self._record.ttft_s = time.monotonic() - self._began
            REQUEST_METRICS.of(self._record.model, self._record.version).first_token.observe(self._record.ttft_s)

    def done(self) -> None:
        self._end("ok", FinishReason.STOP.value, None)

    def failed(self, error: Exception) -> None:
        refused = isinstance(error, (QueueFull, NotServing)) and self._record.ttft_s is None
        self._record.status = status_of(error)
        self._end("refused" if refused else "error", REFUSED if refused else FinishReason.ERROR.value, error)

    def closed(self) -> None:
        """Nobody reads on. Before its end that means that the client has left."""
        if not self._ended:
            self._record.status = CLIENT_CLOSED_REQUEST
            self._end("cancelled", CANCELLED, None)

    def _end(self, outcome: str, reason: str, error: Exception | None) -> None:
        if self._ended:
            return
        self._ended = True
        record = self._record
        record.error = error
        record.e2e_s = time.monotonic() - self._began
        self._figures.requests[outcome] += 1
        counts = REQUEST_METRICS.of(record.model, record.version)
        counts.requests[reason] += 1
        if error is not None:
            counts.count_error(record.status)
        if REQUEST_SINKS.log is not None:
            REQUEST_SINKS.log.write(record)
