"""``PredictionException``, at the place from which handlers import it."""

from ts.utils.util import PredictionException as PredictionException
