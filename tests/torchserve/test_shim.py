"""Parts of the stand-in that tests of handlers use, and no worker: TorchServe's service, its messages, its store."""

from __future__ import annotations

import json
import logging
import socket
import struct
from pathlib import Path
from typing import Any

import pytest

from mlserver_torch_stream.handlers.worker.handler_context import Response, parse

pytestmark = pytest.mark.usefixtures("shim")


def _text(text: str) -> bytes:
    return struct.pack("!i", len(text.encode())) + text.encode()


_END = struct.pack("!i", -1)


def _asked(body: str, content_type: str) -> bytes:
    part = _text("body") + _text(content_type) + _text(body)
    return b"I" + _text("r-1") + _text("x-from") + _text("me") + _END + part + _END + _END


def _read(message: bytes) -> Any:
    from ts.protocol.otf_message_handler import retrieve_msg

    near, far = socket.socketpair()
    with near, far:
        far.sendall(message)
        far.shutdown(socket.SHUT_WR)
        return retrieve_msg(near)


@pytest.fixture
def metrics(shim: None, tmp_path: Path) -> Any:
    from ts.metrics.metric_cache_yaml_impl import MetricsCacheYamlImpl

    (tmp_path / "metrics.yaml").write_text("model_metrics: {}")
    return MetricsCacheYamlImpl(str(tmp_path / "metrics.yaml"))


def _answer(entry: Any, asked: bytes, metrics: Any) -> Response:
    from ts.service import Service

    _, batch = _read(asked)
    answer = Service("model", "/", {"model": {}}, entry, None, 1, True, metrics).predict(batch)
    assert answer is not None
    return parse(answer)


def test_a_service_answers_a_message_of_torchserves_frontend_as_torchserve_does(metrics: Any) -> None:
    def entry(data: Any, context: Any) -> Any:
        return [{"data": data, "from": context.get_request_header(0, "x-from"), "id": context.get_request_id(0)}]

    response = _answer(entry, _asked('{"a": 1}', "application/json"), metrics)
    assert (response.code, response.message) == (200, "Prediction success")
    (prediction,) = response.pieces
    assert prediction.request_id == "r-1"
    assert json.loads(prediction.value) == {"data": [{"body": {"a": 1}}], "from": "me", "id": "r-1"}


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (["a", "b"], "returned 2 results for 1 requests"),
        (ValueError("no"), "ValueError: no"),
        ("a", "instead of a list"),
    ],
)
def test_a_service_answers_a_failure_with_its_status_and_the_reason(result: Any, said: str, metrics: Any) -> None:
    def entry(data: Any, context: Any) -> Any:
        if isinstance(result, Exception):
            raise result
        return result

    response = _answer(entry, _asked("text", "text/plain"), metrics)
    assert response.code == 503 and said in response.message


def test_a_load_message_is_read_and_what_is_none_is_refused() -> None:
    from ts.protocol.otf_message_handler import create_load_model_response

    load = b"L" + _text("m") + _text("/m") + struct.pack("!i", 4) + _text("h.py") + struct.pack("!i", 1)
    _, message = _read(load + _text("json") + b"\x01")
    assert message == {
        "modelName": b"m",
        "modelPath": b"/m",
        "batchSize": 4,
        "handler": b"h.py",
        "gpu": 1,
        "envelope": b"json",
        "limitMaxImagePixels": True,
    }
    with pytest.raises(ValueError, match="Invalid command"):
        _read(b"U")
    with pytest.raises(EOFError):
        _read(b"L\x00")
    response = parse(create_load_model_response(507, "no room"))
    assert (response.code, response.message, response.pieces) == (507, "no room", [])


def test_a_stopping_criterion_decides_what_a_response_says_of_its_next() -> None:
    from ts.context import Context, RequestProcessor
    from ts.protocol.otf_message_handler import create_predict_response

    context = Context("m", "/", {}, 3, None, "0")
    context.request_processor = [RequestProcessor({}) for _ in range(3)]
    context.stopping_criteria = [lambda _: True, lambda _: False, lambda _: None]
    ids = {0: "a", 1: "b", 2: "c"}
    response = parse(create_predict_response(["x", "y", "z"], ids, "ok", 200, context) or b"")
    assert [each.headers.get("ts_stream_next") for each in response.pieces] == ["false", "true", None]


def test_a_deprecated_function_warns_at_each_call() -> None:
    from ts.utils.util import deprecated

    @deprecated(version="2.0", replacement="after")
    def before() -> int:
        return 1

    with pytest.warns(PendingDeprecationWarning, match="before is deprecated and goes with 2.0, use after") as noted:
        assert before() + before() == 2
    assert len(noted) == 2


def test_the_store_keeps_metrics_by_request_and_logs_updates(caplog: pytest.LogCaptureFixture) -> None:
    from ts.metrics.metrics_store import MetricsStore

    caplog.set_level(logging.INFO)
    store = MetricsStore({0: "r-0", 1: "r-1"}, "m")
    store.add_time("Time", 20, 1, "s")
    store.add_time("Time", 30, 1, "s")
    store.add_counter("Count", 1)
    store.add_error("Wrong", "a text")
    assert [(each.name, each.value, each.unit, each.request_id) for each in store.store] == [
        ("Time", 20, "Seconds", "r-1"),
        ("Count", 1, "Count", "r-0,r-1"),
        ("Wrong", "a text", "unit", None),
    ]
    assert "[METRICS]Time.Seconds:30|#ModelName:m,Level:Model|" in caplog.text and caplog.text.endswith("r-1\n")
    for wrong in (lambda: store.add_time("T", 1, unit="ns"), lambda: store.add_size("S", 1, unit="TB")):
        with pytest.raises(ValueError, match="unit"):
            wrong()


def test_an_error_metric_keeps_the_level_that_it_is_given(metrics: Any, caplog: pytest.LogCaptureFixture) -> None:
    from ts.metrics.dimension import Dimension

    caplog.set_level(logging.INFO)
    metrics.add_error("Failed", 2, dimensions=[Dimension("Level", "mine")])
    metrics.get_metric("Failed").add_or_update(3, ["yours"], "r-1")
    assert "[METRICS]Failed.unit:2|#Level:mine|#type:COUNTER|#hostname:" in caplog.text
    assert "[METRICS]Failed.unit:3|#Level:yours|" in caplog.text and caplog.text.endswith(",r-1\n")


def test_what_handlers_of_the_examples_import_of_utils() -> None:
    from ts.utils.util import CLEANUP_REGEX, check_valid_pt2_backend

    assert CLEANUP_REGEX.sub("", "a<br/> b&amp;&#65;") == "a b"
    assert check_valid_pt2_backend("inductor") and not check_valid_pt2_backend("nowhere")
