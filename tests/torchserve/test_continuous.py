"""Continuous batching and asyncCommunication: each request joins, leaves and fails independently."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.handlers.pool.handler_request import HandlerFailed
from tests.torchserve.workshop import outcome, request, run, running, texts, until, write_handler

both = pytest.mark.parametrize("which", ["shim", pytest.param("package", marks=pytest.mark.slow)])

# "count 3" gives "0 of …", "1 of …", "2 of …", where … is how many are in the batch; it is shown its body once.
_STEPS = """
import time

class Steps:
    def initialize(self, context):
        context.cache = {}

    def handle(self, data, context):
        results, criteria = [], []
        time.sleep(0.005)
        for index, row in enumerate(data):
            name = context.get_request_id(index)
            if name not in context.cache:
                text = row["body"].decode()
                if text == "raise":
                    raise ValueError("asked to raise")
                context.cache[name] = [0, text]
            elif context.cache[name][0]:
                assert row == {}, row
        for name in context.request_ids.values():
            state = context.cache[name]
            if state[1] == "raise later" and state[0] == 1:
                raise ValueError("raised later")
        for name in context.request_ids.values():
            state = context.cache[name]
            results.append(f"{state[0]} of {len(data)}")
            state[0] += 1
            criteria.append(self.criterion(context, name))
        context.stopping_criteria = criteria
        return results

    def criterion(self, context, name):
        def stops(result):
            done, text = context.cache[name]
            if text == "once":
                return None
            return done == (int(text.split()[1]) if text.startswith("count") else 10**6)
        return stops
"""


def _config(**more: object) -> dict[str, object]:
    return {"continuousBatching": True, "batchSize": 4, **more}


@both
def test_staggered_requests_join_and_leave(tmp_path: Path, which: str) -> None:
    async def scenario() -> None:
        async with running(write_handler(tmp_path, _STEPS, _config()), which) as pool:
            long = pool.submit(request("count 2000", "long"))
            assert (await anext(long)).value == b"0 of 1"
            short = pool.submit(request("count 3", "short"))
            once = pool.submit(request("once", "once"))
            numbers = [piece.split()[0] for piece in await texts(short)]
            assert numbers == ["0", "1", "2"]
            assert len(await texts(once)) == 1
            seen = set()
            async for piece in long:
                seen.add(piece.value.decode().split()[2])
                if {"2", "3"} & seen and "1" in seen:
                    break
            long.close()
            await until(lambda: not pool.jobs)
            assert await texts(pool.submit(request("count 2", "after"))) == ["0 of 1", "1 of 1"]

    run(scenario())


def test_no_more_are_in_the_batch_than_its_size(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(write_handler(tmp_path, _STEPS, _config(batchSize=2))) as pool:
            jobs = [pool.submit(request("count 5", f"r{index}")) for index in range(5)]
            pieces = [piece for job in jobs for piece in await texts(job)]
            assert len(pieces) == 25 and {piece.split()[2] for piece in pieces} <= {"1", "2"}

    run(scenario())


def test_a_request_that_makes_a_step_fail_fails_alone(tmp_path: Path) -> None:
    """It may have just joined or have run for a while. The other requests lose no piece."""

    async def scenario() -> None:
        async with running(write_handler(tmp_path, _STEPS, _config())) as pool:
            jobs = [
                pool.submit(request(text, f"{index}"))
                for index, text in enumerate(("count 50", "raise", "raise later", "count 3"))
            ]
            first, at_once, later, last = await asyncio.gather(*map(outcome, jobs))
            assert isinstance(first, list) and [each.split()[0] for each in first] == [str(n) for n in range(50)]
            assert isinstance(last, list) and [each.split()[0] for each in last] == ["0", "1", "2"]
            assert isinstance(at_once, HandlerFailed) and "asked to raise" in at_once.message
            assert isinstance(later, HandlerFailed) and "raised later" in later.message

    run(scenario())


# --- asyncCommunication ---

_ASYNC = """
import asyncio, pathlib
from ts.handler_utils.utils import send_intermediate_predict_response

async def handle(data, context):
    text = data[0]["body"].decode()
    if text == "raise":
        raise ValueError("asked to raise")
    if text == "wait":
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pathlib.Path("cancelled").touch()
            raise
    for number in range(int(text)):
        send_intermediate_predict_response([f"{number} {context.get_request_id(0)}"], context.request_ids, "ok", 200,
                                           context)
        await asyncio.sleep(0.005)
    return ["end"]

