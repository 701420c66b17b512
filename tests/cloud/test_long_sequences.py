"""Long sequences: an object larger than memory, and many kills in the middle of compressed data, sound and video.

Each handler keeps what a chunk leaves incomplete: the state of a decompression, part of a sample, part of a frame.
"""

from __future__ import annotations

import io
import json
import os
import random
import re
import signal
import struct
import subprocess
import time
import wave
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.cloud.command import FULL_SIZE, finish, joined, peak_mib, start
from tests.cloud.handlers import predictions, rows, write
from tests.cloud.sparse import MIB, made, sparse_bucket
from tests.waiting import alive

_CHUNK = 8 * MIB
_SIZE = (10 if FULL_SIZE else 1) * 1024 * MIB
_CHECKSUM = """
import zlib

state = {}

def handle(data, context):
    if data is None:
        return None
    name = context.get_request_header(0, "ts_request_sequence_id")
    state[name] = zlib.crc32(data[0]["body"], state.get(name, 0))
    return [state[name]]
"""
_SEQUENCES = 4  # at a time
_STATEFUL = {"batchSize": 1, "sequenceBatching": True, "sequenceMaxIdleMSec": 60_000, "maxNumSequence": _SEQUENCES}


@pytest.mark.slow
def test_a_large_object_keeps_its_state_in_256_mib(tmp_path: Path) -> None:
    """If ``FULL_SIZE`` is in the environment, the object has 10 GiB."""
    handler = write(tmp_path / "h", _CHECKSUM, minWorkers=1, maxWorkers=1, **_STATEFUL)
    with sparse_bucket({"a.bin": _SIZE}) as bucket:
        where = ("run", "--input", "s3://bucket", "--output", tmp_path / "out", *bucket.options())
        process = start(
            *where, "--handler", handler, "--extra", '{"ts": "shim"}', "--sequences", "--chunk-bytes", _CHUNK
        )
        peak = peak_mib(process, seconds=7_200)
        assert finish(process)[0] == 0
    (row,) = rows(joined(tmp_path / "out"))
    expected, checksum = [], 0
    for begin in range(0, _SIZE, _CHUNK):
        for piece in made(begin, begin + _CHUNK):
            checksum = zlib.crc32(piece, checksum)
        expected.append(checksum)
    assert predictions(row) == expected
    print(f"peak of the command {peak:.0f} MiB")
    assert peak <= 256


# Decompresses, finds the peak of each 100 samples, and takes frames apart at the markers of their begin and end.
_MEDIA = """
import os, struct, time, zlib
from pathlib import Path

state = {}

def text(found, body):
    found = found or zlib.decompressobj()
    return found, {"text": found.decompress(body).decode("latin-1")}

def sound(found, body):
    found = (found or b"") + body
    if not found.startswith(b"head"):
        begin = found.find(b"data")
        if begin < 0 or len(found) < begin + 8:
            return found, {"peaks": []}
        found = b"head" + found[begin + 8:]
    whole = (len(found) - 4) // 200 * 200
    samples = [struct.unpack("<100h", found[at : at + 200]) for at in range(4, 4 + whole, 200)]
    return b"head" + found[4 + whole:], {"peaks": [max(map(abs, each)) for each in samples]}

def video(found, body):
    found, frames = (found or b"") + body, []
    while (end := found.find(b"\\xff\\xd9")) >= 0:
        frames.append(zlib.crc32(found[found.index(b"\\xff\\xd8") : end + 2]))
        found = found[end + 2:]
    return found, {"frames": frames}

KINDS = {"zz": text, "wav": sound, "mjpeg": video}

def handle(data, context):
    if data is None:
        return None
    (row,) = data
    names = ("ts_request_sequence_id", "x-object-key", "x-chunk-index", "x-chunk-last")
    name, key, chunk, last = (context.get_request_header(0, header) for header in names)
    with (Path(__file__).parent / "notes").open("a") as notes:
        notes.write(f"{os.getpid()} {key} {chunk} {last}\\n")
    time.sleep(0.01)
    state[name], answer = KINDS[key.rpartition(".")[2]](state.get(name), bytes(row["body"]))
    return [answer]
"""
_MEDIA_CHUNK = 1_000
_OBJECTS = 20  # of each kind in a round
_DRAWS = range(7, 11 if FULL_SIZE else 8)  # of kills, each a test of its own, so that a run may go on where it stopped
_KILLS = 50 if FULL_SIZE else 8  # of a draw
_MAX_HITS = 2  # of one object, which fails at the third


def _zlib(draw: random.Random) -> bytes:
    return zlib.compress("".join(f"{draw.random()}\n" for _ in range(2_000)).encode())


def _wav(draw: random.Random) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(8_000)
        out.writeframes(struct.pack("<9000h", *(draw.randint(-32_768, 32_767) for _ in range(9_000))))
    return file.getvalue()


def _mjpeg(draw: random.Random) -> bytes:
    """Returns frames like those of JPEG, in whose data each 0xff is followed by 0."""
    bodies = (draw.randbytes(draw.randint(100, 3_000)).replace(b"\xff", b"\xff\0") for _ in range(12))
    return b"".join(b"\xff\xd8" + body + b"\xff\xd9" for body in bodies)


