"""TorchServe's gRPC service behind a real MLServer: on its own port and on another, compared with ``/predictions``."""

from __future__ import annotations

import queue
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf import empty_pb2
from google.protobuf.unknown_fields import UnknownFieldSet

from mlserver_torch_stream.server.grpc import torchserve
from tests import plain_http
from tests.server.conftest import FOREIGN, with_foreign
from tests.server.harness import HOST, Model, Server, free_ports, serve
from tests.torchserve.inference_client import _POOL, PredictionResponse, PredictionsRequest, Stub
from tests.torchserve.predicting import SETTINGS, SHIM, TORCHSERVE
from tests.torchserve.workshop import HELLO, write_handler
from tests.waiting import wait_until

_TIMEOUT_S = 60.0
_FREED_S = 10.0  # ten times what it should take
_PORT = "MLSERVER_TORCH_STREAM_GRPC_PORT_TORCHSERVE"
_LARGE = 8 * 2**20  # bytes: above gRPC's own bound of 4 MiB
_ALL_SIZES = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
_SERVERS_ERROR = "org.pytorch.serve.http.InternalServerException"

# Says what it has got, or does what the field "data" says.
_ECHO = """
import time
from ts.handler_utils.utils import send_intermediate_predict_response as send
from ts.service import PredictionException

def handle(data, context):
    if data is None:
        return None
    row = data[0]
    text = bytes(row.get("data", b""))
    if text == b"bytes":
        return [b"\\xff\\x00"]
    if text == b"json":
        return [{"b": [1, "\\u00fc"], "a": None}]
    if text == b"tensor":
        import torch
        return [torch.arange(3)]
    if text == b"pieces":
        for piece in ("one", "", b"\\xff\\x00", {"three": 3}):
            send([piece], context.request_ids, "ok", 200, context)
        return ["last"]
    if text == b"teapot":
        context.set_response_status(404, "Not here", 0)
        return ["no such pot"]
    if text == b"raise":
        raise ValueError("as asked")
    if text == b"raise much":
        raise ValueError("\u00fc" * 3000)
    if text.startswith(b"code "):
        send(["lost"], context.request_ids, "enough", int(text.split()[1]), context)
        return ["ignored"]
    if text == b"late code":
        send(["first"], context.request_ids, "ok", 200, context)
        send(["lost"], context.request_ids, "enough", 429, context)
        return ["ignored"]
    if text.startswith(b"exception "):
        raise PredictionException("no such thing", int(text.split()[1]))
    if text == b"memory":
        raise MemoryError
    if text == b"late":
        send(["first"], context.request_ids, "ok", 200, context)
        raise ValueError("after the first piece")
    if text in (b"endless", b"flood"):
        while True:
            send(["piece" * (1 if text == b"endless" else 100000)], context.request_ids, "ok", 200, context)
            time.sleep(0.01)
    if text == b"sleep":
        time.sleep(0.5)
        return ["slept"]
    if len(text) > 1000:
        return [text]
    names = ("session_id", "ts_request_sequence_id", "ts_request_sequence_start", "ts_request_sequence_end")
    return [{
        "data": {name: [type(value).__name__, bytes(value).decode()] for name, value in row.items()},
        "headers": {name: context.get_request_header(0, name) for name in names},
        "id": context.get_request_id(0),
    }]
"""
SEQUENCES = {
    "sequenceBatching": True,
    "batchSize": 2,
    "maxBatchDelay": 10,
    "maxNumSequence": 2,
    "maxSequenceJobQueueSize": 10,
    "sequenceMaxIdleMSec": 60_000,
}
# Adds up the numbers of each sequence.
STATEFUL = """
totals = {}

def handle(data, context):
    if data is None:
        return None
    answers = []
    for place, row in enumerate(data):
        sequence = context.get_sequence_id(place)
        if row["data"] == b"raise":
            raise ValueError("as asked")
        totals[sequence] = totals.get(sequence, 0) + int(row["data"])
        answers.append(f"{sequence if row.get('named') else ''}{totals[sequence]}")
    return answers
"""


