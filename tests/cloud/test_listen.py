"""Events over HTTP: only for objects below the input, only from authorized senders, and accepted only once recorded."""

from __future__ import annotations

import asyncio
import base64
import datetime
import json
import re
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.x509.oid import NameOID

from mlserver_torch_stream.cloud.listen import MAX_EVENT_BYTES, EventListener
from mlserver_torch_stream.cloud.naming import glob_pattern
from mlserver_torch_stream.cloud.notifications import Created, InputPlace, read_cloud_event
from mlserver_torch_stream.cloud.rows import Outcome, Row, RunRefused, StoreUnavailable
from mlserver_torch_stream.cloud.sns import SnsVerifier
from mlserver_torch_stream.cloud.store import Store, storage_account
from mlserver_torch_stream.cloud.watch import Announced, Watcher
from tests import plain_http
from tests.certificates import Authority
from tests.cloud.command import cloud, finish, start
from tests.cloud.faulty import faulty_server
from tests.cloud.jobs import QUICK, Model
from tests.cloud.models import ModelServer
from tests.cloud.ten_thousand_events import EVENTS, OBJECTS
from tests.cloud.test_watch import _put, _results
from tests.markdown import ROOT
from tests.scripted_http import Handler, serving

_SOON_S = 60.0
_TOPIC = "arn:aws:sns:us-east-1:123456789012:uploads"


def _s3(*keys: str, bucket: str = "b", event: str = "ObjectCreated:Put") -> dict[str, Any]:
    """Returns an event as S3 sends it, with only the fields of a record that AWS documents."""
    return {
        "Records": [
            {
                "eventVersion": "2.1",
                "eventSource": "aws:s3",
                "awsRegion": "us-east-1",
                "eventTime": "2026-11-24T10:00:00.000Z",
                "eventName": event,
                "s3": {
                    "s3SchemaVersion": "1.0",
                    "configurationId": "c",
                    "bucket": {"name": bucket, "arn": f"arn:aws:s3:::{bucket}"},
                    "object": {"key": key, "size": 5, "eTag": "5d41402abc4b2a76b9719d911017c592"},
                },
            }
            for key in keys
        ]
    }


def _minio(key: str) -> dict[str, Any]:
    return {"EventName": "s3:ObjectCreated:Put", "Key": f"b/{key}", **_s3(key, event="s3:ObjectCreated:Put")}


_GOOGLE = {
    "specversion": "1.0",
    "id": "1",
    "type": "google.cloud.storage.object.v1.finalized",
    "source": "//storage.googleapis.com/projects/_/buckets/b",
    "subject": "objects/in/a b.txt",
    "time": "2026-11-24T10:00:00Z",
    "datacontenttype": "application/json",
}
_AZURE = {
    "specversion": "1.0",
    "id": "2",
    "type": "Microsoft.Storage.BlobCreated",
    "source": "/subscriptions/s/resourceGroups/g/providers/Microsoft.Storage/storageAccounts/a",
    "subject": "/blobServices/default/containers/b/blobs/in/c.txt",
    "data": {"api": "PutBlob", "url": "https://a.blob.core.windows.net/b/in/c.txt"},
}
_STRUCTURED = {"Content-Type": "application/cloudevents+json; charset=utf-8"}


def _binary(event: dict[str, Any]) -> dict[str, str]:
    fields = {name: str(value).replace(" ", "%20") for name, value in event.items() if name != "data"}
    return {"Content-Type": "application/json", **{f"ce-{name}": value for name, value in fields.items()}}


