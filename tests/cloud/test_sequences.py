"""``cloud run --sequences``: the chunks of an object share the state of one worker, from the first chunk on."""

from __future__ import annotations

import random
import zlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from mlserver_torch_stream.cloud.source import BLOCK_BYTES
from tests.cloud.command import cloud, finish, joined, start, trouble
from tests.cloud.handlers import predictions, rows, write
from tests.cloud.sparse import sparse_bucket
from tests.waiting import wait_until

_CHUNK = 1000
# The checksum of all bytes so far of a sequence. Notes each chunk; dies, raises, hangs and waits as files say.
_STATEFUL = """
import os, time, zlib
from pathlib import Path

HERE = Path(__file__).parent
state = {}

def handle(data, context):
    if data is None:
        return None
    found = []
    for index, row in enumerate(data):
        body = bytes(row.get("data") or row.get("body") or b"")
        name, key, chunk, last = (
            context.get_request_header(index, header)
            for header in ("ts_request_sequence_id", "x-object-key", "x-chunk-index", "x-chunk-last")
        )
        starts = context.get_request_header(index, "ts_request_sequence_start") == "true"
        with open(HERE / "notes", "a") as notes:
            notes.write(f"{os.getpid()} {name} {key} {chunk} {len(data)}\\n")
        if starts:
            state[name] = 0
        def hold():
            while not (HERE / "go").exists():
                time.sleep(0.01)
        for what, act in (("die", lambda: os._exit(9)), ("hang", lambda: time.sleep(600)), ("hold", hold)):
            flag = HERE / f"{what}-{key}-{chunk}"
            if flag.exists():
                flag.read_text() or flag.unlink()
                act()
        if (HERE / f"raise-{key}-{chunk}").exists():
            raise ValueError("as asked")
        time.sleep(0.01)
        state[name] = zlib.crc32(body, state[name])
        found.append({"chunk": int(chunk), "crc": state[name]})
        if last == "true":
            del state[name]
    return found
"""
_CONFIG = {"sequenceBatching": True, "sequenceMaxIdleMSec": 60_000, "maxNumSequence": 4, "minWorkers": 2}


def _objects() -> dict[str, bytes]:
    draw = random.Random(5)
    return {f"{number}.bin": draw.randbytes(size) for number, size in enumerate((4500, 3000, 10, 0, 5200, 2500))}


@pytest.fixture
def run(tmp_path: Path) -> tuple[Any, ...]:
    """The command without --output. Its handler is in ``h``."""
    (tmp_path / "in").mkdir()
    for key, body in _objects().items():
        (tmp_path / "in" / key).write_bytes(body)
    handler = write(tmp_path / "h", _STATEFUL, batchSize=1, **{**_CONFIG, "maxWorkers": 2})
    options = ("--chunk-bytes", _CHUNK, "--sequences", "--part-rows", 2, "--extra", '{"ts": "shim"}')
    return ("run", "--input", tmp_path / "in", "--handler", handler, *options)


def _whole(key: str) -> list[dict[str, Any]]:
    """Returns the predictions for an object whose chunks one worker has got in order."""
    body = _objects()[key]
    ends = [*range(_CHUNK, len(body), _CHUNK), len(body)]
    return [{"chunk": number, "crc": zlib.crc32(body[:end])} for number, end in enumerate(ends)]


def _notes(folder: Path) -> list[list[str]]:
    path = folder / "h" / "notes"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def _chunks_of_sequences(folder: Path) -> dict[str, list[tuple[str, list[int]]]]:
    """Returns for each key the sequences of the object: the pid and the chunks of each."""
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    pids: dict[tuple[str, str], set[str]] = defaultdict(set)
    for pid, name, key, chunk, _ in _notes(folder):
        found[key, name].append(int(chunk))
        pids[key, name].add(pid)
    assert all(len(each) == 1 for each in pids.values()), "a sequence was in two workers"
    keys: dict[str, list[tuple[str, list[int]]]] = defaultdict(list)
    for (key, name), chunks in found.items():
        (pid,) = pids[key, name]
        keys[key].append((pid, chunks))
    return keys


@pytest.mark.slow
def test_the_chunks_of_an_object_go_to_one_worker_in_order_and_objects_run_beside_each_other(
    run: tuple[Any, ...], tmp_path: Path
) -> None:
    assert cloud(*run, "--output", tmp_path / "out") == 0
    found = rows(joined(tmp_path / "out"))
    assert [row["key"] for row in found] == sorted(_objects())
    assert all(predictions(row) == _whole(row["key"]) for row in found)
    sequences = _chunks_of_sequences(tmp_path)
    for key in _objects():
        ((_, chunks),) = sequences[key]
        assert chunks == list(range(len(_whole(key))))
    keys = [key for _, _, key, _, _ in _notes(tmp_path)]
    assert keys != sorted(keys) and len({pid for pid, *_ in _notes(tmp_path)}) == 2


