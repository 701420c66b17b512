"""The errors of metrics."""


class MetricsCacheValueError(Exception):
    """A value of a metric cannot be used."""


class MetricsCacheTypeError(Exception):
    """A metric has another type."""


class MetricsCacheKeyError(Exception):
    """The cache has no such metric."""


class MetricsCacheIOError(Exception):
    """The file of metrics cannot be read."""


class MetricsCachePyYamlError(Exception):
    """The file of metrics is no YAML."""


class GeneralMetricsCacheError(Exception):
    """Any other failure of the metrics."""
