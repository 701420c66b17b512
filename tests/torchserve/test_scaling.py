"""Workers between minWorkers and maxWorkers, scaled by load and by requests, in real worker processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlserver_torch_stream.errors import LoadFailed, NotServing, QueueFull
from mlserver_torch_stream.handlers.config.model_config import HandlerConfig, not_honoured, read_config
from mlserver_torch_stream.handlers.pool.batch_queue import BatchQueue
from mlserver_torch_stream.handlers.pool.handler_request import HandlerFailed, HandlerJob, HandlerRequest, RequestPart
from mlserver_torch_stream.handlers.pool.worker_pool import WorkerPool
from tests.torchserve.workshop import ask, outcome, request, run, running, texts, until, write_handler

# Writes down each request that it is called with. "sleep 0.2" takes so long; "broken" beside it stops a worker's start.
# With "one" beside it, one more worker starts, and the others wait for "broken", or for "whole" to start too.
_HANDLER = """
import os, time
from pathlib import Path
from ts.handler_utils.utils import send_intermediate_predict_response as send

folder = Path(__file__).parent
sums = {}

def handle(data, context):
    if data is None:
        if (folder / "one").exists():
            try:
                (folder / "taken").mkdir()
                return None
            except FileExistsError:
                while not (folder / "broken").exists() and not (folder / "whole").exists():
                    time.sleep(0.01)
        if (folder / "broken").exists():
            raise ValueError("no memory left on the device")
        return None
    results = []
    for index, row in enumerate(data):
        text = row["body"].decode()
        with (folder / "calls").open("a") as calls:
            calls.write(text + "\\n")
        send([text], context.request_ids, "ok", 200, context)
        time.sleep(float(text.split()[1]) if text.startswith("sleep") else 0)
        sequence = context.get_sequence_id(index)
        sums[sequence] = sums.get(sequence, 0) + 1
        results.append(f"{os.getpid()} {sums[sequence]}")
    return results
