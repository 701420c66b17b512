"""Where handlers look for ``PredictionException``."""

from ts.utils.util import PredictionException as PredictionException

PREDICTION_METRIC = "PredictionTime"
