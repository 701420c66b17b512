"""The metrics of the weights and engines that the models of this process share.

Knows the pools only by their counts.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mlserver_torch_stream.engine.process_resources import ProcessResources


class WeightsMetrics(Collector):
    def __init__(self, resources: ProcessResources) -> None:
        self._resources = resources

    def collect(self) -> Iterator[Metric]:
        weights, engines = self._resources.weights, self._resources.engines
        text = "Copies of weights in memory, each shared by all models that name the same files and devices"
        yield GaugeMetricFamily("torch_stream_loaded_weights", text, value=len(weights))
        yield GaugeMetricFamily("torch_stream_engines", "Engines that take requests", value=len(engines))
        text = "Weights loaded since the process began; a reload of unchanged files loads none"
        yield CounterMetricFamily("torch_stream_weight_loads", text, value=weights.made)
