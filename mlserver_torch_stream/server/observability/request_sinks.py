"""Holds the log and the tracer that get every request at its end, besides the metrics.

Knows nothing of requests. ``telemetry.install`` sets both once the server's settings are known.
"""

from __future__ import annotations

from dataclasses import dataclass

from opentelemetry.trace import Tracer

from mlserver_torch_stream.server.observability.request_log import RequestLog


@dataclass
class RequestSinks:
    """A sink that is None is switched off."""

    log: RequestLog | None = None
    tracer: Tracer | None = None
