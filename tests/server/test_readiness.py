"""Readiness at the moment of a signal: 200 before it and 503 from it on, whatever was under way."""

from __future__ import annotations

import asyncio
import functools
from itertools import product
from typing import Any

import httpx
import pytest
from mlserver import ModelSettings
from mlserver.handlers import DataPlane, ModelRepositoryHandlers
from mlserver.registry import MultiModelRegistry
from mlserver.repository.repository import SchemalessModelRepository
from mlserver.rest.server import RESTServer
from mlserver.settings import Settings

from mlserver_torch_stream.server.lifecycle import health
from mlserver_torch_stream.server.lifecycle.base_runtime import BaseRuntime
from mlserver_torch_stream.server.lifecycle.inflight_requests import OneTimeEvent
from mlserver_torch_stream.server.process_state import LIFECYCLE
from tests.server.harness import PACKAGE_SPELLING

_MODEL = ModelSettings(name="m", implementation=PACKAGE_SPELLING)


@functools.cache
def _server() -> RESTServer:
    """With our routes for health. One for all tests: a process has room for one server's metrics."""
    settings, registry = Settings(debug=False), MultiModelRegistry()
    data_plane = DataPlane(settings, registry)
    server = RESTServer(settings, data_plane, ModelRepositoryHandlers(SchemalessModelRepository(""), registry))
    health.add_routes(server)
    return server


def _client(registry: MultiModelRegistry) -> httpx.AsyncClient:
    """Of a server with these models."""
    server = _server()
    server._data_plane._model_registry = registry
    return httpx.AsyncClient(transport=httpx.ASGITransport(server._app), base_url="http://server")


class Loaded(BaseRuntime):
    """A model of ours without an engine: all that its readiness depends on is the process's."""

    @property
    def trouble(self) -> str | None:
        return LIFECYCLE.shutdown_reason

    async def load(self) -> bool:
        return True


class _Built:
    """An engine that is fine."""

    trouble = None

    @property
    def engine(self) -> Any:
        return self

    def give_back(self) -> bool:
        return False

    def shutdown(self) -> None: ...


class LoadedSlowly(BaseRuntime):
    """A model whose engine is built, and whose load has not ended yet."""

    async def load(self) -> bool:
        await self._slot.load(lambda on_death: _Built())
        await asyncio.Event().wait()
        return True


def test_no_request_that_meets_the_signal_is_answered_400(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes after each number of turns of the event loop that a request may take."""

    async def statuses() -> list[int]:
        registry = MultiModelRegistry(model_initialiser=Loaded)
        await registry.load(_MODEL)
        found = []
        async with _client(registry) as client:
            for path, turns in product(("/v2/health/ready", "/v2/models/m/ready"), range(40)):
                monkeypatch.setattr(LIFECYCLE, "_shutdown_reason", None)
                request = asyncio.create_task(client.get(path))
                for _ in range(turns):
                    await asyncio.sleep(0)
                LIFECYCLE.begin_shutdown("the server is shutting down")
                found.append((await request).status_code)
        return found

    monkeypatch.setattr(LIFECYCLE, "_shutdown_reason", None)
    monkeypatch.setattr(LIFECYCLE, "_shutdown_begun", OneTimeEvent())  # else later tests of this process cannot load
    assert set(asyncio.run(statuses())) == {200, 503}


def test_a_model_whose_engine_is_there_before_its_load_has_ended_is_not_answered_400() -> None:
    """MLServer sets a model ready when its load has ended, which is a moment later."""

    async def scenario() -> None:
        registry = MultiModelRegistry(model_initialiser=LoadedSlowly)
        loading = asyncio.create_task(registry.load(_MODEL))
        async with _client(registry) as client:
            while registry._models.get("m") is None or (await registry.get_model("m"))._slot.engine is None:
                await asyncio.sleep(0)
            for path in ("/v2/health/ready", "/v2/models/m/ready"):
                answer = await client.get(path)
                assert (answer.status_code, answer.json()) == (503, {"error": "model 'm': it is loading"})
        loading.cancel()
        await asyncio.wait((loading,))

    asyncio.run(asyncio.wait_for(scenario(), 60))
