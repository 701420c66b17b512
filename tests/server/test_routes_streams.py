"""A stream's status, its silence, its failures and its reader, with servers that cause faults."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

import httpx
import pytest

from mlserver_torch_stream import client
from mlserver_torch_stream.client import EventParser
from tests import plain_http
from tests.server import raw, v2
from tests.server.harness import Server
from tests.waiting import wait_until

_STREAMS = ("infer_stream", "generate_stream")
_ENDPOINTS = ("infer", "generate", *_STREAMS)
_LONG = {"max_tokens": 900, "ignore_eos": True}


def _post(server: Server, path: str, body: dict[str, Any]) -> httpx.Response:
    return plain_http.post(f"{server.url}/v2/models/{path}", json=body, timeout=v2.TIMEOUT_S)


def _events(content: bytes) -> list[dict[str, Any]]:
    return [json.loads(event) for event in EventParser().feed(content)]


# --- the first byte ---


@pytest.mark.parametrize("endpoint", _ENDPOINTS)
def test_a_refused_stream_has_a_status_and_json(server: Server, endpoint: str) -> None:
    response = _post(server, f"tiny/{endpoint}", v2.rest_body("Hello", max_tokenz=3))
    assert response.status_code == 422 and "max_tokenz" in response.json()["error"]
    assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize("endpoint", _STREAMS)
def test_a_stream_says_that_it_may_not_be_collected(server: Server, endpoint: str) -> None:
    response = _post(server, f"tiny/{endpoint}", v2.rest_body("Hello", max_tokens=3))
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert b"[DONE]" not in response.content


@pytest.mark.parametrize("endpoint", _ENDPOINTS)
def test_time_that_is_over_before_the_first_token_is_504(slow: Server, endpoint: str) -> None:
    body = v2.rest_body(inputs=[v2.bytes_tensor("role", "user"), v2.bytes_tensor("content", "Hi")], timeout=1)
    response = _post(slow, f"tiny/{endpoint}", body)
    assert response.status_code == 504 and response.json()["error"]


def test_a_full_queue_is_429_and_says_when_to_come_back(slow: Server) -> None:
    with (
        closing(client.stream(slow.url, "narrow", "Hello", **_LONG)) as running,
        raw.connected(slow) as waiting,
    ):
        next(running)
        waiting.sendall(raw.post("/v2/models/narrow/infer", v2.rest_body("Hello", **_LONG)))
        slow.wait_for("narrow", lambda now: now["waiting_requests"] == 1)
        for endpoint in _ENDPOINTS:
            refused = _post(slow, f"narrow/{endpoint}", v2.rest_body("Hello"))
            assert refused.status_code == 429 and refused.json()["error"]
            assert int(refused.headers["retry-after"]) >= 1
    slow.wait_for("narrow", lambda now: now["running_sequences"] == now["waiting_requests"] == 0)


# --- silence ---


def test_a_long_prefill_is_bridged_by_comments(slow: Server) -> None:
    response = _post(slow, "tiny/infer_stream", v2.rest_body("Hello", max_tokens=2))
    assert response.content.startswith(b": ping\n\n")
    replies = [v2.rest_reply(event) for event in _events(response.content)]
    assert replies[-1].final and replies[-1].outputs["num_output_tokens"] == [2]


def test_seldons_translator_gets_no_comments(slow: Server) -> None:
    body = v2.rest_body(inputs=[v2.bytes_tensor("role", "user"), v2.bytes_tensor("content", "Hi")], max_tokens=2)
    assert b": ping" not in _post(slow, "tiny/infer_stream", body).content


def test_an_answer_at_once_is_never_bridged(slow: Server) -> None:
    assert _post(slow, "tiny/infer", v2.rest_body("Hello", max_tokens=2)).json()["outputs"]


# --- headers ---


def test_cloudevents_headers_come_once(server: Server) -> None:
    body = {"id": "mine", **v2.rest_body("Hello", max_tokens=12)}
    events = _events(_post(server, "tiny/infer_stream", body).content)
    headers = [event["parameters"].pop("headers", None) for event in events]
    assert headers[0]["Ce-Id"] == "mine" and headers[0]["Ce-Modelid"] == "tiny"
    assert headers[1:] == [None] * (len(events) - 1)
    unary = _post(server, "tiny/infer", body)
    assert "headers" not in unary.json()["parameters"]
    assert {name: unary.headers[name] for name in headers[0]} == headers[0]


def test_an_id_that_no_header_can_hold_is_served(server: Server) -> None:
    body = {"id": "a\r\nb: €", **v2.rest_body("Hello", max_tokens=2)}
    response = _post(server, "tiny/infer", body)
    assert response.json()["id"] == body["id"]
    assert response.headers["ce-id"] == "a%0D%0Ab%3A%20%E2%82%AC"
    assert "b" not in response.headers


# --- the flat spelling ---


@pytest.mark.parametrize("model", ["tiny", "tiny/versions/v1"])
def test_flat_generate_answers_flat_with_the_text_of_v2(server: Server, model: str) -> None:
    body = {"id": "mine", "text_input": "Hello fox", "max_tokens": 40}
    whole = v2.rest_unary(server.url, "/v2/models/tiny/infer", v2.rest_body("Hello fox", max_tokens=40))
    unary = _post(server, f"{model}/generate", body).json()
    assert (unary["id"], unary["model_name"], unary["model_version"]) == ("mine", "tiny", "v1")
    assert (unary["text_output"], unary["finish_reason"], unary["num_output_tokens"]) == (whole.text, "length", 40)
    events = _events(_post(server, f"{model}/generate_stream", body).content)
    assert "".join(event["text_output"] for event in events) == whole.text
    assert [event["triton_final_response"] for event in events] == [False] * (len(events) - 1) + [True]
    assert ["finish_reason" in event for event in events] == [False] * (len(events) - 1) + [True]


@pytest.mark.parametrize("endpoint", ["infer", "infer_stream"])
def test_infer_takes_tensors_only(server: Server, endpoint: str) -> None:
    response = _post(server, f"tiny/{endpoint}", {"text_input": "Hello"})
    assert response.status_code == 422 and "inputs" in response.json()["error"]


def test_sequences_may_be_several_in_flat_streams_too(server: Server) -> None:
    body = {"text_input": ["Hello", "fox"], "max_tokens": 6}
    texts = _post(server, "tiny/generate", body).json()["text_output"]
    events = _events(_post(server, "tiny/generate_stream", body).content)
    assert ["".join(event["text_output"] for event in events if event["index"] == index) for index in range(2)] == texts


# --- failures ---


@pytest.mark.parametrize(("model", "endpoint", "flat"), [("a", "infer_stream", False), ("b", "generate_stream", True)])
def test_a_stream_that_fails_says_so_in_its_own_spelling(
    failing: Server, model: str, endpoint: str, flat: bool
) -> None:
    body = {"text_input": "Hello", **_LONG} if flat else v2.rest_body("Hello", **_LONG)
    response = _post(failing, f"{model}/{endpoint}", body)
    assert response.status_code == 200
    *before, last = _events(response.content)
    assert before and last["error"] and not any("error" in event for event in before)
    if flat:
        assert (last["finish_reason"], last["triton_final_response"]) == ("error", True)
    else:
        assert (v2.rest_reply(last).finish_reason, v2.rest_reply(last).final) == ("error", True)
    assert v2.rest_unary(failing.url, f"/v2/models/{model}/infer", v2.rest_body("Hello", max_tokens=3)).final
    refused = _post(failing, f"{model}/{endpoint}", body)  # the third prefill
    assert refused.status_code == 500 and refused.json()["error"]
    assert v2.rest_unary(failing.url, f"/v2/models/{model}/infer", v2.rest_body("Hello", max_tokens=3)).final


def test_an_answer_at_once_that_fails_is_500(failing: Server) -> None:
    response = _post(failing, "c/infer", v2.rest_body("Hello", **_LONG))
    assert response.status_code == 500 and response.json()["error"]


# --- readers ---


@pytest.mark.long
def test_a_reader_that_stalls_is_cut_off(slow: Server) -> None:
    before = slow.wait_for("tiny", lambda now: now["running_sequences"] == 0)
    body = v2.rest_body("Hello", top_logprobs=20, return_logprobs=True, **_LONG)  # a kilobyte and more per token
    with raw.connected(slow, receive_buffer=4096) as connection:
        connection.sendall(raw.post("/v2/models/tiny/infer_stream", body))
        slow.wait_for("tiny", lambda now: now["cancelled_sequences"] > before["cancelled_sequences"])
        received = raw.read_all(connection)
    wait_until(lambda: "has read nothing" in slow.log, "the reason")
    assert received.startswith(b"HTTP/1.1 200 OK\r\n") and not received.endswith(b"0\r\n\r\n")
