"""Handlers behind a real MLServer: V2 over REST and gRPC, errors by our table, clients that leave, metrics, the end."""

from __future__ import annotations

import base64
import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
from mlserver.grpc import dataplane_pb2 as pb
from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub

from mlserver_torch_stream.client import EventParser
from tests import plain_http
from tests.server import triton_wire
from tests.server.harness import HOST, Model, Server, serve
from tests.torchserve.predicting import SETTINGS, SHIM, TORCHSERVE
from tests.torchserve.test_bad_handlers import _WRONG
from tests.torchserve.test_metrics_config import HANDLER, METRICS
from tests.torchserve.workshop import COUNTER as _COUNTS
from tests.torchserve.workshop import HELLO, write_handler, write_mar
from tests.waiting import wait_until

_TIMEOUT_S = 60.0

_FACTS = """
import json, time
from ts.handler_utils.utils import send_intermediate_predict_response

def handle(data, context):
    if data is None:
        return None
    row = {name: value.decode() if isinstance(value, bytearray) else value for name, value in data[0].items()}
    if row.get("body") == "bytes":
        return [b"\\xff\\x00"]
    if row.get("body") == "endless":
        context.metrics.add_counter("Begun", 1)
        while True:
            send_intermediate_predict_response(["piece"], context.request_ids, "ok", 200, context)
            time.sleep(0.01)
    headers = context.get_all_request_header(0)
    context.set_response_content_type(0, "application/json")
    context.set_response_header(0, "x-mine", "yes")
    names = ("mine", "flag", "authorization", "ts_request_sequence_id", "ts_request_sequence_start")
    return [{"data": row, "id": context.get_request_id(0), "headers": {name: headers.get(name) for name in names}}]
"""
_DOUBLE = """
def handle(data, context):
    return None if data is None else [[number * 2 for number in tensor["data"]] for tensor in data]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("torchserve")
    hello = write_mar(folder / "hello.mar", {"hello.py": HELLO}, {"modelName": "hello", "handler": "hello.py"})
    envelope = {"modelName": "double", "handler": "double.py", "envelope": "kservev2"}
    double = write_mar(folder / "d.mar", {"double.py": _DOUBLE}, envelope)
    (folder / "m.yaml").write_text(METRICS)
    own = {**SHIM, "metrics_config": str(folder / "m.yaml"), "python": sys.executable}
    models = [
        Model("hello", hello, implementation=TORCHSERVE, extra=SHIM, version="1.0"),
        Model("wrong", write_handler(folder / "wrong", _WRONG), implementation=TORCHSERVE, extra=SHIM),
        Model("facts", write_handler(folder / "facts", _FACTS), implementation=TORCHSERVE, extra=SHIM),
        Model("own", write_handler(folder / "own", HANDLER), implementation=TORCHSERVE, extra=own),
        Model("kind", write_handler(folder / "kind", _KIND), implementation=TORCHSERVE, extra=SHIM),
        Model("double", double, implementation=TORCHSERVE, extra=SHIM),
    ]
    with serve(folder / "models", models, settings=SETTINGS, triton=True) as running:
        yield running
        workers = psutil.Process(running.process.pid).children(recursive=True)
        assert len(workers) >= len(models)
        running.process.terminate()
        _, alive = psutil.wait_procs(workers, timeout=20)
        assert not alive, "workers outlive their server"


@pytest.fixture(scope="module")
def stub(server: Server) -> Iterator[GRPCInferenceServiceStub]:
    with grpc.insecure_channel(server.grpc_target) as channel:
        yield GRPCInferenceServiceStub(channel)


def _body(text: str, **parameters: Any) -> dict[str, Any]:
    tensor = {"name": "body", "datatype": "BYTES", "shape": [1], "data": [text]}
    return {"id": "mine", "inputs": [tensor], "parameters": parameters}


def _post(server: Server, path: str, body: dict[str, Any], **options: Any) -> httpx.Response:
    return plain_http.post(f"{server.url}/v2/models/{path}", json=body, timeout=_TIMEOUT_S, **options)


def _events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"].startswith("text/event-stream")
    return [json.loads(event) for event in EventParser().feed(response.content)]


def _grpc(model: str, *texts: str, id: str = "mine") -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=model, id=id)
    tensor = request.inputs.add(name="body", datatype="BYTES", shape=[len(texts)])
    tensor.contents.bytes_contents.extend(text.encode() for text in texts)
    return request


def _value(response: pb.ModelInferResponse) -> bytes:
    return b"".join(response.outputs[0].contents.bytes_contents)


def test_binary_tensors_reach_a_handler_and_its_bytes_come_back_as_they_are(server: Server) -> None:
    head = {"inputs": [{"name": "body", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 9}}]}
    spelled = json.dumps({**head, "parameters": {"binary_data_output": True}}).encode()
    response = plain_http.post(
        f"{server.url}/v2/models/facts/infer",
        content=spelled + b"\x05\0\0\0bytes",
        headers={"inference-header-content-length": str(len(spelled))},
        timeout=_TIMEOUT_S,
    )
    assert response.status_code == 200, response.text
    length = int(response.headers["inference-header-content-length"])
    (tensor,) = json.loads(response.content[:length])["outputs"]
    assert response.content[length:] == b"\x02\0\0\0\xff\0"
    assert tensor == {"name": "output", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 6}}


def test_hello_as_four_events_with_the_clients_id_and_one_final_flag(server: Server) -> None:
    for path in ("hello/infer_stream", "hello/versions/1.0/infer_stream"):
        events = _events(_post(server, path, _body("x")))
        assert [event["outputs"][0]["data"] for event in events] == [["hello"]] * 3 + [["hello world "]]
        assert [event["parameters"]["triton_final_response"] for event in events] == [False] * 3 + [True]
        assert {event["id"] for event in events} == {"mine"}
        assert all("ts_stream_next" not in json.dumps(event) for event in events)


def test_hello_as_one_aggregated_unary_answer(server: Server, stub: GRPCInferenceServiceStub) -> None:
    answer = _post(server, "hello/infer", _body("x")).json()
    assert answer["outputs"][0]["data"] == ["hellohellohellohello world "]
    assert answer["outputs"][1] == {"name": "piece_lengths", "datatype": "INT64", "shape": [4], "data": [5, 5, 5, 12]}
    assert _value(stub.ModelInfer(_grpc("hello", "x"), timeout=_TIMEOUT_S)) == b"hellohellohellohello world "


def test_hello_over_grpc_and_several_messages_of_one_stream(stub: GRPCInferenceServiceStub) -> None:
    messages = [_grpc("hello", "x"), _grpc("hello", "y")]
    responses = list(stub.ModelStreamInfer(iter(messages), timeout=_TIMEOUT_S))
    for index in range(2):
        mine = [each for each in responses if each.parameters["request_index"].int64_param == index]
        assert [_value(each) for each in mine] == [b"hello"] * 3 + [b"hello world "]
        assert [each.parameters["triton_final_response"].bool_param for each in mine] == [False] * 3 + [True]


def test_handlers_stream_over_tritons_port_and_fail_alone(server: Server) -> None:
    messages = [
        _grpc("hello", "x", id="a"),
        _grpc("wrong", "raise before", id="b"),
        _grpc("wrong", "raise after", id="c"),
    ]
    with grpc.insecure_channel(server.triton_target) as channel:
        found = triton_wire.by_id(triton_wire.replies(channel, *messages))
    assert [each.reply.outputs["output"] for each in found["a"]] == [["hello"]] * 3 + [["hello world "]]
    assert [each.final for each in found["a"]] == [False] * 3 + [True]
    (before,) = found["b"]
    assert before.error.startswith("[request id: b] ") and "before the first piece" in before.error and before.final
    first, after = found["c"]
    assert first.reply.outputs["output"] == ["first"] and not first.error
    assert "after the first piece" in after.error and after.final


def test_an_error_before_the_first_piece_is_a_status(server: Server, stub: GRPCInferenceServiceStub) -> None:
    for endpoint in ("infer", "infer_stream"):
        refused = _post(server, f"wrong/{endpoint}", _body("raise before"))
        assert refused.status_code == 503
        assert refused.json() == {"error": "the handler raised ValueError: before the first piece"}
        assert _post(server, f"wrong/{endpoint}", _body("memory")).status_code == 507
        escaped = _post(server, f"wrong/{endpoint}", _body("surrogate"))
        assert escaped.status_code == 503 and escaped.json() == {
            "error": "the handler raised ValueError: lone \\ud800 surrogate"
        }
        assert _post(server, f"wrong/{endpoint}", _body("not found")).status_code == 422
    with pytest.raises(grpc.RpcError) as failed:
        stub.ModelInfer(_grpc("wrong", "raise before"), timeout=_TIMEOUT_S)
    assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "before the first" in failed.value.details()
    with pytest.raises(grpc.RpcError) as failed:
        list(stub.ModelStreamInfer(iter([_grpc("wrong", "memory")]), timeout=_TIMEOUT_S))
    assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert _post(server, "wrong/infer", _body("fine")).json()["outputs"][0]["data"] == ["fine"]


@pytest.mark.parametrize(("text", "said"), [("raise after", "after the first piece"), ("die", "exited with status 9")])
def test_an_error_after_the_first_piece_is_told_in_band(
    server: Server, stub: GRPCInferenceServiceStub, text: str, said: str
) -> None:
    first, last = _events(_post(server, "wrong/infer_stream", _body(text)))
    assert first["outputs"][0]["data"] == ["first"] and "error" not in first
    assert said in last["error"] and last["outputs"] == [] and last["parameters"]["triton_final_response"]
    assert _post(server, "wrong/infer", _body("fine")).status_code == 200
    first, last = stub.ModelStreamInfer(iter([_grpc("wrong", text)]), timeout=_TIMEOUT_S)
    assert _value(first) == b"first" and said in last.parameters["error"].string_param
    assert last.parameters["triton_final_response"].bool_param
    assert _post(server, "wrong/infer", _body("fine")).status_code == 200


def test_bad_input_is_422_with_the_field(server: Server, stub: GRPCInferenceServiceStub) -> None:
    tensor = {"name": "body", "datatype": "BYTES", "shape": [2], "data": ["x"]}
    for body, field in (
        ({"inputs": []}, "inputs"),
        ({"inputs": [tensor]}, "body"),
        ({"inputs": [{**tensor, "shape": [1]}] * 2}, "body"),
        ({**_body("x"), "parameters": {"timeout": "soon"}}, "timeout"),
        ({**_body("x"), "parameters": {"sequence_start": 1}}, "sequence_start"),
    ):
        refused = _post(server, "facts/infer_stream", body)
        assert refused.status_code == 422 and refused.json()["error"].startswith(f"{field}:"), refused.text
    with pytest.raises(grpc.RpcError) as failed:
        stub.ModelInfer(pb.ModelInferRequest(model_name="facts"), timeout=_TIMEOUT_S)
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_what_a_handler_sees_of_a_v2_request(server: Server) -> None:
    body = {
        "id": "r-1",
        "inputs": [
            {"name": "body", "datatype": "BYTES", "shape": [1], "data": ["raw"]},
            {
                "name": "json",
                "datatype": "BYTES",
                "shape": [1],
                "data": ['{"a": 1}'],
                "parameters": {"content_type": "application/json"},
            },
            {
                "name": "text",
                "datatype": "BYTES",
                "shape": [1],
                "data": ["eA=="],
                "parameters": {"content_type": "base64"},
            },
            {"name": "several", "datatype": "BYTES", "shape": [2], "data": ["a", "b"]},
            {"name": "matrix", "datatype": "FP32", "shape": [2, 2], "data": [1.5, 2, 3, 4]},
            {"name": "nested", "datatype": "INT64", "shape": [1, 2], "data": [[1, 2]]},
        ],
        "parameters": {"mine": 3, "flag": True, "sequence_id": 7, "sequence_start": True},
    }
    response = _post(server, "facts/infer", body, headers={"Authorization": "me"})
    answer = response.json()
    facts = json.loads(answer["outputs"][0]["data"][0])
    assert facts["data"] == {
        "body": "raw",
        "json": {"a": 1},
        "text": "x",
        "several": ["a", "b"],
        "matrix": [[1.5, 2], [3, 4]],
        "nested": [[1, 2]],
    }
    assert facts["id"] == answer["id"] == "r-1"
    assert facts["headers"] == {
        "mine": "3",
        "flag": "true",
        "authorization": "me",
        "ts_request_sequence_id": "7",
        "ts_request_sequence_start": "true",
    }
    parameters = answer["parameters"]
    assert parameters["content_type"] == "application/json" and parameters["header.x-mine"] == "yes"
    assert parameters["sequence_id"] == "7"


_KIND = """
def handle(data, context):
    if data is None:
        return None
    body = data[0]["body"]
    shown = list(body) if isinstance(body, bytearray) else body
    return [[type(body).__name__, shown, context.get_request_header(0, "body")["content-type"]]]
