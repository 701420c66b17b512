"""After kill -9 at any moment, the same command completes the same output, and infers nothing twice."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mlserver_torch_stream.cloud.store import Store, settle
from tests.cloud.command import cloud, finish, joined, start, trouble
from tests.cloud.models import ModelServer
from tests.waiting import wait_until

_ROWS = 60
_KILLS = 20


def _input(folder: Path, prompt: str) -> Path:
    (folder / "in").mkdir()
    for part in range(3):
        lines = [
            json.dumps({"custom_id": f"r{i}", "prompt": f"{prompt} {i}", "max_tokens": 12})
            for i in range(part * _ROWS // 3, (part + 1) * _ROWS // 3)
        ]
        (folder / "in" / f"{part}.jsonl").write_text("\n".join(lines))
    return folder / "in"


def _delivered(out: Path) -> set[str]:
    return {json.loads(line)["custom_id"] for line in joined(out).splitlines()}


def _kill(run: tuple[Any, ...], out: Path, seconds: float) -> bool:
    """Starts a run and kills it ``seconds`` after it has claimed the output. Returns whether the kill ended it."""
    process = start(*run)
    end = time.monotonic() + 120
    while not (out / "manifest.json").exists():
        assert time.monotonic() < end and process.poll() is None, "it never began"
        time.sleep(0.002)
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    return finish(process)[0] == -signal.SIGKILL


def _server_run(folder: Path, out: str, server: ModelServer) -> tuple[Any, ...]:
    where = ("run", "--input", folder / "in", "--output", folder / out, "--url", server.url)
    return (*where, "--part-rows", "4", "--concurrency", "4", "--window", "16")


def _killed_and_resumed(folder: Path, server: ModelServer, number: int, seconds: float) -> bool:
    out = folder / f"out{number}"
    killed = _kill(_server_run(folder, out.name, server), out, seconds)
    wait_until(lambda: server.flying == 0)
    delivered = _delivered(out)
    server.asked.clear()
    assert cloud(*_server_run(folder, out.name, server)) == 0
    assert joined(out) == joined(folder / "whole")
    inferred = {f"r{prompt.split()[-1]}" for prompt in server.asked}
    assert not inferred & delivered and inferred | delivered == {f"r{i}" for i in range(_ROWS)}
    return killed and 0 < len(delivered) < _ROWS


def _kills(folder: Path, server: ModelServer, count: int) -> None:
    draw = random.Random(11)
    server.delay = 0.03
    _input(folder, "row")
    began = time.monotonic()
    assert cloud(*_server_run(folder, "whole", server)) == 0
    took = time.monotonic() - began
    hits = sum(_killed_and_resumed(folder, server, number, draw.uniform(0, took)) for number in range(count))
    assert hits >= count // 4, "most kills came too early or too late to tell anything"


@pytest.mark.slow
def test_twenty_kills_and_resumes_through_a_server(tmp_path: Path, server: ModelServer) -> None:
    _kills(tmp_path, server, _KILLS)


@pytest.mark.long
def test_a_kill_and_a_resume_through_a_server(tmp_path: Path, server: ModelServer) -> None:
    server.delay = 0.03
    _input(tmp_path, "row")
    assert cloud(*_server_run(tmp_path, "whole", server)) == 0
    _killed_and_resumed(tmp_path, server, 0, 0.25)


def _killed_while_trying_again(folder: Path, server: ModelServer, number: int, seconds: float) -> bool:
    """First lets half of the rows fail. Returns whether the kill came between the first answer and the last."""
    out = folder / f"out{number}"
    run = _server_run(folder, out.name, server)
    server.trouble = lambda prompt, before: 422 if int(prompt.split()[-1]) % 2 else None
    assert cloud(*run) == 1
    server.trouble = lambda prompt, before: None
    server.asked.clear()
    process = start(*run, "--retry-failed")
    wait_until(lambda: bool(server.asked) or process.poll() is not None)
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    killed = finish(process)[0] == -signal.SIGKILL
    wait_until(lambda: server.flying == 0)
    rows = [json.loads(line) for line in joined(out).splitlines()]
    assert [row["index"] for row in rows] == list(range(_ROWS))
    answered = {row["custom_id"] for row in rows if trouble(row) is None}
    server.asked.clear()
    assert cloud(*run, "--retry-failed") == 0
    assert joined(out) == joined(folder / "whole")
    inferred = {f"r{prompt.split()[-1]}" for prompt in server.asked}
    assert not inferred & answered and inferred | answered == {f"r{i}" for i in range(_ROWS)}
    return killed and _ROWS // 2 < len(answered) < _ROWS


@pytest.mark.slow
def test_ten_kills_of_a_retry_leave_one_row_for_each_and_no_answer_is_asked_for_again(
    tmp_path: Path, server: ModelServer
) -> None:
    draw = random.Random(13)
    server.delay = 0.03
    _input(tmp_path, "row")
    assert cloud(*_server_run(tmp_path, "whole", server)) == 0
    hits = sum(_killed_while_trying_again(tmp_path, server, number, draw.uniform(0.05, 0.35)) for number in range(10))
    assert hits >= 2, "most kills came too early or too late to tell anything"


@pytest.mark.slow
def test_twenty_kills_and_resumes_of_an_engine_give_the_same_bytes(tmp_path: Path, tiny_model: Path) -> None:
    """With greedy sampling in float32, texts do not depend on the batches, whose rows are whatever is waiting."""
    _input(tmp_path, "The quick brown fox")

    def run(out: str, metrics: str) -> tuple[Any, ...]:
        where = ("run", "--input", tmp_path / "in", "--output", tmp_path / out, "--model", tiny_model)
        extra = json.dumps({"dtype": "float32", "threads": 1, "max_num_seqs": 4})
        limits = ("--part-rows", "4", "--batch-rows", "2", "--batches", "2", "--window", "16")
        return (*where, *limits, "--extra", extra, "--metrics", tmp_path / metrics)

    assert cloud(*run("whole", "whole.json")) == 0
    draw, hits = random.Random(12), 0
    for number in range(_KILLS):
        out = tmp_path / f"out{number}"
        killed = _kill_between_parts(
            run(out.name, "killed.json"), out, draw.randrange(_ROWS // 4), draw.uniform(0, 0.05)
        )
        delivered = _delivered(out)
        hits += killed and len(delivered) < _ROWS
        assert cloud(*run(out.name, "m.json")) == 0
        assert joined(out) == joined(tmp_path / "whole")
        assert json.loads((tmp_path / "m.json").read_text())["num_inferences"] == _ROWS - len(delivered)
    assert hits >= _KILLS // 4


def _kill_between_parts(run: tuple[Any, ...], out: Path, parts: int, seconds: float) -> bool:
    """Kills the run ``seconds`` after it has written ``parts`` parts."""
    process = start(*run)
    wait_until(lambda: process.poll() is not None or len(list(out.glob("part-*"))) >= parts)
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    return finish(process)[0] == -signal.SIGKILL


_READER = """
import asyncio, sys
from mlserver_torch_stream.cloud.store import Store, settle

