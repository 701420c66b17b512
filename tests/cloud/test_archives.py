"""Members of archives and records of tables as rows: in order, resumed inside an archive, in bounded memory."""

from __future__ import annotations

import asyncio
import csv
import gzip
import io
import json
import os
import random
import signal
import subprocess
import sys
import tarfile
import threading
import zipfile
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlserver_torch_stream.cloud.archives import MemberBegin, Tar, Zip, read_directory
from mlserver_torch_stream.cloud.rows import Row
from mlserver_torch_stream.cloud.source import Cursor, Listed, Source
from mlserver_torch_stream.cloud.store import Store, settle
from mlserver_torch_stream.cloud.tables import Column, Record, Tables
from mlserver_torch_stream.gunzip import Damaged
from tests import plain_http
from tests.cloud.archives import reviews, tar
from tests.cloud.command import cloud, finish, joined, start, trouble
from tests.cloud.handlers import predictions, rows
from tests.cloud.models import ModelServer
from tests.scripted_http import Handler, serving
from tests.waiting import wait_until

_MEMBERS = [("d/", b""), ("d/" + "long" * 60 + "é.txt", b"one"), ("empty.txt", b""), ("big.txt", os.urandom(70_000))]


def _read(data: bytes, name: str, tables: Tables, cursor: Cursor | None = None, limit: int | None = None) -> list[Row]:
    async def read() -> list[Row]:
        store = Store.memory()
        await store.put(name, data)
        source = Source(store, [Listed(await store.head(name))], tables=tables, limit=limit)
        found = [row async for row in source.rows(cursor or Cursor())]
        await settle()
        return found

    return asyncio.run(read())


def _contents(events: Any) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    name = ""
    for event in events:
        if isinstance(event, MemberBegin):
            name = event.name
            found[name] = b""
        elif isinstance(event, bytes):
            found[name] += event
    return found


@given(st.integers(1, 1500), st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
def test_tar_in_any_chunks_has_the_members_that_were_written(size: int, form: int) -> None:
    members = [(name, data[:2000]) for name, data in _MEMBERS]
    data, reader = tar(members, "w", form), Tar()
    events = [event for at in range(0, len(data), size) for event in reader.feed(data[at : at + size])]
    reader.end()
    assert _contents(events) == dict(members[1:])


@given(st.integers(1, 1500), st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]))
def test_zip_in_any_chunks_has_the_members_that_were_written(size: int, method: int) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in _MEMBERS:
            archive.writestr(name, content[:2000])
    data = file.getvalue()
    reader = Zip(read_directory(data, len(data)))
    events = [event for at in range(0, len(data), size) for event in reader.feed(data[at : at + size])]
    reader.end()
    assert _contents(events) == {name: content[:2000] for name, content in _MEMBERS[1:]}


@given(st.lists(st.lists(st.text('a",\n\r ;é', max_size=6), min_size=1, max_size=4), min_size=1, max_size=4))
def test_records_are_those_of_the_csv_module(table: list[list[str]]) -> None:
    file = io.StringIO(newline="")
    csv.writer(file, quoting=csv.QUOTE_ALL).writerows(table)
    found, record = [], Record(b",", b'"')
    for line in file.getvalue().encode().split(b"\n")[:-1]:
        if record.add(line):
            found.append([field.decode() for field in record.fields])
            record = Record(b",", b'"')
    assert found == table


def test_a_tar_that_ends_early_gives_its_rows_and_then_one_failure() -> None:
    data = tar([("a.csv", reviews(50)), ("b.csv", reviews(50))], "w")
    found = _read(data[:4000], "x.tar", Tables((Column(3),), data=True, archives=True))
    assert len(found) > 20 and [row.index for row in found] == list(range(len(found)))
    assert [row.failure.code for row in found if row.failure] == ["invalid_archive"] and found[-1].failure


@pytest.mark.parametrize(("at", "value"), [(100, b"\xff" * 50), (0, b"not tar")])
def test_what_is_no_tar_is_one_failure(at: int, value: bytes) -> None:
    data = bytearray(tar([("a.csv", reviews(5))], "w"))
    data[at : at + len(value)] = value
    (row,) = _read(bytes(data), "x.tar", Tables(archives=True))
    assert row.failure is not None and row.failure.code == "invalid_archive" and "x.tar" in row.failure.message


