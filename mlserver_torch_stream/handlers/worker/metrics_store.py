"""``context.metrics``: TorchServe's own store, whose values go to the server instead of the log.

Import it when ``ts`` can be imported.
"""

from __future__ import annotations

import logging
import re
from functools import partial
from typing import Any, Callable, Mapping

from ts.metrics.metric_cache_yaml_impl import MetricsCacheYamlImpl

from mlserver_torch_stream.handlers.worker.channel import Channel


class Metrics(MetricsCacheYamlImpl):  # type: ignore[misc]
    """Every metric of the store sends its values through the channel.

    ``config``: the content of ``metrics.yaml``. The server reads it, since this interpreter may have no YAML parser.
    """

    def __init__(self, channel: Channel, model_name: str, config: Mapping[str, Any]) -> None:
        self._config = config
        self._channel = channel
        super().__init__(config_file_path="")
        self.initialize_cache()
        # While the handler loads there is no request, and TorchServe counts a metric without ids among errors.
        self.set_request_ids(model_name)
        self.model_name = model_name

    def _parse_yaml_file(self, config_file_path: str) -> None:
        self._parsed_file = self._config

    def add_metric_to_cache(self, *args: Any, **options: Any) -> Any:
        metric = super().add_metric_to_cache(*args, **options)
        metric.emit_metrics = partial(self._emit, metric)
        metric.add_or_update = partial(self._add_number, metric.metric_name, metric.add_or_update)
        return metric

    def _add_number(self, name: str, add: Callable[..., object], value: Any, *args: Any, **options: Any) -> None:
        """Logs a value that is no number: no metric fails a request."""
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            logging.getLogger(__name__).error("Metric %s: %r is no number", name, value)
            return
        add(number, *args, **options)

    def _emit(self, metric: Any, request_id: str, value: float, dimension_string: str) -> None:
        names = metric.dimension_names or []  # the string is not split at its commas, because a value may have some
        values = re.fullmatch(",".join(f"{re.escape(name)}:(.*?)" for name in names), dimension_string, re.DOTALL)
        self._channel.send(
            "metric",
            name=metric.metric_name,
            type=metric.metric_type.value,
            value=value,
            labels=dict(zip(names, values.groups())) if values else {},
        )
