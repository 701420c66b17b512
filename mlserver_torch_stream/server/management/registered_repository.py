"""Adds the models that were registered by the management API to MLServer's repository, so that its index shows them.

Knows nothing of how they are loaded.
"""

from __future__ import annotations

from typing import Any

from mlserver import ModelSettings
from mlserver.repository import ModelRepository

Found = list[Any]  # of ModelSettings; the class below has a method of the name "list"


class RegisteredRepository(ModelRepository):  # type: ignore[misc]
    """``original``: that of the server's folder."""

    def __init__(self, original: ModelRepository) -> None:
        self._original = original
        self._registered: dict[tuple[str, str], ModelSettings] = {}

    def add(self, name: str, version: str, settings: ModelSettings) -> None:
        self._registered[name, version] = settings

    def remove(self, name: str, version: str) -> None:
        self._registered.pop((name, version), None)

    async def list(self) -> Found:
        return [*await self._original.list(), *self._registered.values()]

    async def find(self, name: str) -> Found:
        registered = [settings for (known, _), settings in self._registered.items() if known == name]
        if not registered:
            found: Found = await self._original.find(name)
            return found
        return [*(each for each in await self._original.list() if each.name == name), *registered]
