"""With how many examples Hypothesis tests a property. Imports no torch."""

from __future__ import annotations

from hypothesis import settings


def examples(most: int, fast: int = 50) -> settings:
    """``most`` under `make test-all`, and ``fast`` under `make test`, which uses the same examples each time."""
    return settings(max_examples=fast if settings.default.derandomize else most, deadline=None)