def test_a_long_header_of_a_tar_is_refused_before_it_is_read() -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 2**40
    with pytest.raises(Damaged, match="1099511627776"):
        list(Tar().feed(info.tobuf(tarfile.GNU_FORMAT)))


def test_members_that_are_no_files_are_named() -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        link = tarfile.TarInfo("link.csv")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    (row,) = _read(file.getvalue(), "x.tar", Tables(archives=True))
    assert row.failure is not None and "link.csv: is a link" in row.failure.message


def test_broken_records_name_member_and_line_and_the_others_are_read() -> None:
    table = b'1,2,a\n1,2\n"x"y,2,b\n1,2,\xff\n1,2,"c\nd"\n1,2,"open\n1,2,e\n'
    found = _read(tar([("t.csv", table)]), "x.tar.gz", Tables((Column(3),), data=True, archives=True))
    assert [(row.line, row.data) for row in found if not row.failure] == [(1, b"a"), (5, b"c\nd")]
    failures = {row.line: row.failure.message for row in found if row.failure}
    assert list(failures) == [2, 3, 4, 7]
    assert all(message.startswith(f"t.csv: line {line}: ") for line, message in failures.items())
    assert "never closed" in failures[7] and "no column 3" in failures[2]


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1", "shift_jis", "utf-8"])
def test_tables_of_any_encoding(encoding: str) -> None:
    text = "名,x\n" if encoding == "shift_jis" else "é,x\n"
    found = _read(text.encode(encoding), "x.csv", Tables((Column(1),), encoding=encoding, data=True))
    assert [row.data.decode() for row in found] == [text[0]]


@pytest.mark.parametrize("name", ["x.csv", "x.jsonl"])
def test_a_table_in_utf16_is_refused_if_its_encoding_is_not_given(name: str) -> None:
    (row,) = _read("1,x\n2,y\n".encode("utf-16"), name, Tables((Column(2),), data=True))
    assert row.failure is not None and row.failure.code == "invalid_table" and "--encoding" in row.failure.message


def test_a_line_that_ends_with_a_carriage_return_alone_hides_no_record() -> None:
    found = _read(b'1,a\r2,b\n3,"c\rd"\r\n4,"e"\r5,f\n', "x.csv", Tables((Column(2),), data=True))
    assert [row.data for row in found if row.failure is None] == [b"c\rd"]
    assert [row.line for row in found if row.failure and "carriage return" in row.failure.message] == [1]
    assert [row.line for row in found if row.failure] == [1, 3]
    (row,) = _read(b"n,text\r1,a\r", "x.csv", Tables((Column("text"),), data=True))
    assert row.failure is not None and row.failure.code == "invalid_table"


def test_numbers_that_json_lacks_fail_their_row() -> None:
    found = _read(b'{"a": NaN}\n{"a": 1}\n{"a": -Infinity}\n', "x.jsonl", Tables((Column("a"),), data=True))
    assert [row.failure is None for row in found] == [False, True, False]
    assert found[2].failure is not None and "-Infinity is not a JSON value" in found[2].failure.message


def test_a_byte_of_no_character_fails_its_record() -> None:
    found = _read(b"\x81\na\n", "x.csv", Tables((Column(1),), encoding="cp1252", data=True))
    assert [row.failure is None for row in found] == [False, True]


def test_a_header_names_columns_and_without_a_column_the_keys_of_bodies() -> None:
    table = b"custom_id;prompt\nr1;hello\n;you\n"
    found = _read(table, "x.csv", Tables(delimiter=";"))
    assert [(row.custom_id, row.body) for row in found] == [("r1", {"prompt": "hello"}), ("x.csv:3", {"prompt": "you"})]
    (row,) = _read(table, "x.csv", Tables((Column("text"),), delimiter=";"))
    assert row.failure is not None and row.failure.code == "invalid_table" and "'text'" in row.failure.message


def test_columns_of_jsonl_and_of_tsv() -> None:
    lines = b'{"a": "x", "b": {"c": 1}}\n{"a": "y"}\n'
    found = _read(lines, "x.jsonl.gz".removesuffix(".gz"), Tables((Column("b"),), data=True))
    assert found[0].data == b'{"c": 1}' and found[1].failure is not None and "'b'" in found[1].failure.message
    found = _read(b'a\t5" wide\n', "x.tsv", Tables((Column(2, "prompt"), Column(1, "custom_id")), quote=""))
    assert [(row.custom_id, row.data) for row in found] == [("a", b'5" wide')]


