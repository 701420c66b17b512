"""Infers rows with a server over HTTP, in the V2 protocol or OpenAI's API, with adaptive concurrency.

``Concurrency`` decides how many requests may be in flight, without a clock and without tasks; ``Gate`` makes tasks
wait.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import httpx

from mlserver_torch_stream.cli.answers_http import (
    GenerationBroke,
    HttpAnswer,
    OpenAIAnswer,
    RowQuestion,
    RowRequest,
    RowUnsuitable,
    V2ServerAnswer,
    each,
    parse,
    refused,
)
from mlserver_torch_stream.cli.argument_types import authorization, without_key
from mlserver_torch_stream.client import AsyncClient, ClientError, EventParser
from mlserver_torch_stream.client.call import GenerationCall
from mlserver_torch_stream.client.http_transport import error_message, retry_after_s
from mlserver_torch_stream.client.v2_json import http_request
from mlserver_torch_stream.cloud.backoff import Retry
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
from mlserver_torch_stream.protocol.openai_stream import error_object
from mlserver_torch_stream.protocol.parameters import SILENT_IN_BODY

Api = Literal["v2", "openai"]


class Concurrency:
    """Additive increase, multiplicative decrease, between 1 and ``most``. The refusal of a request that started before
    the last decrease does not decrease the limit again."""

    def __init__(self, most: int, start: int = 4) -> None:
        if most < 1:
            raise ValueError("at least one request is in flight")
        self.most = most
        self._limit = float(min(start, most))
        self._cuts = 0

    @property
    def limit(self) -> int:
        return int(self._limit)

    def started(self) -> int:
        """A value that the request passes to ``refused`` if the server refuses it."""
        return self._cuts

    def answered(self) -> None:
        self._limit = min(float(self.most), self._limit + 1 / self._limit)

    def refused(self, started: int) -> None:
        if started == self._cuts:
            self._cuts += 1
            self._limit = max(1.0, self._limit / 2)


class Gate:
    """Lets as many tasks through at a time as ``concurrency`` allows, in the order of their arrival.

    A task that is to be alone waits until all others have left, and those behind it wait until it has left.
    """

    def __init__(self, concurrency: Concurrency) -> None:
        self.concurrency = concurrency
        self.inside = 0
        self._closed = False  # the task inside is alone
        self._waiting: deque[tuple[asyncio.Future[None], bool]] = deque()

    @asynccontextmanager
    async def through(self, alone: bool = False) -> AsyncIterator[int]:
        """Yields the argument for ``Concurrency.refused``."""
        if not self._waiting and self._has_room(alone):
            self._enter(alone)
        else:
            await self._wait(alone)
        try:
            yield self.concurrency.started()
        finally:
            self._leave()

    def _has_room(self, alone: bool) -> bool:
        return not self._closed and self.inside < (1 if alone else self.concurrency.limit)

    def _enter(self, alone: bool) -> None:
        self.inside += 1
        self._closed = alone

    async def _wait(self, alone: bool) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, alone))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the task was let through before it was cancelled
                self._leave()
            else:
                self._admit()  # the task may have been alone at the head, before others that have room
            raise

    def _leave(self) -> None:
        self.inside -= 1
        self._closed = False
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            turn, alone = self._waiting[0]
            if not turn.done():  # a cancelled task's turn is done
                if not self._has_room(alone):
                    return
                self._enter(alone)
                turn.set_result(None)
            self._waiting.popleft()


_LATER = (408, 429, 502, 503, 504)
_SLOWER = (429, 503)
MAX_ERROR_CHARACTERS = 2000
_JSON = {"Content-Type": "application/json"}
_BROKEN, _UNREADABLE = 500, 502  # statuses of failures after a 200
_MODELS_TIMEOUT_S = 10.0
_TRIES_OF_A_ROW = 3  # for failures that the row itself may cause


class RowFailed(CloudError, retriable=True):
    """The server failed at this row. The row is sent again; the last attempt's failure is the row's."""

    def __init__(self, message: str, status: int, error: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.failure = row_failure("server_error", message, status, error)


class ServerUnready(StoreUnavailable, code=StoreUnavailable.code, retriable=True):
    """The server takes no connection, or asks for a later attempt, whatever the row holds."""


def unreadable_answer(error: Exception) -> RowFailed:
    return RowFailed(f"the server's answer cannot be read: {type(error).__name__}: {error}", _UNREADABLE)


class RowRejected(CloudError):
    """The server refuses this row, and would refuse it again."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass
