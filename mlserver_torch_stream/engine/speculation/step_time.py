"""Estimates from the steps of the past how long a step takes, by its tokens.

Knows nothing of sequences.
"""

from __future__ import annotations

# What one more token is expected to add: of the time of a step, and at most of what a token of it took. On two cores it
# adds 0.14 beside one token and 0.5 of a token's time beside eight.
_OF_STEP = 0.1
_OF_TOKEN = 0.35
_SPREAD = 8.0  # sum of squared distances of the steps' tokens from their mean
_KEPT = 0.98  # of the weight of earlier steps: about the last fifty count


class StepTime:
    """A line through (tokens, seconds) of decode steps, by least squares with exponential forgetting.

    A prior pulls its slope to the expected one, with the weight of steps whose tokens have a spread of ``_SPREAD``.
    """

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        for name, value in (
            ("_weight", 1.0),
            ("_tokens", tokens),
            ("_seconds", seconds),
            ("_squares", tokens * tokens),
            ("_products", tokens * seconds),
        ):
            setattr(self, name, _KEPT * getattr(self, name) + value)

    @property
    def per_token(self) -> float:
        """Seconds that one more token adds; 0 before the first step.

        While all steps have about as many tokens, the prior decides: by noise alone a token could seem to cost nothing.
        """
        if not self._weight:
            return 0.0
        expected = min(_OF_STEP * self._seconds / self._weight, _OF_TOKEN * self._seconds / self._tokens)
        spread = self._squares - self._tokens**2 / self._weight
        rise = self._products - self._tokens * self._seconds / self._weight
        return max(expected / 4, (rise + _SPREAD * expected) / (spread + _SPREAD))

    def of(self, tokens: int) -> float:
        """Returns the seconds of a step of so many tokens; 0 before the first."""
        if not self._weight:
            return 0.0
        return (self._seconds - self.per_token * self._tokens) / self._weight + self.per_token * tokens
