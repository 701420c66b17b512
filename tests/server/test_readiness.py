"""Readiness around a signal: 200 before it and 503 afterwards, whatever was in progress."""

from __future__ import annotations

import asyncio
import functools
from itertools import product
from typing import Any, cast

import httpx
from mlserver import ModelSettings
from mlserver.handlers import DataPlane, ModelRepositoryHandlers
from mlserver.registry import MultiModelRegistry
from mlserver.repository.repository import SchemalessModelRepository
from mlserver.rest.server import RESTServer
from mlserver.settings import Settings

from mlserver_torch_stream.runtime import TorchStreamRuntime
from mlserver_torch_stream.server.host import ServerHost
from mlserver_torch_stream.server.lifecycle import shutdown
from mlserver_torch_stream.server.lifecycle.lifecycle import Lifecycle
from mlserver_torch_stream.server.rest import health
from tests.server.harness import PACKAGE_SPELLING

_MODEL = ModelSettings(name="m", implementation=PACKAGE_SPELLING)


@functools.cache
def _server() -> tuple[RESTServer, list[Any]]:
    """Returns the server of all tests and MLServer's own routes; a process can register its metrics only once."""
    settings, registry = Settings(debug=False), MultiModelRegistry()
    data_plane = DataPlane(settings, registry)
    server = RESTServer(settings, data_plane, ModelRepositoryHandlers(SchemalessModelRepository(""), registry))
    return server, list(server._app.router.routes)


def _client(registry: MultiModelRegistry, lifecycle: Lifecycle) -> httpx.AsyncClient:
    """Returns the client of a server with these models and our health routes."""
    server, routes = _server()
    server._app.router.routes[:] = routes
    server._data_plane._model_registry = registry
    health.add_routes(ServerHost(server), lifecycle)
    return httpx.AsyncClient(transport=httpx.ASGITransport(server._app), base_url="http://server")


class Loaded(TorchStreamRuntime):
    """A model of ours without an engine, whose readiness depends only on the lifecycle."""

    def __init__(self, lifecycle: Lifecycle, settings: ModelSettings) -> None:
        super().__init__(settings)
        self._lifecycle = lifecycle

    @property
    def trouble(self) -> str | None:
        return self._lifecycle.shutdown_reason

    async def load(self) -> bool:
        return True


class _Built:
    """An engine without any trouble."""

    trouble = None

    @property
    def engine(self) -> Any:
        return self

    def give_back(self) -> bool:
        return False

    def shutdown(self) -> None: ...


class LoadedSlowly(TorchStreamRuntime):
    """A model whose engine is built, but whose load has not ended yet."""

    def __init__(self, built: asyncio.Event, settings: ModelSettings) -> None:
        super().__init__(settings)
        self._built = built

    async def load(self) -> bool:
        await self._slot.load(lambda on_death: _Built())
        self._built.set()
        await asyncio.Event().wait()
        return True


def test_no_request_that_meets_the_signal_is_answered_400() -> None:
    """The signal comes after each possible number of turns of the event loop that a request takes."""

    async def status(path: str, turns: int) -> int:
        lifecycle = Lifecycle()
        registry = MultiModelRegistry(model_initialiser=functools.partial(Loaded, lifecycle))
        await registry.load(_MODEL)
        async with _client(registry, lifecycle) as client:
            request = asyncio.create_task(client.get(path))
            for _ in range(turns):
                await asyncio.sleep(0)
            lifecycle.begin_shutdown("the server is shutting down")
            return (await request).status_code

    async def statuses() -> set[int]:
        paths = ("/v2/health/ready", "/v2/models/m/ready")
        return {await status(path, turns) for path, turns in product(paths, range(40))}

    assert asyncio.run(statuses()) == {200, 503}


def test_a_model_whose_engine_is_there_before_its_load_has_ended_is_not_answered_400() -> None:
    """MLServer sets a model ready when its load has ended, which is a moment later."""

    async def scenario() -> None:
        built = asyncio.Event()
        registry = MultiModelRegistry(model_initialiser=functools.partial(LoadedSlowly, built))
        loading = asyncio.create_task(registry.load(_MODEL))
        await built.wait()
        async with _client(registry, Lifecycle()) as client:
            for path in ("/v2/health/ready", "/v2/models/m/ready"):
                answer = await client.get(path)
                assert (answer.status_code, answer.json()) == (503, {"error": "model 'm': it is loading"})
        loading.cancel()
        await asyncio.wait((loading,))

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_model_that_a_shutdown_took_out_of_the_registry_is_not_ready_and_not_unknown() -> None:
    """MLServer forgets a model whose load fails, and a connection may be accepted just before the listeners close."""

    async def answers(begun: bool) -> list[int]:
        lifecycle = Lifecycle()
        if begun:
            lifecycle.begin_shutdown("the server is shutting down")
        async with _client(MultiModelRegistry(), lifecycle) as client:
            return [(await client.get(f"/v2/models/m{version}/ready")).status_code for version in ("", "/versions/v1")]

    assert asyncio.run(answers(True)) == [503, 503]
    assert asyncio.run(answers(False)) == [404, 404]


def test_without_a_delay_requests_are_refused_as_soon_as_the_server_is_not_ready() -> None:
    """The event loop has no turn in between, in which a client could see the one and make a request."""

    async def scenario() -> tuple[str | None, bool]:
        lifecycle = Lifecycle()
        draining = asyncio.create_task(shutdown._drain(cast(Any, None), lifecycle, "SIGTERM"))
        await asyncio.sleep(0)
        found = lifecycle.shutdown_reason, lifecycle.refusing.is_set
        draining.cancel()
        await asyncio.wait((draining,))
        return found

    assert asyncio.run(scenario()) == ("the server is shutting down", True)
