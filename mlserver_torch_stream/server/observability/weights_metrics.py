"""How many copies of weights this process holds, and how often it has loaded any.

Knows the pools by their counts only. Never reloaded by MLServer: the registry refuses a second collector.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mlserver_torch_stream.engine.process_resources import PROCESS, ProcessResources


class WeightsMetrics(Collector):
    def __init__(self, resources: ProcessResources) -> None:
        self._resources = resources
        self._shown = False

    def show(self) -> None:
        """Idempotent."""
        if not self._shown:
            self._shown = True
            REGISTRY.register(self)

    def collect(self) -> Iterator[Metric]:
        weights, engines = self._resources.weights, self._resources.engines
        text = "Copies of weights in memory, each shared by all models that name the same files and devices"
        yield GaugeMetricFamily("torch_stream_loaded_weights", text, value=len(weights))
        yield GaugeMetricFamily("torch_stream_engines", "Engines that take requests", value=len(engines))
        text = "Weights loaded since the process began; a reload of unchanged files loads none"
        yield CounterMetricFamily("torch_stream_weight_loads", text, value=weights.made)


WEIGHTS = WeightsMetrics(PROCESS)