@dataclass
class Listening:
    """A listener, its address, and the objects that it has announced."""

    listener: EventListener
    url: str = ""
    announced: list[Announced] = field(default_factory=list)

    @property
    def keys(self) -> list[str]:
        return [each.key for each in self.announced]

    async def post(self, body: Any, headers: dict[str, str] | None = None, **options: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with httpx.AsyncClient(trust_env=False, timeout=_SOON_S, **options) as client:
            return await client.post(self.url, content=content, headers=headers)


@asynccontextmanager
async def _listening(records: Store | None = None, **settings: Any) -> AsyncGenerator[Listening, None]:
    ready = asyncio.Event()
    place = InputPlace.of_url("s3://b/in", glob_pattern("**.txt"))

    def report(line: str) -> None:
        if line.startswith("listening on "):
            found.url = line.removeprefix("listening on ")
            ready.set()

    listener = EventListener("127.0.0.1", 0, place, records or Store.memory(), QUICK, report, **settings)
    found = Listening(listener)
    announcements = listener.announcements()

    async def take() -> None:
        async for announced in announcements:
            found.announced.append(announced)

    task = asyncio.create_task(take())
    try:
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        yield found
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await announcements.aclose()


async def _recorded(records: Store) -> list[list[str]]:
    return [json.loads(await records.get(info.key))["keys"] async for info in records.list()]


@pytest.mark.parametrize(
    ("body", "headers", "keys"),
    [
        (_s3("in/a+b%2Bc.txt", "in/d.txt", "in/d.txt"), {}, ["a b+c.txt", "d.txt"]),
        (_minio("in%2Fa.txt"), {}, ["a.txt"]),
        (_s3("in/not.this"), {}, []),
        (_s3("elsewhere.txt", event="ObjectRemoved:Delete"), {}, []),
        ({"Service": "Amazon S3", "Event": "s3:TestEvent", "Bucket": "b"}, {}, []),
        (_GOOGLE, _STRUCTURED, ["a b.txt"]),
        ({"kind": "storage#object"}, _binary(_GOOGLE), ["a b.txt"]),
        (b"", _binary(_GOOGLE), ["a b.txt"]),
        (_AZURE, _STRUCTURED, ["c.txt"]),
        (_AZURE, {**_STRUCTURED, "ce-specversion": "1.0"}, ["c.txt"]),
        (_AZURE["data"], _binary(_AZURE), ["c.txt"]),
        ({**_GOOGLE, "type": "google.cloud.storage.object.v1.deleted"}, _STRUCTURED, []),
        ({**_GOOGLE, "type": "com.example.s3", "data": _s3("in/e.txt")}, _STRUCTURED, ["e.txt"]),
        (
            {**_GOOGLE, "type": "x", "data_base64": base64.b64encode(json.dumps(_s3("in/f.txt")).encode()).decode()},
            _STRUCTURED,
            ["f.txt"],
        ),
    ],
)
def test_an_event_is_recorded_before_it_is_accepted_and_its_record_goes_when_its_objects_are_done(
    body: Any, headers: dict[str, str], keys: list[str]
) -> None:
    async def act() -> None:
        records = Store.memory()
        async with _listening(records) as found:
            answer = await found.post(body, headers)
            assert (answer.status_code, answer.json()) == (202, {"objects": len(keys)})
            assert await _recorded(records) == ([keys] if keys else [])
            await asyncio.sleep(0)
            assert found.keys == keys
            for announced in found.announced:
                assert await _recorded(records) == [keys]
                await announced.done()
            if (deletion := found.listener._deletion) is not None:
                await deletion  # to list objects of a store in memory at the same moment can block for ever
            assert await _recorded(records) == []
            assert found.listener.metrics.refused_events == 0

    asyncio.run(asyncio.wait_for(act(), _SOON_S))


@pytest.mark.parametrize(
    ("body", "headers", "status", "said"),
    [
        (_s3("elsewhere/a.txt"), {}, 403, "not below --input"),
        (_s3("in/a.txt", bucket="other"), {}, 403, "not below --input"),
        (_s3("in/a.txt", "inner/b.txt"), {}, 403, "not below --input"),
        (_s3("in/../secret.txt"), {}, 403, "not below --input"),
        ({**_GOOGLE, "subject": "objects/out/a.txt"}, _STRUCTURED, 403, "not below --input"),
        ({**_AZURE, "subject": "/blobServices/default/containers/c/blobs/in/a"}, _STRUCTURED, 403, "not below"),
        (b"{", {}, 400, "not JSON"),
        (b"[" * 100_000, {}, 400, "not JSON"),
        (b"", {}, 400, "neither an S3, SNS or"),
        ([1], {}, 400, "neither an S3, SNS or"),
        ({"Records": [{"eventName": "ObjectCreated:Put", "s3": {"bucket": "b"}}]}, {}, 400, "neither an S3, SNS or"),
        ({"Type": "Notification", "Message": json.dumps(_s3("in/a.txt"))}, {}, 400, "neither an S3, SNS or"),
        ({"Type": "Notification", "TopicArn": _TOPIC, "Message": json.dumps(_s3("in/a.txt"))}, {}, 403, "--sns-topic"),
        ({**_GOOGLE, "specversion": "0.3"}, _STRUCTURED, 400, "specversion"),
        ({**_GOOGLE, "type": "com.example.cat"}, _STRUCTURED, 400, "neither an S3, SNS or"),
        ({**_GOOGLE, "type": "x", "data_base64": "~"}, _STRUCTURED, 400, "data_base64"),
        ([_GOOGLE], {"Content-Type": "application/cloudevents-batch+json"}, 415, "not implemented"),
        (_s3("in/a.txt"), {"Content-Encoding": "gzip"}, 415, "Content-Encoding"),
        (b" " * (MAX_EVENT_BYTES + 1), {}, 413, "larger than"),
    ],
)
def test_an_event_that_is_refused_is_counted_and_leaves_nothing(
    body: Any, headers: dict[str, str], status: int, said: str
) -> None:
    async def act() -> None:
        records = Store.memory()
        async with _listening(records) as found:
            answer = await found.post(body, headers)
            assert answer.status_code == status and said in answer.json()["error"]
            assert await _recorded(records) == [] and found.keys == []
            assert found.listener.metrics.as_dict()["refused_events"] == 1

    asyncio.run(asyncio.wait_for(act(), _SOON_S))


def test_an_event_of_another_storage_account_names_no_object_below_the_input() -> None:
    """A container of the same name in another account of Azure is another place."""
    (created,) = read_cloud_event(_AZURE, None) or ()
    for account, keys in (("", ["c.txt"]), ("a", ["c.txt"]), ("A", ["c.txt"]), ("b", None)):
        assert InputPlace.of_url("az://b/in", glob_pattern("**"), account).keys([created]) == keys
    assert read_cloud_event({**_AZURE, "source": "/subscriptions/s"}, None) is None


@pytest.mark.parametrize(
    ("options", "variable", "account"),
    [({}, "", ""), ({}, "a", "a"), ({"account_name": "b"}, "a", "b"), ({"AZURE_STORAGE_ACCOUNT_NAME": "c"}, "a", "c")],
)
def test_the_storage_account_is_an_option_or_a_variable(
    options: dict[str, str], variable: str, account: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", variable)
    assert storage_account(options) == account


def test_events_about_folders_name_no_object() -> None:
    place = InputPlace.of_url("s3://b/in", glob_pattern("**"))
    assert place.keys([Created("b", key) for key in ("in/", "in/folder/", "in/a")]) == ["a"]


def test_a_sender_that_leaves_before_its_event_has_come_is_counted_and_logs_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def act() -> None:
        async with _listening() as found:
            _, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(found.url).port)
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
            await writer.drain()
            writer.close()
            while not found.listener.metrics.refused_events:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)

    asyncio.run(asyncio.wait_for(act(), _SOON_S))
    assert not [each for each in caplog.records if each.exc_info]


