"""The command as a user types it: exit statuses, messages, what is printed and written, and every bad input."""

from __future__ import annotations

import asyncio
import json
import re
import resource
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlserver_torch_stream.cli.progress import Total, progress_line, summary
from mlserver_torch_stream.cloud.run_metrics import RunMetrics
from mlserver_torch_stream.cloud.store import Store
from tests.cloud.command import PROCESS, cloud, finish, joined, start, trouble
from tests.cloud.faulty import Fault, faulty_server
from tests.cloud.models import ModelServer
from tests.waiting import wait_until

_QUICK = ("--tries", "3", "--stall", "2")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A folder with 10 rows in two objects."""
    folder = tmp_path / "in"
    folder.mkdir()
    lines = [json.dumps({"custom_id": f"r{i}", "prompt": f"row {i}"}) for i in range(10)]
    (folder / "a.jsonl").write_text("\n".join(lines[:6]))
    (folder / "b.jsonl").write_text("\n".join(lines[6:]))
    return folder


def _lines(text: str | bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_lines_on_stdout_in_order(rows: Path, server: ModelServer, capfdbinary: Any) -> None:
    assert cloud("run", "--input", rows, "--url", server.url) == 0
    out, err = capfdbinary.readouterr()
    assert [row["custom_id"] for row in _lines(out)] == [f"r{i}" for i in range(10)]
    assert _lines(out)[3]["response"]["body"]["choices"][0]["text"] == "3 wor"
    assert b"10 rows, 0 failed" in err and b"busy" in err
    undelivered = re.search(rb"undelivered at most: (\d+) rows, (\d+) bytes of input", err)
    assert undelivered is not None and 1 <= int(undelivered[1]) <= 10 and int(undelivered[2]) >= 30


def test_a_window_is_bounded_in_bytes_as_one_says(rows: Path, server: ModelServer, tmp_path: Path) -> None:
    where = ("--input", rows, "--url", server.url, "--metrics", tmp_path / "m.json")
    assert cloud("run", *where, "--window-bytes", "100") == 0
    size = max(len(line) for path in rows.iterdir() for line in path.read_bytes().splitlines())
    assert 100 - size < json.loads((tmp_path / "m.json").read_text())["peak_undelivered_bytes"] <= 100


def test_the_progress_bar_is_drawn_to_its_end_where_it_is_asked_for(
    rows: Path, server: ModelServer, capsys: Any
) -> None:
    assert cloud("run", "--input", rows, "--url", server.url) == 0
    assert "\r" not in capsys.readouterr().err  # stderr is no terminal here
    assert cloud("run", "--input", rows, "--url", server.url, "--progress", "on") == 0
    last = capsys.readouterr().err.split("\r")[-1]
    assert "[====================]" in last and "10 rows" in last and "0 failed" in last


def test_parts_in_a_bucket_and_resuming_from_it(
    rows: Path, server: ModelServer, bucket: str, capsys: Any, tmp_path: Path
) -> None:
    async def upload() -> list[str]:
        store = Store.open(f"s3://{bucket}/in")
        for path in rows.iterdir():
            await store.create(path.name, path.read_bytes())
        return [info.key async for info in store.list()]

    assert len(asyncio.run(upload())) == 2
    run = ("run", "--input", f"s3://{bucket}/in", "--output", f"s3://{bucket}/out", "--url", server.url)
    assert cloud(*run, "--part-rows", "4", "--metrics", tmp_path / "m.json") == 0

    async def download() -> dict[str, bytes]:
        store = Store.open(f"s3://{bucket}/out")
        return {info.key: await store.get(info.key) async for info in store.list()}

    found = asyncio.run(download())
    parts = [found[f"part-{number:06}.jsonl"] for number in range(3)]
    assert [row["index"] for row in _lines(b"".join(parts))] == list(range(10))
    assert json.loads((tmp_path / "m.json").read_text())["num_inferences"] == 10
    assert cloud(*run, "--part-rows", "4") == 0 and len(server.asked) == 10
    assert cloud(*run, "--part-rows", "4", "--parameters", '{"max_tokens": 5}') == 2
    assert "belongs to another run" in capsys.readouterr().err


def test_a_dry_run_says_what_would_be_done_and_does_nothing(
    rows: Path, server: ModelServer, capsys: Any, tmp_path: Path
) -> None:
    assert cloud("run", "--input", rows, "--output", tmp_path / "out", "--url", server.url, "--dry-run") == 0
    out = capsys.readouterr().out
    assert "2 objects" in out and "2 jsonl" in out and "no parts yet" in out
    assert not server.asked and not (tmp_path / "out").exists()


def test_rows_that_fail_make_the_status_1_and_are_in_their_place(
    rows: Path, server: ModelServer, capsys: Any, tmp_path: Path
) -> None:
    server.trouble = lambda prompt, before: 422 if prompt == "row 2" else None
    (rows / "a.jsonl").write_bytes((rows / "a.jsonl").read_bytes() + b"\n{broken\n")
    assert cloud("run", "--input", rows, "--output", tmp_path / "out", "--url", server.url, "--part-rows", "4") == 1
    found = _lines(joined(tmp_path / "out"))
    assert [row["index"] for row in found] == list(range(11))
    errors = {row["index"]: error["code"] for row in found if (error := trouble(row))}
    assert errors == {2: "invalid_request", 6: "invalid_row"}
    assert found[2]["error"] is None and found[2]["response"]["status_code"] == 422
    assert _lines(joined(tmp_path / "out", "errors-")) == [found[2], found[6]]
    assert "11 rows, 2 failed" in capsys.readouterr().err
    assert cloud("run", "--input", rows, "--output", tmp_path / "out", "--url", server.url, "--part-rows", "4") == 1


@pytest.mark.parametrize(("options", "status"), [(("--fail-fast",), 3), (("--max-failures", "1"), 1)])
def test_how_many_failures_end_a_run(
    rows: Path, server: ModelServer, capsys: Any, options: tuple[str, ...], status: int
) -> None:
    server.trouble = lambda prompt, before: 422 if prompt == "row 2" else None
    assert cloud("run", "--input", rows, "--url", server.url, *options) == status
    out, err = capsys.readouterr()
    assert len(_lines(out)) == (3 if status == 3 else 10)
    assert ("more than the 0 allowed; the last: r2" in err) == (status == 3)


def test_what_a_server_or_a_key_says_steers_no_terminal(rows: Path, server: ModelServer, capsys: Any) -> None:
    (rows / "a.jsonl").rename(rows / "a\x9b2J.jsonl")
    server.trouble = lambda prompt, before: {"message": "\x1b]0;owned\x07\nforged\u202e"}
    typed = ("run", "--input", rows, "--url", server.url)
    assert cloud(*typed, "--dry-run") == 0
    assert "first: a\\x9b2J.jsonl, b.jsonl\n" in capsys.readouterr().out
    assert cloud(*typed, "--fail-fast") == 3
    assert " answered 400: \\x1b]0;owned\\x07\\nforged\\u202e\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--input", "ftp://x/y"), "unknown scheme 'ftp'"),
        (("--input", "/nonexistent/x"), "--input: no such file or folder"),
        (("--input", "s3://b/i", "--storage", "colour=red"), "'colour' is not valid"),
        (("--input", "az://b/i", "--storage", "allow_http=true"), "--storage"),
        (("--glob", "*.nothing"), "--input: nothing found"),
        (("--unary",), "give its --url"),
        (("--batch-tokens", "9", "--batch-bytes", "9"), "--batch-bytes"),
        (("--worker", "1/2"), "--worker"),
        (("--on", "ray"), "--on: several workers need an --output"),
        (("--url", "http://127.0.0.1:9", "--extra", '{"threads": 1}'), "--extra"),
        (("--url", "http://127.0.0.1:9", "--batch-tokens", "9"), "--batch-tokens"),
        (("--url", "http://127.0.0.1:9"), "--url: http://127.0.0.1:9 does not say"),
        (("--as", "image"), "of kind image, which this model does not accept"),
        (("--extra", '{"dtpye": 1}'), "did you mean 'dtype'"),
        (("--parameters", "[1]"), "must be a JSON object"),
        (("--max-wait", "-1"), "seconds above 0"),
    ],
)
def test_what_is_typed_wrong_is_named_before_anything_is_done(
    rows: Path, capsys: Any, options: tuple[str, ...], named: str
) -> None:
    assert cloud("run", "--input", rows, *options) == 2
    assert named in capsys.readouterr().err


def test_a_server_that_is_gone_ends_the_run_to_be_resumed(
    rows: Path, server: ModelServer, capsys: Any, tmp_path: Path
) -> None:
    server.trouble = lambda prompt, before: 401 if prompt == "row 7" else None
    run = ("run", "--input", rows, "--output", tmp_path / "out", "--url", server.url, "--part-rows", "2")
    assert cloud(*run, "--concurrency", "1") == 3
    assert "401" in capsys.readouterr().err
    server.trouble = lambda prompt, before: None
    assert cloud(*run) == 0
    assert [row["index"] for row in _lines(joined(tmp_path / "out"))] == list(range(10))


_BAD = {
    "missing": (404, "missing"),
    "no permission": (403, "denied"),
    "changed": ("change", "changed"),
    "too often unavailable": (503, "unavailable"),
}


@pytest.mark.parametrize("name", _BAD)
def test_an_object_that_cannot_be_had_is_one_error_row_in_its_place(
    name: str, server: ModelServer, capsys: Any
) -> None:
    kind, code = _BAD[name]
    with faulty_server({f"/o/{i}.txt": b"text %d" % i for i in range(4)}) as objects:
        objects.faults["/o/1.txt"] = [Fault(kind)] * (9 if kind == 503 else 1)
        objects.objects["/list"] = b"0.txt\n1.txt\n2.txt\n3.txt\n"
        where = ("--input", f"{objects.url}/o", "--manifest", f"{objects.url}/list")
        assert cloud("run", *where, "--url", server.url, *_QUICK) == 1
    found = _lines(capsys.readouterr().out)
    assert [row["key"] for row in found] == ["0.txt", "1.txt", "2.txt", "3.txt"]
    assert [row["error"] and row["error"]["code"] for row in found] == [None, code, None, None]


@pytest.mark.long
@pytest.mark.parametrize("kind", [503, 500, 429, "reset", "cut", "stall"])
def test_faults_of_a_store_that_pass_leave_no_trace_but_a_count(
    kind: int | str, server: ModelServer, capsys: Any
) -> None:
    with faulty_server({"/o/a.jsonl": b'{"prompt": "abc"}\n' * 3}) as objects:
        objects.faults["/o/a.jsonl"] = [Fault(kind)]
        assert cloud("run", "--input", f"{objects.url}/o/a.jsonl", "--url", server.url, *_QUICK) == 0
    out, err = capsys.readouterr()
    assert [row["line"] for row in _lines(out)] == [1, 2, 3] and "1 retries" in err


@pytest.mark.long
def test_a_full_disk_is_told_and_nothing_half_written_is_left(rows: Path, server: ModelServer, tmp_path: Path) -> None:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))

    command = ["run", "--input", rows, "--output", tmp_path / "out", "--url", server.url, "--part-rows", "9", *_QUICK]
    (rows / "a.jsonl").write_text('{"prompt": "abc"}\n' * 20)
    process = start(*command)
    finish(process)
    wide = joined(tmp_path / "out")
    for path in (tmp_path / "out").iterdir():
        path.unlink()
    narrow = subprocess.run([*PROCESS, *map(str, command)], capture_output=True, preexec_fn=limit, timeout=120)
    assert narrow.returncode == 3 and b"no space left to write" in narrow.stderr
    assert not list((tmp_path / "out").glob("part-*"))
    status, _, _ = finish(start(*command))
    assert status == 0 and joined(tmp_path / "out") == wide


def test_an_output_that_may_not_be_written_is_told_before_anything_is_inferred(
    rows: Path, server: ModelServer, capsys: Any
) -> None:
    with faulty_server() as objects:
        storage = [f"endpoint={objects.url}", "skip_signature=true", "region=us-east-1"]
        options = [word for each in storage for word in ("--storage", each)]
        assert cloud("run", "--input", rows, "--output", "s3://bucket/out", "--url", server.url, *options) == 3
    assert "s3://bucket/out/lease.json: no permission" in capsys.readouterr().err and not server.asked


@pytest.mark.parametrize(("listing", "named"), [(404, "does not exist"), (403, "no permission")])
def test_a_bucket_that_cannot_be_listed_is_told_at_once(
    server: ModelServer, capsys: Any, listing: int, named: str
) -> None:
    with faulty_server() as objects:
        objects.listing = listing
        storage = [f"endpoint={objects.url}", "skip_signature=true", "region=us-east-1"]
        options = [word for each in storage for word in ("--storage", each)]
        assert cloud("run", "--input", "s3://bucket/in", "--url", server.url, *options) == 3
    assert f"s3://bucket/in/: {named}" in capsys.readouterr().err


@pytest.mark.long
def test_a_full_stdout_is_told(rows: Path, server: ModelServer) -> None:
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            [*PROCESS, "run", "--input", str(rows), "--url", server.url],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=120,
        )
    assert ended.returncode == 3 and b"stdout: No space left on device" in ended.stderr


@pytest.mark.long
def test_ctrl_c_keeps_what_is_written_and_says_how_to_go_on(rows: Path, server: ModelServer, tmp_path: Path) -> None:
    held = threading.Event()
    server.trouble = lambda prompt, before: held.wait(60) and None if prompt == "row 6" else None
    run = ("run", "--input", rows, "--output", tmp_path / "out", "--url", server.url, "--part-rows", "2")
    process = start(*run, "--concurrency", "1")
    wait_until(lambda: len(list((tmp_path / "out").glob("part-*"))) == 3)
    process.send_signal(signal.SIGINT)
    status, _, err = finish(process)
    held.set()
    assert status == 130 and "interrupted; the parts that were written are kept" in err and "Traceback" not in err
    kept = joined(tmp_path / "out")
    assert len(_lines(kept)) == 6
    assert cloud(*run) == 0 and joined(tmp_path / "out").startswith(kept)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["run", "watch"])
def test_ctrl_c_while_the_model_loads_ends_at_once_and_leaves_no_process(
    rows: Path, tmp_path: Path, command: str, request: pytest.FixtureRequest
) -> None:
    """The load hangs in a compiler that never returns, in a thread that cannot be stopped."""
    pytest.importorskip("torch")
    tiny_model = request.getfixturevalue("tiny_model")
    compiler, started = tmp_path / "c++", tmp_path / "pid"
    compiler.write_text(f"#!/bin/sh\necho $$ > {started}.part && mv {started}.part {started}\nsleep 600\n")
    compiler.chmod(0o755)
    process = start(
        *(command, "--input", rows, "--output", tmp_path / "out", "--model", tiny_model),
        *("--extra", '{"device_map": "cpu"}'),  # where kernels are compiled
        environment={"CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path / "cache")},
    )
    wait_until(started.exists, seconds=180)
    below = psutil.Process(process.pid).children(recursive=True)
    assert int(started.read_text()) in [each.pid for each in below]
    process.send_signal(signal.SIGINT)
    status, _, err = finish(process, 20)
    assert status == 130 and "Traceback" not in err
    assert "interrupted while the model was loading; nothing was inferred" in err
    _, left = psutil.wait_procs(below, timeout=20)
    assert not left, left


@pytest.mark.long
def test_a_reader_that_leaves_ends_the_run_quietly(rows: Path, server: ModelServer) -> None:
    server.delay = 0.3
    process = start("run", "--input", rows, "--url", server.url, "--concurrency", "1")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 3
    assert process.stderr is not None and b"Traceback" not in process.stderr.read()
    process.stderr.close()


def test_the_progress_line_and_the_summary_tell_what_the_issue_of_a_run_is() -> None:
    metrics = RunMetrics(rows=50, failed=2, input_bytes=2**20, completion_tokens=500, prompt_tokens=100)
    line = progress_line(metrics, Total(4 * 2**20, None), 10.0)
    assert "[=====               ]  25%" in line and "50 rows" in line and "1.0 MiB of 4.0 MiB" in line
    assert "50 tokens/s" in line and "ETA 0:30" in line and "2 failed" in line
    assert "50/100 rows" in progress_line(metrics, Total(4 * 2**20, 100), 0.0)
    narrow = progress_line(metrics, Total(4 * 2**20, None), 10.0, columns=80)
    assert narrow.startswith(" 25%  50 rows") and "2 failed" in narrow and len(narrow) < 80
    assert len(progress_line(metrics, Total(4 * 2**20, None), 10.0, columns=30)) < 30
    metrics.busy.add(0.0, 9.0)
    assert "5.0 rows/s, 50.0 tokens/s" in summary(metrics, 10.0) and "busy 100.0%" in summary(metrics, 10.0)
