"""Parallel handlers: every rank is a process with torchrun's environment, and only the first one speaks."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

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


def test_four_gloo_ranks_compute_together_and_one_speaks(tmp_path: Path) -> None:
    config = {"parallelType": "tp", "torchrun": {"nproc-per-node": 4}}

    async def scenario() -> None:
        async with running(write_handler(tmp_path, _GLOO, config)) as pool:
            for _ in range(2):
                assert await ask(pool, "10") == ["rank 0", "rank 0", "46 of 4"]

    run(scenario())


@pytest.mark.parametrize(("kind", "reached"), [("pp", "0"), ("tp", "012"), ("pptp", "012"), ("custom", "012")])
def test_who_gets_a_request_and_what_the_ranks_know(tmp_path: Path, kind: str, reached: str) -> None:
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
