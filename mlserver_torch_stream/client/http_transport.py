"""Carries calls in the V2 protocol over HTTP: synchronously and for asyncio; parses the events of their streams."""

from __future__ import annotations

import json
import os
import re
import ssl
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import httpx

from mlserver_torch_stream.client.address import tls_context, without_credentials
from mlserver_torch_stream.client.call import (
    UNREADABLE,
    ClientError,
    ConnectionFailed,
    Delta,
    GenerationCall,
    RequestRefused,
    StreamEnding,
    unreadable,
)
from mlserver_torch_stream.client.v2_json import MODELS_BODY, MODELS_PATH, http_request, model_names, read_event

# A whole answer in one event, with log-probabilities and alternatives for every token, has some 30 MB.
MAX_EVENT_BYTES = 64 * 2**20
# A lone \r at the end of a chunk may be half of \r\n: it is kept for the next chunk.
_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")


class EventParser:
    """Parses a ``text/event-stream`` body, in chunks of any size, into the data of its events.

    ``most_bytes`` bounds the memory of one event: its complete lines and its last, incomplete line.
    """

    def __init__(self, most_bytes: int = MAX_EVENT_BYTES) -> None:
        self._most_bytes = most_bytes
        self._kept_bytes = 0
        self._line = bytearray()  # the current line, until its end arrives
        self._half_end = b""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> Iterator[str]:
        """Yields the events that are complete; the iterator must be read to its end. Raises ValueError at a line that
        is not UTF-8 or an event of more than ``most_bytes`` bytes, once the events before it have been yielded.
        """
        *ended, rest = _LINE_END.split(self._half_end + chunk)
        self._half_end = b"\r" if rest.endswith(b"\r") else b""
        for piece in ended:
            self._keep(piece)
            line, self._line = self._line, bytearray()
            if line:
                self._field(line.decode("utf-8"))
            else:
                event, self._data, self._kept_bytes = self._data, [], 0
                if event:
                    yield "\n".join(event)
        self._keep(rest.removesuffix(b"\r"))

    def _keep(self, piece: bytes) -> None:
        self._kept_bytes += len(piece)
        if self._kept_bytes > self._most_bytes:
            raise ValueError(f"an event has more than {self._most_bytes} bytes")
        self._line += piece

    def _field(self, line: str) -> None:
        name, _, value = line.partition(":")
        if name == "data":
            self._data.append(value.removeprefix(" "))


_CONNECT_TIMEOUT_S = 5.0
_Http = TypeVar("_Http", httpx.Client, httpx.AsyncClient)
_MAX_REASON_CHARACTERS = 1000  # the maximum length of a refusal that is not JSON, such as a proxy's error page


class HttpTransport:
    """Makes calls that block. Closing the generator of a stream closes its connection."""

    def __init__(self, url: str, headers: Mapping[str, str], timeout: float, authorities: bytes | None) -> None:
        self._url = url
        self._http = _opened(httpx.Client, url, headers, timeout, authorities)

    def stream(self, call: GenerationCall) -> Generator[Delta, None, None]:
        path, body = http_request(call)
        reading = _StreamReading()
        try:
            with self._http.stream("POST", path, json=body) as response:
                if response.status_code != httpx.codes.OK:
                    raise _refusal(response, response.read())
                for chunk in response.iter_bytes():
                    yield from reading.feed(chunk)
        except httpx.HTTPError as error:
            raise reading.failure(self._url, error) from error
        reading.check()

    def models(self) -> list[str]:
        try:
            response = self._http.post(MODELS_PATH, json=MODELS_BODY)
        except httpx.HTTPError as error:
            raise _no_answer(self._url, error) from error
        return _model_names(response)

    def close(self) -> None:
        self._http.close()