"""
_FAST = {"scaleUpAfterMSec": 50, "scaleDownAfterMSec": 300, "maxBatchDelay": 0}


def _ready(pool: WorkerPool) -> int:
    return pool.gauges()["workers"]


def _pid(pool: WorkerPool) -> int:
    """Returns the pid of the only worker."""
    ((pid,),) = (slot.worker.pids for slot in pool.supervisor.slots if slot.worker is not None)
    return pid


def _of_sequence(name: str, text: str = "next", end: bool = False) -> HandlerRequest:
    headers = {"ts_request_sequence_id": name}
    return request(text, f"{name} {text}", headers=headers, sequence_id=name, sequence_end=end)


def _queued(name: str, arrived: float, sequence: str | None = None) -> HandlerJob:
    asked = HandlerRequest(name, [RequestPart("body", "", b"")], sequence_id=sequence)
    return HandlerJob(asked, name, arrived, lambda job: None)


async def _client(pool: WorkerPool, number: int, scaled: asyncio.Event) -> list[str]:
    """Returns the pieces of at least twelve answers, one after another, until the workers are ``scaled``."""
    answers: list[str] = []
    for turn in range(10_000):
        if turn >= 12 and scaled.is_set():
            break
        answers += await ask(pool, f"sleep 0.02 {number} {turn}", f"{number} {turn}")
    return answers


def _check_answers(answered: list[list[str]], folder: Path) -> None:
    """Checks that each client has its own answers in order, and that the handler was called once for each request."""
    asked = [
        [f"sleep 0.02 {number} {turn}" for turn in range(len(pieces) // 2)] for number, pieces in enumerate(answered)
    ]
    assert [pieces[::2] for pieces in answered] == asked
    assert Counter((folder / "calls").read_text().splitlines()) == Counter(text for each in asked for text in each)


@pytest.mark.long
def test_one_to_three_workers_and_back_under_sixteen_clients_loses_no_request_and_answers_none_twice(
    tmp_path: Path,
) -> None:
    done = False

    async def watch(pool: WorkerPool, scaled: asyncio.Event) -> None:
        while not done:
            if _ready(pool) == 3:
                scaled.set()
            assert len(pool.supervisor.slots) <= 3
            await asyncio.sleep(0.01)

    async def scenario() -> None:
        nonlocal done
        scaled = asyncio.Event()
        async with running(write_handler(tmp_path, _HANDLER, {"maxWorkers": 3, **_FAST})) as pool:
            assert _ready(pool) == 1
            watching = asyncio.create_task(watch(pool, scaled))
            answered = await asyncio.gather(*(_client(pool, number, scaled) for number in range(16)))
            await until(lambda: _ready(pool) == 1)
            await asyncio.sleep(0.6)  # twice the time after which an idle worker may end
            assert _ready(pool) == 1
            answered += [await _client(pool, 16, scaled)]
            done = True
            await watching
            assert len(pool.supervisor.slots) == 1
        _check_answers(answered, tmp_path)

    run(scenario())


@pytest.mark.long
def test_orders_to_scale_under_sixteen_clients_lose_no_request_and_answer_none_twice(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(write_handler(tmp_path, _HANDLER)) as pool:
            scaled = asyncio.Event()
            clients = asyncio.gather(*(_client(pool, number, scaled) for number in range(16)))
            for count in (3, 1, 2, 1):
                await pool.scaling.scale(count, count)
                assert _ready(pool) == count
            scaled.set()
            answered = await clients
            assert all(answered)
            _check_answers(answered, tmp_path)

    run(scenario())


def test_without_workers_the_first_request_starts_one_and_an_idle_one_ends(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = {"minWorkers": 0, "maxWorkers": 1, **_FAST, "scaleUpAfterMSec": 60_000}
        async with running(write_handler(tmp_path, _HANDLER, config)) as pool:
            assert _ready(pool) == 0 and pool.trouble is None
            first = (await ask(pool))[-1]
            await until(lambda: not pool.supervisor.slots)
            assert (await ask(pool))[-1].split()[0] != first.split()[0]
            assert [slot.number for slot in pool.supervisor.slots] == [0]  # the device of the first worker again

    run(scenario())


def test_requests_that_wait_for_their_batch_start_no_worker(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = {"maxWorkers": 2, **_FAST, "batchSize": 4, "maxBatchDelay": 500}
        async with running(write_handler(tmp_path, _HANDLER, config)) as pool:
            assert len(await ask(pool)) == 2
            assert len(pool.supervisor.slots) == 1

    run(scenario())


@pytest.mark.long
def test_a_worker_that_cannot_be_started_for_load_leaves_the_others_serving(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with running(write_handler(tmp_path, _HANDLER, {"maxWorkers": 2, **_FAST})) as pool:
            (tmp_path / "broken").touch()
            jobs = [pool.submit(request("sleep 0.2", str(each))) for each in range(12)]
            assert [len(await texts(job)) for job in jobs] == [2] * 12
            await until(lambda: "no memory left on the device" in caplog.text)
            await until(lambda: len(pool.supervisor.slots) == 1)  # one more may have been tried meanwhile
            assert pool.trouble is None

    run(scenario())


def test_where_the_first_worker_cannot_be_started_the_requests_get_the_reason_and_later_ones_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlserver_torch_stream.handlers.pool.worker_scaling._FIRST_PAUSE_S", 0.1)

    async def scenario() -> None:
        config = {"minWorkers": 0, "maxWorkers": 1, **_FAST}
        async with running(write_handler(tmp_path, _HANDLER, config)) as pool:
            (tmp_path / "broken").touch()
            failed = await outcome(pool.submit(request()))
            assert isinstance(failed, NotServing) and "no memory left on the device" in str(failed)
            (tmp_path / "broken").unlink()
            assert len(await ask(pool)) == 2

    run(scenario())


def test_with_tickets_a_refusal_starts_one_more(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = {"maxWorkers": 2, "useJobTicket": True, **_FAST}
        async with running(write_handler(tmp_path, _HANDLER, config)) as pool:
            busy = pool.submit(request("sleep 5"))
            with pytest.raises(QueueFull, match="useJobTicket"):
                pool.submit(request())
            await until(lambda: _ready(pool) == 2)
            assert len(await ask(pool)) == 2
            busy.close()

    run(scenario())


def test_a_worker_that_is_scaled_away_finishes_its_request_and_its_sequence_and_takes_no_other(tmp_path: Path) -> None:
    config = {"sequenceBatching": True, "maxSequenceJobQueueSize": 9, "sequenceMaxIdleMSec": 60_000, **_FAST}

    async def scenario() -> None:
        async with running(write_handler(tmp_path, _HANDLER, {**config, "minWorkers": 2})) as pool:
            busy = {name: pool.submit(_of_sequence(name, "sleep 1")) for name in "ab"}
            await asyncio.gather(*(anext(job) for job in busy.values()))
            scaled = asyncio.create_task(pool.scaling.scale(1, 1))
            pids = {name: (await texts(job))[-1] for name, job in busy.items()}
            later = {name: (await texts(pool.submit(_of_sequence(name))))[-1] for name in "ab"}
            assert {name: text.replace(" 1", " 2") for name, text in pids.items()} == later
            assert _ready(pool) == 2 and not scaled.done()
            (leaving,) = [slot for slot in pool.supervisor.slots if slot.leaving]
            others = await asyncio.gather(*(ask(pool, "other", str(each)) for each in range(6)))
            assert len({answer[-1].split()[0] for answer in others}) == 1
            for name in "ab":  # the ends of both
                assert (await texts(pool.submit(_of_sequence(name, "last", end=True))))[-1].endswith(" 3")
            await scaled
            assert _ready(pool) == 1 and leaving not in pool.supervisor.slots

    run(scenario())


def test_scaled_to_none_the_workers_finish_what_waits_and_later_requests_are_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(write_handler(tmp_path, _HANDLER)) as pool:
            jobs = [pool.submit(request("sleep 0.1", str(each))) for each in range(4)]
            scaled = asyncio.create_task(pool.scaling.scale(0, 0))
            await asyncio.sleep(0)
            with pytest.raises(NotServing, match="Please use scale workers API"):
                pool.submit(request())
            assert [len(await texts(job)) for job in jobs] == [2] * 4
            await scaled
            assert not pool.supervisor.slots and pool.trouble is None
            await pool.scaling.scale(2, 2)
            assert _ready(pool) == 2 and len(await ask(pool)) == 2

    run(scenario())


def test_after_its_time_a_worker_that_is_scaled_away_is_ended_with_its_request(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(write_handler(tmp_path, _HANDLER)) as pool:
            job = pool.submit(request("sleep 60"))
            await anext(job)
            await pool.scaling.scale(0, 0, grace=0.1)
            failed = await outcome(job)
            assert isinstance(failed, HandlerFailed) and "after it was scaled away" in str(failed)
            await until(lambda: not pool.supervisor.slots)
            assert pool.supervisor.restarts == 0

    run(scenario())


def test_an_unload_waits_for_the_end_of_a_worker_that_was_scaled_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection is closed on the event loop, which may end with the unload."""
    monkeypatch.setattr("mlserver_torch_stream.handlers.pool.worker_rank._STOP_S", 1.5)

    async def scenario() -> None:
        async with running(write_handler(tmp_path, _HANDLER)) as pool:
            await anext(pool.submit(request("sleep 60")))
            process = psutil.Process(_pid(pool))
            process.suspend()  # its end takes as long as the server waits for it
            await pool.scaling.scale(0, 0, grace=0.1)
            assert not pool.supervisor.slots and process.is_running()
        assert not process.is_running()

    run(scenario())


