"""Names the texts that begin and end a reasoning.

Knows nothing of tokens, nor of how a reasoning is found.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """``begin`` is None where the prompt has begun the reasoning; else an answer without ``begin`` has none."""

    end: str
    begin: str | None = None
