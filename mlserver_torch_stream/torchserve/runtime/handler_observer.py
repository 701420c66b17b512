"""Observes one request to a handler, and reports it once, at its end, to the metrics and the log.

Knows nothing of how requests are answered. All of it runs on the event loop's thread.
"""

from __future__ import annotations

import time

from mlserver_torch_stream.errors import NotServing, QueueFull
from mlserver_torch_stream.server.observability.request_metrics import CANCELLED, REFUSED
from mlserver_torch_stream.server.observability.request_observer import TimedRequest
from mlserver_torch_stream.server.observability.request_record import RequestRecord
from mlserver_torch_stream.torchserve.handler_metrics import HandlerMetrics
from mlserver_torch_stream.types import FinishReason


class HandlerRequestObserver(TimedRequest):
    """Its record has no token counts: a handler's pieces need not be tokens."""

    def __init__(self, record: RequestRecord, handler_metrics: HandlerMetrics) -> None:
        super().__init__(record)
        self._handler_metrics = handler_metrics

    def piece(self, queued_s: float | None) -> None:
        if self.record.ttft_s is None:
            self.record.queue_s = queued_s
            self.first_event(time.monotonic())

    def count(self) -> None:
        outcome, reason = self._outcome()
        self._handler_metrics.requests[outcome] += 1
        self.metrics.ended(reason, self.record.e2e_s, self.record.queue_s or 0.0)

    def _outcome(self) -> tuple[str, str]:
        """For the handler's own metric and for the metric of all requests."""
        record = self.record
        if record.client_disconnected:
            return "cancelled", CANCELLED
        if record.error is None:
            return "ok", FinishReason.STOP.value
        if isinstance(record.error, (QueueFull, NotServing)) and record.ttft_s is None:
            return "refused", REFUSED
        return "error", FinishReason.ERROR.value
