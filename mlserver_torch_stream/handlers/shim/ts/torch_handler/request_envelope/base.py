"""The base class of envelopes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any


class BaseEnvelope(ABC):
    """Decodes a request before the handler gets it, and encodes the handler's result."""

    def __init__(self, handle_fn: Callable[[Any, Any], Any]) -> None:
        self._handle_fn = handle_fn
        self.context: Any = None

    def handle(self, data: Any, context: Any) -> Any:
        """Decodes the requests, calls the handler with them, and encodes its results."""
        self.context = context
        results = self._handle_fn(self.parse_input(data) if data else data, context)
        return self.format_output(results) if results else results

    @abstractmethod
    def parse_input(self, data: Any) -> Any:
        """Decodes the batch of requests."""

    @abstractmethod
    def format_output(self, data: Any) -> Any:
        """Encodes the handler's results."""