async def read(store, info):
    return [chunk async for chunk in store.read(info, 0, info.size)]

async def main():
    store = Store.open(sys.argv[1])
    await asyncio.gather(*[read(store, info) async for info in store.list()])
    await settle()

asyncio.run(main())
"""


def _exits(bucket: str, server: ModelServer, count: int) -> None:
    """Without ``settle``, the object-store library aborts many processes that end during one of its calls: 7 of 25."""

    async def upload() -> None:
        store = Store.open(f"s3://{bucket}/in")
        for number in range(8):
            await store.put(f"{number}.txt", b"text" * 50_000)
        await settle()

    asyncio.run(upload())
    for number in range(count):
        out = f"s3://{bucket}/out{number}" if number % 2 else "-"
        process = start("run", "--input", f"s3://{bucket}/in", "--output", out, "--url", server.url)
        status, _, err = finish(process)
        assert status == 0, f"run {number}: {status}: {err}"
        refused, _, _ = finish(start("run", "--input", f"s3://{bucket}/nothing", "--url", server.url))
        assert refused == 2
        reader = subprocess.run([sys.executable, "-c", _READER, f"s3://{bucket}/in"], timeout=120)
        assert reader.returncode == 0


@pytest.mark.long
def test_processes_that_used_a_store_end_with_their_own_status(bucket: str, server: ModelServer) -> None:
    _exits(bucket, server, 1)


@pytest.mark.slow
def test_processes_that_used_a_store_end_with_their_own_status_in_20_of_20_runs(
    bucket: str, server: ModelServer
) -> None:
    _exits(bucket, server, 20)
