"""Rows of Parquet: read by row groups and ranges, with columns as prompts and bodies, and in archives up to a limit."""

from __future__ import annotations

import asyncio
import datetime
import io
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from mlserver_torch_stream.cloud import parquet
from mlserver_torch_stream.cloud.parse import Chunking
from mlserver_torch_stream.cloud.rows import Kind, StoreUnavailable
from mlserver_torch_stream.cloud.run import CloudRun, stream
from mlserver_torch_stream.cloud.tables import Column, RowReader, TableBroken, Tables
from tests.cloud.archives import tar
from tests.cloud.command import cloud
from tests.cloud.faulty import Fault, FaultyServer, faulty_server
from tests.cloud.jobs import Model, job, joined, run
from tests.cloud.models import ModelServer

_PROMPT = Tables((Column("question", "prompt"), Column("id", "custom_id")), archives=True)


def _file(count: int, group: int = 10, filler: int = 0, **columns: Any) -> bytes:
    """Returns a file of ``count`` questions in groups of ``group`` rows, with ``filler`` further bytes in each row."""
    table = {
        "id": [f"r{i}" for i in range(count)],
        "filler": [bytes(filler)] * count,
        "question": [f"fail {i}" if i == 5 else f"row {i}" for i in range(count)],
        **columns,
    }
    found = io.BytesIO()
    options: Any = {"row_group_size": group, "compression": "none", "use_dictionary": False}
    pyarrow.parquet.write_table(pyarrow.table(table), found, **options)
    return found.getvalue()


@pytest.fixture
def server_of_objects() -> Iterator[FaultyServer]:
    with faulty_server() as server:
        yield server


def _write(folder: Path, name: str, data: bytes) -> None:
    (folder / "in").mkdir(exist_ok=True)
    (folder / "in" / name).write_bytes(data)


def _rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in joined(folder).splitlines()]


def _bodies(folder: Path, tables: Tables, whole_bytes: int = 2**20) -> list[Any]:
    """Returns what a model gets for each row: its body or bytes, or the code of its error."""

    async def collect() -> list[Any]:
        made = CloudRun(str(folder / "in"), tables=tables, chunking=Chunking(whole_bytes=whole_bytes))
        found: list[Any] = []

        async def keep(rows: Any) -> list[Any]:
            found.extend(row.body if row.body is not None else row.data for row in rows)
            return await Model()([replace(row, body=None, data=b"") for row in rows])

        failures = [result.outcome.failure async for result in stream(made, keep)]
        return found + [each.code for each in failures if each is not None]

    return asyncio.run(collect())


def test_each_record_is_a_row_in_its_place_beside_other_tables(tmp_path: Path) -> None:
    _write(tmp_path, "a.csv", b"id,question\nc,csv\n")
    _write(tmp_path, "b.parquet", _file(25))
    assert run(job(tmp_path, tables=_PROMPT), Model()) == 1
    rows = _rows(tmp_path)
    assert [row["custom_id"] for row in rows] == ["c", *(f"r{i}" for i in range(25))]
    assert [row["line"] for row in rows] == [2, *range(1, 26)]
    assert [row["index"] for row in rows if row["error"]] == [6]


@pytest.mark.parametrize("lasts", [4, 11, 23])
def test_a_run_that_died_infers_no_row_twice(tmp_path: Path, lasts: int) -> None:
    _write(tmp_path, "a.parquet", _file(25))
    _write(tmp_path, "b.tar", tar([("x.parquet", _file(12)), ("y.parquet", _file(3))], "w"))
    run(job(tmp_path, tables=_PROMPT, output=str(tmp_path / "whole")), Model())
    with pytest.raises(StoreUnavailable):
        run(job(tmp_path, tables=_PROMPT), Model(lasts=lasts))
    written = len(_rows(tmp_path))
    rest = Model()
    run(job(tmp_path, tables=_PROMPT), rest)
    assert len(rest.asked) == 40 - written
    assert joined(tmp_path) == joined(tmp_path, "whole")