class Handler:
    loop = None

    def initialize(self, context):
        asyncio.get_event_loop().run_until_complete(asyncio.sleep(0))

    async def handle(self, data, context):
        return await handle(data, context)
"""


def _async_handler(tmp_path: Path, response_timeout: int = 60) -> str:
    source = _ASYNC.replace("async def handle(data", "async def answer(data").replace("await handle(", "await answer(")
    return write_handler(tmp_path, source, {"asyncCommunication": True, "responseTimeout": response_timeout})


@both
def test_async_requests_run_beside_each_other_each_with_its_own_context(tmp_path: Path, which: str) -> None:
    async def scenario() -> None:
        async with running(_async_handler(tmp_path), which) as pool:
            jobs = [pool.submit(request("5", f"r{index}")) for index in range(4)]
            bad = pool.submit(request("raise", "bad"))
            for index, job in enumerate(jobs):
                assert await texts(job) == [*(f"{number} r{index}" for number in range(5)), "end"]
            failed = await outcome(bad)
            assert isinstance(failed, HandlerFailed) and "asked to raise" in failed.message

    run(scenario())


@pytest.mark.long
def test_an_async_task_is_cancelled_when_its_client_leaves_or_it_gives_no_sign(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(_async_handler(tmp_path, response_timeout=3)) as pool:
            left = pool.submit(request("wait", "left"))
            beside = pool.submit(request("3", "beside"))
            assert len(await texts(beside)) == 4  # the other has begun too
            left.close()
            await until((tmp_path / "cancelled").exists)
            await until(lambda: not pool.jobs)
            silent = await outcome(pool.submit(request("wait", "silent")))
            assert getattr(silent, "status", None) == 504 and "responseTimeout" in str(silent)
            assert await texts(pool.submit(request("1", "next"))) == ["0 next", "end"]

    run(scenario())


@pytest.mark.parametrize("asynchronous", [True, False])
def test_an_async_handler_and_its_setting_belong_together(tmp_path: Path, asynchronous: bool) -> None:
    source = f"{'' if asynchronous else 'async '}def handle(data, context):\n    return [1]\n"

    async def scenario() -> None:
        with pytest.raises(LoadFailed, match="asyncCommunication"):
            async with running(write_handler(tmp_path, source, {"asyncCommunication": asynchronous})):
                pass

    run(scenario())


_AWAITED = """
import asyncio

loaded = []

async def load():
    await asyncio.sleep(0.01)
    loaded.append("weights")

DEF
"""
_ASYNC_FUNCTION = """
async def handle(data, context):
    return await load() if data is None else ["+".join(loaded)]
"""
_ASYNC_INITIALIZE = """
class Handler:
    async def initialize(self, context):
        await load()

    async def handle(self, data, context):
        return ["+".join(loaded)]
"""


@pytest.mark.parametrize("source", [_ASYNC_FUNCTION, _ASYNC_INITIALIZE])
def test_an_async_load_has_ended_before_the_first_request(tmp_path: Path, source: str) -> None:
    async def scenario() -> None:
        uri = write_handler(tmp_path, _AWAITED.replace("DEF", source), {"asyncCommunication": True})
        async with running(uri) as pool:
            assert await texts(pool.submit(request())) == ["weights"]

    run(scenario())


@pytest.mark.parametrize(
    ("source", "asynchronous", "said"),
    [
        (_ASYNC_FUNCTION.replace("await load()", "await missing()"), True, "initialize raised NameError"),
        (_ASYNC_INITIALIZE.replace("async def handle", "def handle"), False, "initialize is an `async def`"),
    ],
)
def test_an_async_load_that_fails_or_cannot_be_awaited_is_refused_with_the_reason(
    tmp_path: Path, source: str, asynchronous: bool, said: str
) -> None:
    async def scenario() -> None:
        uri = write_handler(tmp_path, _AWAITED.replace("DEF", source), {"asyncCommunication": asynchronous})
        with pytest.raises(LoadFailed, match=said):
            async with running(uri):
                pass

    run(scenario())


def test_an_async_task_that_is_left_before_it_begins_is_done_with(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(_async_handler(tmp_path)) as pool:
            for index in range(50):
                pool.submit(request("wait", f"left{index}")).close()
            await until(lambda: not pool.jobs)
            assert await texts(pool.submit(request("1", "next"))) == ["0 next", "end"]

    run(scenario())