"""
_PNG = b"\x89PNG\r\n\x1a\n\x00\xff"


@pytest.mark.parametrize(
    ("raw", "content_type", "expected"),
    [
        (b'{"a": 1}', "application/json", ["dict", {"a": 1}]),
        (b"[1, [2]]", "application/json", ["list", [1, [2]]]),
        (b'"text"', "application/json; charset=utf-8", ["str", "text"]),
        ("Grüße".encode(), "text/plain", ["str", "Grüße"]),
        (b'{"a": 1}', "text/plain", ["str", '{"a": 1}']),
        (_PNG, "image/png", ["bytearray", list(_PNG)]),
        (_PNG, "application/octet-stream", ["bytearray", list(_PNG)]),
        (_PNG, None, ["bytearray", list(_PNG)]),
        (b"", None, ["bytearray", []]),
        (b'{"a": 1}', None, ["dict", {"a": 1}]),
        (b'{"a": 1}', "application/x-www-form-urlencoded", ["dict", {"a": 1}]),  # curl -d
    ],
)
def test_behind_generate_a_handler_gets_any_body_by_its_content_type(
    server: Server, raw: bytes, content_type: str | None, expected: list[Any]
) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    for endpoint in ("generate", "generate_stream"):
        answer = plain_http.post(
            f"{server.url}/v2/models/kind/{endpoint}", content=raw, headers=headers, timeout=_TIMEOUT_S
        )
        assert answer.status_code == 200, answer.text
        body = answer.json() if endpoint == "generate" else _events(answer)[0]
        assert json.loads(body["outputs"][0]["data"][0])[:2] == expected


@pytest.mark.parametrize(
    ("raw", "content_type", "status", "said"),
    [
        (_PNG, "application/json", 422, "body: is not valid JSON (it is not UTF-8 text): name its content type"),
        (b"{", "application/json", 422, "body: is not valid JSON (unexpected end of data"),
        (_PNG, "application/x-www-form-urlencoded", 415, "or send it as the tensor `body` to infer"),
        (b"--x--", "multipart/form-data; boundary=x", 415, "multipart/form-data is not implemented: send each field"),
    ],
)
def test_a_body_that_no_handler_is_given_is_refused_with_the_other_way(
    server: Server, raw: bytes, content_type: str, status: int, said: str
) -> None:
    url = f"{server.url}/v2/models/kind/generate"
    refused = plain_http.post(url, content=raw, headers={"content-type": content_type}, timeout=_TIMEOUT_S)
    assert refused.status_code == status and said in refused.json()["error"]


@pytest.mark.parametrize("asked", [True, "yes"])
def test_binary_outputs_are_a_matter_of_v2_and_not_of_a_handlers_own_object(server: Server, asked: Any) -> None:
    own = {"inputs": ["mine"], "parameters": {"binary_data_output": asked}, "outputs": [{"binary_data": asked}]}
    answer = _post(server, "facts/generate", own)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    assert _post(server, "facts/generate_stream", own).status_code == 200


def test_behind_generate_an_object_of_the_handlers_own_is_its_body(server: Server) -> None:
    (event,) = _events(_post(server, "facts/generate_stream", {"prompt": "x", "inputs": "mine"}))
    assert json.loads(event["outputs"][0]["data"][0])["data"] == {"body": {"prompt": "x", "inputs": "mine"}}
    assert json.loads(_post(server, "facts/generate", _body("raw")).json()["outputs"][0]["data"][0])["data"] == {
        "body": "raw"
    }


def test_bytes_that_are_no_text_are_base64_over_rest_and_raw_over_grpc(
    server: Server, stub: GRPCInferenceServiceStub
) -> None:
    output = _post(server, "facts/infer", _body("bytes")).json()["outputs"][0]
    assert base64.b64decode(output["data"][0]) == b"\xff\x00" and output["parameters"] == {"content_type": "base64"}
    assert _value(stub.ModelInfer(_grpc("facts", "bytes"), timeout=_TIMEOUT_S)) == b"\xff\x00"


def test_the_kservev2_envelope_answers_with_tensors(server: Server, stub: GRPCInferenceServiceStub) -> None:
    tensor = {"name": "x", "datatype": "INT64", "shape": [3], "data": [1, 2, 3]}
    answer = _post(server, "double/infer", {"inputs": [tensor]}).json()
    assert answer["outputs"] == [{"name": "x", "datatype": "INT64", "shape": [3], "data": [2, 4, 6]}]
    request = pb.ModelInferRequest(model_name="double")
    request.inputs.add(name="x", datatype="INT64", shape=[2]).contents.int64_contents.extend([4, 5])
    output = stub.ModelInfer(request, timeout=_TIMEOUT_S).outputs[0]
    assert list(output.contents.int64_contents) == [8, 10]


@pytest.mark.parametrize("endpoint", ["rest", "unary", "grpc"])
def test_a_client_that_leaves_makes_room_for_the_next(
    server: Server, stub: GRPCInferenceServiceStub, endpoint: str
) -> None:
    """The handler would never end."""
    if endpoint == "grpc":
        call = stub.ModelStreamInfer(iter([_grpc("facts", "endless")]), timeout=_TIMEOUT_S)
        assert _value(next(call)) == b"piece"
        call.cancel()
    elif endpoint == "rest":
        url = f"{server.url}/v2/models/facts/infer_stream"
        with plain_http.stream("POST", url, json=_body("endless"), timeout=_TIMEOUT_S) as response:
            next(response.iter_raw())
    else:
        with pytest.raises(httpx.ReadTimeout):
            plain_http.post(f"{server.url}/v2/models/facts/infer", json=_body("endless"), timeout=0.5)
    assert _post(server, "facts/infer", _body("bytes")).status_code == 200


def test_metrics_of_the_server_and_of_handlers_are_scraped(server: Server) -> None:
    _post(server, "facts/infer", _body("x"))
    assert _post(server, "own/infer", _body("x")).status_code == 200
    end = time.monotonic() + 20
    wanted = (
        'torch_stream_handler_requests_total{model="facts",outcome="ok",version=""}',
        'torch_stream_handler_workers{model="facts",version=""} 1.0',
        'torch_stream_handler_waiting_requests{model="facts",version=""} 0.0',
        'torch_stream_handler_responses_total{model="facts",version=""}',
        'torch_stream_handler_worker_restarts_total{model="facts",version=""} 0.0',
        'torchserve_PredictionTime{Level="Model",ModelName="facts",model="facts",version=""}',
        'torchserve_Steps_count{Method="a, b: c",model="own",version=""} 2.0',
        'torch_stream_requests_total{finish_reason="stop",model="hello"',
    )
    while True:
        shown = plain_http.get(f"http://{HOST}:{server.metrics_port}/metrics", timeout=10).text
        missing = [each for each in wanted if each not in shown]
        if not missing or time.monotonic() > end:
            break
        time.sleep(0.1)
    assert not missing


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"broken.py": "raise RuntimeError('at import')"}, "importing broken.py raised RuntimeError: at import"),
        ({"broken.py": "x = 1", "../outside.py": "x = 1"}, "leads out of the archive"),
    ],
)
def test_an_archive_that_cannot_be_loaded_is_refused_with_the_reason_and_the_server_lives(
    server: Server, tmp_path: Path, files: dict[str, str], said: str
) -> None:
    """It is loaded while the server runs, over MLServer's repository."""
    uri = write_mar(tmp_path / "broken.mar", files, {"modelName": "broken", "handler": "broken.py"})
    folder = server.log_path.parent / "models" / tmp_path.name
    folder.mkdir()
    settings = Model(tmp_path.name, uri, implementation=TORCHSERVE, extra=SHIM).settings()
    (folder / "model-settings.json").write_text(json.dumps(settings))
    refused = plain_http.post(f"{server.url}/v2/repository/models/{tmp_path.name}/load", timeout=_TIMEOUT_S)
    assert refused.status_code == 500 and said in refused.text
    wait_until(lambda: said in server.log, "the reason")
    assert _post(server, "hello/infer", _body("x")).status_code == 200