@pytest.mark.parametrize("chunk", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_when_a_worker_dies_its_object_begins_anew_with_another_id_and_no_other_does(
    run: tuple[Any, ...], tmp_path: Path, chunk: int
) -> None:
    (tmp_path / "h" / f"die-4.bin-{chunk}").touch()
    assert cloud(*run, "--output", tmp_path / "out", "--extra", '{"ts": "shim", "maxNumSequence": 2}') == 0
    found = rows(joined(tmp_path / "out"))
    assert [row["key"] for row in found] == sorted(_objects())
    assert all(predictions(row) == _whole(row["key"]) for row in found)
    sequences = _chunks_of_sequences(tmp_path)
    assert [chunks for _, chunks in sequences["4.bin"]] == [list(range(chunk + 1)), list(range(6))]
    assert all(len(sequences[key]) == 1 for key in _objects() if key != "4.bin")


@pytest.mark.slow
def test_an_object_at_which_workers_die_or_handlers_raise_fails_alone(run: tuple[Any, ...], tmp_path: Path) -> None:
    """An object whose worker dies has three tries. One whose handler raises has one try, and its sequence ends."""
    (tmp_path / "h" / "die-1.bin-1").write_text("always")
    (tmp_path / "h" / "raise-0.bin-2").touch()
    (tmp_path / "h" / "raise-4.bin-0").touch()
    assert cloud(*run, "--output", tmp_path / "out", "--extra", '{"ts": "shim", "maxNumSequence": 2}') == 1
    found = {row["key"]: row for row in rows(joined(tmp_path / "out"))}
    errors = {key: error for key, row in found.items() if (error := trouble(row)) is not None}
    assert sorted(errors) == ["0.bin", "1.bin", "4.bin"]
    assert errors["1.bin"]["code"] == "sequence_lost" and "at each of 3 tries" in errors["1.bin"]["message"]
    assert "chunk 2: " in errors["0.bin"]["message"] and "as asked" in errors["0.bin"]["message"]
    sequences = _chunks_of_sequences(tmp_path)
    assert len(sequences["1.bin"]) == 3 and len(sequences["0.bin"]) == len(sequences["4.bin"]) == 1
    assert all(predictions(found[key]) == _whole(key) for key in found if key not in errors)


def test_an_object_that_changes_while_it_is_read_keeps_no_place_from_the_next(tmp_path: Path) -> None:
    """The handler has room for one sequence, and would keep it for 60 s without a request."""
    one = {**_CONFIG, "maxNumSequence": 1, "minWorkers": 1, "maxWorkers": 1}
    handler = write(tmp_path / "h", _STATEFUL, batchSize=1, **one)
    flag = tmp_path / "h" / "hold-a.bin-1"
    flag.touch()
    options = ("--chunk-bytes", BLOCK_BYTES // 2, "--sequences", "--prefetch", 1, "--extra", '{"ts": "shim"}')
    body = bytes(BLOCK_BYTES // 2 + 1)
    with sparse_bucket({"a.bin": 2 * BLOCK_BYTES, "b.bin": body}) as bucket:
        run = ("run", "--input", "s3://bucket", "--handler", handler, *options, *bucket.options())
        process = start(*run, "--output", tmp_path / "out")
        try:
            wait_until(lambda: not flag.exists(), "the second chunk", 120)
            bucket.versions["a.bin"] = 1
            (tmp_path / "h" / "go").touch()
            assert finish(process, 120)[0] == 1
        finally:
            process.kill()
    changed, other = rows(joined(tmp_path / "out"))
    assert (trouble(changed) or {})["code"] == "changed"
    assert [each["crc"] for each in predictions(other)] == [zlib.crc32(body[:-1]), zlib.crc32(body)]


@pytest.mark.slow
def test_a_command_that_was_killed_begins_its_objects_anew_and_keeps_those_that_are_done(
    run: tuple[Any, ...], tmp_path: Path
) -> None:
    hang = tmp_path / "h" / "hang-4.bin-5"  # when this worker's other objects, which have fewer chunks, are done
    hang.touch()
    process = start(*run, "--output", tmp_path / "out")
    try:
        wait_until(lambda: (tmp_path / "out" / "part-000001.jsonl").exists(), "two parts", 120)
        wait_until(lambda: not hang.exists(), "the hang", 120)
    finally:
        process.kill()
        finish(process)
    before = len(_notes(tmp_path))
    assert cloud(*run, "--output", tmp_path / "out") == 0
    found = rows(joined(tmp_path / "out"))
    assert [row["key"] for row in found] == sorted(_objects())
    assert all(predictions(row) == _whole(row["key"]) for row in found)
    assert {key for _, _, key, _, _ in _notes(tmp_path)[before:]} == {"4.bin", "5.bin"}
    assert [chunks for _, chunks in _chunks_of_sequences(tmp_path)["4.bin"]] == [list(range(6))] * 2


@pytest.mark.slow
def test_a_watcher_keeps_the_state_of_an_object_too(run: tuple[Any, ...], tmp_path: Path) -> None:
    options = [each for each in run[1:] if each not in ("--part-rows", 2)]
    assert cloud("watch", *options, "--output", tmp_path / "out", "--poll", "0.1", "--limit", len(_objects())) == 0
    found = {row["key"]: row for row in rows(joined(tmp_path / "out", "result-"))}
    assert sorted(found) == sorted(_objects())
    assert all(predictions(row) == _whole(key) for key, row in found.items())


@pytest.mark.slow
def test_what_goes_not_with_sequences_is_named(run: tuple[Any, ...], tmp_path: Path, capsys: Any) -> None:
    stateless = write(tmp_path / "stateless")
    hasty = write(tmp_path / "hasty", sequenceBatching=True)
    for options, said in (
        ((*run, "--rows", "chunk"), "--rows: with --sequences"),
        ((*run, "--output", tmp_path / "o", "--retry-failed"), "--retry-failed: is not supported"),
        (("run", "--input", tmp_path / "in", "--sequences"), "--sequences: needs a --handler"),
        ((*run[:5], "--sequences"), "--sequences: needs --chunk-bytes"),
        ((*run, "--handler", stateless), "sequenceBatching in"),
        ((*run, "--handler", hasty), "sequenceMaxIdleMSec in"),
    ):
        assert cloud(*options) == 2
        assert said in capsys.readouterr().err