class AsyncHttpTransport:
    """Makes the same calls for asyncio."""

    def __init__(self, url: str, headers: Mapping[str, str], timeout: float, authorities: bytes | None) -> None:
        self._url = url
        self._http = _opened(httpx.AsyncClient, url, headers, timeout, authorities)

    async def stream(self, call: GenerationCall) -> AsyncGenerator[Delta, None]:
        path, body = http_request(call)
        reading = _StreamReading()
        try:
            async with self._http.stream("POST", path, json=body) as response:
                if response.status_code != httpx.codes.OK:
                    raise _refusal(response, await response.aread())
                async for chunk in response.aiter_bytes():
                    for delta in reading.feed(chunk):
                        yield delta
        except httpx.HTTPError as error:
            raise reading.failure(self._url, error) from error
        reading.check()

    async def models(self) -> list[str]:
        try:
            response = await self._http.post(MODELS_PATH, json=MODELS_BODY)
        except httpx.HTTPError as error:
            raise _no_answer(self._url, error) from error
        return _model_names(response)

    async def close(self) -> None:
        await self._http.aclose()


class _StreamReading:
    """Turns chunks into deltas."""

    def __init__(self) -> None:
        self._parser = EventParser()
        self._ending = StreamEnding()

    def feed(self, chunk: bytes) -> Iterator[Delta]:
        for deltas in self._read(chunk):
            yield from self._ending.note(deltas)

    def _read(self, chunk: bytes) -> Iterator[Sequence[Delta]]:
        try:
            for event in self._parser.feed(chunk):
                yield read_event(event)
        except UNREADABLE as error:
            raise unreadable(error) from error

    def check(self) -> None:
        self._ending.check()

    def failure(self, url: str, error: httpx.HTTPError) -> ClientError:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return _no_answer(url, error)
        return self._ending.broken(f"the stream broke: {_reason(error)}")


def _opened(
    library: type[_Http], url: str, headers: Mapping[str, str], timeout: float, authorities: bytes | None
) -> _Http:
    """Creates the client; httpx reads the environment's proxies and certificates here."""
    try:
        httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ValueError(f"url: {error}, got {without_credentials(url)!r}") from None
    try:
        environment = os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")
        verify = _tls_context(*environment) if authorities is None else tls_context(authorities)
        timeouts = httpx.Timeout(timeout, connect=min(timeout, _CONNECT_TIMEOUT_S))
        return library(base_url=url, headers=headers, timeout=timeouts, verify=verify)
    except (ValueError, httpx.InvalidURL, ImportError, OSError) as error:
        raise ValueError(f"a proxy or a certificate of the environment cannot be used: {error}") from error


@lru_cache(maxsize=1)
def _tls_context(cert_file: str | None, cert_folder: str | None) -> ssl.SSLContext:
    """Returns the context that all clients share, because reading the certificates takes 25 ms. httpx takes the
    arguments from the environment itself; with other ones there is a new context."""
    return httpx.create_ssl_context()


def _reason(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__


def _no_answer(url: str, error: httpx.HTTPError) -> ConnectionFailed:
    return ConnectionFailed(f"no server at {without_credentials(url)}: {_reason(error)}")


def _model_names(response: httpx.Response) -> list[str]:
    if response.status_code != httpx.codes.OK:
        raise _refusal(response, response.content)
    try:
        return model_names(response.json())
    except UNREADABLE as error:
        raise unreadable(error) from error


def _refusal(response: httpx.Response, body: bytes) -> RequestRefused:
    try:
        reason = error_message(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        reason = body.decode("utf-8", "replace").strip()[:_MAX_REASON_CHARACTERS]
    status, location = response.status_code, response.headers.get("Location")
    if location:
        reason = f"it redirects to {without_credentials(location)}"
    reason = reason or response.reason_phrase
    return RequestRefused(f"the server answered {status}: {reason}", status, retry_after_s(response.headers))


def error_message(error: Any) -> str:
    """Returns the message of an error object in the format of V2 or of OpenAI's API."""
    return str(error.get("message", error) if isinstance(error, dict) else error)


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Returns the header Retry-After in seconds; None if it is missing, or a date."""
    try:
        return max(0.0, float(headers["Retry-After"]))
    except (KeyError, ValueError):
        return None
