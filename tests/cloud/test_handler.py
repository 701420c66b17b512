"""``cloud run --handler``: a TorchServe handler over the objects of a bucket, in worker processes of the command."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlserver_torch_stream.cloud.rows import Kind
from tests.cloud.command import cloud, finish, joined, start, trouble
from tests.cloud.handlers import counted, predictions, rows, told, write
from tests.cloud.sparse import MIB, SparseBucket, made, sparse_bucket
from tests.torchserve.workshop import write_mar
from tests.waiting import alive, child_pids, wait_until

_SHIM = ("--extra", '{"ts": "shim"}')


def _objects() -> dict[str, bytes]:
    draw = random.Random(3)
    return {
        "a b.bin": draw.randbytes(5000),
        "c.png": draw.randbytes(10),
        "empty": b"",
        "j.json": b'{"a": 1}',
        "t.txt": b"\xffx",
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    for key, body in _objects().items():
        (tmp_path / "in" / key).write_bytes(body)
    return tmp_path


@pytest.fixture
def large() -> Iterator[SparseBucket]:
    """A bucket of small objects and one of 24 MiB."""
    objects: dict[str, bytes | int] = {f"{number:03}.png": bytes([number]) * 100 for number in range(20)}
    with sparse_bucket({**objects, "010-large.bin": 24 * MIB + 5}) as bucket:
        yield bucket


@pytest.mark.long
def test_each_object_reaches_the_handler_whole_or_in_chunks_in_order(folder: Path, capfd: Any) -> None:
    """The handler is a file, and an archive that sets its batch size."""
    run = ("run", "--input", folder / "in", *_SHIM)
    assert cloud(*run, "--handler", write(folder / "h")) == 0
    whole = rows(capfd.readouterr().out)
    assert [row["key"] for row in whole] == sorted(_objects())
    for row in whole:
        key = row["key"].replace(" ", "%20")
        assert told(predictions(row)) == counted(key, _objects()[row["key"]])
    assert [predictions(row)[0]["kind"] for row in whole] == [
        *("application/octet-stream", "image/png", "application/octet-stream", "application/json", "text/plain")
    ]
    source = (folder / "h/handler.py").read_text()
    files = {"handler.py": source, "model-config.yaml": "batchSize: 4\n"}
    model = {"modelName": "m", "handler": "handler.py", "configFile": "model-config.yaml"}
    mar = write_mar(folder / "m.mar", files, model)
    assert cloud(*run, "--handler", mar, "--chunk-bytes", "900", "--max-wait", "5") == 0
    chunked = rows(capfd.readouterr().out)
    for row in chunked:
        key = row["key"].replace(" ", "%20")
        assert told(predictions(row)) == counted(key, _objects()[row["key"]], 900)
        assert {each["kind"] for each in predictions(row)} == {"application/octet-stream"}
    assert [each["batch"] for row in chunked for each in predictions(row)] == [4] * 8 + [2] * 2


@pytest.mark.long
def test_a_batch_of_the_run_is_a_batch_of_the_handler(folder: Path, capfd: Any) -> None:
    """A batch is limited by its number of rows, by bytes, and by the time that its first row waits."""
    for key in ("j.json", "t.txt"):
        (folder / "in" / key).unlink()
    run = ("run", "--input", folder / "in", "--handler", write(folder / "h", batchSize=2), *_SHIM)
    for options, sizes in (
        (("--max-wait", "5"), [2, 2, 1]),
        (("--batch-rows", "3", "--max-wait", "0.01"), [3, 3, 3]),
        (("--batch-rows", "8", "--batch-bytes", "5005", "--max-wait", "5"), [1, 2, 2]),
    ):
        assert cloud(*run, *options) == 0
        assert [predictions(row)[0]["batch"] for row in rows(capfd.readouterr().out)][: len(sizes)] == sizes


@pytest.mark.long
def test_pieces_are_joined_or_a_row_each(folder: Path, capfd: Any) -> None:
    (folder / "in" / "a b.bin").write_bytes(b"pieces" * 3)
    run = ("run", "--input", folder / "in", "--glob", "a*", "--handler", write(folder / "h"), *_SHIM)
    assert cloud(*run) == 0
    (row,) = rows(capfd.readouterr().out)
    assert predictions(row)[0].startswith('piece 0 piece 1 {\n  "bytes": 18')
    assert cloud(*run, "--rows", "piece", "--chunk-bytes", "12") == 0
    found = rows(capfd.readouterr().out)
    assert [(row["index"], row["chunk"]["index"], row["piece"]) for row in found] == [
        (chunk, chunk, {"index": piece, "last": piece == 2}) for chunk in range(2) for piece in range(3)
    ]
    assert predictions(found[0]) == ["piece 0 "] and predictions(found[5])[0]["bytes"] == 6


@pytest.mark.long
def test_an_object_that_the_handler_fails_at_fails_alone(folder: Path, capfd: Any) -> None:
    (folder / "in" / "c.png").write_bytes(b"fail")
    run = ("run", "--input", folder / "in", "--handler", write(folder / "h"), "--batch-rows", "5", *_SHIM)
    assert cloud(*run, "--output", folder / "out") == 1
    found = rows(joined(folder / "out"))
    assert [row["key"] for row in found if trouble(row)] == ["c.png"]
    error = trouble(found[1])
    assert error is not None and "ValueError: as asked" in error["message"]
    (folder / "in" / "c.png").write_bytes(b"fine")
    assert cloud(*run, "--output", folder / "out", "--retry-failed") == 1
    assert rows(joined(folder / "out"))[1]["error"]["code"] == "changed"


@pytest.mark.long
def test_whole_objects_are_bounded_and_the_bound_is_an_option(folder: Path, capfd: Any) -> None:
    run = ("run", "--input", folder / "in", "--handler", write(folder / "h"), *_SHIM)
    assert cloud(*run, "--whole-bytes", "4KiB") == 1
    found = rows(capfd.readouterr().out)
    assert found[0]["error"]["code"] == "too_large" and "larger than 4.0 KiB" in found[0]["error"]["message"]
    assert all(trouble(row) is None for row in found[1:])
    assert cloud(*run, "--chunk-bytes", "4KiB", "--dry-run") == 0
    told = capfd.readouterr().out
    assert "too large" not in told and "chunks: 6 of at most 4.0 KiB" in told


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "count"), [("chunk", 45), ("object", 21)])
def test_killed_in_the_middle_of_an_object_it_goes_on_and_writes_the_same_bytes(
    large: SparseBucket, tmp_path: Path, mode: str, count: int
) -> None:
    """After the kill, none of the command's workers is left either."""
    handler = write(tmp_path / "h")
    bounds = ("--prefetch-bytes", "4MiB", "--window-bytes", "4MiB", "--chunk-bytes", "1MiB", "--part-rows", "4")

    def run(out: str) -> tuple[Any, ...]:
        where = ("run", "--input", "s3://bucket", "--output", tmp_path / out, *large.options())
        return (*where, "--handler", handler, *bounds, "--rows", mode, *_SHIM)

    assert cloud(*run("whole")) == 0
    whole = rows(joined(tmp_path / "whole"))
    assert len(whole) == count
    found = [each for row in whole if row["key"] == "010-large.bin" for each in predictions(row)]
    content = b"".join(made(0, 24 * MIB + 5))
    assert told(found) == counted("010-large.bin", content, MIB)

    process = start(*run("out"))
    there = tmp_path / "out" / f"part-{4 if mode == 'chunk' else 1:06d}.jsonl"
    wait_until(lambda: there.exists() or process.poll() is not None, seconds=60)
    children = _descendants(process.pid)
    process.send_signal(signal.SIGKILL)
    assert finish(process)[0] == -signal.SIGKILL
    wait_until(lambda: not any(map(alive, children)), "the workers end")
    assert len(rows(joined(tmp_path / "out"))) < count
    large.ranges.clear()
    assert cloud(*run("out")) == 0
    assert joined(tmp_path / "out") == joined(tmp_path / "whole")
    begun = min(begin for key, begin, _ in large.ranges if key == "010-large.bin")
    assert (begun > 0) == (mode == "chunk")  # chunks that have a row are not fetched again