def test_only_the_chosen_columns_of_wanted_row_groups_are_fetched(
    server_of_objects: FaultyServer, tmp_path: Path
) -> None:
    data = _file(40, 10, filler=100_000)
    server_of_objects.objects["/a.parquet"] = data
    made = replace(job(tmp_path, tables=_PROMPT), input=f"{server_of_objects.url}/a.parquet")
    with pytest.raises(StoreUnavailable):
        run(made, Model(lasts=30))
    server_of_objects.asked.clear()
    server_of_objects.faults["/a.parquet"] = [Fault("cut")]
    assert run(made, Model()) == 1
    ranges = [asked.removeprefix("bytes=").split("-") for asked in server_of_objects.gets("/a.parquet") if asked]
    nbytes = sum(int(last) + 1 - int(first) for first, last in ranges)
    assert len(_rows(tmp_path)) == 40 and len(ranges) > 2
    assert min(int(first) for first, _ in ranges) >= 20 * 100_000
    assert nbytes < 2 * parquet.FOOTER_TAIL_BYTES + 50_000 < len(data) / 10


def test_a_footer_that_is_longer_than_the_first_look_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: dict[str, Any] = {f"a column with a long name {i:04}": [0, 1] for i in range(3000)}
    data = _file(2, **names)
    assert int.from_bytes(data[-8:-4], "little") > parquet.FOOTER_TAIL_BYTES
    _write(tmp_path, "a.parquet", data)
    assert run(job(tmp_path, tables=_PROMPT), Model()) == 0
    assert len(_rows(tmp_path)) == 2


def test_without_columns_the_record_is_the_body_as_json_has_it(tmp_path: Path) -> None:
    columns: dict[str, list[Any]] = {
        "prompt": ["é", "b"],
        "max_tokens": [1, None],
        "when": [datetime.datetime(2026, 11, 27, 20), datetime.date(2026, 1, 2)],
    }
    columns["when"] = [datetime.datetime(2026, 11, 27, 20), None]
    columns["price"] = [Decimal("1.50"), None]
    columns["tags"] = [["x", None], []]
    found = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), found)
    _write(tmp_path, "a.parquet", found.getvalue())
    first, second = _bodies(tmp_path, Tables())
    assert first == {
        "prompt": "é",
        "max_tokens": 1,
        "when": "2026-11-27T20:00:00",
        "price": "1.50",
        "tags": ["x", None],
    }
    assert second == {"prompt": "b", "tags": []}


def test_a_column_of_bytes_is_the_body_for_handlers_and_no_part_of_json(tmp_path: Path) -> None:
    _write(tmp_path, "a.parquet", _file(2, image=[b"\x00\xff", b"b"], score=[float("nan"), 1.0]))
    assert _bodies(tmp_path, Tables((Column("image"),), data=True)) == [b"\x00\xff", b"b"]
    assert _bodies(tmp_path, Tables((Column(3, "text"), Column("image", "image")), data=True)) == ["invalid_row"] * 2
    assert _bodies(tmp_path, Tables((Column("score", "score"),), data=True)) == [b'{"score": 1.0}', "invalid_row"]


def test_a_member_over_the_bound_is_refused_by_name_and_the_next_one_is_read(tmp_path: Path) -> None:
    members = [("big.parquet", _file(3, filler=2**20)), ("bad.parquet", b"PAR1"), ("x.parquet", _file(2))]
    _write(tmp_path, "a.tar.gz", tar(members))
    found = _bodies(tmp_path, _PROMPT, whole_bytes=2**20)
    assert found == [b"row 0", b"row 1", "too_large", "invalid_table"]


