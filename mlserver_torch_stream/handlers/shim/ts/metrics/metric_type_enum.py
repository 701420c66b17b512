"""The types of metrics."""

import enum


class MetricTypes(enum.Enum):
    """The types; the values are their names in a ``metrics.yaml``."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
