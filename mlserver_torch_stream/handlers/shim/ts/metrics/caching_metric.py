"""One metric of a handler, which checks each update and logs the value; the worker replaces ``emit_metrics``."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Sequence

from ts.metrics.metric_type_enum import MetricTypes
from ts.metrics.unit import Units

logger = logging.getLogger(__name__)


class CachingMetric:
    """A metric with its type, unit and dimensions.

    An invalid update is logged and dropped, so no request fails because of a metric.
    """

    def __init__(
        self,
        metric_name: str,
        unit: str,
        dimension_names: list[str] | None = None,
        metric_type: MetricTypes = MetricTypes.COUNTER,
    ) -> None:
        self.metric_name = metric_name
        self.unit = Units().units.get(unit, unit)
        self.dimension_names = dimension_names or []
        self.metric_type = metric_type

    def add_or_update(self, value: float, dimension_values: Sequence[str] = (), request_id: str = "") -> None:
        if len(dimension_values) != len(self.dimension_names):
            logger.error(
                "Metric %s: the values %r do not match the dimensions %r",
                self.metric_name,
                dimension_values,
                self.dimension_names,
            )
        elif self.metric_type is MetricTypes.COUNTER and value < 0:
            logger.error("Metric %s: a counter cannot go down", self.metric_name)
        else:
            pairs = zip(self.dimension_names, dimension_values)
            self.emit_metrics(request_id, value, ",".join(f"{name}:{text}" for name, text in pairs))

    def emit_metrics(self, request_id: str, value: float, dimension_string: str) -> None:
        line = f"[METRICS]{self.metric_name}.{self.unit}:{value}|#{dimension_string}|#type:{self.metric_type.name}"
        logger.info("%s|#hostname:%s,%d%s", line, socket.gethostname(), time.time(), request_id and f",{request_id}")
