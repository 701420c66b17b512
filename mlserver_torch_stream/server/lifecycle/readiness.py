"""What MLServer says of health and lets in, corrected: our models answer for themselves where it would say 400.

Knows nothing of why a model is not ready. Other models' readiness and requests stay MLServer's own.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from mlserver import MLModel, ModelSettings
from mlserver.context import model_name_var, model_version_var
from mlserver.handlers import DataPlane

from mlserver_torch_stream.server.lifecycle.lifecycle import LIFECYCLE
from mlserver_torch_stream.server.rest.routes import find_model

Says = Callable[[DataPlane], Awaitable[bool]]

_MARK = "_torch_stream_readiness"


def install() -> None:
    """Lets requests to our models in whether they are ready or not: they refuse with a status of their own. Idempotent.

    MLServer refuses with 400, at which Seldon Core 2 loads the model anew; and it knows no model that still takes
    requests but wants no new ones to be routed to it. A process that is to end is not ready, whatever models it has.
    One that ends because an engine is lost is not live either: whatever keeps it from its end, it is to be restarted.
    """
    original = DataPlane._infer_contextmanager
    if getattr(original, _MARK, False):
        return

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
        with seconds, failures, model.visits.one():
            with _as_model(model.settings):
                yield model
            data_plane._ModelInferRequestSuccess.labels(**labels).inc()

    setattr(enter, _MARK, True)
    DataPlane._infer_contextmanager = enter
    DataPlane.ready = _unless(lambda: LIFECYCLE.leaving, DataPlane.ready)
    DataPlane.live = _unless(lambda: LIFECYCLE.failure, DataPlane.live)


@contextmanager
def _as_model(settings: ModelSettings) -> Iterator[None]:
    """MLServer's ``model_context``, which raises where a client that leaves has its stream closed by another task."""
    tokens = [(model_name_var, model_name_var.set(settings.name))]
    tokens += [(model_version_var, model_version_var.set(settings.version or ""))]
    try:
        yield
    finally:
        for variable, token in tokens:
            with suppress(ValueError):  # that task has a context of its own, with nothing to reset
                variable.reset(token)


def _unless(trouble: Callable[[], str | None], says: Says) -> Says:
    @functools.wraps(says)
    async def says_truly(data_plane: DataPlane) -> bool:
        return trouble() is None and await says(data_plane)

    return says_truly


def is_ours(model: MLModel) -> bool:
    return bool(getattr(model, "streams_tokens", False))
