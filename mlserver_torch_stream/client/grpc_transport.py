"""Carries calls over gRPC, synchronously and for asyncio.

Knows channels and timeouts. Knows nothing of the messages' content.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Generator, Mapping
from typing import Any

import grpc

from mlserver_torch_stream.client.address import grpc_target
from mlserver_torch_stream.client.client_errors import StreamBroken
from mlserver_torch_stream.client.deltas import Delta
from mlserver_torch_stream.client.generation_call import GenerationCall
from mlserver_torch_stream.client.grpc_v2 import (
    call_error,
    model_names,
    models_method,
    ready_models_request,
    request_message,
    response_deltas,
    stream_method,
)
from mlserver_torch_stream.client.stream_ending import StreamEnding


class GrpcTransport:
    """Calls that block. Closing the generator of a stream cancels its call."""

    def __init__(self, url: str, headers: Mapping[str, str], timeout: float, authorities: bytes | None) -> None:
        self._url = url
        self._metadata = _metadata(headers)
        self._timeout = timeout
        self._channel = _open_channel(grpc, url, authorities)

    def stream(self, call: GenerationCall) -> Generator[Delta, None, None]:
        rpc = stream_method(self._channel)(request_message(call), metadata=self._metadata)
        watch = SilenceWatch(rpc, self._timeout)
        ending = StreamEnding()
        try:
            while (response := watch.next()) is not None:
                yield from ending.note(response_deltas(response))
        except grpc.RpcError as error:
            if watch.fired:
                raise ending.broken(_silence(self._timeout)) from error
            raise call_error(self._url, error, ending.started) from error
        finally:
            watch.close()
            rpc.cancel()
        ending.check()

    def models(self) -> list[str]:
        ask = models_method(self._channel)
        try:
            return model_names(ask(ready_models_request(), metadata=self._metadata, timeout=self._timeout))
        except grpc.RpcError as error:
            raise call_error(self._url, error, started=False) from error

    def close(self) -> None:
        self._channel.close()


class AsyncGrpcTransport:
    """The same for asyncio. The channel is opened at the first call, in the loop that it belongs to."""

    def __init__(self, url: str, headers: Mapping[str, str], timeout: float, authorities: bytes | None) -> None:
        self._url = url
        self._metadata = _metadata(headers)
        self._timeout = timeout
        self._authorities = authorities
        self._channel: Any = None

    async def stream(self, call: GenerationCall) -> AsyncGenerator[Delta, None]:
        rpc = stream_method(self._opened())(request_message(call), metadata=self._metadata)
        ending = StreamEnding()
        try:
            while (response := await _result(rpc.read(), self._timeout)) is not grpc.aio.EOF:
                for delta in ending.note(response_deltas(response)):
                    yield delta
        except asyncio.TimeoutError as error:
            raise ending.broken(_silence(self._timeout)) from error
        except grpc.RpcError as error:
            raise call_error(self._url, error, ending.started) from error
        finally:
            rpc.cancel()
        ending.check()

    async def models(self) -> list[str]:
        ask = models_method(self._opened())
        try:
            call = ask(ready_models_request(), metadata=self._metadata, timeout=self._timeout)
            return model_names(await _result(call, None))
        except grpc.RpcError as error:
            raise call_error(self._url, error, started=False) from error

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    def _opened(self) -> Any:
        if self._channel is None:
            self._channel = _open_channel(grpc.aio, self._url, self._authorities)
        return self._channel


async def _result(pending: Awaitable[Any], seconds: float | None) -> Any:
    """Returns the result of a call. Raises TimeoutError, or StreamBroken if the client was closed: gRPC cancels the
    calls of a channel that is closed, which is no cancellation of the task that waits."""
    reading = asyncio.ensure_future(pending)
    try:
        done, _ = await asyncio.wait([reading], timeout=seconds)
    finally:
        reading.cancel()
        reading.add_done_callback(_retrieve)
    if not done:
        raise asyncio.TimeoutError
    if reading.cancelled():
        raise StreamBroken("the stream broke: the client was closed")
    return reading.result()


def _retrieve(reading: asyncio.Future[Any]) -> None:
    """Keeps asyncio from logging an exception that was raised after the task was cancelled."""
    if not reading.cancelled():
        reading.exception()


class SilenceWatch:
    """Cancels a call whose next message does not arrive in time. A thread watches, as a blocking read has no timeout.

    The time that the reader of the stream takes for a message does not count.
    """

    def __init__(self, rpc: Any, seconds: float) -> None:
        self.fired = False
        self._rpc = rpc
        self._seconds = seconds
        self._due = math.inf
        self._closed = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def next(self) -> Any:
        """The next message; None after the last."""
        self._due = time.monotonic() + self._seconds
        message = next(self._rpc, None)
        self._due = math.inf
        return message

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(min(self._due - time.monotonic(), self._seconds)):
            if time.monotonic() >= self._due:
                self.fired = True
                self._rpc.cancel()
                return


def _open_channel(library: Any, url: str, authorities: bytes | None) -> Any:
    if url.startswith("grpcs:"):
        return library.secure_channel(grpc_target(url), grpc.ssl_channel_credentials(authorities))
    return library.insecure_channel(grpc_target(url))


def _metadata(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple((name.lower(), value) for name, value in headers.items())


def _silence(seconds: float) -> str:
    return f"the stream broke: nothing came for {seconds:g} s"
