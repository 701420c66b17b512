"""One value of a ``MetricsStore``, which is logged. The metrics port exports those of ``context.metrics`` only."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Sequence
from typing import Any

from ts.metrics.dimension import Dimension
from ts.metrics.unit import Units

logger = logging.getLogger(__name__)


class Metric:
    """``value`` is the first one; later ones are logged, as in torchserve."""

    def __init__(
        self,
        name: str,
        value: Any,
        unit: str,
        dimensions: Sequence[Dimension],
        request_id: str | None = None,
        metric_method: str | None = None,
    ) -> None:
        self.name = name
        self.value = value
        self.unit = Units().units.get(unit, unit)
        self.dimensions = dimensions
        self.request_id = request_id
        self.metric_method = metric_method

    def update(self, value: Any) -> None:
        logger.info("[METRICS]%s", self._line(value))

    def reset(self) -> None:
        self.update(0)

    def __str__(self) -> str:
        return self._line(self.value)

    def to_dict(self) -> dict[str, Any]:
        return {
            "MetricName": self.name,
            "Value": self.value,
            "Unit": self.unit,
            "Dimensions": self.dimensions,
            "Timestamp": int(time.time()),
            "HostName": socket.gethostname(),
            "RequestId": self.request_id,
        }

    def _line(self, value: Any) -> str:
        dimensions = ",".join(map(str, self.dimensions))
        line = f"{self.name}.{self.unit}:{value}|#{dimensions}|#hostname:{socket.gethostname()},{int(time.time())}"
        return f"{line},{self.request_id}" if self.request_id else line
