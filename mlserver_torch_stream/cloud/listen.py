"""Receives notifications of new objects over HTTP: webhooks of S3 and MinIO, messages of SNS, and CloudEvents.

An event is recorded as an object before it is accepted; meanwhile its objects are announced. Its record is deleted,
together with others, when all its objects are done. When a listener starts, it first announces the recorded events.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import ssl
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from aiohttp import BasicAuth, web

from mlserver_torch_stream.cloud.backoff import Retry, within
from mlserver_torch_stream.cloud.notifications import Created, InputPlace, read_cloud_event, read_s3
from mlserver_torch_stream.cloud.rows import CloudError, ObjectMissing, RunRefused
from mlserver_torch_stream.cloud.run_metrics import RunMetrics
from mlserver_torch_stream.cloud.store import Store
from mlserver_torch_stream.cloud.watch import Announced, always

if TYPE_CHECKING:
    from mlserver_torch_stream.cloud.sns import SnsVerifier

MAX_EVENT_BYTES = 2**20
_MAX_OPEN = 10_000  # the maximum number of objects that accepted events name and that are not done yet
_MAX_REQUESTS = 64  # the maximum number of requests in flight
_BODY_S = 10.0
_RETRY_AFTER_S = 5
_DELETE_S = 0.25  # the time between two deletions of records
_CLOSE_S = 2.0
_DELETED_AT_ONCE = 1000
_STRUCTURED, _BATCHED = "application/cloudevents+json", "application/cloudevents-batch+json"


class EventRefused(Exception):
    """The listener does not accept an event. Has the status, the message and the headers of the response."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = dict(headers or {})


