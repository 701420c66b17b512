"""Opens the backend of an endpoint: the callable that lets a server infer rows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp

from mlserver_torch_stream.cloud.batch_backend import BatchBackend
from mlserver_torch_stream.cloud.endpoint import Backend, ServerEndpoint, only_model
from mlserver_torch_stream.cloud.generation_backend import GenerationBackend
from mlserver_torch_stream.cloud.prediction_backend import PredictionBackend
from mlserver_torch_stream.cloud.rows import Infer
from mlserver_torch_stream.cloud.tensor_backend import TensorBackend


async def open_backend(endpoint: ServerEndpoint) -> Backend:
    """Returns the backend of an endpoint.

    Raises RunRefused if the endpoint names no model, and the server has none or several.
    """
    model = endpoint.model or await only_model(endpoint.url, endpoint.api, endpoint.key)
    if endpoint.batches is None and endpoint.tensor is None:
        endpoint = await _recognised(endpoint, model)
    if endpoint.batches:
        return BatchBackend(endpoint, model)
    if endpoint.tensor is not None:
        return TensorBackend(endpoint, model)
    return PredictionBackend(endpoint, model) if endpoint.api == "torchserve" else GenerationBackend(endpoint, model)


async def _recognised(endpoint: ServerEndpoint, model: str) -> ServerEndpoint:
    """Returns the endpoint with ``batches`` if this project's server has the model."""
    backend = BatchBackend(endpoint, model)
    try:
        described = await backend.describe()
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError):
        described = None  # the first request says what is wrong
    finally:
        await backend.aclose()
    if not isinstance(described, dict) or not isinstance(described.get("workers"), list):
        return endpoint
    # A handler, whose description has a batch size, gets the bytes of objects.
    objects = endpoint.object_request if "batchSize" in described else endpoint.objects
    return replace(endpoint, batches=True, objects=objects)


@asynccontextmanager
async def opened(model: Infer | ServerEndpoint | str) -> AsyncIterator[Infer]:
    """Yields ``model`` itself if it is a callable, otherwise a backend for the server at this endpoint or URL."""
    if not isinstance(model, ServerEndpoint | str):
        yield model
        return
    backend = await open_backend(ServerEndpoint(model) if isinstance(model, str) else model)
    try:
        yield backend
    finally:
        await backend.aclose()
