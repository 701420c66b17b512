"""The errors of the store of metrics."""


class MetricsCacheValueError(Exception):
    """A value of a metric cannot be used."""


class MetricsCacheTypeError(Exception):
    """The metric exists with another type."""


class MetricsCacheKeyError(Exception):
    """The store has no such metric."""


class MetricsCacheIOError(Exception):
    """The file of metrics cannot be read."""


class MetricsCachePyYamlError(Exception):
    """The file of metrics is not valid YAML."""


class GeneralMetricsCacheError(Exception):
    """Any other failure of the metrics."""
