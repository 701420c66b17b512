"""Kinds of metrics."""

import enum


class MetricTypes(enum.Enum):
    """The values are what configuration files say."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