def _descendants(pid: int) -> list[int]:
    found = child_pids(pid)
    return found + [each for child in found for each in _descendants(child)]


@pytest.mark.slow
def test_an_object_that_changed_since_the_run_began_is_named(large: SparseBucket, tmp_path: Path) -> None:
    run = ("run", "--input", "s3://bucket", "--glob", "01*", "--output", tmp_path / "out", *large.options())
    command = (*run, "--handler", write(tmp_path / "h"), "--chunk-bytes", "4MiB", "--part-rows", "1", *_SHIM)
    process = start(*command, "--rows", "chunk", "--batch-rows", "1")
    wait_until((tmp_path / "out/part-000001.jsonl").exists, seconds=60)
    process.send_signal(signal.SIGKILL)
    finish(process)
    done = len(rows(joined(tmp_path / "out")))
    large.versions["010-large.bin"] = 1
    large.versions["019.png"] = 1
    assert cloud(*command, "--rows", "chunk", "--batch-rows", "1") == 1
    found = rows(joined(tmp_path / "out"))
    assert [row["index"] for row in found] == list(range(17))
    changed = [row["custom_id"] for row in found if trouble(row)]
    assert changed == [f"010-large.bin#{number}" for number in range(done, 7)] + ["019.png#0"]


@pytest.mark.long
def test_an_answer_that_is_too_large_fails_its_row_alone(folder: Path, capfd: Any) -> None:
    source = """
def handle(data, context):
    return data and [bytes(70 << 20 if bytes(row["body"]) == b"large" else 0) for row in data]
"""
    (folder / "in" / "large.bin").write_bytes(b"large")
    run = ("run", "--input", folder / "in", "--glob", "*.bin", "--handler", write(folder / "h", source), *_SHIM)
    assert cloud(*run, "--batch-rows", "2") == 1
    small, large = rows(capfd.readouterr().out)
    assert predictions(small) == [""] and large["error"]["code"] == "too_large"
    assert large["error"]["message"] == "the answer is larger than 67108864 bytes"


