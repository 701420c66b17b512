"""Defines the interface of models to a batch: a loaded model by its name, and its answer to one row.

Knows neither engines nor servers: the server implements both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class RowModel(Protocol):
    """A loaded model."""

    async def answer(self, endpoint: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """OpenAI's object for the body of a row. It waits until the row may run beside the requests of clients.

        Raises RequestError: NotServing or QueueFull where the same row may be answered later.
        """


class RowModels(Protocol):
    """The models of this process."""

    async def settled(self) -> None:
        """Waits until no model is loading."""

    def find(self, name: str) -> RowModel | None:
        """The model that is loaded under this name; None if none is."""
