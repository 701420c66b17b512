"""Parallel handlers: every rank is a process with torchrun's environment, and only the first one sends."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from mlserver_torch_stream.handlers.pool.rank_cancel import RankCancellation
from mlserver_torch_stream.handlers.pool.worker_pool import WorkerPool
from tests.torchserve.workshop import ask, outcome, request, run, running, until, write_handler

_GLOO = """
import os, torch, torch.distributed as dist
from ts.handler_utils.utils import send_intermediate_predict_response

class Ranks:
    def initialize(self, context):
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()

    def handle(self, data, context):
        number = torch.tensor([float(data[0]["body"]) + self.rank])
        dist.all_reduce(number)
        for piece in range(2):
            send_intermediate_predict_response([f"rank {self.rank}"], context.request_ids, "ok", 200, context)
        return [f"{int(number)} of {dist.get_world_size()}"]
"""
# Without torch: says what it has been given.
_FACTS = """
import json, os, pathlib
NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")

def handle(data, context):
    if data is None:
        return None
    with open("seen", "a") as seen:
        seen.write(os.environ["LOCAL_RANK"])
    if data[0]["body"] == b"die" and os.environ["LOCAL_RANK"] == "1":
        os._exit(1)
    if data[0]["body"] == b"die":
        import time
        time.sleep(600)
    return [json.dumps({name: os.environ.get(name) for name in NAMES})]
"""


@pytest.mark.long
def test_gloo_ranks_compute_together_and_one_speaks(tmp_path: Path) -> None:
    config = {"parallelType": "tp", "torchrun": {"nproc-per-node": 2}}

    async def scenario() -> None:
        async with running(write_handler(tmp_path, _GLOO, config)) as pool:
            for _ in range(2):
                assert await ask(pool, "10") == ["rank 0", "rank 0", "21 of 2"]

    run(scenario())


@pytest.mark.long
@pytest.mark.parametrize(("kind", "reached"), [("pp", "0"), ("tp", "012"), ("pptp", "012"), ("custom", "012")])
def test_which_ranks_get_a_request_and_what_the_ranks_know(tmp_path: Path, kind: str, reached: str) -> None:
    config = {"parallelType": kind, "torchrun": {"nproc-per-node": 3, "OMP_NUMBER_THREADS": 2}}

    async def scenario() -> None:
        async with running(write_handler(tmp_path, _FACTS, config)) as pool:
            (answer,) = await ask(pool, "who")
            assert json.loads(answer) == {
                "RANK": "0",
                "LOCAL_RANK": "0",
                "WORLD_SIZE": "3",
                "LOCAL_WORLD_SIZE": "3",
                "MASTER_ADDR": "127.0.0.1",
                "OMP_NUM_THREADS": "2",
            }
            for _ in range(3):
                await ask(pool, "again")
            await until(lambda: sorted((tmp_path / "seen").read_text()) == sorted(4 * reached))
            await asyncio.sleep(0.2)  # for ranks that should not have been asked
            assert set((tmp_path / "seen").read_text()) == set(reached)

    run(scenario())


def test_a_rank_that_dies_takes_the_others_along_and_all_come_back(tmp_path: Path) -> None:
    config = {"parallelType": "tp", "torchrun": {"nproc-per-node": 2}}

    async def scenario() -> None:
        async with running(write_handler(tmp_path, _FACTS, config)) as pool:
            failed = await outcome(pool.submit(request("die")))
            assert "rank 1 exited with status 1" in str(failed)
            assert len(await ask(pool, "who")) == 1

    run(scenario())


# --- clients that leave ---

# Two ranks in lockstep, without torch: each step both wait for each other, at their own pace, and send. "steps kind":
# who sends ("all", "first"), or whether a thread of the handler's own runs meanwhile ("thread").
_LOCKSTEP = """
import os, pathlib, random, socket, threading, time
from ts.handler_utils.utils import send_intermediate_predict_response

RANK = int(os.environ["RANK"])

class Lockstep:
    def initialize(self, context):
        address = ("127.0.0.1", int(os.environ["MASTER_PORT"]))
        if RANK == 0:
            self.peer, _ = socket.create_server(address).accept()
            return
        while True:
            try:
                self.peer = socket.create_connection(address)
                return
            except OSError:
                time.sleep(0.01)

    def handle(self, data, context):
        steps, kind = data[0]["body"].decode().split()
        done = 0
        if kind == "thread":
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        try:
            for done in range(1, int(steps) + 1):
                time.sleep(random.random() * 0.01)
                self.peer.sendall(b"x")
                assert self.peer.recv(1) == b"x"
                if kind != "first" or RANK == 0:
                    send_intermediate_predict_response([str(done)], context.request_ids, "ok", 200, context)
        finally:
            with open(f"done.{RANK}", "a") as log:
                log.write(f"{done} ")
        return ["end"]
