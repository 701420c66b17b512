"""The client: a blocking class and one for asyncio. The URL's scheme selects HTTP or gRPC.

Chooses the transport for a URL.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from mlserver_torch_stream.client.address import (
    Api,
    checked_headers,
    checked_timeout,
    is_grpc,
    read_authorities,
)
from mlserver_torch_stream.client.call import Delta, GenerationCall, Messages, generation_call
from mlserver_torch_stream.client.http_transport import AsyncHttpTransport, HttpTransport

DEFAULT_TIMEOUT_S = 300.0


class Transport(Protocol):
    """Sends calls to the server, and yields the deltas of its answers."""

    def stream(self, call: GenerationCall) -> Generator[Delta, None, None]:
        """Sends the call and yields its deltas. Closing the generator cancels the call. Raises ClientError if the call
        fails.
        """

    def models(self) -> list[str]:
        """Returns the names of the models that are ready on the server. Raises ClientError."""

    def close(self) -> None:
        """Closes the connections."""


class AsyncTransport(Protocol):
    """The same as ``Transport``, for asyncio."""

    def stream(self, call: GenerationCall) -> AsyncGenerator[Delta, None]: ...

    async def models(self) -> list[str]: ...

    async def close(self) -> None: ...


class Client:
    """Streams generations from one server. Connections are kept for the next call.

    ``url`` begins with ``http://`` or ``https://`` (REST), or with ``grpc://`` or ``grpcs://`` (gRPC, the latter with
    TLS). ``api`` is ``v2``. ``headers`` are sent with every request, over gRPC as metadata, and so is ``api_key``, as
    ``Authorization: Bearer``. ``timeout`` bounds the seconds between two events. ``ca_file`` are PEM certificates of
    the authorities to trust instead of the defaults of httpx and gRPC. Raises ValueError for a URL, another ``api``, a
    header, a key, a timeout or a file that is not valid.
    """

    def __init__(
        self,
        url: str,
        *,
        api: Api = "v2",
        headers: Mapping[str, str] | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        api_key: str | None = None,
        ca_file: str | os.PathLike[str] | None = None,
    ) -> None:
        self._transport: Transport = _open_transport(False, url, api, headers, timeout, api_key, ca_file)

    def stream(
        self,
        model: str,
        prompt: str | Sequence[str] | None = None,
        *,
        messages: Messages | None = None,
        **parameters: Any,
    ) -> Generator[Delta, None, None]:
        """Streams the answers to one or several raw prompts, or to chat ``messages``.

        ``parameters`` are the server's request parameters. Closing the generator cancels the generation. Raises
        ClientError.
        """
        return self._transport.stream(generation_call(model, prompt, messages, parameters))

    def models(self) -> list[str]:
        """Returns the names of the models that are ready on the server. Raises ClientError."""
        return self._transport.models()

    def close(self) -> None:
        """Closes the connections to the server."""
        self._transport.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient:
    """The same as ``Client``, for asyncio."""

    def __init__(
        self,
        url: str,
        *,
        api: Api = "v2",
        headers: Mapping[str, str] | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        api_key: str | None = None,
        ca_file: str | os.PathLike[str] | None = None,
    ) -> None:
        self._transport: AsyncTransport = _open_transport(True, url, api, headers, timeout, api_key, ca_file)

    def stream(
        self,
        model: str,
        prompt: str | Sequence[str] | None = None,
        *,
        messages: Messages | None = None,
        **parameters: Any,
    ) -> AsyncGenerator[Delta, None]:
        """Streams the answers, as ``Client.stream`` does. Raises ClientError."""
        return self._transport.stream(generation_call(model, prompt, messages, parameters))

    async def models(self) -> list[str]:
        """Returns the names of the models that are ready on the server. Raises ClientError."""
        return await self._transport.models()

    async def close(self) -> None:
        """Closes the connections to the server."""
        await self._transport.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def stream(
    url: str,
    model: str,
    prompt: str | Sequence[str] | None = None,
    *,
    messages: Messages | None = None,
    timeout: float = DEFAULT_TIMEOUT_S,
    **parameters: Any,
) -> Generator[Delta, None, None]:
    """Calls ``Client.stream`` over a connection of its own."""
    with Client(url, timeout=timeout) as client:
        yield from client.stream(model, prompt, messages=messages, **parameters)


async def astream(
    url: str,
    model: str,
    prompt: str | Sequence[str] | None = None,
    *,
    messages: Messages | None = None,
    timeout: float = DEFAULT_TIMEOUT_S,
    **parameters: Any,
) -> AsyncGenerator[Delta, None]:
    """Does the same as ``stream``, for asyncio."""
    async with (
        AsyncClient(url, timeout=timeout) as client,
        aclosing(client.stream(model, prompt, messages=messages, **parameters)) as deltas,
    ):
        async for delta in deltas:
            yield delta


def _open_transport(
    asynchronous: bool,
    url: str,
    api: Api,
    headers: Mapping[str, str] | None,
    timeout: float,
    api_key: str | None,
    ca_file: str | os.PathLike[str] | None,
) -> Any:
    """Returns a Transport or an AsyncTransport. Raises ValueError if an argument is wrong."""
    grpc = is_grpc(url, api)
    given = checked_headers(headers, api_key, grpc=grpc), checked_timeout(timeout), read_authorities(ca_file, url)
    if grpc:
        from mlserver_torch_stream.client.grpc_transport import AsyncGrpcTransport, GrpcTransport

        return (AsyncGrpcTransport if asynchronous else GrpcTransport)(url, *given)
    make = AsyncHttpTransport if asynchronous else HttpTransport
    return make(url.rstrip("/"), *given)
