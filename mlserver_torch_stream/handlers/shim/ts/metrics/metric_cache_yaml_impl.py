"""The class of ``context.metrics``: a handler's metrics, by type and name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ts.metrics import metric_cache_errors as errors
from ts.metrics.caching_metric import CachingMetric
from ts.metrics.dimension import Dimension
from ts.metrics.metric_type_enum import MetricTypes


class MetricsCacheYamlImpl:
    """A store of metrics. ``initialize_cache`` fills it with the ``model_metrics`` of ``config_file_path``."""

    def __init__(self, config_file_path: str) -> None:
        self.config_file_path = config_file_path
        self._parsed_file: Any = None
        self.cache: dict[MetricTypes, dict[str, CachingMetric]] = {}
        self.request_ids: dict[int, str] | str | None = None
        self.model_name = ""
        self._parse_yaml_file(config_file_path)

    def _parse_yaml_file(self, config_file_path: str) -> None:
        if not config_file_path:
            raise errors.MetricsCacheTypeError("no metrics file is given")
        import yaml

        try:
            with open(config_file_path, encoding="utf-8") as file:
                self._parsed_file = yaml.safe_load(file)
        except OSError as error:
            raise errors.MetricsCacheIOError(f"cannot read {config_file_path}: {error}") from None
        except yaml.YAMLError as error:
            raise errors.MetricsCachePyYamlError(f"{config_file_path} is not valid YAML: {error}") from None

    def _parse_metrics_section(self, key: str = "model_metrics") -> Any:
        try:
            return self._parsed_file[key]
        except KeyError:
            raise errors.MetricsCacheKeyError(f"{self.config_file_path} has no section {key!r}") from None

    def initialize_cache(self) -> None:
        section = self._parse_metrics_section()
        if not section:
            raise errors.MetricsCacheValueError("the section model_metrics is empty")
        for kind, metrics in section.items():
            try:
                metric_type = MetricTypes(kind)
                for each in metrics:
                    self.add_metric_to_cache(each["name"], each["unit"], each["dimensions"], metric_type)
            except (KeyError, ValueError) as error:
                raise errors.MetricsCacheKeyError(f"model_metrics.{kind}: {error}") from None

    def set_request_ids(self, request_ids: dict[int, str] | str | None) -> None:
        self.request_ids = request_ids

    def add_metric_to_cache(
        self,
        metric_name: str,
        unit: str,
        dimension_names: list[str] | None = None,
        metric_type: MetricTypes = MetricTypes.COUNTER,
    ) -> CachingMetric:
        metric = CachingMetric(metric_name, unit, dimension_names, metric_type)
        self.cache.setdefault(metric_type, {})[metric_name] = metric
        return metric

    def get_metric(self, metric_name: str, metric_type: MetricTypes = MetricTypes.COUNTER) -> CachingMetric:
        try:
            return self.cache[metric_type][metric_name]
        except KeyError:
            raise errors.MetricsCacheKeyError(f"no metric {metric_name!r} of type {metric_type}") from None

    def add_metric(
        self,
        name: str,
        value: float,
        unit: str,
        idx: int | None = None,
        dimensions: Sequence[Dimension] = (),
        metric_type: MetricTypes = MetricTypes.COUNTER,
    ) -> None:
        names = {each.name for each in dimensions}
        always = (Dimension("ModelName", self.model_name), Dimension("Level", "Model"))
        given = [*dimensions, *(each for each in always if each.name not in names)]
        self._update(name, value, unit, given, metric_type)

    def add_counter(
        self, name: str, value: float, idx: int | None = None, dimensions: Sequence[Dimension] = ()
    ) -> None:
        self.add_metric(name, value, "count", idx, dimensions, MetricTypes.COUNTER)

    def add_time(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        unit: str = "ms",
        dimensions: Sequence[Dimension] = (),
        metric_type: MetricTypes = MetricTypes.GAUGE,
    ) -> None:
        if unit not in ("ms", "s"):
            raise errors.MetricsCacheValueError(f"the unit of a time is ms or s, not {unit!r}")
        self.add_metric(name, value, unit, idx, dimensions, metric_type)

    def add_size(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        unit: str = "MB",
        dimensions: Sequence[Dimension] = (),
        metric_type: MetricTypes = MetricTypes.GAUGE,
    ) -> None:
        if unit not in ("MB", "kB", "GB", "B"):
            raise ValueError(f"the unit of a size is MB, kB, GB or B, not {unit!r}")
        self.add_metric(name, value, unit, idx, dimensions, metric_type)

    def add_percent(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        dimensions: Sequence[Dimension] = (),
        metric_type: MetricTypes = MetricTypes.GAUGE,
    ) -> None:
        self.add_metric(name, value, "percent", idx, dimensions, metric_type)

    def add_error(self, name: str, value: float, dimensions: Sequence[Dimension] = ()) -> None:
        levels = [] if any(each.name == "Level" for each in dimensions) else [Dimension("Level", "Error")]
        self._update(name, value, "", [*dimensions, *levels], MetricTypes.COUNTER)

    def _update(
        self, name: str, value: float, unit: str, dimensions: Sequence[Dimension], metric_type: MetricTypes
    ) -> None:
        metric = self.cache.get(metric_type, {}).get(name)
        if metric is None:
            metric = self.add_metric_to_cache(name, unit, [each.name for each in dimensions], metric_type)
        metric.add_or_update(value, [each.value for each in dimensions])