def _whole_answer(key: str, body: bytes) -> list[Any] | str:
    """Returns the answer of a handler that gets the object whole."""
    if key.endswith(".zz"):
        return zlib.decompress(body).decode()
    if key.endswith(".wav"):
        with wave.open(io.BytesIO(body)) as sound:
            samples = struct.unpack("<9000h", sound.readframes(9_000))
        return [max(map(abs, samples[at : at + 100])) for at in range(0, 9_000, 100)]
    return [zlib.crc32(frame) for frame in re.findall(rb"\xff\xd8.*?\xff\xd9", body, re.DOTALL)]


def _joined_answer(found: list[dict[str, Any]]) -> list[Any] | str:
    if "text" in found[0]:
        return "".join(each["text"] for each in found)
    return [value for each in found for values in each.values() for value in values]


class _Round:
    """A run over the objects. Its workers are killed at random times, and sometimes the command itself.

    An object fails if its sequence is lost three times within one command, so no worker is killed while any unwritten
    object may already have been hit by two kills. ``kills`` counts those of workers and of commands while an object is
    open.
    """

    def __init__(self, run: tuple[Any, ...], folder: Path, out: Path, draw: random.Random) -> None:
        self._run, self._notes, self._out, self._draw = run, folder / "h" / "notes", out, draw
        self._keys = sorted(path.name for path in (folder / "in").iterdir())
        self._notes.unlink(missing_ok=True)
        self._began = 0  # notes before those of this command
        self._hits: Counter[str] = Counter()
        self.kills: Counter[str] = Counter()

    def until_its_end(self, most: int) -> None:
        process = start(*self._run)
        while process.poll() is None:
            noted = self._lines()
            time.sleep(self._draw.uniform(0, 1))
            if self.kills.total() < most and len(self._lines()) > len(noted):  # a worker is at work
                process = self._kill(process)
        status, _, err = finish(process)
        assert status == 0, err

    def _kill(self, process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        if self._draw.random() >= 0.15:
            self._kill_worker()
            return process
        process.send_signal(signal.SIGKILL)
        self.kills["command"] += finish(process)[0] == -signal.SIGKILL
        self._began = len(self._lines())
        self._hits.clear()
        return start(*self._run)

    def _kill_worker(self) -> None:
        lines = self._lines()
        written = {row["key"] for row in rows(joined(self._out))}
        begun = {key for _, key, _, _ in lines[self._began :]}
        unwritten = [key for key in self._keys if key not in written]
        may_be_hit = [key for key in unwritten if key in begun]
        may_be_hit += [key for key in unwritten if key not in begun][:_SEQUENCES]
        pid, _, _, last = lines[-1]
        if any(self._hits[key] >= _MAX_HITS for key in may_be_hit) or not alive(int(pid)):
            return
        os.kill(int(pid), signal.SIGKILL)
        self._hits.update(may_be_hit)
        self.kills["worker"] += last == "false"

    def _lines(self) -> list[list[str]]:
        return [line.split() for line in self._notes.read_text().splitlines()] if self._notes.exists() else []


@pytest.mark.slow
@pytest.mark.parametrize("seed", _DRAWS)
def test_after_kills_at_random_the_answers_are_those_to_whole_objects(seed: int, tmp_path: Path) -> None:
    """If ``FULL_SIZE`` is in the environment, there are 200 kills in four draws.

    ``-p tests.resuming`` continues a run.
    """
    draw = random.Random(seed)
    kinds = {"zz": _zlib, "wav": _wav, "mjpeg": _mjpeg}
    objects = {f"{number:02}.{end}": make(draw) for number in range(_OBJECTS) for end, make in kinds.items()}
    (tmp_path / "in").mkdir()
    for key, body in objects.items():
        (tmp_path / "in" / key).write_bytes(body)
    handler = write(tmp_path / "h", _MEDIA, minWorkers=2, maxWorkers=2, **_STATEFUL)
    options = ("--chunk-bytes", _MEDIA_CHUNK, "--sequences", "--part-rows", 1, "--extra", '{"ts": "shim"}')
    run = ("run", "--input", tmp_path / "in", "--handler", handler, *options)
    kills: Counter[str] = Counter()
    for number in range(_KILLS):
        out = tmp_path / f"out{number}"
        killed = _Round((*run, "--output", out), tmp_path, out, draw)
        killed.until_its_end(_KILLS - kills.total())
        kills += killed.kills
        found = rows(joined(out))
        assert [row["key"] for row in found] == sorted(objects)
        assert [len(predictions(row)) for row in found] == [-(-len(objects[row["key"]]) // 1_000) for row in found]
        assert all(_joined_answer(predictions(row)) == _whole_answer(row["key"], objects[row["key"]]) for row in found)
        print(json.dumps(kills), flush=True)
        if kills.total() >= _KILLS:
            break
    assert kills.total() >= _KILLS and min(kills["worker"], kills["command"]) > 0
