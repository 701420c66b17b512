"""Readiness at the moment of a signal: 200 before it and 503 from it on, whatever was under way."""

from __future__ import annotations

import asyncio
from itertools import product

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


class Loaded(BaseRuntime):
    """A model of ours without an engine: all that its readiness depends on is the process's."""

    @property
    def trouble(self) -> str | None:
        return LIFECYCLE.shutdown_reason

    async def load(self) -> bool:
        return True


def test_no_request_that_meets_the_signal_is_answered_400(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes after each number of turns of the event loop that a request may take."""

    async def statuses() -> list[int]:
        registry = MultiModelRegistry(model_initialiser=Loaded)
        await registry.load(ModelSettings(name="m", implementation=PACKAGE_SPELLING))
        settings = Settings(debug=False)
        data_plane = DataPlane(settings, registry)
        server = RESTServer(settings, data_plane, ModelRepositoryHandlers(SchemalessModelRepository(""), registry))
        health.add_routes(server)
        found = []
        async with httpx.AsyncClient(transport=httpx.ASGITransport(server._app), base_url="http://server") as client:
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
