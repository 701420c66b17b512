"""Static batches: when they are sent, which requests they contain, and that a failing request fails alone."""

from __future__ import annotations

import asyncio
import textwrap
from pathlib import Path

import psutil
import pytest

from mlserver_torch_stream.errors import QueueFull
from mlserver_torch_stream.handlers.config.model_config import HandlerConfig, read_config
from mlserver_torch_stream.handlers.pool.batch_queue import BatchQueue
from mlserver_torch_stream.handlers.pool.handler_request import (
    HandlerFailed,
    HandlerJob,
    HandlerRequest,
    RequestPart,
    RequestTooLarge,
    ResponsePiece,
)
from mlserver_torch_stream.handlers.pool.worker_process import batch_frame
from tests.torchserve.workshop import COUNTER, outcome, request, run, running, texts, write_handler

SMALL = {"most_bytes": 5000}  # of the message of a batch


def _waiting(count: int, now: float = 0.0, **config: int | bool) -> tuple[BatchQueue, list[HandlerJob]]:
    waiting = BatchQueue(read_config({}, config))
    jobs = [_job(f"r{index}", now) for index in range(count)]
    for job in jobs:
        waiting.add(job, now)
    return waiting, jobs


def _job(name: str, now: float = 0.0, sequence: str | None = None, end: bool = False, size: int = 0) -> HandlerJob:
    parts = [RequestPart("body", "", b"x" * size)] if size else []
    return HandlerJob(HandlerRequest(name, parts, {}, sequence, end), name, now, lambda job: None)


def test_a_full_batch_is_due_at_once_and_another_after_the_delay() -> None:
    waiting, _ = _waiting(2, now=10.0, batchSize=3, maxBatchDelay=100)
    assert waiting.due(0, idle_since=0.0, now=10.0) == 10.1
    assert waiting.due(0, idle_since=12.0, now=12.0) == 12.1  # the worker comes later than the request
    waiting.add(_job("r2", 10.05), 10.05)
    assert waiting.due(0, idle_since=0.0, now=10.05) == 10.05
    assert [job.key for job in waiting.take(0, 3)] == ["r0", "r1", "r2"]
    assert waiting.due(0, 0.0, 11.0) is None


def test_the_queue_has_a_bound() -> None:
    waiting, _ = _waiting(2, jobQueueSize=2)
    with pytest.raises(QueueFull, match="jobQueueSize"):
        waiting.add(_job("more"), 0.0)


def test_requests_that_idle_workers_gather_are_not_among_those_that_wait() -> None:
    config = {"jobQueueSize": 2, "batchSize": 3, "maxBatchDelay": 1000, "minWorkers": 2, "sequenceBatching": True}
    waiting = BatchQueue(read_config({}, config))
    for number in range(5):
        waiting.add(_job(f"r{number}"), 0.0, idle=lambda: [1])
    assert (waiting.waiting([1]), waiting.waiting([0, 1]), waiting.waiting([])) == (2, 0, 5)
    with pytest.raises(QueueFull, match="2 requests are already waiting"):
        waiting.add(_job("more"), 0.0, idle=lambda: [1])
    for name in ("s1", "s2"):
        waiting.add(_job(name, sequence="s"), 0.0, idle=lambda: [0, 1])  # the second one waits for the first
    assert waiting.waiting([0, 1]) == 1 and len(waiting) == 7
    with pytest.raises(QueueFull, match="1 of its requests are already waiting"):
        waiting.add(_job("s3", sequence="s"), 0.0, idle=lambda: [0, 1])


def test_a_batch_may_be_larger_than_the_queue(tmp_path: Path) -> None:
    source = "def handle(data, context):\n    return None if data is None else [str(len(data))] * len(data)"

    async def scenario() -> None:
        config = {"batchSize": 12, "jobQueueSize": 4, "maxBatchDelay": 60_000}
        async with running(write_handler(tmp_path, source, config)) as pool:
            jobs = [pool.submit(request(request_id=f"r{number}")) for number in range(12)]
            assert [await texts(job) for job in jobs] == [["12"]] * 12

    run(scenario())


def test_a_batch_is_no_larger_than_one_message_carries() -> None:
    waiting = BatchQueue(read_config({}, {"batchSize": 8, "maxBatchDelay": 1000}), most_bytes=5000)
    for index in range(5):
        waiting.add(_job(f"r{index}", size=1300), 0.0)
        assert waiting.due(0, 0.0, 0.0) == (1.0 if index < 3 else 0.0)  # three of them fill it
    assert [[job.key for job in waiting.take(0, 8)] for _ in range(3)] == [["r0", "r1", "r2"], ["r3", "r4"], []]
    with pytest.raises(RequestTooLarge, match=r"bytes is too large: the limit is 5000") as refused:
        waiting.add(_job("large", size=5000), 0.0)
    assert refused.value.status == 413


