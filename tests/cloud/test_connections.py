"""Connections that are cancelled while they are being made, by each kind of client, on uvloop as in the commands."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
import uvloop

from mlserver_torch_stream.cloud.backend import opened
from mlserver_torch_stream.cloud.backoff import Retry
from mlserver_torch_stream.cloud.endpoint import ServerEndpoint
from mlserver_torch_stream.cloud.rows import Row
from mlserver_torch_stream.cloud.urls import UrlStore
from tests.scripted_http import Handler, serving

Ask = Callable[[], Awaitable[object]]


class _Unwell(Handler):
    def do_GET(self) -> None:
        self.answer(500)

    def do_POST(self) -> None:
        self.received()
        self.answer(500)


@asynccontextmanager
async def _backend(url: str) -> AsyncIterator[Ask]:
    async with opened(ServerEndpoint(url, "m", retry=Retry(tries=2, first=0.01, longest=0.01))) as infer:
        yield lambda: infer([Row(0, "k", 1, "r0", body={"prompt": "hello"})])


@asynccontextmanager
async def _url_list(url: str) -> AsyncIterator[Ask]:
    store = UrlStore({"a": f"{url}/a"})
    async with store.connected():
        yield lambda: store.head("a")


@pytest.mark.long
@pytest.mark.parametrize("user", [_backend, _url_list])
def test_a_request_cancelled_while_it_connects_closes_no_descriptor_twice(
    user: Callable[[str], AbstractAsyncContextManager[Ask]],
) -> None:
    """uvloop closes the descriptor when it is cancelled, but the socket object remains and would close it again."""

    async def cancelled_after(turns: int, ask: Ask) -> None:
        request = asyncio.ensure_future(ask())
        for _ in range(turns):
            await asyncio.sleep(0)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)

    async def cancel_at_each_turn(url: str) -> None:
        async with user(url) as ask:
            for turns in range(40):
                await cancelled_after(turns, ask)

    with serving(_Unwell) as url:
        uvloop.run(cancel_at_each_turn(url))
        gc.collect()  # an open socket would warn here, which fails the test