def test_a_zip_member_that_is_damaged_fails_and_the_next_follows() -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.txt", "first")
        archive.writestr("b.txt", "second")
    data = file.getvalue().replace(b"first", b"wurst")
    found = _read(data, "x.zip", Tables(archives=True))
    assert [row.failure is None for row in found] == [False, True] and found[1].data == b"second"
    assert found[0].failure is not None and found[0].failure.message.startswith("x.zip/a.txt: is damaged")


def test_a_member_larger_than_its_bound_is_not_kept() -> None:
    data = tar([("zeros.bin", bytes(65 * 2**20)), ("next.txt", b"n")])
    found = _read(data, "x.tar.gz", Tables(archives=True))
    assert [row.failure.code if row.failure else row.data for row in found] == ["too_large", b"n"]


def test_zstd_in_and_out_of_archives() -> None:
    zstandard = pytest.importorskip("zstandard")
    packed = zstandard.ZstdCompressor().compress(tar([("a.csv.gz", gzip.compress(b"x\ny\n"))], "w"))
    found = _read(packed, "x.tar.zst", Tables((Column(1),), data=True, archives=True))
    assert [row.data for row in found] == [b"x", b"y"]
    frames = b"".join(zstandard.ZstdCompressor().compress(line) for line in (b"1\n2", b"3\n"))
    assert [row.data for row in _read(frames, "x.csv.zst", Tables((Column(1),), data=True))] == [b"1", b"23"]
    row = _read(frames[:-3], "x.csv.zst", Tables((Column(1),), data=True))[-1]
    assert row.failure is not None and row.failure.code == "invalid_zstd"


def test_every_place_in_an_archive_is_a_place_to_go_on_from() -> None:
    data = tar([("a.csv", b"1,x\n2\n3,z\n"), ("b.txt", b"t"), ("a.csv", b"4,x\n"), ("c.jsonl", b'{"a": 1}\n{\n')])
    tables = Tables((Column(2),), data=True, archives=True)
    whole = _read(data, "x.tar.gz", tables)
    assert len(whole) == 7
    for count, row in enumerate(whole, 1):
        member = None if row.member is None else row.member.index
        assert _read(data, "x.tar.gz", tables, Cursor(count, "x.tar.gz", row.line, None, member)) == whole[count:]
        assert _read(data, "x.tar.gz", tables, limit=count) == whole[:count]


class _Predictions(Handler):
    """Answers POSTs to ``/predictions/my_tc`` with the length of the text."""

    bodies: ClassVar[list[Any]] = []
    lock = threading.Lock()

    def do_POST(self) -> None:
        body = json.loads(self.received())
        with self.lock:
            self.bodies.append((self.path, self.headers["x-object-member"], body["text"]))
        self.answer(200, str(len(body["text"])).encode())


def test_a_table_in_an_archive_in_a_bucket_is_posted_column_by_column(bucket: str, tmp_path: Path) -> None:
    _Predictions.bodies.clear()
    archive = tar([("r/readme.txt", b"no table"), ("r/train.csv", reviews(9)), ("r/test.csv", reviews(2100))])
    plain_http.put(f"{os.environ['AWS_ENDPOINT_URL']}/{bucket}/r.tar.gz", content=archive).raise_for_status()
    out = tmp_path / "out"
    with serving(_Predictions) as url:
        where = ("run", "--input", f"s3://{bucket}/r.tar.gz", "--members", "**/test.csv", "--column", "3=text")
        to = ("--limit", 200, "--url", url, "--api", "torchserve", "--model", "my_tc", "--output", out)
        assert cloud(*where, *to) == 0
        found = rows(joined(out))
        assert cloud(*where, *to) == 0 and rows(joined(out)) == found
    texts = [row[2] for row in csv.reader(io.StringIO(reviews(200).decode()))]
    assert [predictions(row) for row in found] == [[len(text)] for text in texts]
    assert sorted(_Predictions.bodies) == sorted(("/predictions/my_tc", "r/test.csv", text) for text in texts)
    assert found[5]["member"] == {"index": 2, "name": "r/test.csv"} and found[5]["line"] == 7


