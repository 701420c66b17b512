"""Patches MLServer's health and its admission of requests: our models refuse requests themselves, and never with 400.

MLServer handles the health and the requests of other models.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any

from mlserver import MLModel, ModelSettings
from mlserver.context import model_name_var, model_version_var
from mlserver.handlers import DataPlane

from mlserver_torch_stream.server.host import Hook, find_model, measured, registry_of, wrap
from mlserver_torch_stream.server.lifecycle.lifecycle import Lifecycle
from mlserver_torch_stream.server.served_model import is_ours

HealthCheck = Callable[[DataPlane], Awaitable[bool]]


def install(lifecycle: Lifecycle) -> None:
    """Passes requests to our models whether they are ready or not: they refuse with a status of their own. Called once.

    MLServer refuses with 400, at which Seldon Core 2 loads the model again; and it has no state for a model that still
    accepts requests although routers should send no new ones. A process that shuts down is not ready, even if its
    models are. A process that shuts down because an engine died is not live either, so that it is restarted even if
    the shutdown hangs.
    """
    wrap(Hook.ENTER, _entering)
    wrap(Hook.READY, partial(_unless, lambda: lifecycle.shutdown_reason))
    wrap(Hook.LIVE, partial(_unless, lambda: lifecycle.failure))


def _entering(original: Callable[..., AbstractAsyncContextManager[MLModel]]) -> Callable[..., Any]:
    @asynccontextmanager
    async def enter(data_plane: DataPlane, name: str, version: str | None = None) -> AsyncIterator[MLModel]:
        model = find_model(registry_of(data_plane), name, version)
        if model is None or not is_ours(model):
            async with original(data_plane, name, version) as model:
                yield model
            return
        with measured(data_plane, name, version), model.inflight.track(), _as_model(model.settings):
            yield model

    return enter


@contextmanager
def _as_model(settings: ModelSettings) -> Iterator[None]:
    """MLServer's ``model_context``, which raises where another task closes the stream of a client that disconnected."""
    tokens = [(model_name_var, model_name_var.set(settings.name))]
    tokens += [(model_version_var, model_version_var.set(settings.version or ""))]
    try:
        yield
    finally:
        for variable, token in tokens:
            with suppress(ValueError):  # that task has a context of its own, in which there is nothing to reset
                variable.reset(token)


def _unless(trouble: Callable[[], str | None], check: HealthCheck) -> HealthCheck:
    async def checked(data_plane: DataPlane) -> bool:
        return trouble() is None and await check(data_plane)

    return checked