@pytest.mark.parametrize(
    ("data", "columns", "named"),
    [
        (b"", ("question",), "is not a Parquet file"),
        (b"PAR1" + b"x" * 100 + b"PAR1", ("question",), "has a footer of"),
        (_file(3)[:-9] + b"x" + _file(3)[-8:], ("nothing",), "cannot be read"),
        (_file(3), ("nothing",), "has no column 'nothing'"),
        (_file(3), (9,), "has only 3 columns, so there is no column 9"),
        (b"PAR1" + b"\xff" * 200 + _file(30)[204:], ("id",), "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error_row_and_the_run_goes_on(
    tmp_path: Path, data: bytes, columns: tuple[str | int, ...], named: str
) -> None:
    _write(tmp_path, "a.parquet", data)
    _write(tmp_path, "b.csv", b"question,nothing,id\n" + b"x,y,z\n")
    tables = Tables(tuple(Column(column) for column in columns), header=True)
    run(job(tmp_path, tables=tables), Model())
    first, *_ = _rows(tmp_path)
    assert first["error"]["code"] == "invalid_table" and named in first["error"]["message"]
    assert _rows(tmp_path)[-1]["key"] == "b.csv"


def test_no_changed_byte_of_a_footer_ends_the_process_or_the_run() -> None:
    """With some of these changes, pyarrow 26 ends the process if a column is read before its row group."""
    whole = _file(4)
    footer = int.from_bytes(whole[-8:-4], "little")
    broken = 0
    for place in range(len(whole) - 8 - footer, len(whole) - 8):
        data = whole[:place] + bytes([(whole[place] + 1) % 256]) + whole[place + 1 :]
        reader = RowReader("k", Kind.PARQUET, _PROMPT)
        try:
            list(parquet.parquet_rows(data, _PROMPT, reader, lambda line: True))
        except TableBroken:
            broken += 1
    assert 0 < broken < footer


def test_without_the_library_the_extra_is_named(
    tmp_path: Path, server: ModelServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    _write(tmp_path, "a.parquet", _file(2))
    assert cloud("run", "--input", tmp_path / "in", "--column", "question", "--url", server.url) == 2
    said = capsys.readouterr().err
    assert "--input: contains a.parquet, which is Parquet, which needs the extra [parquet]" in said
    _write(tmp_path, "a.parquet", b"")
    assert _bodies(tmp_path, _PROMPT) == ["refused"]


def test_the_command_answers_tables_in_files_of_their_own(tmp_path: Path, server: ModelServer, capsys: Any) -> None:
    _write(tmp_path, "a.csv", b"id,question\nc,csv\n")
    _write(tmp_path, "b.parquet", _file(3))
    assert cloud("run", "--input", tmp_path / "in", "--column", "question", "--url", server.url) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["key"], row["line"]) for row in rows] == [("a.csv", 2), *(("b.parquet", i) for i in (1, 2, 3))]
    assert sorted(server.asked) == ["csv", "row 0", "row 1", "row 2"]


def test_a_watcher_answers_the_records_of_files_that_appear(tmp_path: Path, server: ModelServer) -> None:
    """A file has one result with all its rows; an archive of files has parts."""
    _write(tmp_path, "a.parquet", _file(25))
    _write(tmp_path, "b.tar", tar([("x.parquet", _file(3))], "w"))
    _write(tmp_path, "c.parquet", b"PAR1")
    watch = ("watch", "--input", tmp_path / "in", "--output", tmp_path / "out", "--poll", "0.05", "--limit", 3)
    assert cloud(*watch, "--column", "question", "--url", server.url) == 1
    lines = [line for path in (tmp_path / "out").glob("**/*.jsonl") for line in path.read_text().splitlines()]
    found = [row for row in map(json.loads, lines) if "index" in row]
    answered = [row for row in found if row["response"]]
    texts = {(row["key"], row["line"]): row["response"]["body"]["choices"][0]["text"][::-1] for row in answered}
    assert texts == {
        **{("a.parquet", i + 1): f"{'fail' if i == 5 else 'row'} {i}" for i in range(25)},
        **{("b.tar", i + 1): f"row {i}" for i in range(3)},
    }
    assert [(row["key"], row["error"]["code"]) for row in found if row["error"]] == [("c.parquet", "invalid_table")]
    assert len(found) == len(texts) + 1


def test_failed_rows_are_read_again_by_their_numbers(tmp_path: Path) -> None:
    _write(tmp_path, "a.parquet", _file(25))
    made = job(tmp_path, tables=_PROMPT)
    assert run(made, Model()) == 1
    again = Model(fails="never")
    assert run(replace(made, retry_failed=True), again) == 0
    assert again.asked == ["r5"]


def test_as_parquet_reads_objects_of_any_name(tmp_path: Path) -> None:
    _write(tmp_path, "rows", _file(3))
    run(job(tmp_path, tables=_PROMPT, kind=Kind.PARQUET), Model())
    assert len(_rows(tmp_path)) == 3
