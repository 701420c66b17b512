"""Patches MLServer's health and its admission of requests: our models refuse requests themselves, and never with 400.

MLServer handles the health and the requests of other models.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from mlserver import MLModel, ModelSettings
from mlserver.context import model_name_var, model_version_var
from mlserver.handlers import DataPlane

from mlserver_torch_stream.server.process_state import LIFECYCLE
from mlserver_torch_stream.server.registered_models import find_model, is_ours

HealthCheck = Callable[[DataPlane], Awaitable[bool]]


def install() -> None:
    """Passes requests to our models whether they are ready or not: they refuse with a status of their own. Called once.

    MLServer refuses with 400, at which Seldon Core 2 loads the model again; and it has no state for a model that still
    accepts requests although routers should send no new ones. A process that shuts down is not ready, even if its
    models are. A process that shuts down because an engine died is not live either, so that it is restarted even if
    the shutdown hangs.
    """
    original = DataPlane._infer_contextmanager

    @functools.wraps(original)
    @asynccontextmanager
    async def enter(data_plane: DataPlane, name: str, version: str | None = None) -> AsyncIterator[MLModel]:
        model = find_model(data_plane._model_registry, name, version)
        if model is None or not is_ours(model):
            async with original(data_plane, name, version) as model:
                yield model
            return
        labels = {"model": name, "version": version}
        seconds = data_plane._ModelInferRequestDuration.labels(**labels).time()
        failures = data_plane._ModelInferRequestFailure.labels(**labels).count_exceptions()
        with seconds, failures, model.inflight.track():
            with _as_model(model.settings):
                yield model
            data_plane._ModelInferRequestSuccess.labels(**labels).inc()

    DataPlane._infer_contextmanager = enter
    DataPlane.ready = _unless(lambda: LIFECYCLE.shutdown_reason, DataPlane.ready)
    DataPlane.live = _unless(lambda: LIFECYCLE.failure, DataPlane.live)


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
    @functools.wraps(check)
    async def checked(data_plane: DataPlane) -> bool:
        return trouble() is None and await check(data_plane)

    return checked