def test_an_unknown_model_is_404_and_a_ready_one_is_ready(server: Server) -> None:
    assert _post(server, "nobody/infer", _body("x")).status_code == 404
    assert plain_http.get(f"{server.url}/v2/models/hello/ready").status_code == 200


def _last_event(server: Server, model: str, end: Callable[[], object]) -> dict[str, Any]:
    """Returns the last event of an endless stream, which ``end`` ends from another thread after it has begun."""
    url = f"{server.url}/v2/models/{model}/infer_stream"
    parser = EventParser()
    events: list[dict[str, Any]] = []
    with (
        plain_http.stream("POST", url, json=_body("endless"), timeout=_TIMEOUT_S) as response,
        ThreadPoolExecutor() as pool,
    ):
        ending = None
        for chunk in response.iter_raw():
            ending = ending or pool.submit(end)
            events += [json.loads(event) for event in parser.feed(chunk)]
    assert ending is not None
    ending.result(_TIMEOUT_S)
    return events[-1]


@pytest.mark.slow
def test_at_unload_and_at_sigterm_a_stream_in_flight_is_told_why_it_ends_and_no_worker_is_left(tmp_path: Path) -> None:
    uri = write_mar(tmp_path / "facts.mar", {"facts.py": _FACTS}, {"modelName": "facts", "handler": "facts.py"})
    models = [Model(name, uri, implementation=TORCHSERVE, extra=SHIM) for name in ("facts", "other")]
    (tmp_path / "unpacked").mkdir()
    environment = {"MLSERVER_TORCH_STREAM_DRAIN_GRACE": "0.5", "TMPDIR": str(tmp_path / "unpacked")}
    with serve(tmp_path / "models", models, settings=SETTINGS, environment=environment) as running:
        workers = psutil.Process(running.process.pid).children(recursive=True)
        unload = f"{running.url}/v2/repository/models/other/unload"
        last = _last_event(running, "other", lambda: plain_http.post(unload, timeout=_TIMEOUT_S).raise_for_status())
        assert last["error"] == "model 'other' is being unloaded" and last["parameters"]["triton_final_response"]
        last = _last_event(running, "facts", running.process.terminate)
        assert last["error"] == "the server is shutting down" and last["parameters"]["triton_final_response"]
        running.process.wait(20)
        assert running.process.returncode == 0
        _, alive = psutil.wait_procs(workers, timeout=20)
        assert not alive
        assert not list((tmp_path / "unpacked").glob("*mar*")), "the unpacked archive is left behind"


