"""To add an API takes one file and one row: a real server streams it, with its own errors and its own end."""

from __future__ import annotations

import json
from typing import Any

import httpx

from mlserver_torch_stream.client import EventParser
from tests import plain_http
from tests.server import v2
from tests.server.harness import Server


def _post(server: Server, body: Any) -> httpx.Response:
    return plain_http.post(f"{server.url}/trial/chat", json=body, timeout=v2.TIMEOUT_S)


def _events(response: httpx.Response) -> list[str]:
    return list(EventParser().feed(response.content))


def test_it_streams_and_ends_in_its_own_words(failing: Server) -> None:
    response = _post(failing, {"model": "trial", "say": "Hello", "live": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *messages, usage, end = _events(response)
    assert end == "[FIN]" and json.loads(usage) == {"used": 5}
    text = "".join(json.loads(message)["piece"] for message in messages)
    assert _post(failing, {"model": "trial", "say": "Hello"}).json() == {"pieces": [text]}
    body = v2.rest_body("Hello", max_tokens=5, ignore_eos=True)
    there = plain_http.post(f"{failing.url}/v2/models/c/infer", json=body, timeout=v2.TIMEOUT_S).json()["outputs"]
    assert [text] == next(output["data"] for output in there if output["name"] == "text_output")


def test_its_errors_are_its_own(failing: Server) -> None:
    wrong = _post(failing, {"model": "trial", "say": 3, "live": True})
    assert wrong.status_code == 400
    assert wrong.json() == {"problem": {"what": "say: must be a string", "where": "say"}}
    unknown = _post(failing, {"model": "nowhere", "say": "Hello"})
    assert unknown.status_code == 404 and "nowhere" in unknown.json()["problem"]["what"]
    unread = plain_http.post(f"{failing.url}/trial/chat", content=b"{", timeout=v2.TIMEOUT_S)
    assert unread.status_code == 400 and unread.json()["problem"]["where"] == "body"
    handler = _post(failing, {"model": "handler", "say": "Hello"})
    assert handler.status_code == 400 and handler.json()["problem"]["where"] == "model"


def test_a_failure_in_its_stream_has_no_end_of_its_own(failing: Server) -> None:
    events = _events(_post(failing, {"model": "broken", "say": "Hello", "live": True, "limit": 200}))
    assert "[FIN]" not in events
    assert "piece" in json.loads(events[0]) and "problem" in json.loads(events[-1])


def test_a_handler_is_no_model_of_openais_api(failing: Server) -> None:
    refused = plain_http.post(f"{failing.url}/v1/chat/completions", json={"model": "handler"}, timeout=v2.TIMEOUT_S)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "model"
    listed = plain_http.get(f"{failing.url}/v1/models", timeout=v2.TIMEOUT_S).json()["data"]
    named = {model["id"] for model in listed}
    assert "broken" in named and "handler" not in named