@pytest.mark.slow
def test_ctrl_c_ends_the_workers_too(large: SparseBucket, tmp_path: Path) -> None:
    run = ("run", "--input", "s3://bucket", "--output", tmp_path / "out", *large.options(), "--part-rows", "1")
    process = start(*run, "--handler", write(tmp_path / "h"), "--chunk-bytes", "2MiB", *_SHIM)
    wait_until((tmp_path / "out/part-000000.jsonl").exists, seconds=60)
    children = _descendants(process.pid)
    process.send_signal(signal.SIGINT)
    status, _, said = finish(process)
    assert status == 130 and "the same command continues the run" in said
    assert children and not any(map(alive, children))


@pytest.mark.long
def test_a_watcher_gives_new_objects_to_the_handler_in_chunks(folder: Path) -> None:
    watch = ("watch", "--input", folder / "in", "--output", folder / "out", "--poll", "0.05", "--limit", "5")
    command = (*watch, "--handler", write(folder / "h"), "--chunk-bytes", "900", *_SHIM)
    assert cloud(*command) == 0
    found = [row for path in (folder / "out").glob("result-*") for row in rows(path.read_bytes())]
    assert sorted(row["key"] for row in found) == sorted(_objects())
    for row in found:
        assert told(predictions(row)) == counted(row["key"].replace(" ", "%20"), _objects()[row["key"]], 900)


_BAD = [
    (("--chunk-bytes", "0"), "--chunk-bytes: must be a whole number, at least 1"),
    (("--handler", "{no}"), "--handler: no such file: {no}"),
    (("--model", "m"), "--model: is for a server or an engine, and cannot be combined with --handler"),
    (("--url", "http://127.0.0.1:1"), "--url: is for a server or an engine, and cannot be combined with --handler"),
    (("--api", "torchserve"), "--api and --unary: apply only to requests to a server; give its --url"),
    (("--timeout", "5"), "--timeout: applies only to requests to a server; give its --url"),
    (("--concurrency", "2"), "--concurrency: applies only to requests to a server; give its --url"),
    (("--tensor", "x"), "--tensor: is for a server or an engine, and cannot be combined with --handler"),
    (("--rows", "chunk"), "--rows: chunk needs --chunk-bytes"),
    (("--chunk-bytes", "1", "--whole-bytes", "2"), "--whole-bytes: is for objects that are not split"),
    (("--chunk-bytes", "2GiB"), "--chunk-bytes: a handler accepts at most 1072693248 bytes"),
    (("--as", "text"), "--as: applies only to prompts"),
    (("--chat",), "--chat: applies only to prompts"),
    (("--served-model-name", "x"), "--served-model-name: applies only to prompts"),
    (("--batch-tokens", "9"), "--batch-tokens: applies only to prompts"),
    (("--parameters", '{"a b": "c"}'), "--parameters: a b: the name must be a valid HTTP header name"),
    (("--parameters", '{"a": "c\\nd"}'), "--parameters: a: the name must be a valid HTTP header name, and the value"),
    (("--parameters", '{"X-Chunk-Index": "7"}'), "--parameters: X-Chunk-Index: cannot be set"),
    (("--extra", '{"minWorker": 2}'), "--extra: unknown key 'minWorker'; did you mean 'minWorkers'?"),
]


@pytest.mark.long
@pytest.mark.parametrize(("options", "said"), _BAD)
def test_options_that_do_not_fit_are_named(folder: Path, options: tuple[str, ...], said: str, capfd: Any) -> None:
    missing = str(folder / "none.mar")
    given = tuple(each.replace("{no}", missing) for each in options)
    handler = () if "--handler" in given else ("--handler", write(folder / "h"))
    assert cloud("run", "--input", folder / "in", *handler, *given) == 2
    assert said.replace("{no}", missing) in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--api", "torchserve"), "--url: --api torchserve needs the URL of the server"),
        (("--api", "torchserve", "--url", "http://h"), "--model: --api torchserve needs the name of the model"),
        (("--api", "torchserve", "--url", "http://h", "--model", "m", "--tensor", "x"), "--tensor: is for V2"),
        (("--tensor", "x"), "--tensor: needs the --url of a V2 server, and --api v2"),
        (("--tensor", "x", "--url", "http://h", "--rows", "piece"), "--rows: a V2 server is asked for whole answers"),
        (("--chunk-bytes", "5"), "--chunk-bytes: applies only with --handler, --api torchserve or --tensor"),
        (("--rows", "piece"), "--rows: applies only with"),
        (("--whole-bytes", "5"), "--whole-bytes: applies only with"),
    ],
)
def test_options_of_servers_that_do_not_fit_are_named(
    folder: Path, options: tuple[str, ...], said: str, capfd: Any
) -> None:
    assert cloud("run", "--input", folder / "in", *options) == 2
    assert said in capfd.readouterr().err