def test_an_order_ends_with_its_workers_where_the_model_is_unloaded_meanwhile(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(write_handler(tmp_path, _HANDLER)) as pool:
            await anext(pool.submit(request("sleep 60")))
            scaled = asyncio.create_task(pool.scaling.scale(0, 0))
            await asyncio.sleep(0)
            assert not scaled.done()
            await asyncio.to_thread(pool.shutdown)
            await asyncio.wait_for(scaled, 10)

    run(scenario())


def test_an_order_that_cannot_be_met_says_why_and_leaves_the_workers_as_they_were(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(write_handler(tmp_path, _HANDLER)) as pool:
            (tmp_path / "broken").touch()
            with pytest.raises(LoadFailed, match="no memory left on the device"):
                await pool.scaling.scale(3, 4)
            assert (pool.scaling.least, pool.scaling.most) == (1, 1)
            await until(lambda: len(pool.supervisor.slots) == 1)
            assert len(await ask(pool)) == 2
            (tmp_path / "broken").unlink()
            more = asyncio.create_task(pool.scaling.scale(3, 3))
            await asyncio.sleep(0)
            await pool.scaling.scale(1, 1)  # before they are ready
            with pytest.raises(LoadFailed, match="was scaled away while it started"):
                await more
            assert _ready(pool) == 1 and len(await ask(pool)) == 2

    run(scenario())


@pytest.mark.long
def test_a_worker_that_was_ready_finishes_its_request_where_another_of_its_order_fails(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(write_handler(tmp_path, _HANDLER)) as pool:
            (tmp_path / "one").touch()
            scaled = asyncio.create_task(pool.scaling.scale(3, 3))
            await until(lambda: _ready(pool) == 2)
            jobs = [pool.submit(request("sleep 1", str(each))) for each in range(2)]
            await asyncio.gather(*(anext(job) for job in jobs))
            (tmp_path / "broken").touch()
            with pytest.raises(LoadFailed, match="no memory left on the device"):
                await scaled
            answers = await asyncio.wait_for(asyncio.gather(*map(texts, jobs)), 30)
            assert len({answer[-1].split()[0] for answer in answers}) == 2
            await until(lambda: len(pool.supervisor.slots) == 1)
            assert len(await ask(pool)) == 2

    run(scenario())


@pytest.mark.long
def test_fewer_workers_while_they_start_leaves_those_that_stay(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(write_handler(tmp_path, _HANDLER)) as pool:
            (tmp_path / "one").touch()
            more = asyncio.create_task(pool.scaling.scale(4, 4))
            await until(lambda: _ready(pool) == 2)
            jobs = [pool.submit(request("sleep 1", str(each))) for each in range(2)]
            await asyncio.gather(*(anext(job) for job in jobs))
            fewer = asyncio.create_task(pool.scaling.scale(3, 3))
            await asyncio.sleep(0.1)
            assert len(pool.supervisor.staying) == 3 and not fewer.done()
            (tmp_path / "whole").touch()
            await fewer
            assert _ready(pool) == 3
            with pytest.raises(LoadFailed, match="was scaled away while it started"):
                await more
            assert [len(answer) for answer in await asyncio.wait_for(asyncio.gather(*map(texts, jobs)), 30)] == [1, 1]
            await until(lambda: _ready(pool) == len(pool.supervisor.slots) == 3)

    run(scenario())


@pytest.mark.parametrize("grace", [0.1, None])
def test_what_waits_gets_an_error_where_the_last_worker_to_leave_ends_before_it(
    tmp_path: Path, grace: float | None
) -> None:
    async def scenario() -> None:
        async with running(write_handler(tmp_path, _HANDLER)) as pool:
            jobs = [pool.submit(request("sleep 60", str(each))) for each in range(3)]
            await anext(jobs[0])
            scaled = asyncio.create_task(pool.scaling.scale(0, 0, grace))
            await asyncio.sleep(0)
            if grace is None:
                os.kill(_pid(pool), signal.SIGKILL)
            failed = await asyncio.wait_for(asyncio.gather(*map(outcome, jobs)), 30)
            assert isinstance(failed[0], HandlerFailed)
            assert all(isinstance(each, NotServing) and "scale workers API" in str(each) for each in failed[1:])
            await scaled

    run(scenario())


def test_an_order_ends_with_the_model_while_a_worker_still_holds_its_sequence(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = {"sequenceBatching": True, "sequenceMaxIdleMSec": 60_000}
        async with running(write_handler(tmp_path, _HANDLER, config)) as pool:
            await texts(pool.submit(_of_sequence("a")))
            scaled = asyncio.create_task(pool.scaling.scale(0, 0))
            await asyncio.sleep(0.1)
            assert _ready(pool) == 1 and not scaled.done()
            await asyncio.to_thread(pool.shutdown)
            await asyncio.wait_for(scaled, 30)

    run(scenario())


def test_a_worker_that_leaves_gets_only_the_requests_of_its_sequences_and_only_others_wait_for_a_new_one() -> None:
    config: dict[str, Any] = {"sequenceBatching": True, "sequenceMaxIdleMSec": 1000, "maxSequenceJobQueueSize": 9}
    waiting = BatchQueue(HandlerConfig(**config, minWorkers=2))
    waiting.add(_queued("a1", 1.0, "a"), 1.0)
    (a1,) = waiting.take(0, 1)
    waiting.add(_queued("a2", 2.0, "a"), 2.0)
    assert waiting.waiting_since is None and waiting.is_open("a", 0.0) and not waiting.is_open("b", 0.0)
    waiting.add(_queued("free", 3.0), 3.0)
    waiting.add(_queued("b1", 4.0, "b"), 4.0)
    assert waiting.waiting_since == 3.0
    waiting.leaving.add(0)
    waiting.ended(a1, 5.0, False)
    (a2,) = waiting.take(0, 9)
    assert a2.key == "a2" and waiting.held_until(0, 5.0) == float("inf")
    assert [job.key for job in waiting.take(1, 9)] == ["b1", "free"]
    waiting.ended(a2, 6.0, False)
    assert waiting.held_until(0, 6.5) == 7.0 and waiting.held_until(0, 7.5) is None


def test_fewer_workers_at_most_than_at_least_are_named_and_not_scaled() -> None:
    """TorchServe has `default_workers_per_model` workers then, whatever the YAML's `maxWorkers` is."""
    config = read_config({"maxWorkers": 1}, {"minWorkers": 2})
    assert config.most_workers == HandlerConfig(minWorkers=2).most_workers == 2
    assert list(not_honoured({}, config)) == [
        "maxWorkers: 1 is less than minWorkers, so the model always has 2 workers"
    ]
