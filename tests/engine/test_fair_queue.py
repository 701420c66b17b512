"""The order in which waiting requests are tried: priorities, fair shares, and no endless overtaking. Needs no torch."""

from __future__ import annotations

import asyncio

import pytest

from mlserver_torch_stream.engine.api import EngineRequest, Mailbox
from mlserver_torch_stream.engine.request_state import RequestState
from mlserver_torch_stream.engine.scheduler.queue import FairQueue, ServiceRate
from mlserver_torch_stream.engine.text.tokenizer import TextCodec
from mlserver_torch_stream.engine.watchdog import Deadlines
from mlserver_torch_stream.types import FinishReason, SamplingParameters


def request(
    codec: TextCodec, prompt: int, answer: int | None, *, client: str = "", priority: int = 100
) -> RequestState:
    loop = asyncio.new_event_loop()
    loop.close()
    given = EngineRequest((1,) * prompt, SamplingParameters(max_tokens=answer), client=client, priority=priority)
    return RequestState(given, Mailbox(loop, 1, lambda mailbox: None), codec, (), 10_000)


def queue_of(*requests: RequestState) -> FairQueue:
    waiting = FairQueue()
    for each in requests:
        waiting.add(each)
    return waiting


def drain(waiting: FairQueue) -> list[RequestState]:
    order = []
    while (admitted := waiting.admit(lambda request: True)) is not None:
        order.append(admitted)
    return order


def test_a_deadline_that_no_thread_can_wait_for_is_waited_for_in_parts(codec: TextCodec) -> None:
    for seconds in (1e300, float("inf")):
        deadlines = Deadlines()
        deadlines.add(request(codec, 1, 1), seconds, while_waiting=False)
        assert deadlines.seconds_left(0.0) <= 3600
        assert not list(deadlines.due(1e9))


def test_equal_jobs_are_first_come_first_served(codec: TextCodec) -> None:
    requests = [request(codec, 10, 10) for _ in range(5)]
    assert drain(queue_of(*requests)) == requests


def test_a_short_job_passes_long_ones_that_came_before(codec: TextCodec) -> None:
    long = [request(codec, 1000, 4000, client="a") for _ in range(10)]
    short = request(codec, 10, 10, client="b")
    assert drain(queue_of(*long, short))[0] is short


def test_an_answer_without_a_bound_counts_as_1024_tokens(codec: TextCodec) -> None:
    unbounded = request(codec, 10, None, client="a")
    shorter, longer = request(codec, 10, 1000, client="b"), request(codec, 10, 1040, client="b")
    assert drain(queue_of(longer, unbounded)) == [unbounded, longer]
    assert drain(queue_of(unbounded, shorter)) == [shorter, unbounded]


def test_a_clients_flood_does_not_delay_another_client(codec: TextCodec) -> None:
    flood = [request(codec, 50, 50, client="flood") for _ in range(100)]
    other = request(codec, 100, 100, client="other")
    assert drain(queue_of(*flood, other)).index(other) <= 2


def test_a_long_job_is_not_starved_by_a_stream_of_short_ones(codec: TextCodec) -> None:
    waiting = queue_of(long := request(codec, 1000, 1000))
    order: list[RequestState] = []
    while long not in order and len(order) < 1000:
        waiting.add(request(codec, 10, 10))
        admitted = waiting.admit(lambda request: True)
        assert admitted is not None
        order.append(admitted)
    assert 10 < order.index(long) < 300


def test_priority_comes_before_everything_else(codec: TextCodec) -> None:
    urgent = request(codec, 1000, 1000, priority=1)
    ordinary = [request(codec, 1, 1) for _ in range(3)]
    assert drain(queue_of(*ordinary, urgent)) == [urgent, *ordinary]


def test_a_job_that_does_not_fit_is_overtaken_only_so_often(codec: TextCodec) -> None:
    waiting = queue_of(big := request(codec, 5, 5))
    overtaken = 0
    for _ in range(100):
        waiting.add(request(codec, 100, 100))
        if waiting.admit(lambda request: request is not big) is None:
            break
        overtaken += 1
    assert 0 < overtaken < 50
    assert waiting.admit(lambda request: True) is big


def test_counts_are_zero_when_all_have_left(codec: TextCodec) -> None:
    requests = [request(codec, 3, 3) for _ in range(4)]
    waiting = queue_of(*requests)
    assert (len(waiting), waiting.tokens) == (4, 12)
    waiting.remove(requests[0])
    drain(waiting)
    assert (len(waiting), waiting.tokens) == (0, 0)


def test_deadlines_come_due_once_and_only_for_those_they_concern(codec: TextCodec) -> None:
    deadlines = Deadlines()
    waits, runs, ended = (request(codec, 3, 3) for _ in range(3))
    start = waits.submitted_at
    for each in (waits, runs, ended):
        each.submitted_at = start
        deadlines.add(each, 1.0, while_waiting=True)
        deadlines.add(each, 5.0, while_waiting=False)
        deadlines.add(each, None, while_waiting=False)
    runs.started_at = start + 0.5
    ended.finish(FinishReason.STOP)
    assert deadlines.seconds_left(start) == pytest.approx(1.0)
    assert list(deadlines.due(start + 0.9)) == []
    assert list(deadlines.due(start + 1.1)) == [(waits, True)]
    waits.finish(FinishReason.TIMEOUT)
    assert list(deadlines.due(start + 6)) == [(runs, False)]
    assert deadlines.seconds_left(start) == 3600


def test_the_time_to_come_back_follows_the_pace() -> None:
    pace = ServiceRate()
    assert pace.seconds_for(100) == 1
    pace.note(10.0)
    pace.finished(5)
    assert pace.seconds_for(3) == 6
    assert pace.seconds_for(10_000) == 120


def test_deadlines_do_not_hold_on_to_ended_jobs(codec: TextCodec) -> None:
    deadlines = Deadlines()
    for _ in range(1000):
        ended = request(codec, 3, 3)
        deadlines.add(ended, 3600.0, while_waiting=False)
        ended.finish(FinishReason.STOP)
    assert len(deadlines._heap) <= 65
