"""Rows in gzip: the same rows, in bounded memory, and one error row where the data is damaged."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlserver_torch_stream.cli.progress import Total, progress_line
from mlserver_torch_stream.cloud.rows import Row
from mlserver_torch_stream.cloud.run_metrics import RunMetrics
from mlserver_torch_stream.cloud.source import Cursor, Listed, Source
from mlserver_torch_stream.cloud.store import Store
from mlserver_torch_stream.gunzip import PIECE_BYTES, Damaged, Gunzip
from tests.cloud.command import cloud
from tests.cloud.models import ModelServer


def _opened(data: bytes, size: int) -> bytes:
    gunzip = Gunzip(padded=True)
    found = [piece for at in range(0, len(data), size) for piece in gunzip.feed(data[at : at + size])]
    gunzip.end()
    return b"".join(found)


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=4), st.integers(1, 90), st.integers(0, 600))
def test_members_in_any_chunks_are_one_stream_and_padding_is_none_of_it(
    members: list[bytes], size: int, padding: int
) -> None:
    data = b"".join(gzip.compress(member) for member in members) + b"\0" * padding
    assert _opened(data, size) == b"".join(members)


def test_zeros_behind_a_member_are_damage_unless_padding_is_allowed() -> None:
    with pytest.raises(Damaged):
        list(Gunzip().feed(gzip.compress(b"row") + b"\0\0"))


@given(st.binary(max_size=300), st.integers(1, 90))
def test_no_piece_is_larger_than_asked_for(data: bytes, most: int) -> None:
    pieces = list(Gunzip().feed(gzip.compress(data), most))
    assert b"".join(pieces) == data and all(len(piece) <= most for piece in pieces)


@pytest.mark.parametrize(
    "damage",
    [
        *(lambda data, left=left: data[:left] for left in (-9, -1, 10, 1, 0)),
        lambda data: data + data[:1],
        lambda data: data[:40] + b"!!" + data[42:],
        lambda data: b"{}",
    ],
)
def test_what_is_damaged_is_never_taken_for_whole(damage: Any) -> None:
    with pytest.raises(Damaged):
        _opened(damage(gzip.compress(os.urandom(500))), 64)


@pytest.mark.long
def test_a_few_bytes_that_unfold_to_many_come_in_pieces() -> None:
    data = gzip.compress(bytes(200 * 2**20), 9)
    tracemalloc.start()
    try:
        sizes = [len(piece) for piece in Gunzip().feed(data)]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(sizes) == 200 * 2**20 and max(sizes) <= PIECE_BYTES and peak < 8 * PIECE_BYTES


def _rows(body: bytes, cursor: Cursor | None = None, lines: dict[str, set[int]] | None = None) -> list[Row]:
    async def read() -> list[Row]:
        store = Store.memory()
        await store.put("a.jsonl.gz", body)
        source = Source(store, [Listed(await store.head("a.jsonl.gz"))], block=1000, lines=lines)
        return [row async for row in source.rows(cursor or Cursor())]

    return asyncio.run(read())


_BODY = gzip.compress(b"".join(b'{"prompt": "%s"}\n' % os.urandom(20).hex().encode() for _ in range(200)))


def test_rows_are_numbered_and_resumed_as_those_of_the_opened_object() -> None:
    whole = _rows(_BODY)
    assert [(row.index, row.line) for row in whole] == [(index, index + 1) for index in range(200)]
    assert all(row.failure is None for row in whole)
    assert _rows(_BODY, Cursor(150, "a.jsonl.gz", 150)) == whole[150:]
    assert [row.line for row in _rows(_BODY, lines={"a.jsonl.gz": {7, 130}})] == [7, 130]


def test_where_it_breaks_one_error_row_stands_for_the_rest() -> None:
    rows = _rows(_BODY[:-500])
    assert 0 < len(rows) < 200 and [row.index for row in rows] == list(range(len(rows)))
    assert [row.failure and row.failure.code for row in rows[-2:]] == [None, "invalid_gzip"]
    assert rows[-1].line is None


@pytest.mark.parametrize(("body", "said"), [(b"", "is empty, so it is not gzip"), (_BODY[:3], "ends too early")])
def test_an_object_without_a_whole_row_is_one_error_row(body: bytes, said: str) -> None:
    (row,) = _rows(body)
    assert row.failure is not None and row.failure.code == "invalid_gzip" and said in row.failure.message
    assert _rows(gzip.compress(b"")) == []


def test_junk_behind_the_last_member_is_one_error_row_however_much_of_it_there_is() -> None:
    rows = _rows(_BODY + b"junk" * 2000)
    assert len(rows) == 201 and [row.failure and row.failure.code for row in rows[-2:]] == [None, "invalid_gzip"]


def test_the_command_reads_gzip_and_claims_to_know_no_end_of_it(
    tmp_path: Path, server: ModelServer, capsys: Any
) -> None:
    (tmp_path / "in").mkdir()
    lines = "".join(json.dumps({"prompt": f"row {i}"}) + "\n" for i in range(5))
    (tmp_path / "in" / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "in" / "b.GZ").write_bytes(gzip.compress(lines.encode()))
    run = ("run", "--input", tmp_path / "in", "--url", server.url)
    assert cloud(*run) == 2
    assert "contains b.GZ, which is compressed" in capsys.readouterr().err
    assert cloud(*run, "--as", "jsonl", "--progress", "on") == 0
    out, err = capsys.readouterr()
    assert [json.loads(line)["custom_id"] for line in out.splitlines()][4:6] == ["a.jsonl.gz:5", "b.GZ:1"]
    assert "?%" in err and "ETA -:--" in err
    assert " of " not in progress_line(RunMetrics(rows=3, input_bytes=9), Total(None, None), 1.0)