def test_only_who_has_the_key_may_post_and_over_tls(tmp_path: Path) -> None:
    """The key comes as a bearer token, as MinIO sends it, or as a password, as SNS sends it when challenged."""
    authority = Authority(tmp_path)
    pair = authority.sign("listener")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(pair.certificate, pair.key)
    trusted = ssl.create_default_context(cafile=str(authority.certificate))

    async def act() -> None:
        async with _listening(key="the secret", tls=tls) as found:
            assert found.url.startswith("https://")
            for headers in ({}, {"Authorization": "Bearer the secre"}, {"Authorization": "Basic !"}):
                answer = await found.post(_s3("in/a.txt"), headers, verify=trusted)
                assert answer.status_code == 401 and answer.headers["WWW-Authenticate"].startswith("Basic ")
            assert found.keys == [] and found.listener.metrics.refused_events == 3
            headers = {"Authorization": "Bearer the secret"}
            assert (await found.post(_s3("in/a.txt"), headers, verify=trusted)).status_code == 202
            answer = await found.post(_s3("in/b.txt"), verify=trusted, auth=("sns", "the secret"))
            assert answer.status_code == 202 and found.keys == ["a.txt", "b.txt"]

    asyncio.run(asyncio.wait_for(act(), _SOON_S))


def test_an_event_that_cannot_be_recorded_is_not_accepted(tmp_path: Path) -> None:
    records = Store.open(str(tmp_path / "records"))

    async def act() -> None:
        async with _listening(records) as found:
            (tmp_path / "records").rmdir()
            (tmp_path / "records").write_text("in the way")
            answer = await found.post(_s3("in/a.txt"))
            assert answer.status_code == 503
            assert [await announced.stands() for announced in found.announced] == [False]

    asyncio.run(asyncio.wait_for(act(), _SOON_S))


