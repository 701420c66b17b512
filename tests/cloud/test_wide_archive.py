"""One large archive in a bucket, through a handler: in bounded memory, and each row once although the run is killed."""

from __future__ import annotations

import asyncio
import random
import signal
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import obstore
import pytest

from mlserver_torch_stream.cloud.store import settle
from tests.cloud.command import FULL_SIZE, finish, joined, peak_mib, start
from tests.cloud.handlers import predictions, rows, write
from tests.cloud.seaweedfs import s3_server
from tests.cloud.wide_archive import write_wide_archive

_ROWS = 262_144 if FULL_SIZE else 24_000  # 5 GiB of CSV
_KILLS = 10
_KILLED_ROWS = 20_000
_PART_ROWS = 64
_TIMEOUT_S = 7_200.0
# Answers a batch at once. Notes the rows that it gets.
_CHECKSUM = """
import zlib
from pathlib import Path

def handle(data, context):
    if data is None:
        return None
    lines = [(context.get_request_header(index, "x-object-member"), context.get_request_header(index, "x-object-line"))
             for index in range(len(data))]
    with (Path(__file__).parent / "notes").open("a") as notes:
        notes.writelines(f"{member} {line}\\n" for member, line in lines)
    return [zlib.crc32(row["body"].encode() if isinstance(row["body"], str) else row["body"]) for row in data]
"""


@contextmanager
def _bucket(folder: Path) -> Iterator[tuple[list[str], array[int]]]:
    """Yields the options with which ``s3://bucket/wide.tar.gz`` is reached, and the checksums of its rows."""
    archive = folder / "wide.tar.gz"
    checksums = write_wide_archive(archive, _ROWS)
    (folder / "s3").mkdir()
    with s3_server(folder / "s3", "bucket") as options:

        async def upload() -> None:
            store = obstore.store.from_url("s3://bucket", config=options, client_options={"allow_http": True})
            await obstore.put_async(store, archive.name, archive)
            await settle()

        asyncio.run(upload())
        archive.unlink()
        yield [word for name, value in options.items() for word in ("--storage", f"{name}={value}")], checksums


def _parts(out: Path) -> int:
    return sum(name.name.startswith("part-") for name in out.iterdir()) if out.exists() else 0


def _has_parts(out: Path, count: int) -> bool:
    return _parts(out) >= count


@pytest.mark.slow
def test_a_large_archive_is_read_in_200_mib_and_ten_kills_leave_each_row_once_and_in_order(
    tmp_path: Path,
) -> None:
    """If ``FULL_SIZE`` is in the environment, the archive has 1 GiB, and its tables have 5 GiB."""
    handler, out, draw = write(tmp_path / "h", _CHECKSUM, batchSize=16), tmp_path / "out", random.Random(36)
    with _bucket(tmp_path) as (storage, checksums):
        run: tuple[Any, ...] = ("run", "--input", "s3://bucket/wide.tar.gz", "--output", out, *storage)
        run = (*run, "--handler", handler, "--extra", '{"ts": "shim"}', "--column", "2", "--part-rows", _PART_ROWS)
        peaks = []
        for count in sorted(draw.sample(range(1, _KILLED_ROWS // _PART_ROWS - 10), _KILLS)):
            killed = start(*run)
            peaks.append(peak_mib(killed, partial(_has_parts, out, max(count, _parts(out) + 1))))
            killed.send_signal(signal.SIGKILL)
            assert finish(killed)[0] == -signal.SIGKILL
        written = _parts(out) * _PART_ROWS
        assert written <= _KILLED_ROWS
        notes = tmp_path / "h" / "notes"
        notes.unlink()
        last = start(*run)
        peaks.append(peak_mib(last, seconds=_TIMEOUT_S))
        assert finish(last)[0] == 0
    assert len(set(notes.read_text().splitlines())) == len(notes.read_text().splitlines()) == _ROWS - written
    found = rows(joined(out))
    assert [row["index"] for row in found] == list(range(_ROWS))
    assert [(row["member"]["index"], row["line"]) for row in found] == [(n // 1000, n % 1000 + 1) for n in range(_ROWS)]
    assert [each for row in found for each in predictions(row)] == list(checksums)
    print(f"peak of the command {max(peaks):.0f} MiB; {peaks}")
    assert max(peaks) <= 200
