"""Batches that a quick worker gets while it runs another: the order of its requests, and what fails if it dies."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mlserver_torch_stream.errors import QueueFull, TimedOut
from mlserver_torch_stream.handlers.config.model_config import read_config
from mlserver_torch_stream.handlers.pool import batch_dispatch
from mlserver_torch_stream.handlers.pool.batch_queue import BatchQueue
from mlserver_torch_stream.handlers.pool.handler_request import (
    HandlerFailed,
    HandlerJob,
    HandlerRequest,
    PieceStream,
    WorkerLost,
)
from mlserver_torch_stream.handlers.pool.supervisor import WorkerSlot
from mlserver_torch_stream.handlers.pool.worker_pool import WorkerPool
from tests.torchserve.workshop import outcome, request, run, running, texts, until, write_handler

_AHEAD_S = batch_dispatch._AHEAD_S
_SEQUENCES = {"sequenceBatching": True, "maxNumSequence": 8, "maxSequenceJobQueueSize": 32}
# Notes the texts of each batch; "slow" takes half a second, "nap" a quarter, "hang" never ends, "die" ends the process.
NOTING = """
import os, time

def handle(data, context):
    if data is None:
        return None
    texts = [row["body"].decode() for row in data]
    with open(os.environ["NOTES"], "a") as notes:
        notes.write("+".join(texts) + " ")
    if "slow" in texts:
        time.sleep(0.5)
    if "nap" in texts:
        time.sleep(0.25)
    if "hang" in texts:
        time.sleep(600)
    if "die" in texts:
        os._exit(3)
    return texts
"""


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The handler's notes. A worker counts as quick even if its batches take a second, as on a busy machine."""
    monkeypatch.setattr(batch_dispatch, "_AHEAD_S", 16.0)
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    return tmp_path / "notes"


async def _quick(pool: WorkerPool) -> WorkerSlot:
    """Sends requests until the only worker counts as quick."""
    slot = pool.supervisor.slots[0]
    for number in range(500):
        size = pool.config.batchSize
        sequences = [f"s{number}.{index}" if pool.config.sequenceBatching else None for index in range(size)]
        jobs = [
            pool.submit(
                request(f"quick{number}", f"q{index}", sequence_id=each, sequence_end=True), more=index < size - 1
            )
            for index, each in enumerate(sequences)
        ]
        await asyncio.gather(*map(outcome, jobs))
        if slot.batch_s is not None and slot.batch_s < batch_dispatch._AHEAD_S / 5:
            return slot
    raise AssertionError("the worker was never quick")


def test_a_quick_worker_has_further_requests_while_it_runs_one(tmp_path: Path, notes: Path) -> None:
    """The metrics count these requests as waiting, and one whose client leaves is not run."""

    async def scenario() -> None:
        async with running(write_handler(tmp_path, NOTING), responseTimeout=60) as pool:
            slot = await _quick(pool)
            jobs = [pool.submit(request(text, text)) for text in ("slow", "left", "next")]
            assert [job.request.request_id for job in slot.ahead] == ["left", "next"]
            assert pool.gauges()["waiting_requests"] == 2
            jobs[1].close()
            assert await asyncio.gather(*map(outcome, jobs)) == [["slow"], [], ["next"]]
            assert notes.read_text().split()[-2:] == ["slow", "next"]
            assert (pool.jobs, pool.gauges()["waiting_requests"]) == ({}, 0)

    run(scenario())


def test_requests_that_were_sent_ahead_count_for_the_queues_bound(tmp_path: Path, notes: Path) -> None:
    async def scenario() -> None:
        async with running(write_handler(tmp_path, NOTING), jobQueueSize=2) as pool:
            await _quick(pool)
            jobs = [pool.submit(request(text, text)) for text in ("slow", "one", "two")]
            with pytest.raises(QueueFull, match="jobQueueSize"):
                pool.submit(request("three"))
            assert await asyncio.gather(*map(outcome, jobs)) == [["slow"], ["one"], ["two"]]

    run(scenario())