def test_failed_rows_in_an_archive_are_tried_again_in_place(server: ModelServer, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    members = [("a.csv", b"prompt\none\nfail two\n"), ("b.csv", b"prompt\nfail three\nfour\n"), ("c.txt", b"fail five")]
    (tmp_path / "in/x.tar").write_bytes(tar(members, "w"))
    server.trouble = lambda prompt, before: {"message": "no"} if prompt.startswith("fail") else None
    run = ("run", "--input", tmp_path / "in", "--output", tmp_path / "out", "--url", server.url, "--part-rows", 2)
    assert cloud(*run) == 1
    before = rows(joined(tmp_path / "out"))
    assert [trouble(row) is None for row in before] == [True, False, False, True, False]
    server.trouble, server.asked = lambda prompt, before: None, []
    assert cloud(*run, "--retry-failed") == 0
    assert sorted(server.asked) == ["fail five", "fail three", "fail two"]
    after = rows(joined(tmp_path / "out"))
    assert [row["custom_id"] for row in after] == [row["custom_id"] for row in before]
    assert not any(map(trouble, after))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--column", "1=x"), "--column"),
        (("--column", "1", "--column", "2"), "--column"),
        (("--encoding", "base64"), "--encoding"),
        (("--delimiter", ";;"), "--delimiter"),
        (("--column", "0"), "--column"),
        (("--limit", "0"), "--limit"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(
    options: tuple[str, ...], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.csv").write_text("a\n")
    assert cloud("run", "--input", tmp_path, "--url", "http://127.0.0.1:9", "--model", "m", *options) == 2
    assert named in capsys.readouterr().err


_MEASURED = """
import asyncio, sys
from pathlib import Path
from mlserver_torch_stream.cloud.rows import Outcome
from mlserver_torch_stream.cloud.run import CloudRun, stream
from mlserver_torch_stream.cloud.tables import Column, Tables

async def infer(rows):
    return [Outcome({"size": row.size}) for row in rows]

async def main():
    run = CloudRun(sys.argv[1], tables=Tables((Column(2),), data=True, archives=True))
    count = 0
    async for result in stream(run, infer):
        assert result.outcome.failure is None and result.outcome.response["size"] == 20000, result
        count += 1
    status = Path("/proc/self/status").read_text()  # of this program alone, and not of the one that started it
    print(count, int(status.split("VmHWM:")[1].split()[0]) // 1024)

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_large_archive_of_wide_rows_is_read_in_bounded_memory(tmp_path: Path) -> None:
    words = [random.Random(n).randbytes(2000).hex() for n in range(64)]
    line = ("".join(words)[:20000]).encode()
    with tarfile.open(tmp_path / "wide.tar.gz", "w:gz", compresslevel=1) as archive:
        table = b"".join(b"%d,%s\n" % (n, line[n % 97 :] + line[: n % 97]) for n in range(5000))
        for number in range(3):
            info = tarfile.TarInfo(f"{number}.csv")
            info.size = len(table)
            archive.addfile(info, io.BytesIO(table))
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, tmp_path / "wide.tar.gz"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    count, megabytes = map(int, done.stdout.split())
    assert count == 15_000 and megabytes <= 200


@pytest.mark.slow
def test_ten_kills_inside_an_archive_leave_each_row_once_and_in_order(server: ModelServer, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    tables = {name: "prompt\n" + "".join(f"{name} {n}\n" for n in range(400)) for name in "ab"}
    members = [(f"{name}.csv", table.encode()) for name, table in tables.items()]
    (tmp_path / "in/x.tar.gz").write_bytes(tar(members))
    run = ("run", "--input", tmp_path / "in", "--output", tmp_path / "out", "--url", server.url, "--part-rows", 4)
    killed = 0
    for number in range(10):
        process = start(*run, "--concurrency", 4, "--window", 16)
        count = len(list((tmp_path / "out").glob("part-*"))) + 1 + number % 3
        wait_until(lambda count=count: len(list((tmp_path / "out").glob("part-*"))) >= count)
        process.kill()
        killed += finish(process)[0] == -signal.SIGKILL
        wait_until(lambda: server.flying == 0)
    delivered = {row["response"]["body"]["choices"][0]["text"][::-1] for row in rows(joined(tmp_path / "out"))}
    server.asked.clear()
    assert cloud(*run) == 0 and killed == 10 and delivered
    assert not delivered & set(server.asked)
    found = rows(joined(tmp_path / "out"))
    assert [row["custom_id"] for row in found] == [f"x.tar.gz/{m}.csv:{n}" for m in "ab" for n in range(2, 402)]
