"""The types of metrics."""

import enum


class MetricTypes(enum.Enum):
    """The types of metrics; the values are the types' names in a ``metrics.yaml``."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