@dataclass
class EventListener:
    """Announces the new objects of ``place`` that are named by events posted to ``host`` and ``port``.

    ``records`` says where accepted events are recorded. ``key`` is the secret that an event must carry, as a bearer
    token or as the password of basic authentication; None means that no secret is needed. If ``sns`` is None, messages
    of SNS are refused. ``check`` runs for each event; if it raises CloudError, the listener ends. ``report`` is
    called with the address and with one line for each refused event.
    """

    host: str
    port: int
    place: InputPlace
    records: Store
    retry: Retry
    report: Callable[[str], None]
    metrics: RunMetrics = field(default_factory=RunMetrics)
    key: str | None = None
    tls: ssl.SSLContext | None = None
    sns: SnsVerifier | None = None
    check: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._queue: asyncio.Queue[Announced | CloudError] = asyncio.Queue()
        self._open = 0
        self._requests = 0
        self._over: list[str] = []  # records that are to be deleted
        self._deletion: asyncio.Task[None] | None = None

    async def announcements(self) -> AsyncGenerator[Announced, None]:
        """Yields new objects until the caller closes it. Raises CloudError."""
        await self._load()
        app = web.Application(client_max_size=MAX_EVENT_BYTES)
        app.router.add_post("/", self._post)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, auto_decompress=False)
        await runner.setup()
        try:
            site = web.TCPSite(runner, self.host, self.port, ssl_context=self.tls)
            try:
                await site.start()
            except OSError as error:
                raise RunRefused(f"--listen: {self.host}:{self.port}: {error.strerror or error}") from None
            host = f"[{self.host}]" if ":" in self.host else self.host
            self.report(f"listening on http{'s' if self.tls else ''}://{host}:{runner.addresses[0][1]}/")
            while True:
                announced = await self._queue.get()
                if isinstance(announced, CloudError):
                    raise announced
                yield announced
        finally:
            await runner.cleanup()
            if self._deletion is not None:
                self._deletion.cancel()
                await asyncio.wait({self._deletion})
            with suppress(CloudError, asyncio.TimeoutError):  # the next listener deletes the rest
                while self._over:
                    await within(self._delete(), _CLOSE_S)

    async def _load(self) -> None:
        """Announces the objects of recorded events."""
        async for info in self.records.list():
            try:
                keys = json.loads(await self.retry.run(self.records.get, info.key))["keys"]
                self._announce(info.key, [str(key) for key in keys], always)
            except (ValueError, KeyError, TypeError):
                url = self.records.url
                raise RunRefused(f"--output: {url}/{info.key} was not written by this program") from None

    def _announce(self, name: str, keys: Sequence[str], recorded: Callable[[], Awaitable[bool]]) -> None:
        """Announces the objects of an event.

        ``name`` is the key of the event's record, which is deleted when all objects of the event are done. ``recorded``
        waits until the record is written, and returns False if that failed.
        """
        left = len(keys)
        self._open += left

        async def done() -> None:
            nonlocal left
            left -= 1
            self._open -= 1
            if left == 0 and await recorded():
                self._over.append(name)
                if self._deletion is None or self._deletion.done():
                    self._deletion = asyncio.create_task(self._delete_soon())

        for key in keys:
            self._queue.put_nowait(Announced(key, done, recorded))

    async def _delete_soon(self) -> None:
        """Deletes the records of events that end within ``_DELETE_S`` seconds by one request, which delays fewer
        others.
        """
        try:
            while self._over:
                await asyncio.sleep(_DELETE_S)
                await self.retry.run(self._delete)
        except CloudError as error:
            self._queue.put_nowait(error)

    async def _delete(self) -> None:
        names = self._over[:_DELETED_AT_ONCE]
        try:
            await self.records.delete(names)
        except ObjectMissing:  # an earlier attempt has deleted some of them
            for name in names:
                with suppress(ObjectMissing):
                    await self.records.delete([name])
        del self._over[: len(names)]

    async def _post(self, request: web.Request) -> web.Response:
        self._requests += 1
        try:
            if self._requests > _MAX_REQUESTS:
                message = f"too many requests are in flight; at most {_MAX_REQUESTS} are allowed"
                raise EventRefused(503, message, {"Retry-After": str(_RETRY_AFTER_S)})
            try:
                self.check()
            except CloudError as error:
                self._queue.put_nowait(error)
                raise
            return web.json_response({"objects": await self._accepted(request)}, status=202)
        except EventRefused as error:
            self.metrics.refused_events += error.status < 500
            if error.status not in (401, 429, 503):
                self.report(f"refused an event with {error.status}: {error.message}")
            return web.json_response({"error": error.message}, status=error.status, headers=error.headers)
        except CloudError as error:
            self.report(f"could not accept an event: {error.message}")
            return web.json_response({"error": "the event could not be recorded"}, status=503)
        finally:
            self._requests -= 1

    async def _accepted(self, request: web.Request) -> int:
        """Records an event and returns the number of its objects. Raises EventRefused or CloudError."""
        self._check_key(request)
        created = await self._created(request, await _body(request))
        if created is None:
            raise EventRefused(
                400, "the body is neither an S3, SNS or MinIO notification nor a CloudEvent of a storage service"
            )
        keys = self.place.keys(created)
        if keys is None:
            raise EventRefused(403, "the event names an object that is not below --input")
        if not keys:
            return 0
        if self._open + len(keys) > _MAX_OPEN:
            message = f"too many objects would wait; at most {_MAX_OPEN} may wait"
            raise EventRefused(429, message, {"Retry-After": str(_RETRY_AFTER_S)})
        name = f"{uuid.uuid4().hex}.json"
        record = json.dumps({"keys": keys}).encode() + b"\n"
        writing = asyncio.ensure_future(self.retry.run(self.records.put, name, record))

        async def recorded() -> bool:
            await asyncio.wait({writing})
            return not writing.cancelled() and writing.exception() is None

        self._announce(name, keys, recorded)
        await writing
        return len(keys)

    def _check_key(self, request: web.Request) -> None:
        if self.key is None:
            return
        scheme, _, value = request.headers.get("Authorization", "").partition(" ")
        value = value.strip()
        if scheme.lower() == "basic":
            try:
                value = BasicAuth.decode(f"Basic {value}").password
            except ValueError:
                value = ""
        elif scheme.lower() != "bearer":
            value = ""
        if not hmac.compare_digest(value.encode("utf-8", "replace"), self.key.encode()):
            # SNS sends the user and password of its endpoint's URL only after this header.
            raise EventRefused(401, "the key is missing or wrong", {"WWW-Authenticate": 'Basic realm="events"'})

    async def _created(self, request: web.Request, body: bytes) -> list[Created] | None:
        """Returns the new objects that an event names; None if the body is not an event.

        Raises EventRefused or CloudError.
        """
        kind = request.content_type
        if kind == _BATCHED:
            raise EventRefused(415, f"{_BATCHED}: batches are not implemented; send each event by itself")
        value = _json(body) if body else None
        try:
            if kind == _STRUCTURED:
                return read_cloud_event(value, _data(value)) if isinstance(value, dict) else None
            if "ce-specversion" in request.headers:
                names = [name for name in request.headers if name.lower().startswith("ce-")]
                attributes = {name.lower().removeprefix("ce-"): unquote(request.headers[name]) for name in names}
                return read_cloud_event(attributes, value)
        except ValueError as error:
            raise EventRefused(400, str(error)) from None
        if isinstance(value, dict) and "TopicArn" in value:
            text = await self._of_sns(value)
            return [] if text is None else read_s3(_json(text))
        return read_s3(value)

    async def _of_sns(self, envelope: Mapping[str, Any]) -> str | None:
        """Returns the text of an SNS notification; None for any other message of SNS."""
        if self.sns is None:
            raise EventRefused(403, "SNS messages are accepted only for the topics named with --sns-topic")
        from mlserver_torch_stream.cloud.sns import MessageRejected

        try:
            return await self.sns.read(envelope)
        except MessageRejected as error:
            raise EventRefused(403, str(error)) from None


async def _body(request: web.Request) -> bytes:
    """Reads the body. Raises EventRefused if the body is too large, too slow, cut off or compressed."""
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise EventRefused(415, "Content-Encoding: compressed events are not accepted")
    try:
        return await within(request.read(), _BODY_S)
    except asyncio.TimeoutError:
        raise EventRefused(408, f"the event did not arrive within {_BODY_S:.0f} seconds") from None
    except ConnectionError:
        raise EventRefused(408, "the sender disconnected before the whole event had arrived") from None
    except web.HTTPRequestEntityTooLarge:
        raise EventRefused(413, f"the event is larger than {MAX_EVENT_BYTES} bytes") from None


def _json(text: bytes | str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise EventRefused(400, "the event is not JSON") from None


def _data(event: Mapping[str, Any]) -> Any:
    if "data_base64" not in event:
        return event.get("data")
    try:
        return json.loads(base64.b64decode(str(event["data_base64"]), validate=True))
    except (ValueError, RecursionError):
        raise ValueError("data_base64: is not JSON in Base64") from None
