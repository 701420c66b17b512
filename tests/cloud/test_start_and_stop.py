"""What a run leaves behind when it cannot start or is told to stop, and its figures then."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from mlserver_torch_stream.cli.child_server import is_own_listener
from mlserver_torch_stream.cli.progress import summary
from mlserver_torch_stream.cloud.backend import open_backend
from mlserver_torch_stream.cloud.backoff import Retry
from mlserver_torch_stream.cloud.endpoint import ServerEndpoint
from mlserver_torch_stream.cloud.pipeline import PipelineLimits, infer_rows
from mlserver_torch_stream.cloud.rows import Row, RunRefused, StoreUnavailable
from mlserver_torch_stream.cloud.run import CloudRun, plan
from mlserver_torch_stream.cloud.run_metrics import RunMetrics
from tests.cloud.command import cloud, finish, start, trouble
from tests.cloud.models import ModelServer
from tests.server.harness import free_ports


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text("".join(f'{{"prompt": "row {i}"}}\n' for i in range(30)))
    return tmp_path / "in"


def test_a_run_whose_model_is_not_there_leaves_nothing_and_the_right_command_is_not_refused(
    rows: Path, tmp_path: Path, server: ModelServer, capsys: Any
) -> None:
    pytest.importorskip("torch")
    run = ("run", "--input", rows, "--output", tmp_path / "out")
    assert cloud(*run, "--model", "/nonexist") == 2
    assert "--model: no such file or folder: /nonexist" in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert cloud("watch", *run[1:], "--model", "/nonexist") == 2
    assert not (tmp_path / "out").exists()
    assert cloud(*run, "--url", server.url) == 0


def test_another_run_is_told_apart_by_its_options_in_words(
    rows: Path, tmp_path: Path, server: ModelServer, capsys: Any
) -> None:
    run = ("run", "--input", rows, "--output", tmp_path / "out", "--url", server.url)
    assert cloud(*run, "--parameters", '{"max_tokens": 5, "stop": ["a"]}') == 0
    assert cloud(*run, "--parameters", '{"max_tokens": 6, "stop": ["a"]}', "--chat") == 2
    err = capsys.readouterr().err
    assert "belongs to another run: --parameters max_tokens was 5 and is 6 now; --chat was false and is true now" in err
    assert "{" not in err.splitlines()[-1]


def test_an_output_of_another_format_is_refused_by_its_number(rows: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "manifest.json").write_text(json.dumps({"format": 1, "run": "x", "part_rows": 64}))
    with pytest.raises(RunRefused, match=r"was written in format 1, by another version"):
        asyncio.run(plan(CloudRun(str(rows), output=str(tmp_path / "out"))))


def test_a_server_that_refuses_every_connection_was_never_busy() -> None:
    metrics = RunMetrics()

    async def rows() -> AsyncGenerator[Row, None]:
        for index in range(5):
            yield Row(index, "k", index + 1, f"k:{index}", body={"prompt": "x"}, size=1)

    async def act() -> None:
        infer = await open_backend(ServerEndpoint(url, "m", retry=Retry(tries=3, first=0.01)))
        try:
            async for _ in infer_rows(rows(), infer, PipelineLimits(batch_rows=1), metrics):
                pass
        finally:
            await infer.aclose()

    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with pytest.raises(StoreUnavailable):
        asyncio.run(act())
    assert "the engine was busy for no time" in summary(metrics, 1.0)
    assert metrics.num_inferences == 0 and metrics.failed_batches_counter >= 1


def test_time_in_which_a_server_only_refuses_is_not_busy(rows: Path, tmp_path: Path, server: ModelServer) -> None:
    began = time.monotonic()
    (rows / "a.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    server.trouble = lambda prompt, before: 503 if prompt == "b" and before < 3 else None
    where = ("--input", rows, "--url", server.url, "--concurrency", "1", "--metrics", tmp_path / "m.json")
    assert cloud("run", *where) == 0
    figures = json.loads((tmp_path / "m.json").read_text())
    assert figures["busy_share"] < 0.9 and time.monotonic() - began > 0.3  # pauses of 0.1, 0.2 and 0.4 s at least


@pytest.mark.long
def test_batches_that_are_cancelled_have_not_failed(rows: Path, tmp_path: Path, server: ModelServer) -> None:
    held = threading.Event()
    server.trouble = lambda prompt, before: held.wait(60) and None
    process = start("run", "--input", rows, "--url", server.url, "--metrics", tmp_path / "m.json")
    end = time.monotonic() + 120
    while not server.flying:
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    status, _, _ = finish(process)
    held.set()
    figures = json.loads((tmp_path / "m.json").read_text())
    assert status == 130 and (figures["failed_batches_counter"], figures["num_inferences"]) == (0, 0)


@pytest.mark.parametrize("name", [b"new\nline.txt", b"control\x01.txt", b"not utf-8 \xff.txt", b"empty\n.txt"])
def test_a_file_that_the_library_cannot_name_is_one_error_row(
    name: bytes, tmp_path: Path, server: ModelServer, capsys: Any
) -> None:
    folder = tmp_path / "in"
    (folder / "deep").mkdir(parents=True)
    for good in ("a.txt", "deep/b.txt", "z%0A.txt"):
        (folder / good).write_text(good)
    Path(os.fsdecode(os.fsencode(folder / "deep") + b"/" + name)).write_bytes(b"" if b"empty" in name else b"x")
    assert cloud("run", "--input", folder, "--output", tmp_path / "out", "--url", server.url) == 1
    assert sorted(server.asked) == ["a.txt", "deep/b.txt", "z%0A.txt"]
    found = [json.loads(line) for line in (tmp_path / "out" / "part-000000.jsonl").read_bytes().splitlines()]
    (bad,) = [error for row in found if (error := trouble(row))]
    assert len(found) == 4 and bad["code"] == "refused" and "deep/" in bad["message"]
    assert cloud("run", "--input", folder, "--output", tmp_path / "out", "--url", server.url) == 1
    assert len(server.asked) == 3
    assert "Traceback" not in capsys.readouterr().err


def test_a_time_that_is_none_is_named(
    rows: Path, server: ModelServer, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "today")
    assert cloud("run", "--input", rows, "--url", server.url) == 2
    assert "SOURCE_DATE_EPOCH: must be" in capsys.readouterr().err


_LISTENS = """
import os, socket
os.setuid(65534)
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
input()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
def test_a_listener_of_another_user_gets_no_key() -> None:
    with socket.create_server(("127.0.0.1", 0)) as own:
        assert is_own_listener(own.getsockname()[1])
    command = (sys.executable, "-S", "-c", _LISTENS)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as foreign:
        assert foreign.stdout is not None
        assert not is_own_listener(int(foreign.stdout.readline()))
        foreign.communicate("\n")
