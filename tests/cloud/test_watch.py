"""Watching objects and records: each soon has one result, and its announcement is kept until the result is durable."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlserver_torch_stream.cloud.notifications import Created, read_notification
from mlserver_torch_stream.cloud.rows import Outcome, Row
from mlserver_torch_stream.cloud.run_metrics import RunMetrics
from mlserver_torch_stream.cloud.store import Store, settle
from mlserver_torch_stream.cloud.watch import MAX_RESULT_BYTES, Announced, Watcher
from tests.cloud.command import cloud, finish, start
from tests.cloud.faulty import FaultyServer, faulty_server
from tests.cloud.jobs import Model
from tests.cloud.models import ModelServer
from tests.scripted_http import Handler, serving

_SOON_S = 20.0  # ten times what is promised, for machines that are busy


def _aws(service: str, environment: dict[str, str]) -> Any:
    import boto3

    return boto3.client(
        service,
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )


@pytest.fixture
def queue(aws: dict[str, str], bucket: str) -> str:
    """The URL of a queue that gets a message for each new object in the bucket."""
    client = _aws("sqs", aws)
    url = client.create_queue(QueueName=bucket)["QueueUrl"]
    arn = client.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    configuration = {"QueueConfigurations": [{"QueueArn": arn, "Events": ["s3:ObjectCreated:*"]}]}
    _aws("s3", aws).put_bucket_notification_configuration(Bucket=bucket, NotificationConfiguration=configuration)
    return str(url)


def _put(bucket: str, objects: dict[str, bytes]) -> None:
    async def put() -> None:
        store = Store.open(f"s3://{bucket}")
        for key, data in objects.items():
            await store.put(key, data)
        await settle()

    asyncio.run(put())


def _results(url: str) -> list[dict[str, Any]]:
    async def get() -> list[dict[str, Any]]:
        store = Store.open(url)
        names = [info.key async for info in store.list() if info.key.startswith(("result-", "part-"))]
        lines = [line for name in sorted(names) for line in (await store.get(name)).splitlines()]
        await settle()
        return [json.loads(line) for line in lines]

    return asyncio.run(get())


def _left(aws: dict[str, str], queue: str) -> int:
    names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
    found = _aws("sqs", aws).get_queue_attributes(QueueUrl=queue, AttributeNames=names)["Attributes"]
    return sum(int(found[name]) for name in names)


@pytest.mark.long
def test_an_object_that_is_dropped_has_its_result_soon_and_its_message_goes_only_then(
    aws: dict[str, str], bucket: str, queue: str, server: ModelServer
) -> None:
    watch = ("watch", "--input", f"s3://{bucket}/in", "--output", f"s3://{bucket}/out", "--queue", queue)
    process = start(*watch, "--url", server.url, "--glob", "*.txt")
    try:
        assert process.stderr is not None
        assert b"watching" in process.stderr.readline()
        dropped = time.monotonic()
        _put(bucket, {"in/a b+c.txt": b"hello", "in/not.this": b"x"})
        while not (found := _results(f"s3://{bucket}/out")):
            assert time.monotonic() - dropped < _SOON_S, "no result came"
            time.sleep(0.02)
        assert [row["key"] for row in found] == ["a b+c.txt"]
        assert found[0]["response"]["body"]["choices"][0]["text"] == "olleh"
        while _left(aws, queue) > 1:  # the one that stays tells of the result itself, outside of --input
            assert time.monotonic() - dropped < _SOON_S, "the message stayed"
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGINT)
        status, _, err = finish(process)
    assert status == 130 and server.asked == ["hello"] and "no object below --input" in err


@pytest.mark.long
def test_a_message_is_kept_while_its_object_has_no_result_and_twice_told_is_once_inferred(
    aws: dict[str, str], bucket: str, queue: str, server: ModelServer, capsys: Any
) -> None:
    watch = ("watch", "--input", f"s3://{bucket}/in", "--output", f"s3://{bucket}x/out", "--queue", queue)
    _aws("s3", aws).create_bucket(Bucket=f"{bucket}x")
    server.trouble = lambda prompt, before: 401
    _put(bucket, {"in/a.txt": b"hello"})
    assert cloud(*watch, "--url", server.url, "--limit", "1") == 3
    assert _left(aws, queue) >= 1 and not _results(f"s3://{bucket}x/out")
    server.trouble = lambda prompt, before: None
    _put(bucket, {"in/a.txt": b"hello"})  # the same content: the same version, told of once more
    assert cloud(*watch, "--url", server.url, "--limit", "1") == 0
    assert [row["key"] for row in _results(f"s3://{bucket}x/out")] == ["a.txt"]
    _put(bucket, {"in/a.txt": b"hello"})
    assert cloud(*watch, "--url", server.url, "--limit", "1") == 0
    assert len(_results(f"s3://{bucket}x/out")) == 1 and server.answered == ["hello"]


def test_an_object_that_is_denied_or_has_gone_is_told_and_the_others_are_done(
    aws: dict[str, str], bucket: str, queue: str, server: ModelServer, tmp_path: Path, capsys: Any
) -> None:
    """An object that may not be read has a result with the error, and the status is 1; a deleted one has none."""
    _put(bucket, {"in/denied.txt": b"secret", "in/gone.txt": b"tidied", "in/good.txt": b"hello"})
    watch = ("watch", "--input", f"s3://{bucket}/in", "--output", tmp_path / "out", "--queue", queue)
    with faulty_server({f"/{bucket}/in/good.txt": b"hello"}) as objects:
        objects.denied = {f"/{bucket}/in/denied.txt"}
        storage = [word for each in (f"endpoint={objects.url}", "skip_signature=true") for word in ("--storage", each)]
        assert cloud(*watch, *storage, "--url", server.url, "--limit", "3") == 1
    found = {row["key"]: row for row in _results(str(tmp_path / "out"))}
    assert sorted(found) == ["denied.txt", "good.txt"] and server.asked == ["hello"]
    assert found["denied.txt"]["error"]["code"] == "denied" and found["good.txt"]["error"] is None
    err = capsys.readouterr().err
    assert "in/denied.txt: no permission" in err and "gone.txt: was deleted before it was read" in err
    assert "2 rows, 1 failed" in err and _left(aws, queue) == 0


@pytest.mark.parametrize("there", [True, False])
def test_an_earlier_result_is_looked_for_while_the_object_is_read(there: bool) -> None:
    read, beside, written = threading.Event(), [], []
    seen = {"ETag": '"1"', "Last-Modified": "Wed, 21 Oct 2026 07:28:00 GMT"}

    class Bucket(Handler):
        def do_HEAD(self) -> None:
            if "/result-" not in self.path:
                return self.answer(200, b"hello", seen)
            beside.append(read.wait(_SOON_S))
            self.answer(200 if there else 404, headers=seen)

        def do_GET(self) -> None:
            read.set()
            self.answer(200, b"hello", seen)

        def do_PUT(self) -> None:
            written.append(self.received())
            self.answer(200, headers=seen)

    async def done() -> None:
        pass

    model = Model()
    with serving(Bucket) as url:
        store = Store.open("s3://bucket", {"endpoint": url, "region": "x", "skip_signature": "true"})
        asyncio.run(Watcher(store, store, model, {})._object(Announced("a.txt", done)))
    assert beside == [True]
    assert (len(model.asked), len(written)) == ((0, 0) if there else (1, 1))


def test_an_object_whose_announcement_is_withdrawn_is_none_of_the_limit() -> None:
    async def announcements() -> AsyncGenerator[Announced, None]:
        async def withdrawn() -> bool:
            return False

        async def is_done() -> None: ...

        yield Announced("a.txt", is_done, withdrawn)
        yield Announced("b.txt", is_done)
        yield Announced("c.txt", is_done)

    async def act() -> list[bytes]:
        store, output = Store.memory(), Store.memory()
        for name in "abc":
            await store.put(f"{name}.txt", name.encode())
        await Watcher(store, output, Model(), {}, objects=1).watch(announcements(), 1)
        return [await output.get(info.key) async for info in output.list()]

    (found,) = asyncio.run(act())
    assert json.loads(found)["key"] == "b.txt"


def test_more_results_than_are_kept_of_one_object_are_one_failed_row_that_is_told() -> None:
    told: list[str] = []

    async def infer(rows: Sequence[Row]) -> list[Outcome]:
        return [Outcome({"text": "x" * (MAX_RESULT_BYTES // 2)}) for _ in rows]

    async def announcements() -> AsyncGenerator[Announced, None]:
        async def is_done() -> None: ...

        yield Announced("a.jsonl", is_done)

    async def act() -> tuple[list[bytes], int]:
        store, output, metrics = Store.memory(), Store.memory(), RunMetrics()
        await store.put("a.jsonl", b'{"prompt": "x"}\n' * 2)
        await Watcher(store, output, infer, {}, metrics=metrics, report=told.append).watch(announcements())
        return [await output.get(info.key) async for info in output.list()], metrics.failed

    (found,), failures = asyncio.run(act())
    assert json.loads(found)["error"]["code"] == "too_large" and failures == 1
    assert len(told) == 1 and "infer it with cloud run" in told[0]


@pytest.mark.parametrize("key", ["denied.txt", "a//b.txt"])
def test_an_object_that_cannot_be_looked_at_has_one_result_until_it_can(key: str) -> None:
    done: list[str] = []
    told: list[str] = []

    async def infer(rows: Sequence[Row]) -> list[Outcome]:
        return [Outcome({"text": row.data.decode()}) for row in rows]

    async def announcements(key: str) -> AsyncGenerator[Announced, None]:
        async def is_done() -> None:
            done.append(key)

        yield Announced(key, is_done)

    async def act(objects: FaultyServer) -> list[dict[str, Any]]:
        options = {"endpoint": objects.url, "skip_signature": "true", "region": "us-east-1"}
        store, output = Store.open("s3://bucket", options), Store.memory()
        for _ in range(2):
            await Watcher(store, output, infer, {}, report=told.append).watch(announcements(key))
        if key == "denied.txt":
            objects.denied.clear()
            await Watcher(store, output, infer, {}, report=told.append).watch(announcements(key))
        await settle()
        return [json.loads(await output.get(info.key)) async for info in output.list()]

    with faulty_server({"/bucket/denied.txt": b"now"}) as objects:
        objects.denied = {"/bucket/denied.txt"}
        found = asyncio.run(asyncio.wait_for(act(objects), _SOON_S))
    assert sorted((row["error"] or {"code": ""})["code"] for row in found) == (
        ["", "denied"] if key == "denied.txt" else ["refused"]
    )
    assert set(done) == {key} and len(told) == 1 and key in told[0]


@pytest.mark.parametrize(
    ("body", "created"),
    [
        ('{"Event": "s3:TestEvent"}', []),
        ("{", None),
        ("[]", None),
        ('{"Records": [{"eventName": "ObjectRemoved:Delete"}]}', []),
        (
            '{"Records": [{"eventName": "ObjectCreated:Put", "s3": {"bucket": {"name": "b"}, '
            '"object": {"key": "in%2F0+a%2Bb.txt"}}}]}',
            [Created("b", "in/0 a+b.txt")],
        ),
        (
            json.dumps(
                {
                    "Type": "Notification",
                    "Message": '{"Records": [{"eventName": "s3:ObjectCreated:Copy", "s3": {"bucket": {"name": "b"}, '
                    '"object": {"key": "k"}}}]}',
                }
            ),
            [Created("b", "k")],
        ),
    ],
)
def test_notifications(body: str, created: list[Created] | None) -> None:
    assert read_notification(body) == created


def test_polling_sees_what_comes_behind_its_cursor_once_and_a_new_watcher_goes_on(
    tmp_path: Path, server: ModelServer
) -> None:
    (tmp_path / "in").mkdir()
    for name in ("1.txt", "2.txt"):
        (tmp_path / "in" / name).write_text(name)
    watch = ("watch", "--input", tmp_path / "in", "--output", tmp_path / "out", "--poll", "0.05", "--url", server.url)
    assert cloud(*watch, "--limit", "2") == 0
    assert json.loads((tmp_path / "out" / "cursor.json").read_text()) == {"after": "2.txt"}
    (tmp_path / "in" / "3.txt").write_text("3.txt")
    assert cloud(*watch, "--limit", "1") == 0
    assert sorted(server.asked) == ["1.txt", "2.txt", "3.txt"]
    (tmp_path / "out" / "cursor.json").unlink()  # lost, so all is looked at again and found done
    assert cloud(*watch, "--limit", "3") == 0 and len(server.asked) == 3
    assert len(_results(str(tmp_path / "out"))) == 3


@pytest.fixture
def broker() -> Iterator[str]:
    """The test broker of librdkafka, in this process: sockets, groups and offsets are real."""
    from confluent_kafka import Producer

    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    producer = Producer({"test.mock.num.brokers": "1", "log_level": 0})
    brokers = producer.list_topics(timeout=20).brokers.values()
    yield ",".join(f"{each.host}:{each.port}" for each in brokers)
    producer.flush(5)


def _send(broker: str, topic: str, values: list[bytes]) -> None:
    async def send() -> None:
        from aiokafka import AIOKafkaProducer

        producer = AIOKafkaProducer(bootstrap_servers=broker)
        await producer.start()
        for value in values:
            await producer.send_and_wait(topic, value, partition=0)
        await producer.stop()

    asyncio.run(send())


def _received(broker: str, topic: str, count: int) -> list[bytes]:
    async def receive() -> list[bytes]:
        from aiokafka import AIOKafkaConsumer

        consumer = AIOKafkaConsumer(topic, bootstrap_servers=broker, auto_offset_reset="earliest")
        await consumer.start()
        try:
            return [(await asyncio.wait_for(consumer.getone(), 30)).value for _ in range(count)]
        finally:
            await consumer.stop()

    return asyncio.run(receive())


_ROWS = [b'{"custom_id": "r%d", "prompt": "row %d"}' % (i, i) for i in range(6)] + [b"{broken"]


def _kafka(broker: str, folder: Path, server: ModelServer) -> tuple[Any, ...]:
    watch = ("watch", "--kafka", broker, "--topic", "rows", "--output", folder / "out", "--url", server.url)
    return (*watch, "--part-rows", "3", "--dead-letter", "dead")


@pytest.mark.long
def test_kafka_records_become_parts_in_order_and_failed_ones_are_buried(
    broker: str, tmp_path: Path, server: ModelServer
) -> None:
    _send(broker, "rows", _ROWS)
    assert cloud(*_kafka(broker, tmp_path, server), "--group", "g", "--limit", "7") == 1
    rows = _results(str(tmp_path / "out"))
    assert [row["index"] for row in rows] == list(range(7)) and rows[6]["error"]["code"] == "invalid_row"
    assert len(list((tmp_path / "out").glob("part-rows-00000-*"))) == 3
    assert _received(broker, "dead", 1) == [b"{broken"]


@pytest.mark.slow
def test_kafka_offsets_are_committed_behind_durable_parts_and_a_part_that_is_there_is_not_inferred_again(
    broker: str, tmp_path: Path, server: ModelServer
) -> None:
    _send(broker, "rows", _ROWS)
    watch = _kafka(broker, tmp_path, server)
    assert cloud(*watch, "--group", "g", "--limit", "4") == 0
    assert cloud(*watch, "--group", "g", "--limit", "3") == 1  # goes on where the group's offsets are
    assert [row["index"] for row in _results(str(tmp_path / "out"))] == list(range(7))
    assert len(server.asked) == 6
    # Another group has no offsets, as a consumer that died before it committed: it finds the parts, whose ends are not
    # where it would have put them, infers nothing, and buries what failed once more, as it may not have been.
    assert cloud(*watch, "--group", "other", "--limit", "7") == 0
    assert len(server.asked) == 6 and len(_results(str(tmp_path / "out"))) == 7
    assert _received(broker, "dead", 2) == [b"{broken"] * 2


@pytest.mark.slow
def test_kafka_partitions_that_went_to_another_consumer_meanwhile_end_nothing(broker: str) -> None:
    from aiokafka import AIOKafkaConsumer, TopicPartition

    from mlserver_torch_stream.cloud.kafka import Topic

    async def nothing(rows: Any) -> Any:
        raise AssertionError

    async def commit() -> bool:
        consumer = AIOKafkaConsumer(bootstrap_servers=broker, group_id="g", enable_auto_commit=False)
        await consumer.start()
        try:
            consumer.assign([TopicPartition("rows", 1)])
            topic = Topic(broker, "rows", "g", Store.memory(), nothing, {})
            return await topic._commit(consumer, TopicPartition("rows", 0), 3)
        finally:
            await consumer.stop()

    assert asyncio.run(commit()) is False


@pytest.mark.slow
def test_kafka_commits_nothing_while_the_model_is_gone(
    broker: str, tmp_path: Path, server: ModelServer, capsys: Any
) -> None:
    _send(broker, "rows", [b'{"prompt": "abc"}'])
    watch = ("watch", "--kafka", broker, "--topic", "rows", "--group", "g", "--output", tmp_path / "out")
    watch = (*watch, "--url", server.url, "--limit", "1")
    server.trouble = lambda prompt, before: 401
    assert cloud(*watch) == 3 and "are delivered again" in capsys.readouterr().err
    server.trouble = lambda prompt, before: None
    assert cloud(*watch) == 0 and len(_results(str(tmp_path / "out"))) == 1
    assert cloud(*watch, "--parameters", '{"seed": 1}') == 2
    assert "belongs to another run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--output", "o"), "--input"),
        (("--output", "o", "--input", "i", "--kafka", "k"), "--input"),
        (("--output", "o", "--kafka", "k", "--topic", "t"), "--group"),
        (("--output", "o", "--kafka", "k", "--topic", "t", "--group", "g", "--glob", "*"), "--glob"),
        (("--output", "o", "--input", "i", "--dead-letter", "d"), "--dead-letter"),
        (("--output", "o", "--input", "gs://b/i", "--queue", "http://q"), "--queue"),
        (("--output", "i/o", "--input", "i"), "--output"),
    ],
)
def test_what_makes_no_sense_together_is_named(options: tuple[str, ...], named: str, capsys: Any) -> None:
    assert cloud("watch", *options) == 2
    assert named in capsys.readouterr().err


def test_a_queue_without_credentials_is_refused(
    tmp_path: Path, server: ModelServer, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/none")
    watch = ("watch", "--input", "s3://b/i", "--output", tmp_path / "o", "--queue", "http://127.0.0.1:9/q")
    assert cloud(*watch, "--url", server.url) == 2
    said = capsys.readouterr().err
    assert "AWS_ACCESS_KEY_ID" in said and "watching" not in said  # nor is a model loaded
