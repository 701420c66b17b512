"""For each model name, allows only one load or unload of our models at a time. An unload cancels a running load.

MLServer's registry allows them concurrently: a model that is loaded while an unload waits for streams is forgotten when
the unload ends, and the first of two concurrent loads may unregister the second.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from mlserver import ModelSettings
from mlserver.registry import MultiModelRegistry

from mlserver_torch_stream.server.host import Hook, wrap
from mlserver_torch_stream.server.lifecycle.lifecycle import Lifecycle, OneTimeEvent

_OURS = "mlserver_torch_stream."


class RegistryLock:
    """The names of the models that are being loaded or unloaded. Each has an event that is set when this has ended."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._changing: dict[str, OneTimeEvent] = {}

    @asynccontextmanager
    async def hold(self, name: str) -> AsyncIterator[None]:
        """Waits until no other load or unload of this name is running, and holds the name during the ``with`` block."""
        while (change := self._changing.get(name)) is not None:
            await change.wait()
        change = self._changing[name] = OneTimeEvent()
        try:
            await self._lifecycle.settled(name)  # the load that installed this lock does not hold it
            yield
        finally:
            del self._changing[name]
            change.set()

    def cancel_loads(self, name: str) -> None:
        """Cancels the running loads of this name."""
        self._lifecycle.cancel_loads(name)

    def covers(self, subject: ModelSettings | str) -> bool:
        """Whether the settings or the name belong to a model of this package."""
        if isinstance(subject, ModelSettings) and subject.implementation_.startswith(_OURS):
            return True
        name = _name_of(subject)
        return name in self._changing or any(member.name == name for member in self._lifecycle.members())


def install(lock: RegistryLock) -> None:
    """Wraps the methods that change MLServer's registry. Called once."""
    for hook in (Hook.LOAD, Hook.UNLOAD, Hook.UNLOAD_VERSION):
        wrap(hook, partial(_locked, lock))


def _locked(lock: RegistryLock, change: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def changed(registry: MultiModelRegistry, subject: ModelSettings | str, *more: Any, **options: Any) -> Any:
        if not lock.covers(subject):
            return await change(registry, subject, *more, **options)
        if change.__name__ == "unload":
            lock.cancel_loads(_name_of(subject))
        async with lock.hold(_name_of(subject)):
            return await change(registry, subject, *more, **options)

    return changed


def _name_of(subject: ModelSettings | str) -> str:
    return subject if isinstance(subject, str) else str(subject.name)
