"""Lets a server infer rows over HTTP: sends requests, reads refusals, and decides when to send a request again."""

from __future__ import annotations

import asyncio
import io
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
from yarl import URL

from mlserver_torch_stream.client.http_transport import error_message, retry_after_s
from mlserver_torch_stream.cloud.answers import parse
from mlserver_torch_stream.cloud.backoff import Concurrency, Gate, Retry
from mlserver_torch_stream.cloud.connections import close_session, make_connector
from mlserver_torch_stream.cloud.requests import ObjectRequest, RowRequest, RowUnsuitable
from mlserver_torch_stream.cloud.rows import (
    AccessDenied,
    CloudError,
    Failure,
    ObjectMissing,
    Outcome,
    Row,
    RunRefused,
    StoreUnavailable,
    refusal,
)
from mlserver_torch_stream.errors import RequestError
from mlserver_torch_stream.protocol.openai_stream import BAD_REQUEST, error_object

Api = Literal["v2", "openai", "torchserve"]

_LATER = (408, 429, 502, 503, 504)
_SLOWER = (429, 503)
MAX_ERROR_CHARACTERS = 2000
JSON = {"Content-Type": "application/json"}
FRAMES = {"Content-Type": "application/octet-stream"}
BROKEN, UNREADABLE = 500, 502  # statuses of failures after a 200
UNSENDABLE = (RowUnsuitable, RequestError, ValueError, RecursionError)  # a row with one of these errors is not sent
_CONNECT_S = 10.0
_TRIES_OF_A_ROW = 3  # how often a row is tried if it may have caused the failure itself
_SHORTEST_SECRET = 8  # characters; a shorter key, such as EMPTY, is not a secret
_WARNED_BYTES = 2**20  # aiohttp warns of larger bodies that it gets as bytes


@dataclass(frozen=True)
class ServerEndpoint:
    """A model of a server, and how rows are sent to it. If ``model`` is None, it is the server's only model.

    ``rows`` says how prompts become requests. ``objects`` says how whole objects and chunks become requests, if ``api``
    is "torchserve" or if ``tensor``, the name of a BYTES tensor, is set. With ``batches`` each batch of the run is one
    request, which only servers of this project accept; None means that this is done if it is such a server. At most
    ``concurrency`` requests are in flight. ``timeout`` is the longest silence in seconds; None means no limit. ``name``
    is the model's name in answers that do not name it, and in all answers to ``batches``. ``ended`` returns why the
    server will never answer again, or None as long as it may.
    """

    url: str
    model: str | None = None
    api: Api = "v2"
    rows: RowRequest = field(default_factory=RowRequest)
    objects: ObjectRequest | None = None
    tensor: str | None = None
    batches: bool | None = None
    concurrency: int = 32
    stream: bool = True
    key: str | None = None
    timeout: float | None = 300.0
    name: str | None = None
    retry: Retry = field(default_factory=lambda: Retry(tries=10, first=0.2, longest=30.0))
    ended: Callable[[], str | None] = lambda: None

    @property
    def object_request(self) -> ObjectRequest:
        """``objects``, or its default if that is None."""
        return self.objects or ObjectRequest()


