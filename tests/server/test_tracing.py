"""Spans as a real collector receives them from a real server."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import grpc
import httpx
import pytest
from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub as Stub

from tests import plain_http
from tests.server import triton_wire, v2
from tests.server.harness import Server
from tests.server.otlp import Collector, Span

_ID = "gen_ai.response.id"
_TRACE = "0af7651916cd43dd8448eb211c80319c"
_TRACEPARENT = f"00-{_TRACE}-b7ad6b7169203331-01"


def _of(collected: list[Span], request_id: str) -> list[Span]:
    return [span for span in collected if span.attributes.get(_ID) == request_id]


def _span(spans: Collector, request_id: str) -> Span:
    (span,) = _of(spans.wait_for(lambda collected: bool(_of(collected, request_id))), request_id)
    return span


def _parent(spans: Collector, span: Span) -> Span:
    def found(collected: list[Span]) -> list[Span]:
        return [each for each in collected if each.span_id == span.parent_id]

    (parent,) = found(spans.wait_for(lambda collected: bool(found(collected))))
    assert parent.trace_id == span.trace_id
    return parent


def _rest_unary(server: Server, request_id: str, **parameters: Any) -> None:
    _rest(server, "infer", request_id, parameters)


def _rest_stream(server: Server, request_id: str, **parameters: Any) -> None:
    _rest(server, "infer_stream", request_id, parameters)


def _rest(server: Server, endpoint: str, request_id: str, parameters: dict[str, Any]) -> None:
    body = {**v2.rest_body("Hello fox", **parameters), "id": request_id}
    headers = {"traceparent": _TRACEPARENT}
    plain_http.post(f"{server.url}/v2/models/tiny/{endpoint}", json=body, headers=headers, timeout=v2.TIMEOUT_S)


def _grpc_unary(server: Server, request_id: str, **parameters: Any) -> None:
    request = v2.grpc_request("tiny", "Hello fox", id=request_id, **parameters)
    with grpc.insecure_channel(server.grpc_target) as channel:
        metadata = (("traceparent", _TRACEPARENT),)
        Stub(channel).ModelInfer(request, timeout=v2.TIMEOUT_S, metadata=metadata)


def _grpc_stream(server: Server, request_id: str, **parameters: Any) -> None:
    request = v2.grpc_request("tiny", "Hello fox", id=request_id, **parameters)
    with grpc.insecure_channel(server.grpc_target) as channel:
        metadata = (("traceparent", _TRACEPARENT),)
        list(Stub(channel).ModelStreamInfer(iter([request]), timeout=v2.TIMEOUT_S, metadata=metadata))


def _triton_unary(server: Server, request_id: str, **parameters: Any) -> None:
    request = v2.grpc_request("tiny", "Hello fox", id=request_id, **parameters)
    with grpc.insecure_channel(server.triton_target) as channel:
        triton_wire.infer(channel, request, metadata=(("traceparent", _TRACEPARENT),))


def _triton_stream(server: Server, request_id: str, **parameters: Any) -> None:
    request = v2.grpc_request("tiny", "Hello fox", id=request_id, **parameters)
    with grpc.insecure_channel(server.triton_target) as channel:
        list(triton_wire.stream(channel, [request], metadata=(("traceparent", _TRACEPARENT),)))


@pytest.mark.parametrize("ask", [_rest_unary, _rest_stream, _grpc_unary, _grpc_stream, _triton_unary, _triton_stream])
def test_a_request_is_one_span_below_the_servers(observed: Server, spans: Collector, ask: Callable[..., None]) -> None:
    request_id = f"trace-{ask.__name__}"
    ask(observed, request_id, max_tokens=6, ignore_eos=True)
    span = _span(spans, request_id)
    assert span.name == "text_completion tiny" and not span.failed
    assert span.attributes["gen_ai.request.model"] == "tiny"
    assert span.attributes["gen_ai.request.max_tokens"] == 6
    assert span.attributes["gen_ai.usage.output_tokens"] == 6
    assert span.attributes["gen_ai.usage.input_tokens"] > 0
    assert span.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert span.attributes["gen_ai.response.time_to_first_chunk"] > 0
    assert span.attributes["gen_ai.latency.time_in_queue"] >= 0
    assert span.events == ("gen_ai.first_token",)
    parent = _parent(spans, span)
    assert "infer" in parent.name.lower() and span.trace_id.hex() == _TRACE


def test_a_conversation_is_a_chat(observed: Server, spans: Collector) -> None:
    message = v2.bytes_tensor("messages", '[{"role": "user", "content": "Hi"}]')
    body = {**v2.rest_body(inputs=[message], max_tokens=2), "id": "trace-chat"}
    v2.rest_unary(observed.url, "/v2/models/tiny/infer", body)
    assert _span(spans, "trace-chat").name == "chat tiny"


def test_failures_are_errors_with_their_kind(observed: Server, spans: Collector) -> None:
    _rest_unary(observed, "trace-bad", temperature="hot")
    _rest_stream(observed, "trace-late", timeout=1)
    bad, late = _span(spans, "trace-bad"), _span(spans, "trace-late")
    assert bad.failed and bad.attributes["error.type"] == "InvalidInput" and bad.message == ""
    assert late.failed and late.attributes["error.type"] == "TimedOut" and "exceeded its timeout" in late.message
    assert not bad.events and _parent(spans, bad)


def test_a_client_that_leaves_ends_its_span(observed: Server, spans: Collector) -> None:
    request = v2.grpc_request("tiny", "Hello", id="trace-left", max_tokens=900, ignore_eos=True)
    with grpc.insecure_channel(observed.grpc_target) as channel:
        call = Stub(channel).ModelStreamInfer(iter([request]), timeout=v2.TIMEOUT_S)
        next(call)
        call.cancel()
    span = _span(spans, "trace-left")
    assert span.failed and span.attributes["error.type"] == "client_disconnected"
    assert 0 < span.attributes["gen_ai.usage.output_tokens"] < 900


def test_neither_prompts_nor_answers_are_in_spans(observed: Server, spans: Collector) -> None:
    with closing(httpx.Client(verify=False, timeout=v2.TIMEOUT_S)) as asking:
        body = {**v2.rest_body("quite private", max_tokens=30, ignore_eos=True), "id": "trace-private"}
        reply = asking.post(f"{observed.url}/v2/models/tiny/infer", json=body).raise_for_status().json()
    _parent(spans, _span(spans, "trace-private"))
    shown = [str(part) for span in spans.spans for part in (span.name, span.message, *span.attributes.values())]
    answer = v2.rest_reply(reply).text
    for text in ("quite private", answer, repr(answer)[1:-1]):  # as it is, or in a list
        assert len(text) > 8 and not [part for part in shown if text in part]