def test_a_request_that_has_left_makes_no_batch_due() -> None:
    waiting = BatchQueue(read_config({}, {"batchSize": 8, "maxBatchDelay": 1000}), most_bytes=5000)
    jobs = [_job(f"r{index}", size=1800) for index in range(3)]
    for job in jobs:
        waiting.add(job, 0.0)
    assert waiting.due(0, 0.0, 0.0) == 0.0  # they fill a message
    waiting.remove(jobs[1], 0.0)
    assert waiting.due(0, 0.0, 0.0) == 1.0
    taken = waiting.take(0, 8)
    waiting.take_back(taken[0])
    assert (len(waiting), waiting.due(0, 0.0, 0.0), waiting.clear()) == (1, 1.0, [jobs[0]])
    assert waiting.due(0, 0.0, 0.0) is None


def test_what_a_frame_takes_is_not_underestimated() -> None:
    """Names and headers may contain any characters."""
    wide = "\U0001f600" * 50
    request = HandlerRequest(wide, [RequestPart(wide, wide, b"x" * 10)] * 3, {wide: wide, "\x00": "\x00"})
    job = HandlerJob(request, wide, 0.0, lambda job: None)
    assert sum(map(len, batch_frame([job]))) <= job.bytes


@pytest.mark.parametrize("how", [{}, {"continuousBatching": True}, {"asyncCommunication": True}])
def test_more_than_one_message_carries_is_run_in_several_batches(tmp_path: Path, how: dict[str, bool]) -> None:
    """A single request that is larger than a message is refused. The worker lives on."""
    source = f"""
        {"async" if "asyncCommunication" in how else ""} def handle(data, context):
            return None if data is None else [f"{{len(data)}} {{len(row['body'])}}" for row in data]
    """
    if "asyncCommunication" in how:
        source += "        async def initialize(context): ..."

    async def scenario() -> None:
        uri = write_handler(tmp_path, textwrap.dedent(source), {"batchSize": 4, **how})
        async with running(uri, limits=SMALL) as pool:
            with pytest.raises(RequestTooLarge):
                pool.submit(request("x" * 5000))
            jobs = [pool.submit(request("x" * 1500, f"r{index}")) for index in range(4)]
            assert [(await texts(job))[0].split()[1] for job in jobs] == ["1500"] * 4
            assert pool.metrics.batched_requests == 4 and pool.supervisor.restarts == 0

    run(scenario())


def test_all_for_whom_there_is_room_go_to_a_worker_that_comes_back_however_many_messages_it_takes(
    tmp_path: Path,
) -> None:
    """The handler ends the four requests when it has all four."""
    source = """
        import asyncio, os

        class Handler:
            here = 0

            def initialize(self, context): ...

            async def handle(self, data, context):
                if not data[0]["body"]:
                    os._exit(1)
                self.here += 1
                while self.here < 4:
                    await asyncio.sleep(0.01)
                return ["met"]
    """

    async def scenario() -> None:
        async with running(write_handler(tmp_path, source, {"asyncCommunication": True}), limits=SMALL) as pool:
            await outcome(pool.submit(request("")))
            jobs = [pool.submit(request("x" * 1500, f"r{index}")) for index in range(4)]
            assert [await texts(job) for job in jobs] == [["met"]] * 4
            assert pool.metrics.batches == 3  # the first one, and two for the four

    run(scenario())


_ECHO = """
def handle(data, context):
    if data is None:
        return None
    if "large" in data[0]:
        return [bytes((1 << 30) + 1)]
    return [bytes(row["body"]) for row in data]
"""


@pytest.mark.slow
@pytest.mark.skipif(psutil.virtual_memory().available < 12 << 30, reason="needs 12 GiB of memory")
def test_a_batch_and_an_answer_of_more_than_a_gibibyte_leave_the_worker_alive(tmp_path: Path) -> None:
    quarter = b"x" * (1 << 28)

    async def scenario() -> None:
        async with running(write_handler(tmp_path, _ECHO, {"batchSize": 5, "maxBatchDelay": 1000})) as pool:
            jobs = [pool.submit(HandlerRequest(f"r{index}", [RequestPart("body", "", quarter)])) for index in range(5)]
            for job in jobs:
                assert [len(piece.value) async for piece in job] == [1 << 28]
            assert pool.metrics.batches == 2
            with pytest.raises(RequestTooLarge):
                pool.submit(HandlerRequest("five", [RequestPart("body", "", quarter)] * 5))
            failed = await outcome(pool.submit(HandlerRequest("large", [RequestPart("large", "", b"")])))
            assert getattr(failed, "status", None) == 507 and "1073741825 bytes is too large" in str(failed)
            assert await texts(pool.submit(request("fine"))) == ["fine"]
            assert pool.supervisor.restarts == 0

    run(scenario())


