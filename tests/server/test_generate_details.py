"""``details`` of the generate extension, from a real server: the same tokens whole and streamed, an object for each."""

from __future__ import annotations

import json
from typing import Any

import httpx

from mlserver_torch_stream.client import EventParser
from tests import plain_http
from tests.server import v2
from tests.server.harness import Server


def _post(server: Server, door: str, **body: Any) -> httpx.Response:
    asked = {"text_input": "Hello fox", "max_tokens": 12, "ignore_eos": True, **body}
    return plain_http.post(f"{server.url}/v2/models/tiny/{door}", json=asked, timeout=v2.TIMEOUT_S)


def test_details_are_the_same_whole_and_streamed(server: Server) -> None:
    whole = _post(server, "generate", parameters={"details": True}).json()
    events = [json.loads(event) for event in EventParser().feed(_post(server, "generate_stream", details=True).content)]
    tokens = [event["details"]["token"] for event in events if event["details"]["token"] is not None]
    assert whole["details"] == {"finish_reason": "length", "logprobs": tokens} and len(tokens) == 12
    assert [event["details"]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["length"]
    assert "".join(event["text_output"] for event in events) == whole["text_output"]
    assert all(token["logprob"] <= 0 and token["text"] for token in tokens)
    assert "logprobs" not in whole


def test_only_the_flat_spelling_has_details(server: Server) -> None:
    body = v2.rest_body("Hello", details=True)
    response = plain_http.post(f"{server.url}/v2/models/tiny/infer", json=body, timeout=v2.TIMEOUT_S)
    assert response.status_code == 422 and response.json()["error"].startswith("details: ")
    assert "details" not in _post(server, "generate").json()
