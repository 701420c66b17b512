"""Answers "ok" at once, so that only the server takes time."""

from __future__ import annotations

from typing import Any


def handle(data: list[dict[str, Any]] | None, context: Any) -> list[str] | None:
    return None if data is None else ["ok"] * len(data)
