"""Estimates from the steps of the past how long a step takes, by its tokens.

Knows nothing of what the tokens are.
"""

from __future__ import annotations

_KEPT = 0.98  # of the weight of earlier steps: about the last fifty count


class StepTime:
    """A line through (tokens, seconds) of decode steps, by least squares with exponential forgetting."""

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
        """Seconds that one more token adds; 0 while all steps had equally many."""
        spread = self._weight * self._squares - self._tokens**2
        if self._weight < 1 or spread <= 1e-6 * self._squares * self._weight:
            return 0.0
        return max(0.0, (self._weight * self._products - self._tokens * self._seconds) / spread)

    def of(self, tokens: int) -> float:
        """Returns the seconds of a step of so many tokens; 0 before the first."""
        if not self._weight:
            return 0.0
        return (self._seconds - self.per_token * self._tokens) / self._weight + self.per_token * tokens