@dataclass(frozen=True)
class Served:
    server: Server
    port: int  # of its own

    @property
    def targets(self) -> dict[str, str]:
        return {"mlserver": self.server.grpc_target, "own": f"{HOST}:{self.port}"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("grpc_predictions")
    stateful = write_handler(folder / "stateful", STATEFUL, SEQUENCES)
    impatient = write_handler(folder / "impatient", _ECHO, {"clientTimeoutInMills": 100})
    narrow = write_handler(folder / "narrow", _ECHO, {"jobQueueSize": 1})
    models = [
        FOREIGN,
        Model("hello", write_handler(folder / "hello", HELLO), implementation=TORCHSERVE, extra=SHIM, version="1.0"),
        Model("echo", write_handler(folder / "echo", _ECHO), implementation=TORCHSERVE, extra=SHIM),
        Model("stateful", stateful, implementation=TORCHSERVE, extra=SHIM),
        Model("impatient", impatient, implementation=TORCHSERVE, extra=SHIM),
        Model("narrow", narrow, implementation=TORCHSERVE, extra=SHIM),
        Model("tokens", str(tiny_model)),
    ]
    settings = {**SETTINGS, "grpc_max_message_length": 2 * _LARGE}
    (port,) = free_ports(1)
    environment = {
        **with_foreign(folder),
        _PORT: str(port),
        "MLSERVER_TORCH_STREAM_STALLED_READER_TIMEOUT": "2",
    }
    with serve(folder / "models", models, settings=settings, environment=environment) as running:
        yield Served(running, port)


@pytest.fixture(scope="module", params=["mlserver", "own"])
def stub(served: Served, request: pytest.FixtureRequest) -> Iterator[Stub]:
    """A stub for each port in turn."""
    with grpc.insecure_channel(served.targets[request.param], options=_ALL_SIZES) as channel:
        yield Stub(channel)


@pytest.fixture(scope="module")
def one(served: Served) -> Iterator[Stub]:
    """A stub for tests that do not depend on the port."""
    with grpc.insecure_channel(served.targets["own"], options=_ALL_SIZES) as channel:
        yield Stub(channel)


def _ask(data: bytes = b"", model: str = "echo", **more: Any) -> PredictionsRequest:
    inputs = {"data": data, **more.pop("input", {})}
    return PredictionsRequest(model_name=model, input=inputs, **more)


def _unary(stub: Stub, request: PredictionsRequest, **options: Any) -> bytes:
    return bytes(stub.Predictions(request, timeout=_TIMEOUT_S, **options).prediction)


def _streamed(stub: Stub, request: PredictionsRequest) -> list[bytes]:
    return [bytes(response.prediction) for response in stub.StreamPredictions(request, timeout=_TIMEOUT_S)]


def _error(ask: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        ask()
    return caught.value.code(), caught.value.details()


def _posted(served: Served, data: bytes) -> bytes:
    url = f"{served.server.url}/predictions/echo"
    return plain_http.post(url, files={"data": (None, data)}, timeout=_TIMEOUT_S).content


# --- answers ---


@pytest.mark.long
@pytest.mark.parametrize("data", [b"bytes", b"json", b"tensor", b"pieces", b"teapot"])
def test_bytes_are_those_of_the_rest_path(served: Served, stub: Stub, data: bytes) -> None:
    expected = _posted(served, data)
    assert expected and _unary(stub, _ask(data)) == expected
    assert b"".join(_streamed(stub, _ask(data))) == expected


def test_each_intermediate_response_is_a_message_and_the_final_one_is_the_last(stub: Stub) -> None:
    assert _streamed(stub, _ask(b"x", "hello")) == [b"hello"] * 3 + [b"hello world "]
    assert _streamed(stub, _ask(b"pieces")) == [b"one", b"", b"\xff\x00", b'{\n  "three": 3\n}', b"last"]
    assert _streamed(stub, _ask(b"bytes")) == [b"\xff\x00"]


def test_a_client_reads_each_piece_when_it_is_sent(stub: Stub) -> None:
    call = stub.StreamPredictions(_ask(b"endless"), timeout=_TIMEOUT_S)
    assert next(call).prediction == b"piece"
    call.cancel()


def test_entries_of_the_input_are_fields_of_bytes_and_metadata_are_headers(served: Served, stub: Stub) -> None:
    metadata = (("session_id", "12345"), ("ts_request_sequence_id", "s-1"), ("x-request-id", "mine"), ("raw-bin", b"x"))
    request = _ask(b"a", input={"body": b'{"b": 1}', "größe": b"5"})
    got = httpx.Response(200, content=_unary(stub, request, metadata=metadata)).json()
    assert got == {
        "data": {"data": ["bytearray", "a"], "body": ["bytearray", '{"b": 1}'], "größe": ["bytearray", "5"]},
        "headers": {
            "session_id": "12345",
            "ts_request_sequence_id": "s-1",
            "ts_request_sequence_start": None,
            "ts_request_sequence_end": None,
        },
        "id": "mine",
    }
    wait_until(lambda: "request_id=mine " in served.server.log, "the request's line")


def test_a_version_may_be_named(stub: Stub) -> None:
    assert _unary(stub, _ask(b"x", "hello", model_version="1.0")) == b"hellohellohellohello world "


def test_messages_may_be_as_large_as_mlservers_setting_says(stub: Stub) -> None:
    large = b"x" * _LARGE
    assert _unary(stub, _ask(large)) == large
    assert _streamed(stub, _ask(large)) == [large]
    code, _ = _error(lambda: _unary(stub, _ask(large * 2)))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_ping_tells_the_health_of_all_models(stub: Stub) -> None:
    assert stub.Ping(empty_pb2.Empty(), timeout=_TIMEOUT_S).health == '{\n  "status": "Healthy"\n}'


# --- errors ---


@pytest.mark.parametrize(
    ("data", "code", "said"),
    [
        (b"raise", grpc.StatusCode.UNAVAILABLE, "the handler raised ValueError: as asked"),
        (b"memory", grpc.StatusCode.INTERNAL, "the handler raised MemoryError"),
        (b"exception 400", grpc.StatusCode.INVALID_ARGUMENT, "no such thing"),
        (b"exception 404", grpc.StatusCode.NOT_FOUND, "no such thing"),
        (b"exception 409", grpc.StatusCode.ABORTED, "no such thing"),
        (b"exception 422", grpc.StatusCode.FAILED_PRECONDITION, "no such thing"),
        (b"exception 500", grpc.StatusCode.INTERNAL, "no such thing"),
        (b"code 429", grpc.StatusCode.RESOURCE_EXHAUSTED, "enough"),
        (b"code 206", grpc.StatusCode.UNAVAILABLE, "enough"),
    ],
)
def test_what_a_handler_raises_has_the_code_of_its_status(
    one: Stub, data: bytes, code: grpc.StatusCode, said: str
) -> None:
    expected = (code, f"{said}\n{_SERVERS_ERROR}")
    assert _error(lambda: _unary(one, _ask(data))) == expected
    assert _error(lambda: _streamed(one, _ask(data))) == expected


def test_an_error_after_the_first_piece_ends_the_stream_with_its_reason(stub: Stub) -> None:
    call = stub.StreamPredictions(_ask(b"late"), timeout=_TIMEOUT_S)
    assert next(call).prediction == b"first"
    said = f"the handler raised ValueError: after the first piece\n{_SERVERS_ERROR}"
    assert _error(lambda: next(call)) == (grpc.StatusCode.UNAVAILABLE, said)


def test_a_code_after_the_first_piece_ends_the_stream_with_its_message(stub: Stub) -> None:
    call = stub.StreamPredictions(_ask(b"late code"), timeout=_TIMEOUT_S)
    assert next(call).prediction == b"first"
    assert _error(lambda: next(call)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, f"enough\n{_SERVERS_ERROR}")


def test_an_error_whose_text_is_too_long_for_metadata_is_cut(stub: Stub) -> None:
    for ask in (_unary, _streamed):
        code, details = _error(lambda ask=ask: ask(stub, _ask(b"raise much")))
        assert code is grpc.StatusCode.UNAVAILABLE
        assert details.startswith("the handler raised ValueError: üüü") and details.endswith(f"ü…\n{_SERVERS_ERROR}")


def _refusals() -> dict[str, tuple[PredictionsRequest, grpc.StatusCode, str]]:
    missing = "org.pytorch.serve.archive.model.Model{}Exception"
    unknown = missing.format("NotFound")
    not_found, invalid = grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT
    version = "Model version: 2.0 does not exist for model: hello"
    return {
        "no model": (_ask(model="nobody\nx"), not_found, f"Model not found: nobody\nx\n{unknown}"),
        "another runtime": (
            _ask(model="foreign"),
            not_found,
            f"Model not found: foreign\n{unknown}",
        ),
        "no version": (
            _ask(model="hello", model_version="2.0"),
            not_found,
            f"{version}\n{missing.format('VersionNotFound')}",
        ),
        "fields": (
            _ask(input={str(number): b"" for number in range(1000)}),
            invalid,
            "input: must have at most 1000 entries, got 1001\nBadRequestException.()",
        ),
        "no name": (_ask(model=""), invalid, "Parameter model_name is required.\nBadRequestException.()"),
        "tokens": (
            _ask(model="tokens"),
            invalid,
            "model: tokens generates tokens and has no TorchServe handler; send requests to /v1/chat/completions or "
            "/v2/models/tokens/generate\nBadRequestException.()",
        ),
    }


@pytest.mark.parametrize("what", _refusals())
def test_a_refused_request_has_its_code_and_one_line_in_the_log(served: Served, stub: Stub, what: str) -> None:
    request, code, said = _refusals()[what]
    begun = len(served.server.log)
    assert _error(lambda: _unary(stub, request)) == (code, said)
    assert _error(lambda: _streamed(stub, request)) == (code, said)
    (response,) = stub.StreamPredictions2(iter([_in_sequence(request)]), timeout=_TIMEOUT_S)
    assert (response.status.code, response.status.message) == (code.value[0], said.rpartition("\n")[0])

    def lines() -> list[str]:
        """Returns the log lines without those of workers, which may be about earlier requests."""
        return [line for line in served.server.log[begun:].splitlines() if "process_output" not in line]

    wait_until(lambda: len(lines()) >= 3, "the lines")
    assert len(lines()) == 3 and all(" INFO " in line for line in lines()), lines()


def _in_sequence(request: PredictionsRequest) -> PredictionsRequest:
    copy = PredictionsRequest()
    copy.CopyFrom(request)
    copy.sequence_id = "s"
    return copy


@pytest.mark.parametrize("garbage", [b"\xff\xff", b"\x0a\x02\xff\xfe", b"\x1a\x04\x0a\x02\xff\xfe"])
def test_bytes_that_are_no_message_are_an_invalid_argument(served: Served, garbage: bytes) -> None:
    with grpc.insecure_channel(served.targets["mlserver"]) as channel:
        for method in ("Predictions", "StreamPredictions"):
            call = channel.unary_stream(f"/org.pytorch.serve.grpc.inference.InferenceAPIsService/{method}")
            code, details = _error(lambda call=call: list(call(garbage, timeout=_TIMEOUT_S)))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert details.startswith("request: its bytes are not a PredictionsRequest")


def test_a_full_queue_refuses_a_request(one: Stub) -> None:
    calls = [one.Predictions.future(_ask(b"sleep", "narrow"), timeout=_TIMEOUT_S) for _ in range(4)]
    codes = [call.code() for call in calls if call.exception() is not None]
    assert codes and set(codes) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert any(call.code() is grpc.StatusCode.OK for call in calls)


def test_a_request_has_the_time_that_its_models_settings_give_it(one: Stub) -> None:
    code, _ = _error(lambda: _unary(one, _ask(b"sleep", "impatient")))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED


# --- sequences ---


def _answers(stub: Stub, *requests: PredictionsRequest) -> list[Any]:
    return list(stub.StreamPredictions2(iter(requests), timeout=_TIMEOUT_S))


def _number(value: int | bytes, sequence: str = "", **inputs: bytes) -> PredictionsRequest:
    data = value if isinstance(value, bytes) else str(value).encode()
    return _ask(data, "stateful", input=inputs, **({"sequence_id": sequence} if sequence else {}))


def test_requests_of_a_sequence_are_answered_in_their_order_with_its_state(stub: Stub) -> None:
    name = f"ordered-{time.monotonic_ns()}"
    found = _answers(stub, *(_number(value, name) for value in (1, 2, 3, 4)), _number(0, name, **_END))
    assert not any(response.HasField("status") for response in found), found
    assert [response.prediction for response in found] == [b"1", b"3", b"6", b"10", b"10"]
    assert {response.sequence_id for response in found} == {name}
    assert not any(response.HasField("status") for response in found)


_START = {"ts_request_sequence_start": b"true"}
_END = {"ts_request_sequence_end": b"True"}


def test_sequences_on_one_call_have_states_of_their_own(one: Stub) -> None:
    names = [f"{name}-{time.monotonic_ns()}" for name in "ab"]
    requests = [_number(value, name) for value in (1, 2) for name in names]
    found = _answers(one, *requests, *(_number(0, name, **_END) for name in names))
    for name in names:
        assert [each.prediction for each in found if each.sequence_id == name] == [b"1", b"3", b"3"]


def test_a_client_may_read_an_answer_before_it_sends_the_next_request(one: Stub) -> None:
    waiting: queue.Queue[Any] = queue.Queue()
    call = one.StreamPredictions2(iter(waiting.get, None), timeout=_TIMEOUT_S)
    name = f"kept-{time.monotonic_ns()}"
    for value, expected in ((5, b"5"), (6, b"11")):
        waiting.put(_number(value, name))
        assert next(call).prediction == expected
    waiting.put(_number(0, name, **_END))
    waiting.put(None)
    assert [each.prediction for each in call] == [b"11"] and call.code() is grpc.StatusCode.OK


def test_a_sequence_that_starts_without_an_id_gets_one(one: Stub) -> None:
    (first,) = _answers(one, _number(7, named=b"x", **_START))
    assert first.sequence_id.startswith("ts-seq-") and first.prediction == f"{first.sequence_id}7".encode()
    (second,) = _answers(one, _number(1, first.sequence_id, **_END))
    assert second.prediction == b"8"


def test_the_headers_of_http_end_a_sequence_and_make_room_for_others(served: Served) -> None:
    url = f"{served.server.url}/predictions/stateful"
    for number in range(3):  # one more than may be open at once
        headers = {"ts_request_sequence_id": f"http-{number}"}
        for end, total in (({}, "1"), ({"ts_request_sequence_end": "true"}, "2")):
            reply = httpx.post(url, data={"data": "1"}, headers={**headers, **end}, timeout=_TIMEOUT_S)
            assert (reply.status_code, reply.text) == (200, total)


def test_the_handler_finds_the_sequence_in_its_headers(one: Stub) -> None:
    (response,) = _answers(one, _ask(sequence_id="s-2", input={**_START, **_END}))
    headers = httpx.Response(200, content=response.prediction).json()["headers"]
    assert {name: value for name, value in headers.items() if name != "session_id"} == {
        "ts_request_sequence_id": "s-2",
        "ts_request_sequence_start": "true",
        "ts_request_sequence_end": "true",
    }


def test_a_request_without_a_sequence_is_refused_alone(one: Stub) -> None:
    name = f"alone-{time.monotonic_ns()}"
    found = _answers(one, _number(1, name), _number(2), _number(0, name, **_END))
    refused = [each.status for each in found if each.HasField("status")]
    assert [(each.code, each.message) for each in refused] == [(3, "Parameter sequenceId is required.")]
    assert [each.prediction for each in found if not each.HasField("status")] == [b"1", b"1"]
    (detail,) = refused[0].details
    assert _strings(detail) == {1: b"type.googleapis.com/google.rpc.ErrorInfo", 2: b"\n\x16BadRequestException.()"}


def _strings(raw: bytes) -> dict[int, bytes]:
    return {field.field_number: field.data for field in UnknownFieldSet(empty_pb2.Empty.FromString(raw))}


def test_an_error_in_a_sequence_is_a_response_and_the_others_go_on(one: Stub) -> None:
    name = f"failing-{time.monotonic_ns()}"
    found = _answers(one, _number(1, name), _number(b"raise", name), _number(2, name), _number(0, name, **_END))
    assert [each.prediction for each in found] == [b"1", b"", b"3", b"3"]
    assert (found[1].status.code, found[1].status.message) == (14, "the handler raised ValueError: as asked")


def test_more_sequences_than_the_model_keeps_are_refused(one: Stub) -> None:
    names = [f"{name}-{time.monotonic_ns()}" for name in "abc"]
    found = _answers(one, *(_number(1, name) for name in names))
    codes = [each.status.code for each in found if each.HasField("status")]
    assert codes == [grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]]
    _answers(one, *(_number(0, name, **_END) for name in names[:2]))


# --- clients that leave ---


def _leave_unary(stub: Stub) -> None:
    call = stub.Predictions.future(_ask(b"endless"), timeout=_TIMEOUT_S)
    time.sleep(0.2)
    call.cancel()


def _leave_stream(stub: Stub) -> None:
    call = stub.StreamPredictions(_ask(b"endless"), timeout=_TIMEOUT_S)
    next(call)
    call.cancel()


def _leave_sequences(stub: Stub) -> None:
    call = stub.StreamPredictions2(iter([_ask(b"endless", sequence_id="s")]), timeout=_TIMEOUT_S)
    next(call)
    call.cancel()


def _pass_the_deadline(stub: Stub) -> None:
    assert _error(lambda: list(stub.StreamPredictions(_ask(b"endless"), timeout=0.5)))[0] is (
        grpc.StatusCode.DEADLINE_EXCEEDED
    )


@pytest.mark.parametrize("leave", [_leave_unary, _leave_stream, _leave_sequences, _pass_the_deadline])
def test_a_client_that_leaves_frees_its_worker(served: Served, stub: Stub, leave: Callable[[Stub], None]) -> None:
    """The handler would never end, and the model has only one worker."""
    leave(stub)
    assert stub.Predictions(_ask(b"bytes"), timeout=_FREED_S).prediction == b"\xff\x00"
    own = [line for line in served.server.log.splitlines() if " worker 0: " not in line]
    assert not [line for line in own if "Traceback" in line or "never retrieved" in line]


@pytest.mark.long
def test_a_client_that_reads_nothing_is_cut_off_and_frees_its_worker(served: Served) -> None:
    options = [*_ALL_SIZES, ("grpc.http2.lookahead_bytes", 65536)]
    with grpc.insecure_channel(served.targets["own"], options=options) as channel:
        stub = Stub(channel)
        call = stub.StreamPredictions(_ask(b"flood"), timeout=_TIMEOUT_S)
        next(call)
        wait_until(lambda: "has read nothing for 2 s: its stream is closed" in served.server.log)
        with grpc.insecure_channel(served.targets["own"], options=[("grpc.use_local_subchannel_pool", 1)]) as other:
            assert _unary(Stub(other), _ask(b"bytes")) == b"\xff\x00"
        call.cancel()


# --- records, messages, shutdown ---


def test_requests_are_counted_and_logged_as_those_of_other_endpoints(served: Served, one: Stub) -> None:
    before = _succeeded(served)
    begun = len(served.server.log)
    _unary(one, _ask(b"x", "hello"), metadata=(("x-request-id", "counted-1"),))
    list(one.StreamPredictions(_ask(b"x", "hello"), metadata=(("x-request-id", "counted-2"),), timeout=_TIMEOUT_S))

    def lines() -> list[str]:
        return [line for line in served.server.log[begun:].splitlines() if "counted-" in line]

    wait_until(lambda: len(lines()) >= 2, "the lines")
    assert _succeeded(served) == before + 2
    assert len(lines()) == 2 and "grpc-unary" in lines()[0] and "grpc-stream" in lines()[1], lines()


def _succeeded(served: Served) -> int:
    """Returns the number of successful requests to ``hello``."""
    text = plain_http.get(f"http://{HOST}:{served.server.metrics_port}/metrics", timeout=_TIMEOUT_S).text
    pattern = r'^torch_stream_handler_requests_total{[^}]*model="hello"[^}]*outcome="ok"[^}]*} ([\d.]+)$'
    return round(float(re.findall(pattern, text, re.MULTILINE)[0]))


def test_our_messages_have_the_fields_that_clients_know() -> None:
    for name in ("PredictionsRequest", "PredictionResponse", "TorchServeHealthResponse"):
        ours = getattr(torchserve, name).DESCRIPTOR.fields
        theirs = _POOL.FindMessageTypeByName(f"org.pytorch.serve.grpc.inference.{name}").fields
        assert [(field.name, field.number, field.type) for field in ours] == [
            (field.name, field.number, field.type) for field in theirs
        ]


@pytest.mark.slow
def test_at_sigterm_a_stream_in_flight_ends_and_new_requests_are_refused(tmp_path: Path) -> None:
    models = [Model("echo", write_handler(tmp_path / "echo", _ECHO), implementation=TORCHSERVE, extra=SHIM)]
    (port,) = free_ports(1)
    environment = {"MLSERVER_TORCH_STREAM_DRAIN_GRACE": "600", _PORT: str(port)}
    with (
        serve(tmp_path / "models", models, settings=SETTINGS, environment=environment) as running,
        grpc.insecure_channel(f"{HOST}:{port}") as channel,
    ):
        stub = Stub(channel)
        waiting: queue.Queue[Any] = queue.Queue()
        idle = stub.StreamPredictions2(iter(waiting.get, None), timeout=_TIMEOUT_S)
        call = stub.StreamPredictions(_ask(b"endless"), timeout=_TIMEOUT_S)
        next(call)
        running.process.terminate()
        wait_until(lambda: "Unhealthy" in stub.Ping(empty_pb2.Empty(), timeout=_TIMEOUT_S).health)
        said = f"the server is shutting down\n{_SERVERS_ERROR}"
        refused = (grpc.StatusCode.UNAVAILABLE, said)
        assert _error(lambda: _unary(stub, _ask())) == refused
        running.process.terminate()  # the second signal ends the grace
        assert _error(lambda: list(idle)) == refused
        assert _error(lambda: list(call)) == refused
        waiting.put(None)
        assert running.process.wait(30) == 0
        assert "Traceback" not in running.log


def test_responses_are_what_protoc_describes() -> None:
    response = PredictionResponse.FromString(torchserve.PredictionResponse(prediction=b"x").SerializeToString())
    assert not response.HasField("status") and not response.HasField("sequence_id")
