"""Pieces of a handler reach their client one by one and in order, with the shim and with TorchServe's own package."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mlserver_torch_stream.handlers.pool.handler_metrics import HandlerMetrics
from mlserver_torch_stream.handlers.pool.handler_request import HandlerFailed, HandlerRequest, RequestPart
from mlserver_torch_stream.handlers.runtime.reply import HandlerReply, HandlerRequestObserver
from mlserver_torch_stream.handlers.runtime.v2_messages import PieceEncoder
from mlserver_torch_stream.protocol.spelling import ReplyContext
from mlserver_torch_stream.server.observability.request_observer import (
    ClientLoad,
    EndpointKind,
    RequestMetrics,
    RequestRecord,
    RequestReports,
    RequestSinks,
)
from tests.torchserve.workshop import COUNTER, HELLO, ask, outcome, request, run, running, texts, until, write_handler

both = pytest.mark.parametrize("which", ["shim", "package"])
package_is_slow = pytest.mark.parametrize("which", ["shim", pytest.param("package", marks=pytest.mark.slow)])


@pytest.mark.long
@both
def test_three_times_hello_then_hello_world_are_four_pieces(tmp_path: Path, which: str) -> None:
    async def scenario() -> None:
        async with running(write_handler(tmp_path, HELLO), which) as pool:
            pieces = [piece async for piece in pool.submit(request())]
            assert [piece.value for piece in pieces] == [b"hello"] * 3 + [b"hello world "]
            assert [piece.last for piece in pieces] == [False, False, False, True]

    run(scenario())


@package_is_slow
def test_context_data_and_metrics_are_torchserves(tmp_path: Path, which: str) -> None:
    source = """
        import json
        from ts.context import Context
        from ts.service import PredictionException

        def handle(data, context):
            if data is None:
                context.state = {"calls": 0}
                assert context.model_yaml_config["handler"].pop(7) == "seven"  # a key that JSON does not have
                return None
            assert isinstance(context, Context)
            if data[0].get("fail"):
                raise PredictionException("no such thing", 513)
            context.state["calls"] += 1
            context.metrics.add_counter("Seen", 2)
            context.metrics.add_time("Took", 1.5, unit="s")
            context.set_response_content_type(0, "application/json")
            context.set_response_header(0, "x-more", "yes")
            facts = {
                "data": {key: value if not isinstance(value, bytearray) else "raw" for key, value in data[0].items()},
                "id": context.get_request_id(0), "ids": {str(k): v for k, v in context.request_ids.items()},
                "header": context.get_request_header(0, "x-from"), "all": context.get_all_request_header(0),
                "model": context.model_name, "yaml": context.model_yaml_config, "manifest": context.manifest["model"],
                "properties": {k: v for k, v in context.system_properties.items() if k != "server_version"},
                "calls": context.state["calls"],
            }
            return [facts]
    """
    config = {"batchSize": 3, "maxBatchDelay": 0, "deviceType": "cpu", "handler": {"mine": True, 7: "seven"}}
    parts = [
        RequestPart("body", "application/json", b'{"a": 1}'),
        RequestPart("note", "text/plain", b"hi"),
        RequestPart("data", "", b"\xff"),
    ]

    async def scenario() -> None:
        import json

        async with running(write_handler(tmp_path, source, config), which) as pool:
            (piece,) = [p async for p in pool.submit(HandlerRequest("r-1", parts, {"x-from": "me"}))]
            facts = json.loads(piece.value)
            assert piece.value == json.dumps(facts, indent=2).encode()
            assert (piece.content_type, piece.headers) == ("application/json", {"x-more": "yes"})
            assert facts["data"] == {"body": {"a": 1}, "note": "hi", "data": "raw"}
            assert facts["id"] == "r-1" and facts["ids"] == {"0": "r-1"} and facts["header"] == "me"
            assert facts["all"]["note"] == {"content-type": "text/plain"}
            assert (
                facts["model"] == "model"
                and facts["yaml"] == {**config, "handler": {"mine": True}}
                and facts["calls"] == 1
            )
            assert facts["manifest"]["handler"] == "handler.py"
            assert facts["properties"] == {
                "model_dir": str(tmp_path),
                "gpu_id": None,
                "batch_size": 3,
                "server_name": "MMS",
                "limit_max_image_pixels": True,
            }
            own = {(name, kind): value for (name, kind, _), value in pool.metrics.own.items()}
            assert own["Seen", "counter"] == [1, 2.0] and own["Took", "gauge"] == [1, 1.5]
            with pytest.raises(HandlerFailed, match="no such thing") as failed:
                await texts(pool.submit(HandlerRequest("r-2", [RequestPart("fail", "text/plain", b"yes")])))
            assert failed.value.status == 513

    run(scenario())


@package_is_slow
def test_a_client_that_leaves_stops_the_handler(tmp_path: Path, which: str) -> None:
    """``except Exception`` in the handler does not prevent it, and the next request is served."""
    source = """
        import pathlib, time
        from ts.handler_utils.utils import send_intermediate_predict_response

        def handle(data, context):
            if data is None:
                return None
            if data[0]["body"] == b"short":
                return ["short"]
            try:
                for number in range(100_000):
                    pathlib.Path("reached").write_text(str(number))
                    send_intermediate_predict_response(["piece"], context.request_ids, "ok", 200, context)
                    time.sleep(0.01)
            except Exception:
                pathlib.Path("reached").write_text("100000")
            return ["end"]
    """

    async def scenario() -> None:
        async with running(write_handler(tmp_path, source), which) as pool:
            job = pool.submit(request("long"))
            assert (await anext(job)).value == b"piece"
            job.close()
            assert await ask(pool, "short") == ["short"]
            assert int((tmp_path / "reached").read_text()) < 5000

    run(scenario())


def test_a_request_that_waits_leaves_without_a_trace(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(write_handler(tmp_path, COUNTER)) as pool:
            first = pool.submit(request("count 20", "first"))
            second = pool.submit(request("count 1", "second"))
            third = pool.submit(request("count 1", "third"))
            second.close()
            assert len(await texts(first)) == 21
            assert await texts(third) == ["0", "end"]
            assert await texts(second) == []
            assert not pool.jobs

    run(scenario())


def test_equal_ids_of_two_clients_are_two_requests_for_the_handler(tmp_path: Path) -> None:
    source = """
        def handle(data, context):
            return None if data is None else [context.get_request_id(i) for i in range(len(data))]
    """

    async def scenario() -> None:
        async with running(write_handler(tmp_path, source, {"batchSize": 2})) as pool:
            both = [pool.submit(request("", "same")) for _ in range(2)]
            assert sorted([(await texts(job))[0] for job in both]) == ["same", "same#2"]

    run(scenario())


def test_a_time_limit_ends_a_stream_with_what_came(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(write_handler(tmp_path, COUNTER)) as pool:
            job = pool.submit(request("count 5000", timeout_s=0.3))
            ended = await outcome(job)
            assert getattr(ended, "status", None) == 504
            assert await ask(pool, "count 1") == ["0", "end"]

    run(scenario())


def test_a_reader_that_lags_makes_a_lone_handler_wait(tmp_path: Path) -> None:
    """40 MB in 640 pieces: while nobody reads, much less than that is in memory, and in the end all of it arrives."""
    source = """
        from ts.handler_utils.utils import send_intermediate_predict_response

        def handle(data, context):
            if data is None:
                return None
            for _ in range(640):
                send_intermediate_predict_response([b"x" * 65536], context.request_ids, "ok", 200, context)
            return ["end"]
    """

    async def scenario() -> None:
        async with running(write_handler(tmp_path, source)) as pool:
            job = pool.submit(request())
            await until(lambda: job.lags)
            await asyncio.sleep(0.5)
            assert job._bytes < 8 << 20
            assert len(await texts(job)) == 641

    run(scenario())


def test_an_id_that_was_left_at_its_very_end_may_come_again(tmp_path: Path) -> None:
    """The worker has already finished the request when it hears that its client has left."""
    source = """
        import pathlib
        from ts.handler_utils.utils import send_intermediate_predict_response

        def handle(data, context):
            if data is None:
                return None
            send_intermediate_predict_response([b"x" * (2 << 20)], context.request_ids, "ok", 200, context)
            pathlib.Path("sent").touch()
            return ["end"]
    """

    async def scenario() -> None:
        async with running(write_handler(tmp_path, source)) as pool:
            left = pool.submit(request())
            await until((tmp_path / "sent").exists)
            await asyncio.sleep(0.2)
            left.close()
            await until(lambda: not pool.jobs)
            assert len(await ask(pool)) == 2

    run(scenario())


def test_a_time_limit_frees_the_worker_that_waits_for_a_reader(tmp_path: Path) -> None:
    source = """
        from ts.handler_utils.utils import send_intermediate_predict_response

        def handle(data, context):
            if data is None:
                return None
            for _ in range(1 if data[0]["body"] else 640):
                send_intermediate_predict_response([b"x" * 65536], context.request_ids, "ok", 200, context)
            return ["end"]
    """

    async def scenario() -> None:
        async with running(write_handler(tmp_path, source)) as pool:
            unread = pool.submit(request("", "unread", timeout_s=0.5))
            assert len(await asyncio.wait_for(ask(pool, "x", "next"), 30)) == 2
            assert getattr(await outcome(unread), "status", None) is not None

    run(scenario())


def test_a_handler_without_end_does_not_fill_the_memory_of_one_response(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(write_handler(tmp_path, COUNTER)) as pool:
            asked = request("count 5000")
            record = RequestRecord("r", "model", "", EndpointKind.REST_UNARY)
            reports = RequestReports(RequestMetrics(), RequestSinks(), ClientLoad())
            observer = HandlerRequestObserver(record, reports, HandlerMetrics())
            reply = PieceEncoder(ReplyContext("model"), asked, False)
            whole = HandlerReply(asked, reply, pool.submit, observer, most_pieces=10)
            with pytest.raises(HandlerFailed, match="request a stream") as failed:
                await whole.whole()
            assert failed.value.status == 507
            whole.close()
            assert await asyncio.wait_for(ask(pool, "count 1"), 15) == ["0", "end"]

    run(scenario())