def _deleted(asked: bytes) -> bytes:
    """Returns S3's answer to the request to delete several objects."""
    keys = b"".join(b"<Deleted>%b</Deleted>" % key for key in re.findall(b"<Key>.*?</Key>", asked))
    return b"<DeleteResult>%b</DeleteResult>" % keys


@contextmanager
def _slow_bucket() -> Iterator[tuple[Store, threading.Event, list[int]]]:
    """Yields an empty bucket whose PUTs wait for the event, and then get the first of the statuses."""
    go, statuses = threading.Event(), [200]

    class Slow(Handler):
        def do_GET(self) -> None:
            self.answer(200, b"<ListBucketResult></ListBucketResult>")

        def do_PUT(self) -> None:
            self.received()
            go.wait(_SOON_S)
            self.answer(statuses[0], headers={"ETag": '"1"'})

        def do_POST(self) -> None:
            self.answer(200, _deleted(self.received()))

    with serving(Slow) as url:
        options = {"endpoint": url, "region": "x", "skip_signature": "true"}
        yield Store.open("s3://bucket", options), go, statuses


@pytest.mark.parametrize("status", [200, 403])
def test_an_object_is_inferred_while_its_event_is_recorded_and_has_a_result_only_then(status: int) -> None:
    async def act() -> None:
        source, output, inferred = Store.memory(), Store.memory(), asyncio.Event()
        await source.put("a.txt", b"hello")

        async def infer(rows: Sequence[Row]) -> list[Outcome]:
            inferred.set()
            return [Outcome({"text": "olleh"})] * len(rows)

        async def results() -> list[str]:
            return [info.key async for info in output.list()]

        with _slow_bucket() as (records, go, statuses):
            statuses[0] = status
            async with _listening(records) as found:
                posted = asyncio.create_task(found.post(_s3("in/a.txt")))
                while not found.announced:
                    await asyncio.sleep(0.01)
                watcher = Watcher(source, output, infer, {}, retry=QUICK)
                written = asyncio.create_task(watcher._object(found.announced[0]))
                await inferred.wait()
                await asyncio.sleep(0.1)
                assert await results() == [] and not posted.done()
                go.set()
                await written
                assert (await posted).status_code == (202 if status == 200 else 503)
                assert len(await results()) == (status == 200) and found.listener._open == 0

    asyncio.run(asyncio.wait_for(act(), _SOON_S))


def test_an_announcement_that_is_withdrawn_does_not_end_the_watcher_if_its_store_fails() -> None:
    async def act() -> None:
        async def withdrawn() -> bool:
            return False

        async def done() -> None:
            ended.append(True)

        ended: list[bool] = []
        with faulty_server() as server:
            pass
        options = {"endpoint": server.url, "region": "x", "skip_signature": "true"}
        watcher = Watcher(Store.open("s3://bucket", options), Store.memory(), Model(), {}, retry=QUICK)
        await watcher._object(Announced("a.txt", done, withdrawn))
        assert ended == [True]
        with pytest.raises(StoreUnavailable):
            await watcher._object(Announced("a.txt", done))

    asyncio.run(asyncio.wait_for(act(), _SOON_S))