@pytest.mark.long
@pytest.mark.parametrize("how", [{}, {"useJobTicket": True}, {"minWorkers": 2, "maxWorkers": 2}])
def test_a_worker_gets_one_batch_at_a_time_where_it_is_slow_or_another_could_take_the_next(
    tmp_path: Path, notes: Path, how: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_dispatch, "_AHEAD_S", _AHEAD_S)

    async def scenario() -> None:
        async with running(write_handler(tmp_path, NOTING), responseTimeout=60, **how) as pool:
            if how:
                await _quick(pool) if "useJobTicket" in how else None
                first = [pool.submit(request("slow", f"{index}")) for index in range(len(pool.supervisor.slots))]
            else:
                await texts(pool.submit(request("slow", "first")))
                first = [pool.submit(request("slow", "second"))]
            if "useJobTicket" in how:
                with pytest.raises(QueueFull, match="useJobTicket"):
                    pool.submit(request("more", "more"))
            else:
                first.append(pool.submit(request("more", "more")))
            assert not any(slot.ahead for slot in pool.supervisor.slots)
            assert all(isinstance(each, list) for each in await asyncio.gather(*map(outcome, first)))

    run(scenario())


@pytest.mark.parametrize("delay", [0, 100])
def test_a_batch_is_sent_ahead_once_it_is_full(tmp_path: Path, notes: Path, delay: int) -> None:
    """Otherwise it would be smaller than a batch that is sent when the worker is free."""

    async def scenario() -> None:
        async with running(write_handler(tmp_path, NOTING), batchSize=3, maxBatchDelay=delay) as pool:
            slot = await _quick(pool)
            jobs = [pool.submit(request("slow", f"s{index}"), more=index < 2) for index in range(3)]
            jobs += [pool.submit(request(text, text)) for text in ("a", "b")]
            assert not slot.ahead
            jobs += [pool.submit(request(text, text)) for text in ("c", "d")]
            assert [job.request.request_id for job in slot.ahead] == ["a", "b", "c"]
            await asyncio.gather(*map(outcome, jobs))
            assert notes.read_text().split()[-3:] == ["slow+slow+slow", "a+b+c", "d"]

    run(scenario())


@pytest.mark.long
@pytest.mark.parametrize(("text", "error"), [("die", HandlerFailed), ("hang", TimedOut)])
def test_a_worker_that_ends_fails_what_it_has_begun_and_the_rest_is_run_once(
    tmp_path: Path, notes: Path, text: str, error: type[Exception]
) -> None:
    """A request whose client has left in the meantime is not run."""

    async def scenario() -> None:
        async with running(write_handler(tmp_path, NOTING), responseTimeout=2) as pool:
            slot = await _quick(pool)
            jobs = [pool.submit(request(each, each)) for each in (text, "ahead", "left", "behind")]
            assert len(slot.ahead) == 3
            jobs[2].close()
            failed, *others = await asyncio.gather(*map(outcome, jobs))
            assert isinstance(failed, error) and others == [["ahead"], [], ["behind"]]
            assert notes.read_text().split()[-3:] == [text, "ahead", "behind"]
            assert (pool.jobs, pool.gauges()["waiting_requests"]) == ({}, 0)

    run(scenario())


@pytest.mark.long
def test_the_time_limit_of_a_batch_begins_with_it(tmp_path: Path, notes: Path) -> None:
    """The later ones wait behind the first for longer than the limit, and still have all of their own time."""

    async def scenario() -> None:
        async with running(write_handler(tmp_path, NOTING), responseTimeout=1) as pool:
            slot = await _quick(pool)
            jobs = [pool.submit(request("nap", f"{index}")) for index in range(6)]
            assert len(slot.ahead) == 5
            assert await asyncio.gather(*map(outcome, jobs)) == [["nap"]] * 6
            assert pool.supervisor.restarts == 0

    run(scenario())


def test_the_requests_of_a_sequence_run_and_are_answered_in_their_order(tmp_path: Path, notes: Path) -> None:
    """There are 32 requests at once, of four sequences."""

    async def scenario() -> None:
        how = {**_SEQUENCES, "sequenceMaxIdleMSec": 60000}
        async with running(write_handler(tmp_path, NOTING), **how) as pool:
            slot = await _quick(pool)
            answered: list[str] = []

            async def ask(stream: PieceStream) -> None:
                answered.extend(await texts(stream))

            jobs = [
                pool.submit(request(f"{index % 4}:{index:02}", f"{index}", sequence_id=f"{index % 4}"))
                for index in range(32)
            ]
            assert slot.ahead
            await asyncio.gather(*map(ask, jobs))
            for found in (answered, notes.read_text().split()[-32:]):
                for name in range(4):
                    own = [text for text in found if text.startswith(f"{name}:")]
                    assert own == [f"{name}:{index:02}" for index in range(name, 32, 4)]

    run(scenario())