class RowFailed(CloudError, retriable=True):
    """The server failed at this row. The row is sent again; if the last attempt fails too, the row fails with its
    error.
    """

    def __init__(self, message: str, status: int, error: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.failure = row_failure("server_error", message, status, error)


class RowRejected(CloudError):
    """The server refuses this row, and would refuse it again if it were sent again."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class ServerUnready(StoreUnavailable, code=StoreUnavailable.code, retriable=True):
    """The server accepts no connection, or asks for a later attempt. This does not depend on the row."""


class ServerEnded(StoreUnavailable, code=StoreUnavailable.code):
    """The server will not answer again."""


class Backend(ABC):
    """Infers batches with the ``model`` of an endpoint. ``retries`` counts the requests that were sent again.

    Raises StoreUnavailable if the server answers none of the attempts, AccessDenied for a wrong key and ObjectMissing
    for an unknown model. These errors end the run, which can be resumed later, instead of failing every row.
    """

    def __init__(self, endpoint: ServerEndpoint, model: str) -> None:
        self.endpoint = endpoint
        self.model = model
        self.gate = Gate(Concurrency(endpoint.concurrency))
        self.retries = 0
        self._url = endpoint.url.rstrip("/")
        self._session = _session(endpoint.key, endpoint.timeout, endpoint.concurrency)

    @abstractmethod
    async def __call__(self, rows: Sequence[Row]) -> list[Outcome]:
        """Returns the outcome of each row. Raises CloudError if the run has to end."""

    async def aclose(self) -> None:
        """Closes the connections to the server."""
        await close_session(self._session)

    def _count_retry(self, error: CloudError) -> None:
        self.retries += 1

    @asynccontextmanager
    async def _posted(
        self, path: str, content: bytes | AsyncIterator[bytes], headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yields the response to a POST, whatever its status. Raises StoreUnavailable if the connection breaks."""
        body = io.BytesIO(content) if isinstance(content, bytes) and len(content) >= _WARNED_BYTES else content
        url = URL(self._url + path, encoded=True)
        try:
            async with self._session.post(url, data=body, headers=headers, allow_redirects=False) as response:
                yield response
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            if (why := self.endpoint.ended()) is not None:
                raise ServerEnded(why) from error
            unconnected = isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
            kind = ServerUnready if unconnected else StoreUnavailable
            raise kind(f"{self._url}: {error or type(error).__name__}") from error

    @asynccontextmanager
    async def _answered(
        self, started: int, path: str, content: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yields the response to a POST. Raises CloudError if the server refuses the request or the response breaks
        off.
        """
        async with self._posted(path, content, headers) as response:
            if response.status != 200:
                if response.status in _SLOWER:
                    self.gate.concurrency.refused(started)
                raise self._refusal(response, await response.read())
            yield response
        self.gate.concurrency.answered()

    def _refusal(self, response: aiohttp.ClientResponse, body: bytes) -> CloudError:
        status = response.status
        reason, error = _server_error(self._without_key(body.decode(errors="replace")))
        text = f"{self._url} answered {status}: {reason}"
        if status in _LATER:
            kind = ServerUnready if status in _SLOWER else StoreUnavailable
            return kind(text, retry_after_s(response.headers))
        return lasting_refusal(text, status, missing=status == 404, error=error)

    def _without_key(self, text: str) -> str:
        """Removes the key from a text, because a server may repeat the key in an error."""
        key = self.endpoint.key or ""
        return text.replace(key, "***") if len(key) >= _SHORTEST_SECRET else text


class RowBackend(Backend):
    """Sends each row in a separate request.

    If the connection breaks at every attempt to send a row while the server answers other rows, only this row fails.
    """

    def __init__(self, endpoint: ServerEndpoint, model: str) -> None:
        super().__init__(endpoint, model)
        self._answers = 0

    async def __call__(self, rows: Sequence[Row]) -> list[Outcome]:
        """Infers all rows concurrently. If a row raises, the other rows are cancelled, and its exception is raised."""
        tasks = [asyncio.ensure_future(self._one(row)) for row in rows]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @abstractmethod
    async def _one(self, row: Row) -> Outcome:
        """Infers a row."""

    async def _tried(self, once: Callable[[bool], Awaitable[Outcome]]) -> Outcome:
        """Returns the outcome of a row. ``once`` sends the row, and is called again after a temporary failure.

        At the last try ``once`` is called with True, and sends the row while no other row is in flight, because another
        row in the same batch of the server may have caused the earlier failures.
        """
        failures = breaks = 0
        before: int | None = None  # all answers before the second break; some may have come after the first

        async def attempt() -> Outcome:
            nonlocal failures, breaks, before
            try:
                outcome = await once(failures == _TRIES_OF_A_ROW - 1)
                self._answers += 1
                return outcome
            except ServerUnready:
                raise
            except StoreUnavailable:
                breaks += 1
                before = self._answers if breaks == 2 else before
                raise
            except RowFailed as error:
                failures += 1
                if failures == _TRIES_OF_A_ROW:
                    raise RowRejected(error.failure) from None
                raise

        try:
            return await self.endpoint.retry.run(attempt, on_retry=self._count_retry)
        except RowRejected as error:
            return Outcome(failure=error.failure)
        except StoreUnavailable as error:
            if isinstance(error, ServerUnready) or before in (None, self._answers):
                raise
            text = f"{error.message}, at each of {breaks} tries, while other rows were answered"
            return Outcome(failure=row_failure("server_error", text, UNREADABLE, None))


def _session(key: str | None, timeout: float | None, concurrency: int) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=timeout),
        connector=make_connector(concurrency),
        skip_auto_headers=("Accept-Encoding",),  # compression hides where the pieces of an answer end
        trust_env=True,
    )


def lasting_refusal(
    text: str, status: int, *, missing: bool, error: Mapping[str, Any] | None = None
) -> AccessDenied | ObjectMissing | RowFailed | RowRejected:
    """Returns the error for a refusal that would be the same at a later try. ``missing`` means that the server has no
    such model.
    """
    if status in (401, 403):
        return AccessDenied(text)
    if missing:
        return ObjectMissing(text)
    if status >= 500:
        return RowFailed(text, status, error)
    return RowRejected(row_failure("invalid_request", text, status, error))


def row_failure(code: str, message: str, status: int, error: Mapping[str, Any] | None) -> Failure:
    """Returns the failure of a row. ``error`` is the server's own error object, if it sent one."""
    return Failure(code, message, status, error or error_object(status, message, code=code))


def unsent(error: Exception) -> Outcome:
    """Returns the outcome of a row that cannot be sent, for example because of a lone surrogate, NaN or nesting that
    is too deep.
    """
    if isinstance(error, RequestError):
        return Outcome(failure=refusal(error))
    if isinstance(error, RowUnsuitable):
        return Outcome(failure=row_failure("unsuitable", str(error), BAD_REQUEST, None))
    return Outcome(failure=row_failure("invalid_request", f"cannot be sent as JSON: {error}", BAD_REQUEST, None))


def unreadable(error: Exception) -> RowFailed:
    """Returns the failure of a row whose answer cannot be read because of ``error``."""
    return RowFailed(f"the server's answer cannot be read: {type(error).__name__}: {error}", UNREADABLE)


def _server_error(body: str) -> tuple[str, Mapping[str, Any] | None]:
    """Returns the message of a refusal, and its error object if it has OpenAI's format."""
    try:
        error = parse(body)["error"]
        return error_message(error), error if isinstance(error, dict) else None
    except (ValueError, KeyError, TypeError):
        return body[:MAX_ERROR_CHARACTERS].strip(), None


async def only_model(url: str, api: Api, key: str | None) -> str:
    """Returns the name of the server's only model. Raises RunRefused if the server has no model or several."""
    method, path, body = (
        ("GET", "/v1/models", None) if api == "openai" else ("POST", "/v2/repository/index", b'{"ready": true}')
    )
    try:
        async with (
            _session(key, _CONNECT_S, 1) as session,
            session.request(method, url.rstrip("/") + path, data=body, headers=JSON, allow_redirects=False) as response,
        ):
            if response.status != 200:  # a redirect may lead to another owner's server
                raise ValueError(f"it answered {response.status}")
            found = await response.json(content_type=None)
            models = found["data"] if api == "openai" else found
            names = sorted({str(model["id" if api == "openai" else "name"]) for model in models})
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError, KeyError, TypeError) as error:
        raise RunRefused(f"--url: {url} does not say which models it has ({error or type(error).__name__})") from None
    if not names:
        raise RunRefused(f"--url: {url} has no model that is ready")
    if len(names) != 1:
        raise RunRefused(f"--model: must name one of the server's models: {', '.join(names)}")
    return names[0]