@pytest.mark.slow
def test_a_reload_under_a_stream_lets_it_finish_and_ends_the_old_workers(tmp_path: Path) -> None:
    models = [Model("wrong", write_handler(tmp_path / "wrong", _COUNTS), implementation=TORCHSERVE, extra=SHIM)]
    with serve(tmp_path / "models", models, settings=SETTINGS) as running:
        old = psutil.Process(running.process.pid).children(recursive=True)
        url = f"{running.url}/v2/models/wrong/infer_stream"
        received = b""
        with plain_http.stream("POST", url, json=_body("count 200"), timeout=_TIMEOUT_S) as response:
            for chunk in response.iter_raw():
                if not received:
                    load = plain_http.post(f"{running.url}/v2/repository/models/wrong/load", timeout=_TIMEOUT_S)
                    assert load.status_code == 200
                received += chunk
        events = [json.loads(event) for event in EventParser().feed(received)]
        assert len(events) == 201 and events[-1]["outputs"][0]["data"] == ["end"]
        _, alive = psutil.wait_procs(old, timeout=20)
        assert not alive
        assert _post(running, "wrong/infer", _body("count 1")).status_code == 200


@pytest.mark.slow
def test_what_a_server_that_was_killed_has_unpacked_goes_when_it_starts_again(tmp_path: Path) -> None:
    uri = write_mar(tmp_path / "hello.mar", {"hello.py": HELLO}, {"modelName": "hello", "handler": "hello.py"})
    (tmp_path / "unpacked").mkdir()
    seen: list[set[Path]] = []
    for number in range(2):
        models = [Model("hello", uri, implementation=TORCHSERVE, extra=SHIM)]
        environment = {"TMPDIR": str(tmp_path / "unpacked")}
        with serve(tmp_path / f"models{number}", models, settings=SETTINGS, environment=environment) as running:
            seen.append(set((tmp_path / "unpacked").glob("*mar*")))
            assert _post(running, "hello/infer", _body("x")).status_code == 200
            running.process.kill()
            running.process.wait(20)
    assert [len(folders) for folders in seen] == [1, 1] and not seen[0] & seen[1]
