"""The errors of metrics."""


class MetricsCacheValueError(Exception):
    pass


class MetricsCacheTypeError(Exception):
    pass


class MetricsCacheKeyError(Exception):
    pass


class MetricsCacheIOError(Exception):
    pass


class MetricsCachePyYamlError(Exception):
    pass


class GeneralMetricsCacheError(Exception):
    pass
