"""How many examples of Hypothesis a property is tried with. Imports no torch."""

from __future__ import annotations

from hypothesis import settings


def examples(most: int, fast: int = 50) -> settings:
    """``most`` under `make test-all`, and ``fast`` under `make test`, which tries the same ones each time."""
    return settings(max_examples=fast if settings.default.derandomize else most, deadline=None)