def test_the_records_of_events_that_end_together_are_deleted_by_one_request(tmp_path: Path) -> None:
    deletions: list[bytes] = []

    class Bucket(Handler):
        def do_GET(self) -> None:
            self.answer(200, b"<ListBucketResult></ListBucketResult>")

        def do_PUT(self) -> None:
            self.received()
            self.answer(200, headers={"ETag": '"1"'})

        def do_POST(self) -> None:
            deletions.append(self.received())
            self.answer(200, _deleted(deletions[-1]))

    async def act() -> None:
        with serving(Bucket) as url:
            options = {"endpoint": url, "region": "x", "skip_signature": "true"}
            async with _listening(Store.open("s3://bucket", options)) as found:
                for number in range(5):
                    assert (await found.post(_s3(f"in/{number}.txt"))).status_code == 202
                for announced in found.announced:
                    await announced.done()
                assert found.listener._deletion is not None
                await found.listener._deletion
        assert [body.count(b"<Key>") for body in deletions] == [5]

    asyncio.run(asyncio.wait_for(act(), _SOON_S))


def test_a_listener_whose_output_another_has_taken_over_accepts_nothing_and_ends() -> None:
    def check() -> None:
        raise RunRefused("taken over")

    async def act() -> None:
        async with _listening(check=check) as found:
            assert (await found.post(_s3("in/a.txt"))).status_code == 503
            while found.listener._queue.qsize():
                await asyncio.sleep(0.01)
            assert found.keys == []

    asyncio.run(asyncio.wait_for(act(), _SOON_S))


def sns_verifier(url: str, authority: str) -> SnsVerifier:
    """Returns a verifier of the topic's messages; ``authority`` has certified the certificates' host ``url``."""
    tls = ssl.create_default_context(cafile=authority)
    return SnsVerifier([_TOPIC], re.compile(re.escape(url.removeprefix("https://"))), tls)


class Sns:
    """A key and its certificate, served by a host on this machine, and the confirmed subscriptions."""

    def __init__(self, folder: Path) -> None:
        self.key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self.authority = Authority(folder)
        self.confirmed: list[str] = []
        self.url = ""
        now = datetime.datetime.now(datetime.timezone.utc)
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "sns.amazonaws.com")])
        builder = x509.CertificateBuilder(name, name, self.key.public_key(), x509.random_serial_number())
        day = datetime.timedelta(days=1)
        signed = builder.not_valid_before(now - day).not_valid_after(now + day).sign(self.key, hashes.SHA256())
        self.certificate = signed.public_bytes(serialization.Encoding.PEM)

    def verifier(self) -> SnsVerifier:
        return sns_verifier(self.url, str(self.authority.certificate))

    def message(self, kind: str = "Notification", version: str = "2", **changes: Any) -> dict[str, Any]:
        """Returns a signed message that includes ``changes``."""
        message = {
            "Type": kind,
            "MessageId": "22b80b92-fdea-4c2c-8f9d-bdfb0c7bf324",
            "TopicArn": _TOPIC,
            "Subject": "Amazon S3 Notification",
            "Message": json.dumps(_s3("in/a.txt")),
            "Timestamp": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.123Z"),
            "SigningCertURL": f"{self.url}/SimpleNotificationService-0a.pem",
            "SignatureVersion": version,
            **changes,
        }
        if kind != "Notification":
            message |= {
                "Token": "token",
                "SubscribeURL": changes.get("SubscribeURL", f"{self.url}/confirm?Token=token"),
            }
            del message["Subject"]
        unsigned = {"SigningCertURL", "SignatureVersion"}
        text = "".join(f"{name}\n{message[name]}\n" for name in sorted(message) if name not in unsigned)
        algorithm = {"1": hashes.SHA1, "2": hashes.SHA256}[version]()
        signature = self.key.sign(text.encode(), padding.PKCS1v15(), algorithm)
        return {**message, "Signature": base64.b64encode(signature).decode()}


@contextmanager
def sns_host(folder: Path) -> Iterator[Sns]:
    """Serves the certificate. ``folder`` gets the authority's files."""
    found = Sns(folder)
    pair = found.authority.sign("sns")

    class Host(Handler):
        def do_GET(self) -> None:
            if self.path.startswith("/confirm"):
                found.confirmed.append(self.path)
                return self.answer(200, b"<ConfirmSubscriptionResponse/>")
            if self.path == "/SimpleNotificationService-0a.pem":
                return self.answer(200, found.certificate)
            self.answer(404, b"")

    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(pair.certificate, pair.key)
    with serving(Host, tls) as found.url:
        yield found