class HttpInfer:
    """The callable that infers a batch. At most ``most`` requests are in flight, fewer after an answer of 429 or 503.

    Raises StoreUnavailable if the server does not answer within all tries of ``retry``, AccessDenied for a wrong key
    and ObjectMissing for an unknown model. These end the run, which can be resumed, instead of failing every row. A row
    at which the connection breaks each time fails alone if the server answers other rows meanwhile.
    """

    url: str
    model: str
    api: Api
    row_request: RowRequest
    most: int = 32
    stream: bool = True
    key: str | None = None
    timeout: float = 300.0  # seconds of silence
    name: str | None = None  # the model's name in answers without one; None: ``model``
    retry: Retry = field(default_factory=lambda: Retry(tries=10, first=0.2, longest=30.0))

    def __post_init__(self) -> None:
        self.gate = Gate(Concurrency(self.most))
        self.retries = 0
        self._answers = 0
        limits = httpx.Limits(max_connections=self.most, max_keepalive_connections=self.most)
        timeout = httpx.Timeout(self.timeout, connect=10.0, pool=None)
        headers = authorization(self.key)
        self._client = httpx.AsyncClient(base_url=self.url, headers=headers, limits=limits, timeout=timeout)

    async def __call__(self, rows: Sequence[Row]) -> list[Outcome]:
        return await each(rows, self._one)

    async def aclose(self) -> None:
        await self._client.aclose()

    async def _one(self, row: Row) -> Outcome:
        try:
            ask = self.row_request.ask(row)
            path, body = self._request(ask)
            content = json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
        except RowUnsuitable as error:
            return refused("unsuitable", str(error))
        except RequestError as error:
            return Outcome(failure=refusal(error))
        except (ValueError, RecursionError) as error:  # a lone surrogate, NaN, or nesting without end
            return refused("invalid_request", f"cannot be sent as JSON: {error}")
        return await self._tried(lambda alone: self._attempt(path, content, ask))

    async def _tried(self, once: Callable[[bool], Awaitable[Outcome]]) -> Outcome:
        """The outcome of a row. ``once`` sends the row, and is called again after a failure that may pass.

        It is called with True at the row's last try: another row that the server put into the same batch may have
        failed the tries before, so that the row should be sent while no other is.
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
            return await self.retry.run(attempt, on_retry=self._count_retry)
        except RowRejected as error:
            return Outcome(failure=error.failure)
        except StoreUnavailable as error:
            if isinstance(error, ServerUnready) or before in (None, self._answers):
                raise
            text = f"{error.message}, at each of {breaks} tries, while other rows were answered"
            return Outcome(failure=row_failure("server_error", text, _UNREADABLE, None))

    def _count_retry(self, error: CloudError) -> None:
        self.retries += 1

    def _request(self, ask: RowQuestion) -> tuple[str, dict[str, Any]]:
        if self.api == "openai":
            body = {**ask.parameters, "model": self.model, "stream": self.stream}
            if self.stream:
                body["stream_options"] = {"include_usage": True}
            if ask.chat:
                return "/v1/chat/completions", {**body, "messages": ask.messages}
            return "/v1/completions", {**body, "prompt": ask.prompt}
        # Parameters that change nothing in OpenAI's API are left out in V2.
        parameters = {key: value for key, value in ask.parameters.items() if key not in SILENT_IN_BODY}
        # The prompt is None in a chat, which has messages, and in a row without a prompt, which the server refuses.
        prompts = (cast(str, ask.prompt),)
        return http_request(GenerationCall(self.model, prompts, ask.messages, parameters), self.stream)

    async def _attempt(self, path: str, content: bytes, ask: RowQuestion) -> Outcome:
        answer = OpenAIAnswer() if self.api == "openai" else V2ServerAnswer(self.name or self.model, ask.chat)
        async with self.gate.through() as started:
            began = time.monotonic()
            async with self._answered(started, path, content, _JSON) as response:
                body = await self._read(response, answer)
        span = began, time.monotonic()
        return Outcome(body, None, answer.prompt_tokens, answer.completion_tokens, span)

    @asynccontextmanager
    async def _answered(
        self, started: int, path: str, content: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[httpx.Response]:
        """Yields the answer to a post. Raises CloudError where it is a refusal, or breaks off."""
        try:
            async with self._client.stream("POST", path, content=content, headers=headers) as response:
                if response.status_code != httpx.codes.OK:
                    if response.status_code in _SLOWER:
                        self.gate.concurrency.refused(started)
                    raise self._refusal(response, await response.aread())
                yield response
        except httpx.HTTPError as error:
            unconnected = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            kind = ServerUnready if unconnected else StoreUnavailable
            raise kind(f"{self.url}: {error or type(error).__name__}") from error
        self.gate.concurrency.answered()

    async def _read(self, response: httpx.Response, answer: HttpAnswer) -> dict[str, Any]:
        """The answer as OpenAI's object. Raises CloudError."""
        try:
            if not self.stream:
                answer.whole(parse(await response.aread()))
                return answer.body()
            parser, ended = EventParser(), False
            async for chunk in response.aiter_bytes():
                for event in parser.feed(chunk):
                    ended = answer.event(event) or ended
            if ended:
                return answer.body()
        except GenerationBroke as error:
            raise RowFailed(f"the generation failed: {error}", _BROKEN, error.error) from None
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise unreadable_answer(error) from None
        raise StoreUnavailable(f"{self.url}: the stream ended before its last event")

    def _refusal(self, response: httpx.Response, body: bytes) -> CloudError:
        status = response.status_code
        reason, error = _server_error(without_key(body.decode(errors="replace")))
        text = f"{self.url} answered {status}: {reason}"
        if status in _LATER:
            kind = ServerUnready if status in _SLOWER else StoreUnavailable
            return kind(text, retry_after_s(response.headers))
        return lasting_refusal(text, status, missing=status == 404, error=error)


