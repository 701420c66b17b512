"""Rare cases: cancelled models or connections, byte order marks, objects as folders, incomplete characters."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from mlserver_torch_stream.cloud.aws import S3Listing
from mlserver_torch_stream.cloud.backoff import Concurrency, Gate, Retry, within
from mlserver_torch_stream.cloud.naming import glob_pattern, lies_within
from mlserver_torch_stream.cloud.pipeline import infer_rows
from mlserver_torch_stream.cloud.prefetch import fetch_range
from mlserver_torch_stream.cloud.rows import CloudError, Outcome, Result, Row, RunRefused, StoreUnavailable
from mlserver_torch_stream.cloud.run import CloudRun, plan, stream
from mlserver_torch_stream.cloud.store import Store, settle
from mlserver_torch_stream.cloud.watch import Announced, Watcher
from tests import plain_http
from tests.cloud.azure import azure_server
from tests.cloud.command import cloud, joined
from tests.cloud.models import ModelServer
from tests.scripted_http import Handler, serving

_SOON_S = 20.0
_NOT_ROOT = pytest.mark.skipif(os.geteuid() == 0, reason="root may read any folder")


async def _answer(rows: Sequence[Row]) -> list[Outcome]:
    return [Outcome({"text": row.data.decode() or str((row.body or {}).get("prompt"))}) for row in rows]


async def _two() -> AsyncGenerator[Row, None]:
    for index in range(2):
        yield Row(index, "k", index + 1, f"k:{index}", body={"prompt": str(index)}, size=1)


def _all(job: CloudRun) -> list[Result]:
    async def collect() -> list[Result]:
        return [result async for result in stream(job, _answer)]

    return asyncio.run(collect())


def test_a_row_that_cannot_be_weighed_fails_alone_and_the_run_ends() -> None:
    def weigh(row: Row) -> int:
        return 1 // row.index

    async def run() -> list[Result]:
        return [result async for result in infer_rows(_two(), _answer, weigh=weigh)]

    bad, good = asyncio.run(asyncio.wait_for(run(), _SOON_S))
    assert bad.outcome.failure is not None and "ZeroDivisionError" in bad.outcome.failure.message
    assert good.outcome.response == {"text": "1"}


def test_a_model_that_was_cancelled_by_itself_ends_the_run_instead_of_hanging_it() -> None:
    async def cancelled(rows: Sequence[Row]) -> list[Outcome]:
        raise asyncio.CancelledError

    async def run() -> None:
        async for _ in infer_rows(_two(), cancelled):
            pass

    with pytest.raises(CloudError, match="cancelled"):
        asyncio.run(asyncio.wait_for(run(), _SOON_S))


def test_a_watcher_ends_when_an_object_cannot_be_done_although_nothing_new_comes() -> None:
    done: list[str] = []

    async def dead(rows: Sequence[Row]) -> list[Outcome]:
        raise StoreUnavailable("the server is gone")

    async def announcements() -> AsyncGenerator[Announced, None]:
        async def is_done() -> None:
            done.append("a.txt")

        yield Announced("a.txt", is_done)
        await asyncio.Event().wait()

    async def run() -> None:
        store = Store.memory()
        await store.put("a.txt", b"x")
        await Watcher(store, Store.memory(), dead, {}).watch(announcements())

    with pytest.raises(StoreUnavailable, match="the server is gone"):
        asyncio.run(asyncio.wait_for(run(), _SOON_S))
    assert not done


def test_a_place_at_a_gate_goes_past_a_task_that_was_cancelled_in_the_same_breath() -> None:
    async def run() -> None:
        gate = Gate(Concurrency(1))
        leave = asyncio.Event()

        async def hold() -> None:
            async with gate.through():
                await leave.wait()

        async def enter() -> None:
            async with gate.through():
                pass

        first = asyncio.create_task(hold())
        await asyncio.sleep(0)
        second, third = asyncio.create_task(enter()), asyncio.create_task(enter())
        await asyncio.sleep(0)
        leave.set()  # the first leaves before the second hears of its end
        second.cancel()
        await asyncio.gather(first, third)
        assert gate.inside == 0

    asyncio.run(asyncio.wait_for(run(), _SOON_S))


def test_a_task_that_is_to_be_alone_in_a_gate_is_and_leaves_no_other_waiting_when_it_is_cancelled() -> None:
    async def run() -> None:
        gate, most = Gate(Concurrency(3, 3)), list[int]()

        async def enter(alone: bool) -> None:
            async with gate.through(alone):
                for _ in range(3):
                    await asyncio.sleep(0)
                    if alone:
                        most.append(gate.inside)

        tasks = [asyncio.create_task(enter(number % 3 == 1)) for number in range(9)]
        await asyncio.sleep(0)
        tasks[1].cancel()  # waits at the head
        await asyncio.wait(tasks)
        assert most == [1] * 6 and gate.inside == 0

    asyncio.run(asyncio.wait_for(run(), _SOON_S))


def test_marks_of_byte_order_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b"}\r\n')
    (tmp_path / "b\u2028.txt").write_text("c")
    (tmp_path / "list").write_bytes("\ufeffa.jsonl\r\nb\u2028.txt".encode())
    found = _all(CloudRun(str(tmp_path), manifest=str(tmp_path / "list")))
    answers = [(each.row.line, each.outcome.response) for each in found]
    assert answers == [(1, {"text": "a"}), (3, {"text": "b"}), (None, {"text": "c"})]


def test_objects_that_stand_for_folders_are_no_input(aws: dict[str, str], bucket: str) -> None:
    """Even if they are beside an object of the same name."""
    for key in ("", "sub/", "v1.0/", "sub/a.txt", "sub/a.txt/", "empty.txt", "empty.txt/"):
        body = b"x" if key.endswith("a.txt") else b""
        plain_http.put(f"{aws['AWS_ENDPOINT_URL']}/{bucket}/in/{key}", content=body).raise_for_status()
    planned = asyncio.run(plan(CloudRun(f"s3://{bucket}/in")))
    assert [(each.info.key, each.info.size) for each in planned.objects] == [("empty.txt", 0), ("sub/a.txt", 1)]


@pytest.mark.parametrize("unreadable", [False, pytest.param(True, marks=_NOT_ROOT)])
def test_a_folder_that_cannot_be_walked_is_an_error_row_and_the_other_files_are_answered(
    tmp_path: Path, server: ModelServer, capfdbinary: Any, unreadable: bool
) -> None:
    for key in ("a/1.txt", "b/2.txt", "z.txt"):
        (tmp_path / key).parent.mkdir(exist_ok=True)
        (tmp_path / key).write_text("x")
    if unreadable:
        (tmp_path / "a/up").mkdir(0)
    else:
        (tmp_path / "a/up").symlink_to(tmp_path)
    assert cloud("run", "--input", tmp_path, "--url", server.url) == 1
    found = [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    assert [row["key"] for row in found] == ["a/1.txt", "a/up", "b/2.txt", "z.txt"]
    said = (
        "a folder that cannot be read: Permission denied" if unreadable else "a link to a folder that contains the link"
    )
    assert [row["error"] and row["error"]["message"] for row in found] == [None, f"'a/up': is {said}", None, None]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'"\\ud800"', b"cannot be sent as JSON"),
        (b'"x", "temperature": NaN', b"line 1: is not JSON: NaN is not a JSON value"),
    ],
    ids=["surrogate", "NaN"],
)
def test_a_row_that_json_cannot_carry_fails_alone_in_its_batch(
    tmp_path: Path, server: ModelServer, capfdbinary: Any, body: bytes, said: bytes
) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": ' + body + b'}\n{"prompt": "good"}\n')
    assert cloud("run", "--input", tmp_path, "--url", server.url, "--batch-rows", "2") == 1
    bad, good = capfdbinary.readouterr().out.splitlines()
    assert said in bad and b'"text":"doog"' in good


def test_a_key_that_the_library_has_no_name_for_is_one_error_row(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("a//b.txt\n")
    (found,) = _all(CloudRun("s3://bucket/in", manifest=str(tmp_path / "list"), storage={"region": "us-east-1"}))
    assert found.outcome.failure is not None and found.outcome.failure.code == "refused"
    assert "a//b.txt: " in found.outcome.failure.message and "empty path segment" in found.outcome.failure.message


def _put_raw(aws: dict[str, str], path: str, body: bytes) -> None:
    """Sends a PUT to a path that is not normalized."""
    parts = urlsplit(aws["AWS_ENDPOINT_URL"])
    connection = HTTPConnection(parts.netloc)
    connection.request("PUT", quote(path), body)
    assert connection.getresponse().status == 200
    connection.close()


_UNNAMEABLE = ["a/../b.txt", "c/./d.txt", "e//f.txt", "m\x7f.txt", "n\x01.txt"]


@pytest.mark.parametrize("output", [False, True])
def test_keys_that_the_library_has_no_name_for_are_error_rows_in_their_places_and_the_others_are_answered(
    aws: dict[str, str], bucket: str, tmp_path: Path, server: ModelServer, capfdbinary: Any, output: bool
) -> None:
    good = ["0.txt", "b+ c%2F.txt", "d.txt", "f/", "l.txt", "z.txt"]
    for key in (*good, *_UNNAMEABLE):
        _put_raw(aws, f"/{bucket}/in/{key}", b"" if key.endswith("/") else b"text")
    run = ("run", "--input", f"s3://{bucket}/in", "--url", server.url, "--part-rows", "3")
    out = tmp_path / "out"
    assert cloud(*run, *(("--output", out) if output else ())) == 1
    found = [json.loads(line) for line in (joined(out) if output else capfdbinary.readouterr().out).splitlines()]
    assert [row["key"] for row in found] == sorted({*good, *_UNNAMEABLE} - {"f/"})
    assert [row["key"] for row in found if row["error"]] == _UNNAMEABLE
    assert found[1]["error"] == {
        "code": "refused",
        "message": "'a/../b.txt': the object-store library cannot name it",
    }


@pytest.mark.parametrize("unnameable", [False, True])
def test_a_place_in_a_bucket_is_taken_as_it_is_written(
    aws: dict[str, str], bucket: str, server: ModelServer, unnameable: bool
) -> None:
    """This holds for our own listing, too, which is used if the library cannot name a key."""
    for key in ("50%25 a?b#c/a.txt", "50% a?b#c/no.txt", "50%25 a/no.txt", *(["50%25 a?b#c/e//f.txt"] * unnameable)):
        _put_raw(aws, f"/{bucket}/{key}", b"text")
    place = f"s3://{bucket}/50%25 a?b#c"
    assert cloud("run", "--input", place, "--url", server.url, "--output", f"s3://{bucket}/out#1?") == int(unnameable)

    async def read() -> tuple[list[str], bytes]:
        keys = [info.key async for info in Store.open(f"s3://{bucket}/out").list()]
        part = await Store.open(f"s3://{bucket}/out#1?").get("part-000000.jsonl")
        await settle()
        return keys, part

    keys, part = asyncio.run(read())
    assert not keys
    found = [json.loads(line)["key"] for line in part.splitlines()]
    assert found == ["a.txt", *(["e//f.txt"] * unnameable)]


def test_a_place_that_the_library_would_change_is_refused() -> None:
    for place in ("a/../b", "a/./b", "a//b", "a\nb"):
        with pytest.raises(RunRefused, match="cannot name it"):
            Store.open(f"s3://bucket/{place}", {"region": "us-east-1"})


def test_a_listing_of_our_own_is_signed_for_the_region_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    listing = S3Listing.find("s3://b/in", {"access_key_id": "k", "secret_access_key": "s"}, _SOON_S)
    assert listing is not None and listing.credentials is not None
    assert (listing.endpoint, listing.credentials["region_name"]) == ("https://s3.eu-west-1.amazonaws.com", "eu-west-1")


def test_a_listing_that_a_key_stops_names_the_option_where_the_bucket_cannot_be_listed_otherwise(
    aws: dict[str, str], bucket: str, server: ModelServer, capfd: Any
) -> None:
    _put_raw(aws, f"/{bucket}/in/e//f.txt", b"text")
    place = (f"endpoint={aws['AWS_ENDPOINT_URL']}/{bucket}", "virtual_hosted_style_request=true")
    hosted = [part for option in place for part in ("--storage", option)]
    assert cloud("run", "--input", f"s3://{bucket}/in", "--url", server.url, *hosted) == 2
    said = capfd.readouterr().err
    assert (
        f"error: s3://{bucket}/in: cannot be listed" in said
        and "e//f.txt" in said
        and "name the other objects with --manifest" in said
    )


def test_a_listing_of_our_own_that_is_no_xml_is_an_error_that_may_pass() -> None:
    class Page(Handler):
        def do_GET(self) -> None:
            self.answer(200, b"<html>")

    async def act() -> None:
        listing = S3Listing.find("s3://b/in", {"endpoint": url, "skip_signature": "true"}, _SOON_S)
        assert listing is not None
        async for _ in listing.objects(None):
            pass

    with serving(Page) as url, pytest.raises(StoreUnavailable, match="ListObjectsV2"):
        asyncio.run(act())


def test_folders_are_made_by_writing_alone(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("x")
    asyncio.run(plan(CloudRun(str(tmp_path / "in"), output=str(tmp_path / "out"))))
    with pytest.raises(RunRefused, match=r"--manifest: .* does not exist"):
        asyncio.run(plan(CloudRun(str(tmp_path / "in"), manifest=str(tmp_path / "none" / "list"))))
    assert os.listdir(tmp_path) == ["in"]


def test_an_output_within_the_input_is_seen_however_either_is_spelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "link").symlink_to("in")
    for inner, outer in (
        (".", "."),
        ("out", "."),
        ("link/out", "in"),
        (f"{tmp_path}/in/x", "./in"),
        ("file://" + str(tmp_path), ".."),
    ):
        assert lies_within(inner, outer)
    for inner, outer in (("out", "in"), ("s3://b/input", "s3://b/in"), ("in", "s3://b"), (".", "in")):
        assert not lies_within(inner, outer)


def test_a_glob_and_an_address_that_mean_nothing_are_refused(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(RunRefused, match=r"--glob: \[z-a\]"):
        glob_pattern("[z-a]*")
    (tmp_path / "a.jsonl").write_text("")
    assert cloud("run", "--input", tmp_path / "a.jsonl", "--glob", "*.txt", "--dry-run") == 2
    assert "--glob: cannot be used, because --input names a single object: a.jsonl" in capsys.readouterr().err
    assert cloud("run", "--input", tmp_path, "--url", "http://[::1") == 2
    assert "--url: http://[::1 does not say" in capsys.readouterr().err


def test_azures_etags_are_listed_without_the_quotes_that_they_are_asked_for_with() -> None:
    async def read() -> bytes:
        store = Store.open("az://container", options)
        (listed,) = [info async for info in store.list()]
        assert listed == await store.head("a.txt")
        data = await fetch_range(store, listed, 0, listed.size, Retry(1), lambda error: None)
        await settle()
        return data

    with azure_server({"a.txt": b"hello"}) as url:
        options = {"account_name": "a", "endpoint": url, "skip_signature": "true"}
        assert asyncio.run(read()) == b"hello"


def test_a_run_that_is_told_to_stop_just_as_a_store_answers_stops() -> None:
    async def run() -> None:
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(Store.memory()._call("k", lambda: answer))
        await asyncio.sleep(0.01)
        answer.set_result(b"")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


async def _served() -> tuple[asyncio.Server, list[asyncio.StreamWriter]]:
    """Returns a server that accepts connections and leaves them open, and a list of their writers."""
    accepted: list[asyncio.StreamWriter] = []
    return await asyncio.start_server(lambda _, writer: accepted.append(writer), "127.0.0.1", 0), accepted


def test_a_connection_that_is_made_after_its_time_is_over_is_closed() -> None:
    async def run() -> None:
        server, accepted = await _served()
        made: list[asyncio.StreamWriter] = []

        async def connect_too_late() -> Any:
            opened = await asyncio.open_connection(*server.sockets[0].getsockname())
            made.append(opened[1])
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            return opened

        with pytest.raises(asyncio.TimeoutError):
            await within(connect_too_late(), 0.5, lambda opened: opened[1].close())
        assert made[0].is_closing()
        for writer in accepted:
            writer.close()
        server.close()

    asyncio.run(asyncio.wait_for(run(), _SOON_S))
