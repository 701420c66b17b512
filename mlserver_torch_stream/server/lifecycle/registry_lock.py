"""One load or unload of a name at a time, for names of our models.

MLServer's registry knows no such order: a load that begins while an unload still waits for streams is forgotten when
the unload ends, and of two loads at once the first may unregister the second. Other models' names are left alone.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from mlserver import ModelSettings
from mlserver.registry import MultiModelRegistry

from mlserver_torch_stream.server.lifecycle.inflight_requests import OneTimeEvent
from mlserver_torch_stream.server.lifecycle.lifecycle import LIFECYCLE

_MARK = "_torch_stream_turnover"
_OURS = "mlserver_torch_stream."


class RegistryLock:
    """The names that are being loaded or unloaded, each with the moment when that is over."""

    def __init__(self) -> None:
        self._changing: dict[str, OneTimeEvent] = {}

    def goes_on(self, name: str) -> bool:
        return name in self._changing

    @asynccontextmanager
    async def of(self, name: str) -> AsyncIterator[None]:
        while (change := self._changing.get(name)) is not None:
            await change.wait()
        mine = self._changing[name] = OneTimeEvent()
        try:
            await LIFECYCLE.settled(name)  # the load that brought us here began before we watched
            yield
        finally:
            del self._changing[name]
            mine.come()


REGISTRY_LOCK = RegistryLock()


def install() -> None:
    """Wraps what changes MLServer's registry. Idempotent."""
    if getattr(MultiModelRegistry.load, _MARK, False):
        return
    MultiModelRegistry.load = _in_turn(MultiModelRegistry.load)
    MultiModelRegistry.unload = _in_turn(MultiModelRegistry.unload)
    MultiModelRegistry.unload_version = _in_turn(MultiModelRegistry.unload_version)


def _in_turn(change: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(change)
    async def changed(registry: MultiModelRegistry, subject: ModelSettings | str, *more: Any, **options: Any) -> Any:
        if not _is_ours(subject):
            return await change(registry, subject, *more, **options)
        async with REGISTRY_LOCK.of(subject if isinstance(subject, str) else subject.name):
            return await change(registry, subject, *more, **options)

    setattr(changed, _MARK, True)
    return changed


def _is_ours(subject: ModelSettings | str) -> bool:
    if isinstance(subject, ModelSettings) and subject.implementation_.startswith(_OURS):
        return True
    name = subject if isinstance(subject, str) else subject.name
    return REGISTRY_LOCK.goes_on(name) or any(member.name == name for member in LIFECYCLE.members())
