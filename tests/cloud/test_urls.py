"""A list of URLs as input: several hosts and a bucket, signatures that stay secret, and the allowed redirects."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import ssl
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pytest
from yarl import URL

from mlserver_torch_stream.cloud.pipeline import PipelineLimits
from mlserver_torch_stream.cloud.rows import RunRefused, StoreUnavailable
from mlserver_torch_stream.cloud.run import CloudRun, plan, stream, write
from mlserver_torch_stream.cloud.run_metrics import RunMetrics
from mlserver_torch_stream.cloud.urls import MAX_BYTES_WITHOUT_RANGES, UrlStore, read_url_list, redirected
from tests.certificates import Authority
from tests.cloud.command import cloud, finish, start
from tests.cloud.faulty import Fault, FaultyServer, faulty_server
from tests.cloud.jobs import Model, job, joined, run
from tests.cloud.models import ModelServer
from tests.scripted_http import Handler, serving

_BATCHES = PipelineLimits(batch_rows=1000, window=4000)
_SECRET = "X-Amz-Signature=deadbeef%2Fdeadbeef"


class Recorder:
    """A server that records its requests, and redirects each path in ``leads``.

    It serves ``objects`` for GET only, without ranges.
    """

    def __init__(self) -> None:
        self.leads: dict[str, str] = {}
        self.objects: dict[str, bytes] = {}
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.url = ""


@contextlib.contextmanager
def recorder(tls: ssl.SSLContext | None = None) -> Iterator[Recorder]:
    kept = Recorder()

    class Recording(Handler):
        def do_HEAD(self) -> None:
            self.answer(403)

        def do_GET(self) -> None:
            kept.asked.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
            path = self.path.partition("?")[0]
            if path in kept.leads:
                return self.answer(302, headers={"Location": kept.leads[path], "Set-Cookie": "a=secret"})
            body = kept.objects.get(path)
            self.answer(404 if body is None else 200, body or b"")

    with serving(Recording, tls) as kept.url:
        yield kept


@pytest.fixture
def one() -> Iterator[FaultyServer]:
    with faulty_server() as server:
        yield server


@pytest.fixture
def other() -> Iterator[Recorder]:
    with recorder() as server:
        yield server


def _job(folder: Path, lines: Iterable[object], **changes: Any) -> CloudRun:
    """Returns a run of the URLs, each of which is a line of its list."""
    written = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    (folder / "urls").write_text("".join(f"{line}\n" for line in written))
    return replace(job(folder, **changes), input=None, manifest=str(folder / "urls"))


def _rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in joined(folder).splitlines()]


def _texts(folder: Path) -> list[str | None]:
    """Returns the answer to each row, or the code of its error."""
    rows = _rows(folder)
    return [row["error"]["code"] if row["error"] else row["response"]["body"]["text"] for row in rows]


def _presigned(aws: dict[str, str], bucket: str, key: str, body: bytes) -> str:
    client = boto3.client("s3", endpoint_url=aws["AWS_ENDPOINT_URL"])
    client.put_object(Bucket=bucket, Key=key, Body=body)
    return str(client.generate_presigned_url("get_object", {"Bucket": bucket, "Key": key}))


def test_hosts_and_a_bucket_are_one_run_in_the_order_of_the_list(
    aws: dict[str, str], bucket: str, one: FaultyServer, other: Recorder, tmp_path: Path
) -> None:
    one.objects["/o/rows.jsonl"] = b'{"prompt": "ab"}\n{"prompt": "cd"}\n'
    signed = _presigned(aws, bucket, "deep/signed.txt", b"gh")
    _presigned(aws, bucket, "plain.txt", b"ij")
    lines = [f"s3://{bucket}/plain.txt", f"{one.url}/o/rows.jsonl", signed, {"key": f"{other.url}/a%20b.txt?{_SECRET}"}]
    other.objects["/a%20b.txt"] = b"ef"
    assert run(_job(tmp_path, lines), Model()) == 0
    assert _texts(tmp_path) == ["ji", "ba", "dc", "hg", "fe"]
    keys = [row["key"] for row in _rows(tmp_path)]
    assert keys == [lines[0], lines[1], lines[1], signed.partition("?")[0], f"{other.url}/a%20b.txt"]


def test_a_signature_is_sent_and_written_nowhere(
    other: Recorder, tmp_path: Path, server: ModelServer, capfd: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    other.objects["/a.txt"] = b"ab"
    lines = [f"{other.url}/a.txt?{_SECRET}", f"{other.url}/gone.txt?{_SECRET}", f"{other.url}/led.txt?{_SECRET}"]
    lines.append(f"http://127.0.0.1:9/none.txt?{_SECRET}")
    other.leads["/led.txt"] = f"http://localhost:1/led.txt?{_SECRET}"
    (tmp_path / "urls").write_text("\n".join(lines))
    typed = ("run", "--manifest", tmp_path / "urls", "--url", server.url, "--tries", 1)
    into = ("--output", tmp_path / "out")
    assert [cloud(*typed, *more) for more in (("--dry-run",), into, (*into, "--retry-failed"))] == [0, 1, 1]
    assert {path for path, _ in other.asked} == {f"/{name}.txt?{_SECRET}" for name in ("a", "gone", "led")}
    written = [path.read_text() for path in (tmp_path / "out").iterdir()]
    said = capfd.readouterr()
    assert any("/a.txt" in text for text in written) and "input: 4 objects" in said.out
    assert not [text for text in (*written, *said, caplog.text) if "deadbeef" in text]


def test_neither_keys_nor_options_of_storage_are_sent_over_http(
    aws: dict[str, str], bucket: str, other: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login user password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    other.objects["/a.txt"] = b"ab"
    other.leads["/led.txt"] = "/a.txt"
    _presigned(aws, bucket, "b.txt", b"cd")
    storage = {"endpoint": aws["AWS_ENDPOINT_URL"], "secret_access_key": "storagesecret", "access_key_id": "storageid"}
    lines = [f"{other.url}/led.txt", f"{other.url}/a.txt", f"s3://{bucket}/b.txt"]
    made = _job(tmp_path, lines, output=None, storage=storage)

    async def collect() -> list[str]:
        return [str((result.outcome.response or {})["text"]) async for result in stream(made, Model())]

    assert asyncio.run(collect()) == ["ba", "ba", "dc"]
    allowed = {"host", "accept", "accept-encoding", "user-agent", "range"}
    assert other.asked and all(set(headers) <= allowed for _, headers in other.asked)


def test_a_run_that_died_goes_on_with_signatures_made_anew(other: Recorder, tmp_path: Path) -> None:
    other.objects = {f"/{i}.txt": f"text {i}".encode() for i in range(20)}
    lines = [f"{other.url}/{i}.txt?{_SECRET}{{}}" for i in range(20)]
    with pytest.raises(StoreUnavailable):
        run(_job(tmp_path, [line.format("old") for line in lines]), Model(lasts=9))
    before = len(_rows(tmp_path))
    other.asked.clear()
    rest = Model()
    assert run(_job(tmp_path, [line.format("new") for line in reversed(lines)]), rest) == 0
    assert before > 0 and len(rest.asked) == 20 - before
    assert _texts(tmp_path) == [f"text {i}"[::-1] for i in range(20)]
    assert other.asked and not [path for path, _ in other.asked if "old" in path]
    with pytest.raises(RunRefused, match="no longer names"):
        run(_job(tmp_path, [lines[0]]), Model())


@pytest.mark.long
@pytest.mark.parametrize("fault", [503, "reset", "cut", "stall"])
def test_a_large_object_is_read_by_ranges_and_faults_that_pass_change_no_byte(
    one: FaultyServer, tmp_path: Path, fault: str | int
) -> None:
    rows = [json.dumps({"prompt": f"{i}" + "x" * 2000}) for i in range(6000)]
    one.objects["/big.jsonl"] = "\n".join(rows).encode()
    made = _job(tmp_path, [f"{one.url}/big.jsonl"], part_rows=1000, stall_s=0.5, limits=_BATCHES)

    async def faulty() -> int:
        planned = await plan(made)
        one.faults["/big.jsonl"] = [Fault(fault)]
        return await write(planned, Model(), RunMetrics())

    assert asyncio.run(faulty()) == 0
    assert _texts(tmp_path) == [json.loads(row)["prompt"][::-1] for row in rows]
    assert len(set(one.gets("/big.jsonl"))) >= 3


def test_an_object_that_changes_is_never_spliced(one: FaultyServer, tmp_path: Path) -> None:
    one.objects["/a.txt"] = b"xy" * 50_000
    made = _job(tmp_path, [f"{one.url}/a.txt"])

    async def changed() -> int:
        planned = await plan(made)
        one.faults["/a.txt"] = [Fault("change")]
        return await write(planned, Model(), RunMetrics())

    assert asyncio.run(changed()) == 1
    assert _texts(tmp_path) == ["changed"]


def test_a_server_without_ranges_is_read_up_to_a_bound(other: Recorder, tmp_path: Path) -> None:
    line = json.dumps({"prompt": "x" * 2**20}).encode() + b"\n"
    other.objects = {"/small.txt": b"ab", "/large.jsonl": line * (MAX_BYTES_WITHOUT_RANGES // 2**20 + 1)}
    run(_job(tmp_path, [f"{other.url}/large.jsonl", f"{other.url}/small.txt"]), Model())
    why = "its server does not support range requests, which objects larger than 8 MiB need"
    errors = [row["error"] for row in _rows(tmp_path) if row["error"]]
    assert errors == [{"code": "refused", "message": f"{other.url}/large.jsonl: {why}"}]
    assert _texts(tmp_path)[-1] == "ba"


def test_empty_missing_and_denied_objects_are_rows_in_their_places(
    aws: dict[str, str], bucket: str, one: FaultyServer, other: Recorder, tmp_path: Path
) -> None:
    one.objects, one.denied = {"/denied.txt": b"x"}, {"/denied.txt"}
    other.objects["/empty.txt"] = b""
    lines = [_presigned(aws, bucket, "empty.txt", b""), f"{other.url}/empty.txt", f"{one.url}/denied.txt"]
    lines += [f"{one.url}/missing.txt", "http://127.0.0.1:9/none.txt", f"s3://{bucket}/missing.txt"]
    run(_job(tmp_path, lines), Model())
    assert _texts(tmp_path) == ["", "", "denied", "missing", "unavailable", "missing"]


def test_names_tell_urls_apart_that_differ_in_their_queries(other: Recorder, tmp_path: Path) -> None:
    other.objects["/get"] = b"ab"
    lines = [{"key": "x/first.txt", "url": f"{other.url}/get?id=1"}, {"key": "2.txt", "url": f"{other.url}/get?id=2"}]
    assert run(_job(tmp_path, lines), Model()) == 0
    assert [row["key"] for row in _rows(tmp_path)] == ["x/first.txt", "2.txt"]
    assert {path for path, _ in other.asked} == {"/get?id=1", "/get?id=2"}


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("prompts/a.txt", "is not a URL of s3, gs, az, http, https"),
        ("file:///etc/passwd", "is not a URL of"),
        ("abfss://c@stranger.dfs.core.windows.net/a", "is not a URL of"),
        ("az://c@stranger/a", "does not name an object in a bucket"),
        ("s3://bucket", "does not name an object in a bucket"),
        ("http:///a.txt", "without a valid host"),
        ("http://[::1/a.txt", "without a valid host"),
        ("https://user:pw@host/a.txt", "has a user or a password"),
        ('{"url": "https://host/a"}', "line 1 is neither a URL nor"),
        ('{"key": "https://host/a"', "line 1 is neither a URL nor"),
        ("https://host/a?1\nhttps://host/a?2", "line 2 repeats https://host/a, which is already on line 1"),
    ],
)
def test_lines_that_name_no_object_are_refused(line: str, named: str) -> None:
    with pytest.raises(RunRefused, match=re.escape(named)) as refused:
        read_url_list(line.encode())
    assert "pw" not in refused.value.message


@pytest.mark.parametrize(
    ("url", "location", "target"),
    [
        ("http://a/x?s=1", "/y?t=2", "http://a/y?t=2"),
        ("http://a/x", "http://a:80/y", "http://a/y"),
        ("http://a/x", "https://b/y%2Fz#part", "https://b/y%2Fz"),
        ("https://a/x", "https://b:444/y", "https://b:444/y"),
        ("http://a/x", "http://b/y", None),
        ("http://a/x", "http://a:81/y", None),
        ("http://a/x", "//169.254.169.254/latest", None),
        ("https://a/x", "http://a/y", None),
        ("https://a/x", "https://user:pw@b/y", None),
        ("https://a/x", "ftp://a/y", None),
        ("https://a/x", "https://[::1/y", None),
    ],
)
def test_the_rule_of_redirects(url: str, location: str, target: str | None) -> None:
    if target is not None:
        assert str(redirected(URL(url), location)) == target
        return
    with pytest.raises(RunRefused, match="redirects to"):
        redirected(URL(url), location)


@pytest.mark.long
def test_redirects_within_the_rule_are_followed_and_no_stranger_is_asked_beyond_it(
    other: Recorder, tmp_path: Path, server: ModelServer
) -> None:
    authority = Authority(tmp_path)
    pair = authority.sign("server")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(pair.certificate, pair.key)
    with recorder(tls) as safe, recorder() as stranger:
        safe.objects["/a.txt"] = b"ab"
        other.leads = {f"/{i}": f"/{i + 1}" for i in range(10)} | {"/10": f"{safe.url}/a.txt"}
        other.leads["/strange"] = f"{stranger.url}/a.txt"
        safe.leads["/down"] = f"{other.url}/a.txt"
        lines = [f"{other.url}/6", f"{other.url}/5", f"{other.url}/strange", f"{safe.url}/down"]
        (tmp_path / "urls").write_text("\n".join(lines))
        typed = ("--manifest", tmp_path / "urls", "--as", "text", "--url", server.url)
        status, out, err = finish(start("run", *typed, environment={"SSL_CERT_FILE": str(authority.certificate)}))
        rows = [json.loads(line) for line in out.splitlines()]
        assert status == 1, err
        assert [row["error"] and row["error"]["code"] for row in rows] == [None, "refused", "refused", "refused"]
        assert server.asked == ["ab"] and "more than 5 times" in rows[1]["error"]["message"]
        assert not stranger.asked and all("cookie" not in headers for _, headers in other.asked + safe.asked)
        assert "/a.txt" not in [path for path, _ in other.asked]


def test_options_that_two_kinds_of_buckets_would_get_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunRefused, match="--storage: the options could be for gs or s3"):
        UrlStore({"a": "s3://b/a", "b": "gs://b/a"}, {"endpoint": "http://127.0.0.1"}, 1.0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"input": None}, "--input: is missing"),
        ({"input": "https://host/a.txt?signature=1"}, "--input: a URL with a query"),
        ({"manifest": "https://host/list?signature=1"}, "--manifest: a URL with a query"),
    ],
)
def test_what_cannot_be_an_input_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(RunRefused, match=named):
        CloudRun(**{"input": "in", **changes})


@pytest.mark.parametrize(
    ("urls", "said"),
    [
        ([], "urls: is empty"),
        (["https://host/a", "ftp://host/b"], "urls: number 2 is not a URL"),
        (["https://host/a", "https://host/a"], "urls: number 2 repeats https://host/a, which is already number 1"),
    ],
)
def test_what_is_wrong_in_a_list_of_python_is_named_as_such(urls: list[str], said: str) -> None:
    with pytest.raises(RunRefused, match=said):
        asyncio.run(plan(CloudRun(urls=urls)))