@pytest.fixture
def sns(tmp_path: Path) -> Iterator[Sns]:
    with sns_host(tmp_path) as found:
        yield found


@pytest.mark.parametrize("version", ["1", "2"])
def test_a_signed_message_of_a_listed_topic_is_accepted_and_its_subscription_confirmed(sns: Sns, version: str) -> None:
    async def act() -> None:
        async with _listening(sns=sns.verifier()) as found:
            kind = {"Content-Type": "text/plain; charset=UTF-8", "x-amz-sns-message-type": "SubscriptionConfirmation"}
            answer = await found.post(sns.message("SubscriptionConfirmation", version, Message="You have …"), kind)
            assert answer.status_code == 202 and sns.confirmed == ["/confirm?Token=token"]
            answer = await found.post(sns.message(version=version), kind)
            assert answer.status_code == 202 and found.keys == ["a.txt"]
            answer = await found.post(sns.message("UnsubscribeConfirmation", version), kind)
            assert answer.status_code == 202 and len(sns.confirmed) == 1

    asyncio.run(asyncio.wait_for(act(), _SOON_S))


@pytest.mark.long
def test_a_message_that_is_not_of_sns_or_not_of_a_listed_topic_is_refused(sns: Sns) -> None:
    """Nothing is fetched for a topic that is not listed, or from another host, whatever key has signed the message."""
    other = "arn:aws:sns:us-east-1:999999999999:uploads"
    altered = {**sns.message(), "Message": json.dumps(_s3("in/b.txt"))}
    confirm = "SubscriptionConfirmation"
    refused = {
        "TopicArn": [sns.message(TopicArn=other), sns.message(confirm, TopicArn=other)],
        "Signature:": [altered, {**sns.message(), "Signature": "AAAA"}, {**sns.message(), "Signature": ""}],
        "SignatureVersion": [{**sns.message(), "SignatureVersion": "3"}, {**sns.message(), "SignatureVersion": []}],
        "Timestamp": [
            sns.message(Timestamp="2026-01-01T00:00:00.000Z"),
            sns.message(Timestamp="2099-01-01T00:00:00.000Z"),
            sns.message(Timestamp="now"),
        ],
        "SigningCertURL": [
            sns.message(SigningCertURL=url)
            for url in (
                "https://example.com/SimpleNotificationService-0a.pem",
                f"{sns.url.replace('https://', 'https://x@')}/SimpleNotificationService-0a.pem",
                f"{sns.url.replace('https', 'http')}/SimpleNotificationService-0a.pem",
                f"{sns.url}/SimpleNotificationService-0a.pem?Action=Publish",
                f"{sns.url}/other.pem",
                "https://[",
            )
        ],
        "SubscribeURL": [sns.message(confirm, SubscribeURL="https://example.com/")],
        "Type": [sns.message(Type="Other"), {**sns.message(), "Type": []}],
        "strings": [{**sns.message(), "Message": {}}],
        "not below": [sns.message(Message=json.dumps(_s3("out/a.txt")))],
    }

    async def act() -> None:
        async with _listening(sns=sns.verifier()) as found:
            for said, messages in refused.items():
                for message in messages:
                    answer = await found.post(message)
                    assert answer.status_code == 403 and said in answer.json()["error"], (said, answer.text)
            assert found.keys == [] and sns.confirmed == []
            assert found.listener.metrics.refused_events == sum(map(len, refused.values()))
            gone = sns.message(SigningCertURL=f"{sns.url}/SimpleNotificationService-0b.pem")
            assert (await found.post(gone)).status_code == 503

    asyncio.run(asyncio.wait_for(act(), _SOON_S))


@pytest.mark.parametrize(
    ("netloc", "taken"),
    [
        ("sns.us-east-1.amazonaws.com", True),
        ("sns.us-gov-west-1.amazonaws.com", True),
        ("sns.cn-north-1.amazonaws.com.cn", True),
        ("sns.us-east-1.amazonaws.com.example.com", False),
        ("sns.us-east-1.amazonaws.com:8443", False),
        ("sns.us-east-1.amazonaws.com@example.com", False),
        ("x.sns.us-east-1.amazonaws.com", False),
        ("bucket.s3.amazonaws.com", False),
    ],
)
def test_certificates_come_from_hosts_of_sns_alone(netloc: str, taken: bool) -> None:
    assert bool(SnsVerifier([])._hosts.fullmatch(netloc)) is taken


