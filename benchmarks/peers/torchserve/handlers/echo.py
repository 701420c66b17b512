"""Answers at once, so that a request's time is that of the server alone."""

from __future__ import annotations

from typing import Any


def handle(data: list[dict[str, Any]] | None, context: Any) -> list[str] | None:
    return None if data is None else ["ok"] * len(data)
