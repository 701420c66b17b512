"""The errors of the store of metrics."""


class MetricsCacheValueError(Exception):
    """Raised for a value of a metric that cannot be used."""


class MetricsCacheTypeError(Exception):
    """Raised if no metrics file is given."""


class MetricsCacheKeyError(Exception):
    """Raised if the store has no such metric."""


class MetricsCacheIOError(Exception):
    """Raised if the metrics file cannot be read."""


class MetricsCachePyYamlError(Exception):
    """Raised if the metrics file is not valid YAML."""


class GeneralMetricsCacheError(Exception):
    """Raised for any other failure of the metrics."""
