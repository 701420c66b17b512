"""One line per request: its fields, what it never contains, and that clients cannot forge a line."""

from __future__ import annotations

import json
import re
import time
from contextlib import closing, suppress
from typing import Any

import grpc
import pytest
from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub as Stub

from mlserver_torch_stream import client
from tests import plain_http
from tests.server import v2
from tests.server.harness import Server
from tests.server.scrape import on_metrics_port, on_rest_port

_NAME = "[mlserver_torch_stream.requests]"
_FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)')


def _lines(server: Server, request_id: str, count: int = 1) -> list[dict[str, str]]:
    """Returns the fields of the lines about one request, whose line is written just after its last byte is sent."""
    end = time.monotonic() + 20
    while len(found := [line for line in server.log.splitlines() if f"request_id={request_id} " in line]) < count:
        assert time.monotonic() < end, server.log
        time.sleep(0.02)
    return [dict(_FIELD.findall(line)) for line in found]


def _line(server: Server, request_id: str) -> dict[str, str]:
    (line,) = _lines(server, request_id)
    return line


def _body(request_id: str, text: str = "Hello", **parameters: Any) -> dict[str, Any]:
    return {**v2.rest_body(text, **parameters), "id": request_id}


def test_a_request_is_one_line_in_mlservers_format(observed: Server) -> None:
    body = _body("log-1", n=2, temperature=1, max_tokens=5, ignore_eos=True)
    reply = v2.rest_unary(observed.url, "/v2/models/tiny/infer", body)
    fields = _line(observed, "log-1")
    (line,) = [line for line in observed.log.splitlines() if "request_id=log-1 " in line]
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ", line) and _NAME in line and " INFO - " in line
    assert fields["model"] == "tiny" and fields["version"] == "v1" and fields["endpoint"] == "rest-unary"
    assert fields["status"] == "200" and fields["client"] == "connected" and fields["finish_reason"] == "length,length"
    assert fields["sequences"] == "2" and fields["completion_tokens"] == "10"
    assert fields["prompt_tokens"] == str(reply.outputs["num_input_tokens"][0])
    assert float(fields["queue_time_ms"]) >= 0 and 0 < float(fields["ttft_ms"]) <= float(fields["e2e_latency_ms"])


def test_every_message_of_a_grpc_stream_has_its_line(observed: Server) -> None:
    request = v2.grpc_request("tiny", "Hello", id="log-2", max_tokens=3, ignore_eos=True)
    with grpc.insecure_channel(observed.grpc_target) as channel:
        list(Stub(channel).ModelStreamInfer(iter([request, request]), timeout=v2.TIMEOUT_S))
    for request_id in ("log-2", "log-2-1"):
        fields = _line(observed, request_id)
        assert fields["endpoint"] == "grpc-stream" and fields["completion_tokens"] == "3"


def test_a_refusal_names_its_field_and_its_status(observed: Server) -> None:
    plain_http.post(f"{observed.url}/v2/models/tiny/infer", json=_body("log-3", temperature="hot"))
    fields = _line(observed, "log-3")
    assert fields["status"] == "422" and fields["error"] == "InvalidInput" and fields["field"] == "temperature"
    assert (
        fields["completion_tokens"] == "0"
        and fields["ttft_ms"] == fields["queue_time_ms"] == fields["finish_reason"] == "-"
    )


def test_a_client_that_left_is_said_to(observed: Server) -> None:
    with plain_http.stream(
        "POST",
        f"{observed.url}/v2/models/tiny/infer_stream",
        json=_body("log-4", max_tokens=900, ignore_eos=True),
        timeout=v2.TIMEOUT_S,
    ) as response:
        next(response.iter_bytes())
    fields = _line(observed, "log-4")
    assert fields["client"] == "disconnected" and fields["status"] == "499" and fields["finish_reason"] == "-"
    assert 1 <= int(fields["completion_tokens"]) < 900


def test_no_prompt_and_no_answer_is_in_the_log(observed: Server) -> None:
    secret = "a very private matter"
    reply = v2.rest_unary(observed.url, "/v2/models/tiny/infer", _body("log-5", secret, max_tokens=30, ignore_eos=True))
    question = [{"role": "user", "content": secret}]
    with closing(client.stream(observed.url, "tiny", messages=question, max_tokens=30)) as deltas:
        answer = "".join(map(str, deltas))
    plain_http.post(f"{observed.url}/v2/models/tiny/infer", json=_body("log-6", secret, temperature="hot"))
    plain_http.post(f"{observed.url}/v2/models/tiny/infer", json={"inputs": [{"name": secret}], "id": "log-7"})
    plain_http.post(f"{observed.url}/v2/models/tiny/infer", json=_body("log-8", f"{secret} " * 400))
    for request_id in ("log-5", "log-6", "log-7", "log-8"):
        _line(observed, request_id)
    assert secret not in observed.log
    for text in (reply.text, answer):
        assert len(text) > 8 and text not in observed.log and json.dumps(text)[1:-1] not in observed.log


@pytest.mark.parametrize("number", [9, 10])
def test_a_client_cannot_write_a_line(observed: Server, number: int) -> None:
    forged = f"\n2026-01-01 00:00:00,000 {_NAME} INFO - request_id=forged-{number} status=200\r\x1b[2J\u2028\x85"
    request_id = f"log-{number}{forged}"
    if number == 9:
        v2.rest_unary(observed.url, "/v2/models/tiny/infer", _body(request_id, max_tokens=1))
    else:
        request = v2.grpc_request("tiny", "Hello", id=request_id, max_tokens=1)
        # MLServer puts the id into its CloudEvents metadata as it is, which gRPC may refuse to send.
        with grpc.insecure_channel(observed.grpc_target) as channel, suppress(grpc.RpcError):
            Stub(channel).ModelInfer(request, timeout=v2.TIMEOUT_S)
    end = time.monotonic() + 20
    while not (found := [line for line in observed.log.splitlines() if f'request_id="log-{number}' in line]):
        assert time.monotonic() < end, observed.log
        time.sleep(0.02)
    assert len(found) == 1 and found[0].isascii() and found[0].isprintable()
    quoted = dict(_FIELD.findall(found[0]))["request_id"]
    assert json.loads(quoted).startswith(request_id[:100])


def test_a_structured_line_is_json_with_the_prompt_if_asked_for(bare_server: Server) -> None:
    prompt = 'He said "no",\nand left \\ slowly: 日本'
    reply = v2.rest_unary(bare_server.url, "/v2/models/tiny/infer", _body("log-11", prompt, max_tokens=4))
    _line(bare_server, "log-11")
    (line,) = [line for line in bare_server.log.splitlines() if "request_id=log-11 " in line]
    entry = json.loads(line)
    assert (entry["name"], entry["level"]) == ("mlserver_torch_stream.requests", "INFO")
    prompts, _, outputs = entry["message"].partition(" prompts=")[2].partition(" outputs=")
    assert json.loads(prompts) == [prompt] and json.loads(outputs) == [reply.text]


def test_a_server_with_workers_shows_the_same_on_both_ports(bare_server: Server) -> None:
    """With workers, MLServer collects its own figures from files."""
    for scrape in (on_rest_port(bare_server), on_metrics_port(bare_server)):
        assert scrape.value("torch_stream_requests_total", model="tiny", finish_reason="length") >= 1
        assert scrape.names("model_infer_request_")