@pytest.mark.long
def test_a_worker_that_dies_fails_what_it_had_and_the_next_one_goes_on(folder: Path, capfd: Any) -> None:
    source = """
import os

def handle(data, context):
    if data and any(bytes(row["body"]) == b"die" for row in data):
        os._exit(1)
    return data and [str(len(row["body"])) for row in data]
"""
    for number in range(6):
        (folder / "in" / f"{number}.x").write_bytes(b"die" if number == 2 else b"fine")
    run = ("run", "--input", folder / "in", "--glob", "*.x", "--handler", write(folder / "h", source), *_SHIM)
    assert cloud(*run) == 1
    found = rows(capfd.readouterr().out)
    assert [trouble(row) is None for row in found] == [True, True, False, True, True, True]
    assert "exited with status 1" in found[2]["response"]["body"]["error"]["message"]


@pytest.mark.long
def test_an_object_at_which_the_worker_dies_fails_alone_in_its_batch(folder: Path, capfd: Any) -> None:
    source = """
import os

def handle(data, context):
    if data and any(bytes(row["body"]) == b"die" for row in data):
        os._exit(1)
    return data and [str(len(data)) for row in data]
"""
    for number in range(8):
        (folder / "in" / f"{number}.x").write_bytes(b"die" if number in (2, 5) else b"fine")
    run = ("run", "--input", folder / "in", "--glob", "*.x", "--handler", write(folder / "h", source), *_SHIM)
    batches = ("--batch-rows", "4", "--max-wait", "5")
    assert cloud(*run, *batches, "--output", folder / "out") == 1
    found = rows(joined(folder / "out"))
    assert [row["key"] for row in found if trouble(row)] == ["2.x", "5.x"]
    assert cloud(*run, *batches, "--fail-fast") == 3
    out, err = capfd.readouterr()
    assert [trouble(row) is None for row in rows(out)] == [True, True, False]
    assert "1 rows failed, more than the 0 allowed" in err


@pytest.mark.long
def test_mlservers_environment_does_not_reach_the_handlers_settings(
    folder: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLSERVER_MODEL_EXTRA", '{"dtype": "float32", "batchSize": 7}')
    monkeypatch.setenv("MLSERVER_MODEL_URI", "elsewhere")
    run = ("run", "--input", folder / "in", "--handler", write(folder / "h", batchSize=2), *_SHIM)
    assert cloud(*run, "--max-wait", "5") == 0
    assert [predictions(row)[0]["batch"] for row in rows(capfd.readouterr().out)] == [2, 2, 2, 2, 1]


@pytest.mark.long
def test_a_handler_that_cannot_be_loaded_leaves_the_output_alone(folder: Path, capfd: Any) -> None:
    (folder / "h").mkdir()
    (folder / "h/handler.py").write_text("raise ImportError('as asked')")
    run = ("run", "--input", folder / "in", "--output", folder / "out", "--handler", folder / "h/handler.py", *_SHIM)
    assert cloud(*run) == 2
    assert "--handler: " in (said := capfd.readouterr().err) and "ImportError: as asked" in said
    assert not (folder / "out").exists()


@pytest.mark.long
def test_other_parameters_of_a_run_are_another_run(folder: Path, capfd: Any) -> None:
    run = ("run", "--input", folder / "in", "--output", folder / "out", "--handler", write(folder / "h"), *_SHIM)
    assert cloud(*run, "--chunk-bytes", "1KiB") == 0
    manifest = json.loads((folder / "out/manifest.json").read_text())
    assert manifest["chunk_bytes"] == 1024 and manifest["rows"] == "object" and manifest["kind"] == Kind.BYTES.value
    for other, said in (
        (("--chunk-bytes", "2KiB"), "--chunk-bytes was 1024 and is 2048 now"),
        (("--chunk-bytes", "1KiB", "--rows", "piece"), "--rows"),
        (("--chunk-bytes", "1KiB", "--parameters", '{"a": "b"}'), "--parameters a was not given and is b now"),
    ):
        assert cloud(*run, *other) == 2
        assert said in capfd.readouterr().err
