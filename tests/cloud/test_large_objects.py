"""Objects larger than their memory limit, from a server that generates their bytes, through a handler."""

from __future__ import annotations

import json
import signal
import struct
import subprocess
import sys
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.cloud.command import finish, joined, peak_mib, start
from tests.cloud.handlers import predictions, rows, write
from tests.cloud.sparse import MIB, SparseBucket, sparse_bucket
from tests.markdown import ROOT

_GIB5 = 5 * 2**30
_CHUNK = 8 * MIB
# Counts and sums up what comes, as a handler that looks at a video chunk by chunk.
_COUNT = """
import zlib

def handle(data, context):
    if data is None:
        return None
    chunks = [context.get_request_header(index, "x-chunk-index") for index in range(len(data))]
    return [
        {"bytes": len(row["body"]), "crc": zlib.crc32(row["body"]), "chunk": chunk} for row, chunk in zip(data, chunks)
    ]
"""


@pytest.mark.long
def test_an_object_in_chunks_needs_no_more_memory_than_the_bounds_say() -> None:
    """Measured: 45 to 55 MiB, of which 25 are libraries; reading the 128 MiB as a whole would need more than 256."""
    with sparse_bucket({"a.bin": 128 * MIB}) as bucket:
        script = [sys.executable, "-m", "tests.cloud.chunked", bucket.url, "1", "8"]
        told = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout)
    assert (found["rows"], found["bytes"]) == (128, 128 * MIB)
    assert found["crc"] == zlib.crc32(b"".join(map(_block, range(128))))
    assert found["grown_mib"] <= 80


def _block(number: int) -> bytes:
    return struct.pack(">Q", number) + _zeros()


@cache
def _zeros() -> bytes:
    return bytes(MIB - 8)


def _chunk_crc(number: int) -> int:
    return zlib.crc32(b"".join(_block(number * 8 + each) for each in range(8)))


def _command(bucket: SparseBucket, folder: Path, out: str, mode: str) -> tuple[Any, ...]:
    where = ("run", "--input", "s3://bucket", "--output", folder / out, *bucket.options())
    bounds = ("--chunk-bytes", _CHUNK, "--prefetch-bytes", "32MiB", "--window-bytes", "32MiB", "--part-rows", "16")
    handler = ("--handler", folder / "h/handler.py", "--extra", '{"ts": "shim"}', "--batch-rows", "4")
    return (*where, *bounds, *handler, "--batch-bytes", "16MiB", "--rows", mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["chunk", "object"])
def test_500_images_and_5_gib_come_in_order_within_bounds_and_resume_byte_for_byte(tmp_path: Path, mode: str) -> None:
    """Measured: about 320 MiB, of which 150 are libraries."""
    write(tmp_path / "h", _COUNT)
    images: dict[str, bytes | int] = {f"{number:04}.png": b"%04d" % number * 50 for number in range(500)}
    with sparse_bucket({**images, "0250-video.mp4": _GIB5}) as bucket:
        whole = start(*_command(bucket, tmp_path, "whole", mode))
        peak = peak_mib(whole)
        assert finish(whole, 900)[0] == 0
        _check_rows(rows(joined(tmp_path / "whole")), mode)
        assert peak <= 450

        killed = start(*_command(bucket, tmp_path, "out", mode))
        part = tmp_path / "out" / f"part-{20 if mode == 'chunk' else 15:06d}.jsonl"
        peak_mib(killed, part.exists)
        killed.send_signal(signal.SIGKILL)
        assert finish(killed)[0] == -signal.SIGKILL
        before = len(rows(joined(tmp_path / "out")))
        assert 0 < before < (1140 if mode == "chunk" else 501)
        again = start(*_command(bucket, tmp_path, "out", mode))
        assert peak_mib(again) <= 450 and finish(again, 900)[0] == 0
    assert joined(tmp_path / "out") == joined(tmp_path / "whole")


def _check_rows(found: list[dict[str, Any]], mode: str) -> None:
    keys = sorted([*(f"{number:04}.png" for number in range(500)), "0250-video.mp4"])
    assert [row["index"] for row in found] == list(range(len(found)))
    assert list(dict.fromkeys(row["key"] for row in found)) == keys
    count = _GIB5 // _CHUNK
    assert len(found) == (500 + count if mode == "chunk" else 501)
    video = [each for row in found if row["key"] == "0250-video.mp4" for each in predictions(row)]
    assert [each["chunk"] for each in video] == [str(number) for number in range(count)]
    assert {each["bytes"] for each in video} == {_CHUNK}
    assert [video[number]["crc"] for number in (0, 1, count - 1)] == [_chunk_crc(n) for n in (0, 1, count - 1)]


@pytest.mark.long
def test_the_chunks_of_an_object_are_asked_for_in_ranges_that_hold_whole_chunks() -> None:
    with sparse_bucket({"a.bin": 20 * MIB + 1}) as bucket:
        script = [sys.executable, "-m", "tests.cloud.chunked", bucket.url, "3", "8"]
        assert subprocess.run(script, cwd=ROOT, capture_output=True, timeout=300).returncode == 0
        ranges = sorted((begin, end) for _, begin, end in bucket.ranges)
    assert ranges == [(begin * MIB, min(begin + 6, 20 + 1 / MIB) * MIB) for begin in (0, 6, 12, 18)]