"""


def _done(tmp_path: Path) -> list[list[int]]:
    """Returns how many steps each call has made, by rank."""
    logs = [tmp_path / f"done.{rank}" for rank in range(2)]
    return [[int(each) for each in log.read_text().split()] if log.exists() else [] for log in logs]


async def _all_done(tmp_path: Path, calls: int) -> None:
    """Waits for the other rank, too, whose answers nobody reads."""
    await until(lambda: all(len(each) == calls for each in _done(tmp_path)))


async def _leave(pool: WorkerPool, text: str, after: int) -> None:
    job = pool.submit(request(text, "leaves"))
    for _ in range(after):
        await anext(job)
    job.close()


@pytest.mark.long
def test_ranks_that_send_alike_stop_at_the_same_send_when_their_client_leaves(tmp_path: Path) -> None:
    """They stop only after they have been seen to send alike, so that the very first call runs to its end."""
    config = {"parallelType": "tp", "parallelLevel": 2}

    async def scenario() -> None:
        async with running(write_handler(tmp_path, _LOCKSTEP, config)) as pool:
            await _leave(pool, "20 all", after=1)
            assert len(await ask(pool, "3 all")) == 4
            for after in range(1, 13):
                await _leave(pool, "10000 all", after)
                assert await ask(pool, "1 all") == ["1", "end"]
            assert pool.supervisor.restarts == 0
            await _all_done(tmp_path, 26)

    run(scenario())
    first, second = _done(tmp_path)
    assert first == second and first[:2] == [20, 3]
    left = first[2::2]
    assert all(after <= steps < 10_000 for after, steps in enumerate(left, 1)), left


@pytest.mark.parametrize("kind", ["first", "thread"])
def test_ranks_that_cannot_stop_together_go_on_to_their_end(tmp_path: Path, kind: str) -> None:
    """Ranks are not asked if only the first one sends, or if a handler sends from its own thread."""
    config = {"parallelType": "tp", "parallelLevel": 2}

    async def scenario() -> None:
        async with running(write_handler(tmp_path, _LOCKSTEP, config)) as pool:
            await ask(pool, f"3 {'all' if kind == 'thread' else kind}")
            await _leave(pool, f"40 {kind}", after=1)
            assert await ask(pool, "1 all") == ["1", "end"]
            await _all_done(tmp_path, 3)

    run(scenario())
    assert _done(tmp_path) == [[3, 40, 1]] * 2


def test_ranks_that_do_not_come_to_the_same_send_go_on_after_a_while(tmp_path: Path) -> None:
    """They have sent alike before, but no longer do; they are not asked again."""
    config = {"parallelType": "tp", "parallelLevel": 2}

    async def scenario() -> None:
        async with running(write_handler(tmp_path, _LOCKSTEP, config), limits={"meet_s": 0.2}) as pool:
            await ask(pool, "3 all")
            await _leave(pool, "40 first", after=1)
            assert await ask(pool, "1 all") == ["1", "end"]
            await _leave(pool, "40 all", after=1)
            assert await ask(pool, "1 all") == ["1", "end"]
            await _all_done(tmp_path, 5)

    run(scenario())
    assert _done(tmp_path) == [[3, 40, 1, 40, 1]] * 2


def test_where_ranks_stop_is_the_furthest_send_and_only_if_all_meet_there() -> None:
    def verdict(call: int, stop: bool) -> dict[str, Any]:
        return {"t": "verdict", "call": call, "stop": stop}

    together = RankCancellation(3)
    assert together.asked(1, send=5) == verdict(1, False)  # nothing is known of them
    for rank in range(3):
        together.ended(rank, 1, 0)
    assert together.asked(2, send=5) == verdict(2, False)  # who never sends shows nothing
    for rank in range(3):
        together.ended(rank, 2, 9)
    assert together.asked(3, send=5) == {"t": "halt", "call": 3}
    assert together.next_send(2, 3, 7) is None
    assert together.next_send(1, 3, 6) == {"t": "meet", "call": 3, "at": 7}
    assert [together.met(rank, 3, True) for rank in range(3)] == [None, None, verdict(3, True)]
    assert together.too_late(3) is None
    assert together.asked(4, send=5) == {"t": "halt", "call": 4}
    assert together.next_send(1, 4, 0) == verdict(4, False)  # has ended the call
    assert together.next_send(2, 4, 6) is None
    assert together.asked(5, send=1) == {"t": "halt", "call": 5}
    assert together.too_late(5) == verdict(5, False)
    assert together.met(1, 5, True) is None
    assert together.asked(6, send=1) == verdict(6, False)  # never again