def _start(bucket: str, server: ModelServer, *options: object) -> tuple[subprocess.Popen[bytes], str]:
    watch = ("watch", "--input", f"s3://{bucket}/in", "--output", f"s3://{bucket}/out", "--listen", "0", *options)
    process = start(*watch, "--url", server.url)
    assert process.stderr is not None
    while (line := process.stderr.readline().decode()) and "listening on " not in line:
        pass
    return process, line.strip().removeprefix("listening on ")


@pytest.mark.long
def test_an_accepted_event_has_its_result_though_the_watcher_is_killed_and_an_event_told_twice_is_inferred_once(
    aws: dict[str, str], bucket: str, server: ModelServer, tmp_path: Path
) -> None:
    server.delay = 600.0
    _put(bucket, {"in/a.txt": b"hello"})
    process, url = _start(bucket, server)
    try:
        assert plain_http.post(url, json=_s3("in/a.txt", bucket=bucket)).status_code == 202
        assert plain_http.post(url, json=_s3("in/a.txt", bucket=bucket)).status_code == 202
        deadline = time.monotonic() + _SOON_S
        while not server.asked and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.2)
        assert server.asked == ["hello"]  # the second waits for the result of the first
    finally:
        process.kill()
        process.communicate()
    server.delay = 0.0
    metrics = tmp_path / "metrics.json"
    process, url = _start(bucket, server, "--limit", "3", "--metrics", metrics, "--poll", "0.1")
    try:
        assert plain_http.post(url, json=_s3("out/result.jsonl", bucket=bucket)).status_code == 403
        assert plain_http.post(url, json=_s3("in/a.txt", bucket=bucket)).status_code == 202
    finally:
        status, _, err = finish(process)
    assert status == 0 and server.answered == ["hello"] and "1 events were refused" in err
    assert [row["key"] for row in _results(f"s3://{bucket}/out")] == ["a.txt"]
    assert json.loads(metrics.read_text())["refused_events"] == 1


@pytest.mark.slow
def test_more_events_than_may_wait_are_accepted_in_bounded_memory_and_each_object_is_inferred_once() -> None:
    """Runs in a separate process, whose memory nothing else has used. Each object is announced four times."""
    script = [sys.executable, "-m", "tests.cloud.ten_thousand_events"]
    told = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout)
    assert found["accepted"] == EVENTS and found["refusals"] > 0 and found["most_open"] <= 10_000
    assert (found["inferred"], found["inferred_most"]) == (OBJECTS, 1)
    assert (found["results"], found["result_objects"], found["records"]) == (OBJECTS, OBJECTS, 0)
    assert found["growth_mib"] <= 40


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--input", "s3://b/i", "--listen-key", "k"), "--listen-key"),
        (("--input", "s3://b/i", "--sns-topic", "t"), "--sns-topic"),
        (("--input", "s3://b/i", "--listen", "0", "--queue", "https://sqs.eu-west-1.amazonaws.com/1/q"), "--listen"),
        (("--input", "i", "--listen", "0"), "--listen"),
        (("--input", "s3://b/i", "--listen", "0.0.0.0:0"), "--listen-key"),
        (("--input", "s3://b/i", "--listen", "0", "--listen-key", "/none"), "--listen-key"),
        (("--input", "s3://b/i", "--listen", "0", "--listen-tls", "/none", "/none"), "--listen-tls"),
        (("--input", "s3://b/i", "--listen", "host"), "--listen"),
        (("--kafka", "k", "--topic", "t", "--group", "g", "--listen", "0"), "--listen"),
    ],
)
def test_options_of_a_listener_that_make_no_sense_are_named(
    options: tuple[str, ...], named: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    assert cloud("watch", "--output", "o", "--url", "http://127.0.0.1:9", *options) == 2
    assert f"{named}:" in capsys.readouterr().err
