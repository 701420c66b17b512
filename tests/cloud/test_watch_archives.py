"""Watching for archives: the members of each are inferred as in a run over it, and none twice after a kill."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import zipfile
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mlserver_torch_stream.cloud.rows import Outcome, Row
from mlserver_torch_stream.cloud.store import Store, settle
from mlserver_torch_stream.cloud.tables import Tables
from mlserver_torch_stream.cloud.watch import Announced, Watcher
from tests import plain_http
from tests.cloud.archives import tar
from tests.cloud.command import cloud, finish, joined, start, trouble
from tests.cloud.handlers import rows
from tests.cloud.models import ModelServer
from tests.cloud.test_listen import _s3, _start
from tests.cloud.test_watch import _put
from tests.waiting import wait_until

_MEMBERS = [("d/a.csv", b"prompt\none\ntwo\n"), ("d/b.txt", b"three"), ("d/c.jsonl", b'{"prompt": "four"}\n')]
_PROMPTS = ["one", "two", "three", "four"]
_TIMEOUT_S = 60.0


def _zip(members: Sequence[tuple[str, bytes]]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return file.getvalue()


def _watch(folder: Path, server: ModelServer, *options: object) -> tuple[object, ...]:
    where = ("watch", "--input", folder / "in", "--output", folder / "out", "--poll", "0.05")
    return (*where, "--url", server.url, *options)


def _in(folder: Path, **archives: bytes) -> None:
    (folder / "in").mkdir(exist_ok=True)
    for name, data in archives.items():
        (folder / "in" / name.replace("_", ".")).write_bytes(data)


def _result(folder: Path) -> Path:
    (found,) = (path for path in (folder / "out").glob("result-*") if path.is_dir())
    return found


def _facts(found: bytes) -> list[tuple[Any, ...]]:
    """Returns the content of each row, without the ids of its run."""
    names = ("index", "key", "line", "member", "custom_id", "error")
    return [(*(row.get(name) for name in names), row["response"]["body"]["choices"]) for row in rows(found)]


@pytest.mark.parametrize(
    ("name", "data"), [("x_tar_gz", tar(_MEMBERS)), ("x_tar", tar(_MEMBERS, "w")), ("x_zip", _zip(_MEMBERS))]
)
def test_an_archive_that_appears_has_the_rows_of_a_run_over_it(
    name: str, data: bytes, tmp_path: Path, server: ModelServer
) -> None:
    _in(tmp_path, **{name: data, "y_txt": b"plain"})
    assert cloud(*_watch(tmp_path, server, "--limit", 2, "--part-rows", 3)) == 0
    assert sorted(server.asked) == sorted([*_PROMPTS, "plain"])
    result = _result(tmp_path)
    assert sorted(path.name for path in result.glob("part-*")) == ["part-000000.jsonl", "part-000001.jsonl"]
    assert json.loads((result / "done.json").read_text())["failed"] == 0
    run = ("run", "--input", tmp_path / "in" / name.replace("_", "."), "--output", tmp_path / "run", "--part-rows", 3)
    assert cloud(*run, "--url", server.url) == 0
    assert _facts(joined(result)) == _facts(joined(tmp_path / "run"))
    (plain,) = (tmp_path / "out").glob("result-*.jsonl")
    assert [row["key"] for row in rows(plain.read_bytes())] == ["y.txt"]


def test_options_of_tables_choose_members_and_columns_of_what_appears(tmp_path: Path, server: ModelServer) -> None:
    _in(tmp_path, x_tar=tar([("a.csv", b"0;first\n1;second\n"), ("b.csv", b"2;other\n")], "w"), y_csv=b"3;third\n")
    table = ("--members", "a.*", "--column", "2", "--delimiter", ";")
    assert cloud(*_watch(tmp_path, server, "--limit", 2, *table)) == 0
    assert sorted(server.asked) == ["first", "second", "third"]
    assert [row["member"]["name"] for row in rows(joined(_result(tmp_path)))] == ["a.csv"] * 2


def test_a_broken_archive_and_a_member_that_is_refused_are_error_rows_of_their_own_archive(
    tmp_path: Path, server: ModelServer, capsys: pytest.CaptureFixture[str]
) -> None:
    _in(tmp_path, x_tar=tar([*_MEMBERS, ("e.bin", b"bytes")], "w")[:4096], y_tar=b"no tar")
    assert cloud(*_watch(tmp_path, server, "--limit", 2)) == 1
    results = [path.parent for path in (tmp_path / "out").glob("*/done.json")]
    found = {rows(joined(result))[0]["key"]: (result, rows(joined(result))) for result in results}
    assert [json.loads((found[key][0] / "done.json").read_text())["failed"] for key in ("x.tar", "y.tar")] == [2, 1]
    errors = [(trouble(row) or {"message": ""}) for key in ("x.tar", "y.tar") for row in found[key][1]]
    assert [error.get("code") for error in errors[-1:]] == ["invalid_archive"]
    assert [bool(error["message"]) for error in errors] == [False] * 4 + [True] * 3
    assert errors[4]["message"] == "x.tar/e.bin: the model does not accept bytes"
    err = capsys.readouterr().err
    assert "x.tar: 2 of its rows failed" in err and "y.tar: 1 of its rows failed" in err


_ROWS = [f"{name} {number}" for name in "ab" for number in range(60)]


def _parts(folder: Path) -> int:
    return len(list((folder / "out").glob("result-*/part-*")))


def _has_parts(folder: Path, count: int) -> bool:
    return _parts(folder) >= count


def _killed(folder: Path, server: ModelServer, kills: int) -> None:
    """Kills a watcher inside an archive ``kills`` times, and lets the last one finish."""
    tables = [
        (f"{name}.csv", "".join(f"{row}\n" for row in ["prompt", *_ROWS] if row[0] in f"p{name}")) for name in "ab"
    ]
    server.delay = 0.1
    _in(folder, x_tar_gz=tar([(name, text.encode()) for name, text in tables]))
    watch = _watch(folder, server, "--limit", 1, "--part-rows", 4, "--concurrency", 2, "--window", 8)
    for _ in range(kills):
        count = _parts(folder) + 1
        process = start(*watch)
        wait_until(partial(_has_parts, folder, count))
        process.send_signal(signal.SIGKILL)
        assert finish(process)[0] == -signal.SIGKILL
        wait_until(lambda: server.flying == 0)
    delivered = {row["response"]["body"]["choices"][0]["text"][::-1] for row in rows(joined(_result(folder)))}
    assert 0 < len(delivered) < len(_ROWS) and not (_result(folder) / "done.json").exists()
    server.asked.clear()
    server.delay = 0.0
    assert cloud(*watch) == 0
    assert not delivered & set(server.asked) and delivered | set(server.asked) == set(_ROWS)
    found = rows(joined(_result(folder)))
    assert [row["index"] for row in found] == list(range(len(_ROWS)))
    assert [row["response"]["body"]["choices"][0]["text"][::-1] for row in found] == _ROWS
    assert len({row["response"]["body"]["created"] for row in found}) == 1
    (folder / "out/cursor.json").unlink()  # announced once more
    server.asked.clear()
    assert cloud(*watch) == 0 and not server.asked


@pytest.mark.long
def test_after_a_kill_an_archive_goes_on_behind_its_last_part(tmp_path: Path, server: ModelServer) -> None:
    _killed(tmp_path, server, 1)


@pytest.mark.slow
def test_after_eight_kills_each_row_of_an_archive_is_there_once(tmp_path: Path, server: ModelServer) -> None:
    _killed(tmp_path, server, 8)


@pytest.mark.long
def test_an_archive_of_an_event_goes_on_from_the_record_of_the_event_after_a_kill(
    aws: dict[str, str], bucket: str, server: ModelServer
) -> None:
    prompts = [f"row {number}" for number in range(40)]
    _put(bucket, {"in/x.zip": _zip([("a.csv", "".join(f"{row}\n" for row in ["prompt", *prompts]).encode())])})
    server.delay = 0.1
    options = ("--part-rows", 4, "--concurrency", 2, "--window", 8, "--limit", 1)
    process, url = _start(bucket, server, *options)
    try:
        assert plain_http.post(url, json=_s3("in/x.zip", bucket=bucket), trust_env=False).status_code == 202
        wait_until(lambda: bool(_parts_of(bucket)))
    finally:
        process.kill()
        process.communicate()
    wait_until(lambda: server.flying == 0)
    delivered = [row["response"]["body"]["choices"][0]["text"][::-1] for row in _parts_of(bucket)]
    assert 0 < len(delivered) < len(prompts)
    server.asked.clear()
    server.delay = 0.0
    process, _ = _start(bucket, server, *options)  # which is told of nothing
    assert finish(process)[0] == 0
    assert not set(delivered) & set(server.asked)
    assert [row["response"]["body"]["choices"][0]["text"][::-1] for row in _parts_of(bucket)] == prompts


def _parts_of(bucket: str) -> list[dict[str, Any]]:
    """Returns the rows of all parts below the output in the bucket."""

    async def get() -> bytes:
        store = Store.open(f"s3://{bucket}/out")
        names = sorted([info.key async for info in store.list() if "/part-" in info.key])
        found = b"".join([await store.get(name) for name in names])
        await settle()
        return found

    return rows(asyncio.run(get()))


def test_of_two_watchers_that_are_told_of_an_archive_one_infers_it_and_the_other_waits(tmp_path: Path) -> None:
    asked: list[str] = []
    told: list[str] = []
    done: list[str] = []

    async def infer(batch: Sequence[Row]) -> list[Outcome]:
        while not told:  # until the other one waits
            await asyncio.sleep(0.01)
        asked.extend(row.data.decode() for row in batch)
        return [Outcome({"text": "x"}) for _ in batch]

    async def announcements() -> AsyncGenerator[Announced, None]:
        async def is_done() -> None:
            done.append("x.tar")

        yield Announced("x.tar", is_done)

    async def act() -> None:
        def watcher() -> Watcher:
            store, output = Store.open(str(tmp_path / "in")), Store.open(str(tmp_path / "out"))
            return Watcher(store, output, infer, {}, tables=Tables(archives=True), report=told.append)

        await asyncio.gather(*(watcher().watch(announcements()) for _ in range(2)))
        await settle()

    _in(tmp_path, x_tar=tar([(f"{number}.txt", b"%d" % number) for number in range(40)], "w"))
    asyncio.run(asyncio.wait_for(act(), _TIMEOUT_S))
    assert sorted(asked, key=int) == [str(number) for number in range(40)]
    assert done == ["x.tar"] * 2 and told == ["x.tar: another watcher is inferring it; waiting for that watcher"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--input", "i", "--column", "1=x"), "--column"),
        (("--input", "i", "--encoding", "base64"), "--encoding"),
        (("--kafka", "k", "--topic", "t", "--group", "g", "--column", "1"), "--column"),
        (("--kafka", "k", "--topic", "t", "--group", "g", "--members", "*"), "--members"),
        (("--kafka", "k", "--topic", "t", "--group", "g", "--quote", ""), "--quote"),
    ],
)
def test_options_of_tables_that_cannot_be_are_refused_by_name(
    options: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cloud("watch", "--output", "o", "--url", "http://127.0.0.1:9", "--model", "m", *options) == 2
    assert f"{named}:" in capsys.readouterr().err