def test_a_batch_on_a_real_worker_takes_what_came_together(tmp_path: Path) -> None:
    source = """
        def handle(data, context):
            return None if data is None else [str(len(data))] * len(data)
    """

    async def scenario() -> None:
        async with running(write_handler(tmp_path, source, {"batchSize": 4, "maxBatchDelay": 10_000})) as pool:
            jobs = [pool.submit(request("", f"r{index}")) for index in range(4)]
            assert [await texts(job) for job in jobs] == [["4"]] * 4
        async with running(write_handler(tmp_path, source, {"batchSize": 4, "maxBatchDelay": 20})) as pool:
            assert await texts(pool.submit(request())) == ["1"]

    run(scenario())


def test_members_of_a_batch_get_as_many_pieces_as_they_have(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(write_handler(tmp_path, COUNTER, {"batchSize": 3, "maxBatchDelay": 10_000})) as pool:
            jobs = [pool.submit(request(f"count {count}", f"r{count}")) for count in (1, 4, 0)]
            assert [len(await texts(job)) for job in jobs] == [2, 5, 1]

    run(scenario())


@pytest.mark.parametrize("which", ["shim", pytest.param("package", marks=pytest.mark.slow)])
def test_a_member_ends_early_and_its_stream_with_it(tmp_path: Path, which: str) -> None:
    """The other requests of the batch continue, and the one that has ended does not wait for them."""
    source = """
        import pathlib, time
        from ts.handler_utils.utils import send_intermediate_predict_response

        def handle(data, context):
            if data is None:
                return None
            short = [row["body"] for row in data].index(b"short")
            context.set_response_header(short, "ts_stream_next", "false")
            send_intermediate_predict_response(["piece"] * len(data), context.request_ids, "ok", 200, context)
            while not pathlib.Path("short-is-over").exists():
                time.sleep(0.005)
            return ["end"] * len(data)
    """

    async def scenario() -> None:
        async with running(write_handler(tmp_path, source, {"batchSize": 2, "maxBatchDelay": 10_000}), which) as pool:
            long, short = (pool.submit(request(text, text)) for text in ("long", "short"))
            assert await texts(short) == ["piece"]
            (tmp_path / "short-is-over").touch()
            assert await texts(long) == ["piece", "end"]

    run(scenario())


def test_a_request_that_makes_its_batch_fail_fails_alone(tmp_path: Path) -> None:
    """The other requests are run again alone, and no piece is delivered twice."""

    async def scenario() -> None:
        async with running(write_handler(tmp_path, COUNTER, {"batchSize": 3, "maxBatchDelay": 10_000})) as pool:
            jobs = [pool.submit(request(text, text)) for text in ("count 3", "raise", "count 1")]
            first, bad, last = await asyncio.gather(*map(outcome, jobs))
            assert first == ["0", "1", "2", "end"] and last == ["0", "end"]
            assert isinstance(bad, HandlerFailed) and bad.status == 503
            assert bad.message == "the handler raised ValueError: asked to raise"

    run(scenario())


def test_a_stream_that_begins_differently_when_run_again_is_ended_with_the_reason() -> None:
    job = _job("r")
    job.deliver(ResponsePiece(b"a", False))
    job.deliver(ResponsePiece(b"b", False))
    job.retry = HandlerFailed("the handler raised")
    job.run_again()
    job.deliver(ResponsePiece(b"a", False))
    job.deliver(ResponsePiece(b"other", False))

    async def scenario() -> None:
        assert [(await anext(job.stream)).value for _ in range(2)] == [b"a", b"b"]
        with pytest.raises(HandlerFailed, match="when it was run again alone, its answer began differently"):
            await anext(job.stream)

    run(scenario())


def test_a_client_that_lags_in_company_is_cut(tmp_path: Path) -> None:
    """The other requests of its batch continue."""
    source = """
        from ts.handler_utils.utils import send_intermediate_predict_response

        def handle(data, context):
            if data is None:
                return None
            for _ in range(600):
                send_intermediate_predict_response([b"x" * 65536] * 2, context.request_ids, "ok", 200, context)
            return ["end"] * 2
    """

    async def scenario() -> None:
        async with running(write_handler(tmp_path, source, {"batchSize": 2, "maxBatchDelay": 10_000})) as pool:
            lags, reads = pool.submit(request("", "lags")), pool.submit(request("", "reads"))
            assert len(await texts(reads)) == 601
            ended = await outcome(lags)
            assert "has not read" in str(ended)

    run(scenario())


def test_one_large_piece_is_no_lag() -> None:
    stream = _job("r").stream
    stream.put(ResponsePiece(b"x" * (17 << 20), False))
    stream.cut_if_far_behind()
    assert not stream.over
    stream.put(ResponsePiece(b"x", False))
    stream.cut_if_far_behind()
    assert stream.over


def test_job_tickets_refuse_where_no_worker_is_free(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(write_handler(tmp_path, COUNTER, {"useJobTicket": True})) as pool:
            busy = pool.submit(request("count 50", "busy"))
            with pytest.raises(QueueFull, match="useJobTicket"):
                pool.submit(request("count 1", "more"))
            assert len(await texts(busy)) == 51
            assert await texts(pool.submit(request("count 1", "later"))) == ["0", "end"]

    run(scenario())


# --- sequences ---

_SEQUENCES = {"sequenceBatching": True, "maxNumSequence": 2, "maxSequenceJobQueueSize": 3, "batchSize": 4}


def test_a_batch_has_one_request_of_a_sequence_and_they_come_in_order() -> None:
    waiting = BatchQueue(HandlerConfig(**_SEQUENCES, minWorkers=1))
    for name, sequence in (("a1", "a"), ("a2", "a"), ("b1", "b"), ("free", None)):
        waiting.add(_job(name, 0.0, sequence), 0.0)
    first = waiting.take(0, 4)
    assert [job.key for job in first] == ["a1", "b1", "free"]
    assert waiting.take(0, 4) == []
    for job in first:
        waiting.ended(job, 1.0, False)
    assert [job.key for job in waiting.take(0, 4)] == ["a2"]


def test_sequences_stay_with_their_worker_and_have_bounds() -> None:
    waiting = BatchQueue(HandlerConfig(**_SEQUENCES, minWorkers=2, sequenceMaxIdleMSec=1000))
    waiting.add(_job("a1", 0.0, "a"), 0.0)
    waiting.add(_job("b1", 0.0, "b"), 0.0)
    with pytest.raises(QueueFull, match="maxNumSequence"):
        waiting.add(_job("c1", 0.0, "c"), 0.0)
    (a1,) = waiting.take(0, 4)  # each worker holds its share of them
    (b1,) = waiting.take(1, 4)
    for job in (a1, b1):
        waiting.ended(job, 0.5, False)
    for number in range(3):
        waiting.add(_job(f"a{number}", 1.0, "a"), 1.0)
    with pytest.raises(QueueFull, match="maxSequenceJobQueueSize"):
        waiting.add(_job("a9", 1.0, "a"), 1.0)
    assert waiting.take(1, 4) == [] and [job.key for job in waiting.take(0, 4)] == ["a0"]
    waiting.add(_job("c1", 2.0, "c"), 2.0)  # b has been idle for too long


def test_a_sequence_that_ends_makes_room() -> None:
    waiting = BatchQueue(HandlerConfig(**{**_SEQUENCES, "maxNumSequence": 1}, sequenceMaxIdleMSec=10**6))
    waiting.add(_job("a", 0.0, "a", end=True), 0.0)
    (job,) = waiting.take(0, 1)
    waiting.ended(job, 0.0, False)
    waiting.add(_job("b", 0.0, "b"), 0.0)


def test_a_sequence_whose_client_ends_it_makes_room_once_none_of_its_requests_waits_or_runs() -> None:
    waiting = BatchQueue(HandlerConfig(**{**_SEQUENCES, "maxNumSequence": 1}, sequenceMaxIdleMSec=10**6))
    first, second = _job("a1", 0.0, "a"), _job("a2", 0.0, "a")
    waiting.add(first, 0.0)
    waiting.add(second, 0.0)
    assert waiting.take(0, 4) == [first]
    waiting.end_sequence("other", 1.0)
    waiting.end_sequence("a", 1.0)
    waiting.remove(second, 1.0)
    with pytest.raises(QueueFull):
        waiting.add(_job("b", 1.0, "b"), 1.0)
    waiting.ended(first, 2.0, False)
    left = _job("b1", 2.0, "b")
    waiting.add(left, 2.0)
    waiting.end_sequence("b", 2.0)
    waiting.remove(left, 2.0)
    waiting.add(_job("c", 2.0, "c"), 2.0)
    assert [job.key for job in waiting.take(0, 4)] == ["c"]


def test_sequences_keep_their_state_in_their_worker(tmp_path: Path) -> None:
    """The handler keeps a sum per sequence, in two workers, with requests of both sequences at once."""
    source = """
        import os
        sums = {}

        def handle(data, context):
            if data is None:
                return None
            results = []
            for index, row in enumerate(data):
                sequence = context.get_sequence_id(index)
                sums[sequence] = sums.get(sequence, 0) + int(row["body"])
                if context.get_request_header(index, "ts_request_sequence_end"):
                    results.append(f"{sums.pop(sequence)} over")
                else:
                    results.append(f"{sums[sequence]} {os.getpid()}")
            return results
    """
    config = {**_SEQUENCES, "minWorkers": 2, "sequenceMaxIdleMSec": 60_000, "maxBatchDelay": 1}

    def ask(name: str, number: int, last: bool) -> HandlerRequest:
        headers = {"ts_request_sequence_id": name} | ({"ts_request_sequence_end": "true"} if last else {})
        return request(str(number), f"{name}{number}", headers=headers, sequence_id=name, sequence_end=last)

    async def scenario() -> None:
        async with running(write_handler(tmp_path, source, config)) as pool:
            jobs = {name: [pool.submit(ask(name, number, number == 3)) for number in (1, 2, 3)] for name in ("a", "b")}
            for each in jobs.values():
                answers = [(await texts(job))[0].split() for job in each]
                assert [answer[0] for answer in answers] == ["1", "3", "6"]
                assert answers[0][1] == answers[1][1] and answers[2][1] == "over"

    run(scenario())


def test_a_handler_ends_a_sequence_by_the_header_that_torchserves_variable_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TS_REQUEST_SEQUENCE_END", "X-Last")
    source = """
        def handle(data, context):
            if data is None:
                return None
            context.set_response_header(0, context.header_key_sequence_end, context.get_request_id(0))
            return ["over"]
    """
    config = {**_SEQUENCES, "maxNumSequence": 1, "sequenceMaxIdleMSec": 60_000, "batchSize": 1}

    async def scenario() -> None:
        async with running(write_handler(tmp_path, source, config)) as pool:
            for name in ("a", "b"):  # there is room for one of them
                assert await texts(pool.submit(request(request_id=name, sequence_id=name))) == ["over"]

    run(scenario())


def test_one_that_is_run_again_stays_with_the_worker_of_its_sequence_and_leaves_it_free() -> None:
    waiting = BatchQueue(HandlerConfig(**_SEQUENCES, minWorkers=2))
    for name in ("a1", "a2"):
        waiting.add(_job(name, 0.0, "a"), 0.0)
    (a1,) = waiting.take(0, 4)
    waiting.add_retry(a1)
    assert waiting.due(1, 0.0, 1.0) is None and waiting.take(1, 4) == []
    waiting.remove(a1, 1.0)  # its client leaves
    (a2,) = waiting.take(0, 4)
    waiting.add_retry(a2)
    assert waiting.worker_lost(0) == [a2] and len(waiting) == 0


def test_without_a_number_of_its_own_each_worker_holds_a_batch_of_sequences() -> None:
    assert BatchQueue(HandlerConfig(sequenceBatching=True, batchSize=3, minWorkers=2)).most_sequences == 6


def test_a_wrong_number_of_results_fails_only_the_request_that_it_comes_of(tmp_path: Path) -> None:
    """It is unknown to which requests the batch's results belong, so that each request is run again alone."""
    source = """
        def handle(data, context):
            if data is None:
                return None
            asked = [row["body"].decode() for row in data]
            return [text for text in asked for _ in range(2 if text == "twice" else 1)]
    """

    async def scenario() -> None:
        config = {"batchSize": 3, "maxBatchDelay": 5000}
        async with running(write_handler(tmp_path, textwrap.dedent(source), config)) as pool:
            jobs = [pool.submit(request(text, text)) for text in ("a", "twice", "b")]
            first, wrong, last = await asyncio.gather(*map(outcome, jobs))
            assert (first, last) == (["a"], ["b"])
            assert isinstance(wrong, HandlerFailed) and "returned 2 results for 1 requests" in wrong.message

    run(scenario())