def test_a_sequence_that_was_only_sent_ahead_outlives_the_worker_and_one_with_a_state_does_not(
    tmp_path: Path, notes: Path
) -> None:
    async def scenario() -> None:
        how = {**_SEQUENCES, "sequenceMaxIdleMSec": 60000}
        async with running(write_handler(tmp_path, NOTING), **how) as pool:
            await texts(pool.submit(request("begin", "begin", sequence_id="old")))
            slot = await _quick(pool)
            asked = (("die", "dying"), ("new", "new"), ("old", "old"))
            jobs = [pool.submit(request(text, text, sequence_id=name)) for text, name in asked]
            assert len(slot.ahead) == 2
            dying, new, old = await asyncio.gather(*map(outcome, jobs))
            assert isinstance(dying, HandlerFailed) and new == ["new"] and isinstance(old, HandlerFailed)
            assert notes.read_text().split()[-2:] == ["die", "new"]

    run(scenario())


def test_no_request_is_answered_before_an_earlier_one(tmp_path: Path, notes: Path) -> None:
    """There are 64 clients, each of which sends its next request as soon as it is answered."""

    async def scenario() -> None:
        async with running(write_handler(tmp_path, NOTING)) as pool:
            slot = await _quick(pool)
            asked, ahead = iter(range(960)), 0
            answered: list[int] = []

            async def client() -> None:
                nonlocal ahead
                for number in asked:
                    job = pool.submit(request(f"n{number}", f"{number}"))
                    ahead = max(ahead, len(slot.ahead))
                    await texts(job)
                    answered.append(number)

            await asyncio.gather(*(client() for _ in range(64)))
            assert ahead and answered == list(range(960))
            assert notes.read_text().split()[-960:] == [f"n{number}" for number in range(960)]

    run(scenario())


def test_what_is_taken_back_waits_where_it_did() -> None:
    queue = BatchQueue(read_config({}, {"batchSize": 2}))
    jobs = [HandlerJob(HandlerRequest(name, []), name, 0.0, lambda job: None) for name in "abcd"]
    for job in jobs:
        queue.add(job, 0.0)
    assert queue.is_full(0)
    taken = queue.take(0, 2)
    for job in reversed(taken):
        queue.take_back(job)
    assert [job.key for job in queue.clear()] == ["a", "b", "c", "d"]


def test_a_worker_killed_under_load_loses_no_request_and_runs_none_twice(tmp_path: Path, notes: Path) -> None:
    """There are sixteen clients. Requests that had begun fail, and all others are answered."""

    async def scenario() -> None:
        async with running(write_handler(tmp_path, NOTING)) as pool:
            slot = await _quick(pool)

            async def client(number: int) -> list[list[str] | Exception]:
                return [await outcome(pool.submit(request(f"{number}.{turn}", f"{number}"))) for turn in range(30)]

            clients = [asyncio.ensure_future(client(number)) for number in range(16)]
            for _ in range(2):
                await until(lambda: slot.ready and slot.ahead)
                pool.supervisor.kill(slot, "was killed by the test")
            results = [each for answers in await asyncio.gather(*clients) for each in answers]
            failed = [each for each in results if not isinstance(each, list)]
            assert len(results) == 480 and len(failed) <= 2
            ran = [text for text in notes.read_text().split() if "." in text]
            assert len(ran) == len(set(ran)) and len(ran) >= 480 - len(failed)

    run(scenario())


def test_an_open_sequence_that_no_worker_holds_is_refused(tmp_path: Path) -> None:
    """A request that continues a sequence is never the first of that sequence that a worker gets."""

    async def scenario() -> None:
        source = "def handle(data, context):\n    return None if data is None else ['ok'] * len(data)\n"
        limits = {"sequenceBatching": True, "sequenceMaxIdleMSec": 60_000}
        async with running(write_handler(tmp_path, source), **limits) as pool:
            sequence = {"sequence_id": "s", "whole_sequence": True}
            with pytest.raises(WorkerLost, match="the sequence is not open"):
                pool.submit(request("a", "1", **sequence, sequence_open=True))
            assert await texts(pool.submit(request("a", "2", **sequence))) == ["ok"]
            assert await texts(pool.submit(request("b", "3", **sequence, sequence_open=True))) == ["ok"]

    run(scenario())
