"""Thousands of events, sent twice, out of order and through kills: each object has exactly one result.

As in clouds, senders deliver at least once: an event is sent until it is acknowledged. One sender in four leaves at
once, or does not read the acknowledgement.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from mlserver_torch_stream.cloud.store import Store, settle
from tests.cloud.command import FULL_SIZE, finish, start
from tests.cloud.models import ModelServer
from tests.cloud.seaweedfs import s3_server
from tests.cloud.test_listen import _AZURE, _GOOGLE, _STRUCTURED, Sns, _binary, _s3, sns  # noqa: F401
from tests.cloud.test_watch import _aws, _left
from tests.markdown import ROOT
from tests.server.harness import free_ports
from tests.waiting import wait_until

_OBJECTS = 480 if FULL_SIZE else 24  # of each of five ways over HTTP, with four events of each object, and of polling
_QUEUED = 120 if FULL_SIZE else 24  # objects of the queue, also with four events each
_QUEUE_LENGTH = 60  # messages, of which moto finds the next ones in time
_TIMES = 4
_KILLS = 2
_AT_A_TIME = 8  # objects that a watcher infers, which a kill may lose
_SENDERS = 16
_LEAVING = 0.25
_TIMEOUT_S = 1800.0

_Event = tuple[dict[str, Any], dict[str, str]]


def _webhook(bucket: str, key: str) -> _Event:
    return _s3(f"in/{key}", bucket=bucket), {}


def _minio(bucket: str, key: str) -> _Event:
    event = "s3:ObjectCreated:Put"
    return {"EventName": event, "Key": f"{bucket}/in/{key}", **_s3(f"in/{key}", bucket=bucket, event=event)}, {}


def _structured(bucket: str, key: str) -> _Event:
    return {**_AZURE, "subject": f"/blobServices/default/containers/{bucket}/blobs/in/{key}"}, _STRUCTURED


def _binary_mode(bucket: str, key: str) -> _Event:
    source = f"//storage.googleapis.com/projects/_/buckets/{bucket}"
    return {}, _binary({**_GOOGLE, "source": source, "subject": f"objects/in/{key}"})


WAYS = {"s3": _webhook, "minio": _minio, "structured": _structured, "binary": _binary_mode}


class Place:
    """A bucket with the folder ``in``, and the outputs of watchers beside it."""

    def __init__(self, storage: dict[str, str]) -> None:
        self.storage = storage
        self.options = [word for name, value in storage.items() for word in ("--storage", f"{name}={value}")]

    def put(self, keys: Sequence[str]) -> None:
        """Writes objects, each with its key as its text."""

        async def act() -> None:
            store = Store.open("s3://bucket/in", self.storage)
            for key in keys:
                await store.put(key, key.encode())
            await settle()

        asyncio.run(act())

    def count(self, folder: str, begin: str = "") -> int:
        async def act() -> int:
            store = Store.open(f"s3://bucket/{folder}", self.storage)
            found = [info.key async for info in store.list() if info.key.startswith(begin)]
            await settle()
            return len(found)

        return asyncio.run(act())

    def results(self, folder: str) -> list[dict[str, Any]]:
        async def act() -> list[dict[str, Any]]:
            store = Store.open(f"s3://bucket/{folder}", self.storage)
            names = [info.key async for info in store.list() if info.key.startswith("result-")]
            found = [json.loads(line) for name in names for line in (await store.get(name)).splitlines()]
            await settle()
            return found

        return asyncio.run(act())


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    (tmp_path / "s3").mkdir()
    with s3_server(tmp_path / "s3", "bucket") as storage:
        yield Place(storage)


def _keys(way: str, count: int = _OBJECTS) -> list[str]:
    return [f"{way}-{number:04}.txt" for number in range(count)]


def _shuffled(events: Sequence[_Event], draw: random.Random) -> list[_Event]:
    found = [*events] * _TIMES
    draw.shuffle(found)
    return found


class _Senders:
    """Sends events to a listener that may be killed meanwhile.

    ``acknowledged`` counts events with status 202, ``lost`` answers that the sender did not read.
    """

    def __init__(self, port: int, events: Sequence[_Event], draw: random.Random) -> None:
        self._url, self._port, self._draw = f"http://127.0.0.1:{port}/", port, draw
        self._events = iter(events)
        self.acknowledged = self.lost = self.failed = 0

    async def send(self, kills: Callable[[int], None]) -> None:
        """``kills`` is called with the number of acknowledgements after each of them."""
        timeout = aiohttp.ClientTimeout(total=60)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            await asyncio.gather(*(self._sender(session, kills) for _ in range(_SENDERS)))

    async def _sender(self, session: aiohttp.ClientSession, kills: Callable[[int], None]) -> None:
        for body, headers in self._events:
            if self._draw.random() < _LEAVING:
                await self._leave_early(body, headers)
            while not await self._acknowledged(session, body, headers):
                await asyncio.sleep(0.05)
            self.acknowledged += 1
            await asyncio.to_thread(kills, self.acknowledged)

    async def _acknowledged(self, session: aiohttp.ClientSession, body: Any, headers: dict[str, str]) -> bool:
        try:
            async with session.post(self._url, json=body, headers=headers) as answer:
                assert answer.status in (202, 429, 503), await answer.text()
                return answer.status == 202
        except (aiohttp.ClientError, asyncio.TimeoutError):
            self.failed += 1
            return False

    async def _leave_early(self, body: Any, headers: dict[str, str]) -> None:
        data = json.dumps(body).encode()
        lines = {"Host": "x", "Content-Type": "application/json", "Content-Length": str(len(data)), **headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            writer.write(f"POST / HTTP/1.1\r\n{head}\r\n".encode() + data)
            await writer.drain()
            if self._draw.random() < 0.5:  # else the watcher may see the end of the connection before the event
                self.lost += bool(await reader.read(1))
            writer.close()
        except OSError:
            self.failed += 1


class _Watched:
    """A watcher that is killed and started again after the given numbers of events."""

    def __init__(self, begin: Callable[[], subprocess.Popen[bytes]], kills: Sequence[int]) -> None:
        self._begin = begin
        self._kills = list(kills)
        self.process = begin()
        self.killed = 0

    def kills(self, events: int) -> None:
        if self._kills and events >= self._kills[0]:
            del self._kills[0]
            self.process.send_signal(signal.SIGKILL)
            assert finish(self.process)[0] == -signal.SIGKILL
            self.killed += 1
            self.process = self._begin()

    def runs(self) -> bool:
        assert self.process.poll() is None, finish(self.process)[2]
        return True

    def stop(self) -> str:
        """Interrupts the watcher, and returns what it wrote to stderr."""
        self.process.send_signal(signal.SIGINT)
        return finish(self.process)[2]


def _send(watched: _Watched, senders: _Senders, place: Place, records: str) -> None:
    try:
        asyncio.run(asyncio.wait_for(senders.send(watched.kills), _TIMEOUT_S))
        wait_until(lambda: watched.runs() and place.count(records) == 0, "all events are done", _TIMEOUT_S)
    finally:
        watched.stop()


def _each_has_one_result(found: Sequence[dict[str, Any]], keys: Sequence[str], text: Callable[[Any], str]) -> None:
    assert Counter(row["key"] for row in found) == Counter(keys)
    assert all(text(row["response"]["body"]) == row["key"][::-1] for row in found)


def _completion(body: Any) -> str:
    return str(body["choices"][0]["text"])


@pytest.mark.slow
def test_events_of_four_senders_over_http_have_one_result_for_each_object(place: Place, server: ModelServer) -> None:
    draw, (port,) = random.Random(3), free_ports(1)
    events = _shuffled([make("bucket", key) for way, make in WAYS.items() for key in _keys(way)], draw)
    keys = [key for way in WAYS for key in _keys(way)]
    place.put(keys)
    watch = ("watch", "--input", "s3://bucket/in", "--output", "s3://bucket/out", "--listen", port, *place.options)
    watched = _Watched(lambda: start(*watch, "--url", server.url), [len(events) // 4, len(events) // 2])
    senders = _Senders(port, events, draw)
    _send(watched, senders, place, "out/events")
    assert senders.acknowledged == len(events) and senders.lost > 0 and watched.killed == _KILLS
    _each_has_one_result(place.results("out"), keys, _completion)
    assert len(keys) <= len(server.asked) <= len(keys) + watched.killed * _AT_A_TIME


@pytest.mark.slow
def test_messages_of_sns_have_one_result_for_each_object(place: Place, sns: Sns, tmp_path: Path) -> None:  # noqa: F811
    draw, (port,), keys = random.Random(4), free_ports(1), _keys("sns")
    place.put(keys)
    told = [(sns.message(Message=json.dumps(_s3(f"in/{key}", bucket="bucket"))), {}) for key in keys]
    events = _shuffled(told, draw)
    asked = tmp_path / "asked"
    authority = str(sns.authority.certificate)
    command = ["bucket", json.dumps(place.storage), str(port), sns.url, authority, str(asked)]

    def begin() -> subprocess.Popen[bytes]:
        script = [sys.executable, "-m", "tests.cloud.sns_watcher", *command]
        return subprocess.Popen(script, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    watched, senders = _Watched(begin, [len(events) // 4, len(events) // 2]), _Senders(port, events, draw)
    _send(watched, senders, place, "sns/events")
    assert senders.acknowledged == len(events) and senders.lost > 0 and watched.killed == _KILLS
    _each_has_one_result(place.results("sns"), keys, lambda body: str(body["text"]))
    assert len(keys) <= len(asked.read_text().splitlines()) <= len(keys) + watched.killed * _AT_A_TIME


@pytest.mark.slow
def test_messages_of_a_queue_have_one_result_for_each_object(
    place: Place, server: ModelServer, aws: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill loses the acknowledgements of messages in progress, which the queue delivers again after a minute."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(name, aws[name])
    draw, keys, client = random.Random(5), _keys("queue", _QUEUED), _aws("sqs", aws)
    place.put(keys)
    url = client.create_queue(QueueName="ten-thousand")["QueueUrl"]
    messages = _shuffled([_webhook("bucket", key) for key in keys], draw)
    watch = ("watch", "--input", "s3://bucket/in", "--output", "s3://bucket/queue", "--queue", url, *place.options)
    watched = _Watched(
        lambda: start(*watch, "--url", server.url), [len(messages) * part // (_KILLS + 2) for part in (1, 2)]
    )
    try:
        for count, (body, _) in enumerate(messages, 1):
            client.send_message(QueueUrl=url, MessageBody=json.dumps(body))
            if count % (_QUEUE_LENGTH // 4) == 0:
                wait_until(lambda: watched.runs() and _left(aws, url) < _QUEUE_LENGTH, "messages are taken", _TIMEOUT_S)
                watched.kills(count)
        wait_until(lambda: watched.runs() and _left(aws, url) == 0, "all messages are done", _TIMEOUT_S)
    finally:
        watched.stop()
    _each_has_one_result(place.results("queue"), keys, _completion)
    assert len(keys) <= len(server.asked) <= len(keys) + watched.killed * _AT_A_TIME


@pytest.mark.slow
def test_objects_that_polling_finds_have_one_result_each(place: Place, server: ModelServer) -> None:
    """The objects arrive in the order of their keys, in three groups; the watcher is killed after the first two."""
    keys, third = _keys("poll"), _OBJECTS // (_KILLS + 1)
    watch = ("watch", "--input", "s3://bucket/in", "--output", "s3://bucket/poll", "--poll", "0.2", *place.options)
    place.put(keys[:1])
    watched = _Watched(lambda: start(*watch, "--url", server.url), [0] * _KILLS)
    try:
        for number in range(_KILLS):
            place.put(keys[number * third : (number + 1) * third])
            done = number * third + third // 2
            wait_until(
                lambda done=done: watched.runs() and place.count("poll", "result-") >= done, "results", _TIMEOUT_S
            )
            watched.kills(0)
        place.put(keys[_KILLS * third :])
        wait_until(lambda: watched.runs() and place.count("poll", "result-") >= _OBJECTS, "all results", _TIMEOUT_S)
    finally:
        watched.stop()
    _each_has_one_result(place.results("poll"), keys, _completion)
    assert len(keys) <= len(server.asked) <= len(keys) + watched.killed * _AT_A_TIME
