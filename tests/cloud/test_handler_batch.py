"""One batch of ``cloud run --handler``: what happens to its requests when the run ends."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from mlserver_torch_stream.cli.child_server import NAME, child_server
from mlserver_torch_stream.cloud.backend import open_backend
from mlserver_torch_stream.cloud.batch_backend import BatchBackend
from mlserver_torch_stream.cloud.endpoint import ServerEndpoint
from mlserver_torch_stream.cloud.requests import ObjectRequest
from mlserver_torch_stream.cloud.rows import AccessDenied, Chunk, Row, SequenceLost
from mlserver_torch_stream.cloud.run_metrics import RunMetrics
from tests import plain_http
from tests.cloud.handlers import write
from tests.server.harness import Model, serve
from tests.torchserve.predicting import SETTINGS, SHIM, TORCHSERVE

_ENDLESS = """
import itertools, pathlib, time
from ts.handler_utils.utils import send_intermediate_predict_response as send

def handle(data, context):
    if data and bytes(data[0]["body"]) == b"short":
        return ["done"] * len(data)
    for number in itertools.count() if data else ():
        (pathlib.Path(__file__).parent / "begun").touch()
        send(["x"] * len(data), context.request_ids, "ok", 200, context)
        time.sleep(0.01)
"""


@pytest.mark.long
def test_a_batch_needs_the_key_and_its_requests_are_closed_when_it_is_cancelled(tmp_path: Path) -> None:
    """Otherwise the only worker would answer no other batch, as nobody reads the pieces of an endless answer."""
    asyncio.run(_cancelled(write(tmp_path / "h", _ENDLESS)))


# A batch ends when the test has created its file.
_HELD = """
import pathlib, time

def handle(data, context):
    if data is None:
        return None
    name = "+".join(bytes(row["body"]).decode() for row in data)
    with (pathlib.Path(__file__).parent / "notes").open("a") as notes:
        notes.write(name + " ")
    while not (pathlib.Path(__file__).parent / f"go-{name}").exists():
        time.sleep(0.01)
    return ["done"] * len(data)
"""


@pytest.mark.long
def test_while_a_worker_runs_a_batch_the_next_one_waits_in_its_queue_and_no_batch_is_split_or_joined(
    tmp_path: Path,
) -> None:
    handler = write(tmp_path / "h", _HELD)
    waiting = asyncio.run(asyncio.wait_for(_waiting(handler, ["0", "1"], ["2"], ["3", "4"], ["5"]), 120))
    assert waiting == {"0+1": 1, "2": 2, "3+4": 1, "5": 0}
    assert (tmp_path / "h" / "notes").read_text().split() == ["0+1", "2", "3+4", "5"]


async def _waiting(handler: Path, *batches: list[str]) -> dict[str, int]:
    """Sends the batches at once. Returns how many rows wait in the queue while each of them runs."""
    extra = {"ts": "shim", "batchSize": 2, "maxBatchDelay": 0, "jobQueueSize": 1000}
    async with child_server("TorchServeRuntime", str(handler), extra, RunMetrics()) as child:
        endpoint = ServerEndpoint(child.url, NAME, objects=ObjectRequest(), batches=True, key=child.key)
        backend = await open_backend(endpoint)
        assert isinstance(backend, BatchBackend)
        rows = [[Row(int(text), text, None, "", data=text.encode()) for text in batch] for batch in batches]
        answers = asyncio.gather(*(backend(batch) for batch in rows))
        notes, found = handler.parent / "notes", dict[str, int]()
        while not answers.done():
            begun = notes.read_text().split() if notes.exists() else []
            pending = (await backend.describe())["jobQueueStatus"]["pendingRequests"]
            if begun and begun[-1] not in found and (pending or len(begun) == len(batches)):
                found[begun[-1]] = pending
                (handler.parent / f"go-{begun[-1]}").touch()
            await asyncio.sleep(0.01)
        assert all(each.failure is None for batch in await answers for each in batch)
        await backend.aclose()
    return found


async def _cancelled(handler: Path) -> None:
    extra = {"ts": "shim", "batchSize": 3, "maxBatchDelay": 0}
    async with child_server("TorchServeRuntime", str(handler), extra, RunMetrics()) as child:
        endpoint = ServerEndpoint(child.url, NAME, objects=ObjectRequest(), batches=True, key=child.key)
        with pytest.raises(AccessDenied):
            keyless = await open_backend(replace(endpoint, key=None))
            try:
                await keyless([Row(0, "0", None, "", data=b"short")])
            finally:
                await keyless.aclose()
        backend = await open_backend(endpoint)
        batch = asyncio.create_task(backend([Row(number, str(number), None, "") for number in range(3)]))
        for _ in range(2000):
            await asyncio.sleep(0.01)
            if (handler.parent / "begun").exists():
                break
        batch.cancel()
        await asyncio.wait({batch})
        (outcome,) = await asyncio.wait_for(backend([Row(3, "3", None, "", data=b"short")]), 60)
        assert outcome.response is not None and outcome.response["predictions"] == ["done"]
        await backend.aclose()


@pytest.mark.long
def test_a_chunk_after_the_first_whose_worker_has_died_is_lost_and_does_not_fail(tmp_path: Path) -> None:
    """The object must be started again, although the worker died between two chunks."""
    config = {"sequenceBatching": True, "sequenceMaxIdleMSec": 60_000}
    handler = write(tmp_path / "h", "def handle(data, context):\n    return data and ['ok'] * len(data)\n", **config)

    async def act() -> None:
        async with child_server("TorchServeRuntime", str(handler), {"ts": "shim"}, RunMetrics()) as child:
            endpoint = ServerEndpoint(child.url, NAME, objects=ObjectRequest(), batches=True, key=child.key)
            backend = await open_backend(endpoint)
            second = Row(0, "a", None, "a", data=b"x", chunk=Chunk(1, 8, last=True, joined=True), sequence="s")
            with pytest.raises(SequenceLost, match="the sequence is not open"):
                await backend([second])
            await backend.aclose()

    asyncio.run(asyncio.wait_for(act(), 120))


@pytest.mark.long
def test_after_a_reload_an_exchange_that_began_before_it_ends_the_sequences_of_the_new_model(tmp_path: Path) -> None:
    """The handler has room for one sequence, and would keep it for 60 s without a request."""
    config = {"sequenceBatching": True, "sequenceMaxIdleMSec": 60_000, "maxNumSequence": 1}
    handler = write(tmp_path / "h", "def handle(data, context):\n    return data and ['ok'] * len(data)\n", **config)
    models = [Model("h", str(handler), implementation=TORCHSERVE, extra=SHIM)]

    async def act(url: str) -> None:
        backend = await open_backend(ServerEndpoint(url, "h", objects=ObjectRequest(), batches=True))
        assert isinstance(backend, BatchBackend)

        async def begin(name: str) -> None:
            chunk = Chunk(0, 0, last=False, joined=True)
            (outcome,) = await backend([Row(0, name, None, name, data=b"x", chunk=chunk, sequence=name)])
            assert outcome.failure is None

        await begin("old")
        assert plain_http.post(f"{url}/v2/repository/models/h/load").is_success
        for name in ("a", "b", "c"):
            await begin(name)
            backend.end_sequence(name)
        assert backend.retries == 0
        await backend.aclose()

    with serve(tmp_path / "models", models, settings=SETTINGS) as server:
        asyncio.run(asyncio.wait_for(act(server.url), 60))
