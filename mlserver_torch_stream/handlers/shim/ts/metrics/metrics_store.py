"""TorchServe's older store of metrics, which tests of handlers give to their mock of a context."""

from __future__ import annotations

from typing import Any

from ts.metrics.dimension import Dimension
from ts.metrics.metric import Metric


class MetricsStore:
    """``request_ids``: by place in the batch, or one for all. ``cache``: by name, unit, request and dimensions."""

    def __init__(self, request_ids: Any, model_name: str) -> None:
        self.request_ids = request_ids
        self.model_name = model_name
        self.store: list[Metric] = []
        self.cache: dict[str, Metric] = {}

    def add_counter(self, name: str, value: Any, idx: int | None = None, dimensions: list[Any] | None = None) -> None:
        self._add(name, value, self._request(idx), "count", dimensions, "counter")

    def add_time(
        self, name: str, value: Any, idx: int | None = None, unit: str = "ms", dimensions: list[Any] | None = None
    ) -> None:
        if unit not in ("ms", "s"):
            raise ValueError("the unit for a timed metric should be one of ['ms', 's']")
        self.add_metric(name, value, unit, idx, dimensions)

    def add_size(
        self, name: str, value: Any, idx: int | None = None, unit: str = "MB", dimensions: list[Any] | None = None
    ) -> None:
        if unit not in ("MB", "kB", "GB", "B"):
            raise ValueError("The unit for size based metric is one of ['MB','kB', 'GB', 'B']")
        self.add_metric(name, value, unit, idx, dimensions)

    def add_percent(self, name: str, value: Any, idx: int | None = None, dimensions: list[Any] | None = None) -> None:
        self.add_metric(name, value, "percent", idx, dimensions)

    def add_error(self, name: str, value: Any, dimensions: list[Any] | None = None) -> None:
        self._add(name, value, None, "", dimensions)

    def add_metric(
        self, name: str, value: Any, unit: str, idx: int | None = None, dimensions: list[Any] | None = None
    ) -> None:
        self._add(name, value, self._request(idx), unit, dimensions)

    def _request(self, idx: int | None) -> Any:
        """The id at a place of the batch; all ids if the batch has no such place."""
        if not isinstance(self.request_ids, dict):
            return self.request_ids
        return self.request_ids.get(idx) or ",".join(self.request_ids.values())

    def _add(
        self, name: str, value: Any, request_id: Any, unit: str, dimensions: list[Any] | None, method: str | None = None
    ) -> None:
        if dimensions is not None and not isinstance(dimensions, list):
            raise ValueError("Please provide a list of dimensions")
        given = list(dimensions or ())
        if request_id is None:
            given.append(Dimension("Level", "Error"))
        else:
            given += [Dimension("ModelName", self.model_name), Dimension("Level", "Model")]
        key = "-".join([name, unit, str(request_id), *map(str, given)])
        if key in self.cache:
            self.cache[key].update(value)
            return
        self.cache[key] = Metric(name, value, unit, given, request_id, method)
        self.store.append(self.cache[key])
