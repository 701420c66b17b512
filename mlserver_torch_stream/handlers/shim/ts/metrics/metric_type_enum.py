"""The types of metrics."""

import enum


class MetricTypes(enum.Enum):
    """The values are the names in configuration files."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