def lasting_refusal(
    text: str, status: int, *, missing: bool, error: Mapping[str, Any] | None = None
) -> AccessDenied | ObjectMissing | RowFailed | RowRejected:
    """The error of a refusal that does not pass by itself. ``missing``: the server has no such model."""
    if status in (401, 403):
        return AccessDenied(text)
    if missing:
        return ObjectMissing(text)
    if status >= 500:
        return RowFailed(text, status, error)
    return RowRejected(row_failure("invalid_request", text, status, error))


def row_failure(code: str, message: str, status: int, error: Mapping[str, Any] | None) -> Failure:
    """``error``: the server's own error object, where it sent one."""
    return Failure(code, message, status, error or error_object(status, message, code=code))


def _server_error(body: str) -> tuple[str, Mapping[str, Any] | None]:
    """The message of a refusal, and its error object, if it is OpenAI's."""
    try:
        error = parse(body)["error"]
        return error_message(error), error if isinstance(error, dict) else None
    except (ValueError, KeyError, TypeError):
        return body[:MAX_ERROR_CHARACTERS].strip(), None


async def only_model(url: str, api: Api, key: str | None) -> str:
    """The name of the server's only model. Raises RunRefused where it has none or several."""
    try:
        if api == "openai":
            names = await _openai_models(url, key)
        else:
            async with AsyncClient(url, headers=authorization(key), timeout=_MODELS_TIMEOUT_S) as client:
                names = await client.models()
    except (ClientError, ValueError, KeyError, TypeError, httpx.HTTPError, httpx.InvalidURL) as error:
        raise RunRefused(f"--url: {url} does not say which models it has ({without_key(str(error))})") from None
    if len(names) != 1:
        raise RunRefused(f"--model: name one of the server's models: {', '.join(names) or 'it has none'}")
    return names[0]


async def _openai_models(url: str, key: str | None) -> list[str]:
    """Raises httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError or TypeError."""
    async with httpx.AsyncClient(base_url=url, headers=authorization(key), timeout=_MODELS_TIMEOUT_S) as http:
        answer = await http.get("/v1/models")
    if answer.status_code != httpx.codes.OK:
        raise ValueError(f"the server answered {answer.status_code}: {_server_error(answer.text)[0]}")
    return sorted({item["id"] for item in answer.json()["data"]})
